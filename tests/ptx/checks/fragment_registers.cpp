// FragmentRegisters: what its rules say to each access.
#include "checks/fragment_registers.hpp"

#include "machine/fault.hpp"

namespace headrace::ptx {

void FragmentRegisters::touch(const std::vector<FragmentRegister>& reads, const std::vector<FragmentRegister>& writes,
                              int line) {
    for (const FragmentRegister& read : reads) {
        State& own = state(read.slot);
        if (own.writers > 0)
            throw_fault("reads ", read.name, " while the wgmma of line ", own.writer, " is in flight to it");
        if (own.access == Access::written) continue;
        own.access = Access::read;
        own.line = line;
    }
    for (const FragmentRegister& write : writes) {
        State& own = state(write.slot);
        if (own.writers > 0)
            throw_fault("writes ", write.name, " while the wgmma of line ", own.writer, " is in flight to it");
        if (own.readers > 0)
            throw_fault("writes ", write.name, " while the wgmma of line ", own.reader, ", in flight, has it in A");
        own.access = Access::written;
        own.line = line;
    }
}

void FragmentRegisters::fence() {
    for (State& own : states_) own.access = Access::none;
    fenced_ = true;
}

void FragmentRegisters::require_fence() const {
    if (!fenced_) throw_fault("the warp's first wgmma.mma_async, and no wgmma.fence before it");
}

void FragmentRegisters::take_a(const FragmentRegister& a, int line) {
    require_fence();
    State& own = state(a.slot);
    if (own.writers > 0)
        throw_fault("has ", a.name, " in A while the wgmma of line ", own.writer, " is in flight to it");
    if (own.access == Access::written)
        throw_fault("has ", a.name, " in A, which line ", own.line, " wrote; no wgmma.fence lies between");
    if (own.access == Access::as_d)
        throw_fault("has ", a.name, " in A, to which the wgmma of line ", own.line,
                    " accumulated; no wgmma.fence lies between");
    own.access = Access::as_a;
    own.line = own.reader = line;
    ++own.readers;
}

void FragmentRegisters::take_d(const std::vector<int>& d, std::size_t index, const std::string& name, int line) {
    require_fence();
    State& own = state(d[index]);
    const bool is_same = own.first == d[0] && own.index == index && own.count == d.size();
    if (own.readers > 0)
        throw_fault("accumulates to ", name, " while the wgmma of line ", own.reader, ", in flight, has it in A");
    if (own.writers > 0 && !is_same)
        throw_fault("accumulates to ", name, " while the wgmma of line ", own.writer,
                    " is in flight to it, of another shape or with other registers beside it");
    if (own.access == Access::as_d && !is_same)
        throw_fault("accumulates to ", name, ", as the wgmma of line ", own.line,
                    " of another shape did; no wgmma.fence lies between");
    if (own.access != Access::none && own.access != Access::as_d)
        throw_fault("accumulates to ", name, ", which line ", own.line,
                    own.access == Access::written ? " wrote" : " read", "; no wgmma.fence lies between");
    own.access = Access::as_d;
    own.line = own.writer = line;
    own.first = d[0];
    own.index = index;
    own.count = d.size();
    ++own.writers;
}

}  // namespace headrace::ptx
