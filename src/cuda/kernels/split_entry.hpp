// split_entry: the kernels of the split backward for one rule and gate.
#pragma once

#include <type_traits>

#include "cuda/chunk/split_kernel.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

template <class Kernel>
__global__ void __launch_bounds__(chunk_threads(true), chunk_blocks(true)) split_sweeps(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    Kernel kernel(args, arena, Use::sweeps);
    const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
    const Task task = task_of(args.first_item + blockIdx.x, args.HV, blocks);
    const bool back = task.place < args.N;
    const std::int64_t n = back ? task.place : task.place - args.N, head = task.head;
    const int first = task.part * args.value_columns;
    back ? kernel.sweep_adjoints(n, head, first) : kernel.sweep_states(n, head, first);
}

template <class Kernel>
__global__ void __launch_bounds__(chunk_threads(true), chunk_blocks(true)) split_gradients(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    Kernel kernel(args, arena, Use::gradients);
    HEADRACE_ROLLED
    for (std::int64_t item = blockIdx.x; item < args.parts * args.H; item += gridDim.x) {
        const Task task = task_of(item, args.H);
        kernel.gradients(task.place, task.head);
    }
}

template <class Kernel, Use use>
BlockMemory split_memory(const KernelArgs& args, std::size_t shared_limit) {
    Arena arena{nullptr, nullptr, shared_limit};
    Kernel(args, arena, use);
    return {arena.shared_used, arena.spill_used};
}

template <bool delta, bool channel_gate>
SplitKernels split_kernels() {
    using Gate = std::conditional_t<channel_gate, ChannelGate<double>, ScalarGate<double>>;
    using Block = SplitKernel<Gate, delta, ChunkOps<Gate>>;
    using Sweeps = SplitKernel<Gate, delta, ChunkOps<Gate, few_values>>;
    return {{"split_sweeps", reinterpret_cast<const void*>(&split_sweeps<Sweeps>),
             registers_allowed(chunk_threads(true), chunk_blocks(true)), &split_memory<Sweeps, Use::sweeps>,
             &split_sweeps_work<delta, channel_gate>},
            {"split_gradients", reinterpret_cast<const void*>(&split_gradients<Block>),
             registers_allowed(chunk_threads(true), chunk_blocks(true)), &split_memory<Block, Use::gradients>,
             &split_gradients_work<delta, channel_gate>}};
}

}  // namespace headrace::cuda
