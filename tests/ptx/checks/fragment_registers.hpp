// FragmentRegisters: the registers that wgmma reads and writes asynchronously: who may touch them, and when.
#pragma once

#include <string>
#include <vector>

namespace headrace::ptx {

struct FragmentRegister {
    int slot;
    std::string name;
};

// Of one warp. A product is in flight from its wgmma.mma_async to the wgmma.wait_group that covers it. Until then only
// a wgmma that accumulates into the same registers may touch those of D, and nobody may write those of A. Registers
// that others wrote, or whose D others read, are wgmma's again behind a wgmma.fence; so are D's of another shape.
class FragmentRegisters {
  public:
    explicit FragmentRegisters(int slots) : states_(static_cast<std::size_t>(slots)) {}

    // Another statement than wgmma. Throws Fault, as all here: names both lines.
    void touch(const std::vector<FragmentRegister>& reads, const std::vector<FragmentRegister>& writes, int line);
    void fence();
    // A wgmma takes a register of A, or number `index` of D.
    void take_a(const FragmentRegister& a, int line);
    void take_d(const std::vector<int>& d, std::size_t index, const std::string& name, int line);
    // It has landed.
    void release_a(int slot) { --state(slot).readers; }
    void release_d(int slot) { --state(slot).writers; }

  private:
    enum class Access { none, read, written, as_a, as_d };  // since the last fence; read and as_a excuse each other
    struct State {
        Access access = Access::none;
        int line = 0;    // of the access
        int first = -1;  // as_d: its first register, its place and the number
        std::size_t index = 0, count = 0;
        int readers = 0, reader = 0, writers = 0, writer = 0;  // products in flight with it in A, in D; a line each
    };
    State& state(int slot) { return states_[static_cast<std::size_t>(slot)]; }
    void require_fence() const;

    std::vector<State> states_;
    bool fenced_ = false;
};

}  // namespace headrace::ptx
