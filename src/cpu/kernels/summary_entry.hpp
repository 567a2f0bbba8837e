// summary_entry: the entry points of SummaryKernels for one arithmetic, rule and gate.
#pragma once

#include "cpu/chunk/summary_kernel.hpp"
#include "cpu/plumbing/kernel_table.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class A, class GateType, bool delta>
struct SummaryEntry {
    using Kernel = SummaryKernel<A, GateType, delta>;

    static std::size_t summarize_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::map);
        return arena.used;
    }
    static std::size_t adjoint_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::gradient);
        return arena.used;
    }
    static void summarize(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int count, void* scratch, Unfinished* rest) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::map).summarize(n, head, first, count, rest);
    }
    static void adjoint(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int count, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::gradient).adjoint(n, head, first, count);
    }
    static SummaryKernels entries() { return {summarize_scratch, adjoint_scratch, summarize, adjoint}; }
};

template <class A>
void fill_summary_kernels(SummaryKernels (&kernels)[2][2]) {
    kernels[0][0] = SummaryEntry<A, ScalarGate<A>, false>::entries();
    kernels[0][1] = SummaryEntry<A, ChannelGate<A>, false>::entries();
    kernels[1][0] = SummaryEntry<A, ScalarGate<A>, true>::entries();
    kernels[1][1] = SummaryEntry<A, ChannelGate<A>, true>::entries();
}

void fill_summaries_f32(SummaryKernels (&kernels)[2][2]);
void fill_summaries_f64(SummaryKernels (&kernels)[2][2]);
void fill_summaries_bf16(SummaryKernels (&kernels)[2][2]);

}  // namespace headrace::cpu::inline HEADRACE_ISA
