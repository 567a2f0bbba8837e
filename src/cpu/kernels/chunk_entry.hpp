// chunk_entry: the entry points of ChunkKernels for one arithmetic, rule and gate.
#pragma once

#include "cpu/chunk/chunk_kernel.hpp"
#include "cpu/plumbing/kernel_table.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class A, class GateType, bool delta>
struct ChunkEntry {
    using Kernel = ChunkKernel<A, GateType, delta>;

    static std::size_t forward_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::forward_only);
        return arena.used;
    }
    static std::size_t backward_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::with_backward);
        return arena.used;
    }
    static std::size_t sweeps_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::sweeps_only);
        return arena.used;
    }
    static void forward(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, void* scratch, Unfinished* rest) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::forward_only).forward(n, head, first, values, rest);
    }
    // `first`: index of the slot's first saved state; per chunk the slot holds the heads of a task, or all heads.
    static SavedSlot thread_slot(const KernelArgs& args, std::int64_t first) {
        return {{args.saved_states, args.state_scales, args.state_dtype},
                {args.saved_adjoints, args.adjoint_scales, args.adjoint_dtype},
                args.saved_residuals, first,
                args.walk * args.group};
    }
    static SavedSlot shared_slot(const KernelArgs& args, std::int64_t first) {
        return {{args.saved_states, args.state_scales, args.state_dtype},
                {args.saved_adjoints, args.adjoint_scales, args.adjoint_dtype},
                args.saved_residuals, first,
                args.HV};
    }
    static void one_pass(const KernelArgs& args, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward).one_pass(n, key_head, thread_slot(args, first));
    }
    static void save_states(const KernelArgs& args, std::int64_t n, std::int64_t head, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward).save_states(n, head, 1, shared_slot(args, first));
    }
    static void adjoint_pass(const KernelArgs& args, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward).adjoint_pass(n, key_head, shared_slot(args, first));
    }
    static void chunk_gradients(const KernelArgs& args, std::int64_t n, std::int64_t key_head, std::int64_t chunk,
                                std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward)
            .chunk_gradients(n, {chunk, key_head}, {chunk + 1, key_head}, 0, shared_slot(args, first), Pass::gradients);
    }
    static void two_sweeps(const KernelArgs& args, std::int64_t n, std::int64_t key_head, void* scratch) {
        if constexpr (!delta) {
            KernelArgs queries = args;
            queries.chunk = args.state_chunk;
            Arena arena{static_cast<char*>(scratch)}, again{static_cast<char*>(scratch)};
            if (args.d_q.given) Kernel(queries, arena, Kernel::sweeps_only).sweep_queries(n, key_head);
            Kernel(args, again, Kernel::sweeps_only).sweep_keys(n, key_head);
        }
    }
    static ChunkKernels entries() {
        return {forward_scratch, backward_scratch, sweeps_scratch,  forward,                       one_pass,
                save_states,     adjoint_pass,     chunk_gradients, delta ? nullptr : two_sweeps};
    }
};

template <class A>
void fill_chunk_kernels(ChunkKernels (&kernels)[2][2]) {
    kernels[0][0] = ChunkEntry<A, ScalarGate<A>, false>::entries();
    kernels[0][1] = ChunkEntry<A, ChannelGate<A>, false>::entries();
    kernels[1][0] = ChunkEntry<A, ScalarGate<A>, true>::entries();
    kernels[1][1] = ChunkEntry<A, ChannelGate<A>, true>::entries();
}

void fill_chunk_f32(ChunkKernels (&kernels)[2][2]);
void fill_chunk_f64(ChunkKernels (&kernels)[2][2]);
void fill_chunk_bf16(ChunkKernels (&kernels)[2][2]);
void fill_recurrent(RecurrentKernels (&kernels)[2][2]);

}  // namespace headrace::cpu::inline HEADRACE_ISA
