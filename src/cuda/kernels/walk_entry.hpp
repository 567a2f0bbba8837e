// walk_entry: the kernels of the chunk form for one arithmetic, rule and gate.
#pragma once

#include <type_traits>

#include "cuda/chunk/chunk_kernel.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

template <class Kernel, class T = typename Kernel::T>
__global__ void __launch_bounds__(chunk_threads(sizeof(T) == 8), chunk_blocks(sizeof(T) == 8))
    walk_forward(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    Kernel kernel(args, arena, Use::forward);
    const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
    const Task task = task_of(args.first_item + blockIdx.x, args.HV, blocks);
    kernel.forward(task.place, task.head, task.part * args.value_columns);
}

template <class Kernel>
__global__ void __launch_bounds__(chunk_threads(true), chunk_blocks(true)) walk_backward(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    Kernel kernel(args, arena, Use::backward);
    const Task task = task_of(args.first_item + blockIdx.x, args.H);
    kernel.backward(task.place, task.head);
}

template <class Kernel, Use use>
BlockMemory memory_of(const KernelArgs& args, std::size_t shared_limit) {
    Arena arena{nullptr, nullptr, shared_limit};
    Kernel(args, arena, use);
    return {arena.shared_used, arena.spill_used};
}

template <class T, bool delta, bool channel_gate>
WalkKernels walk_kernels() {
    using Gate = std::conditional_t<channel_gate, ChannelGate<T>, ScalarGate<T>>;
    using Forward = ChunkKernel<Gate, delta, ChunkOps<Gate, few_values>>;
    constexpr bool in_double = sizeof(T) == 8;
    WalkKernels kernels{{"walk_forward", reinterpret_cast<const void*>(&walk_forward<Forward>),
                         registers_allowed(chunk_threads(in_double), chunk_blocks(in_double)),
                         &memory_of<Forward, Use::forward>, &walk_forward_work<T, delta, channel_gate>},
                        {}};
    if constexpr (in_double) {
        using Backward = ChunkKernel<Gate, delta>;
        kernels.backward = {"walk_backward", reinterpret_cast<const void*>(&walk_backward<Backward>),
                            registers_allowed(chunk_threads(true), chunk_blocks(true)),
                            &memory_of<Backward, Use::backward>, &walk_backward_work<delta, channel_gate>};
    }
    return kernels;
}

}  // namespace headrace::cuda
