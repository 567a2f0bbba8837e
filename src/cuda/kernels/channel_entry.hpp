// channel_entry: the kernels of the chunk form on tensor cores under channel gates for one rule.
#pragma once

#include "cuda/chunk/channel_estimate.hpp"
#include "cuda/chunk/channel_prepare.hpp"
#include "cuda/chunk/channel_walk.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

// As shared memory lets three blocks of the delta rule onto a multiprocessor of 9.0.
inline constexpr int prepare_blocks = 3;

template <class Block>
__global__ void __launch_bounds__(block_threads, prepare_blocks)
    channel_prepare(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Block block(args, arena);
    const Task task = task_of(blockIdx.x, args.HV);
    block.run(task.place, task.head);
}

template <int K>
__global__ void __launch_bounds__(block_threads) channel_estimate(const __grid_constant__ KernelArgs args) {
    const Task task = task_of(blockIdx.x * block_warps + warp(), args.HV);
    if (task.place < args.N) ChannelEstimate<K>{args}.run(task.place, task.head);
}

template <class Block>
__global__ void __launch_bounds__(block_threads, prepare_blocks)
    channel_prepare_low(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Block block(args, arena);
    HEADRACE_ROLLED
    for (WantedPlaces wanted(args, block.wanted(), [&](std::int64_t place) { return Block::wants_low(args, place); });
         wanted.any(); wanted.next())
        block.run_low(wanted.first());
}

template <class Block>
__device__ void walk_channels(const KernelArgs& args) {
    Arena arena = block_arena();
    Block block(args, arena);
    const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    block.forward(task.place, task.head, task.part * args.value_columns);
}
template <class Block>
__global__ void __launch_bounds__(Block::threads, 1) channel_walk(const __grid_constant__ KernelArgs args) {
    walk_channels<Block>(args);
}
// By two groups of warps, where there is a third.
template <class Block>
__global__ void __launch_bounds__(Block::has_third_group ? three_groups : block_threads, 1)
    channel_walk_two(const __grid_constant__ KernelArgs args) {
    if constexpr (Block::has_third_group) walk_channels<Block>(args);
}

// Of the additive rule as many as registers let onto a multiprocessor.
template <bool delta>
inline constexpr int states_blocks = delta ? 1 : 2;
template <class Block, int blocks>
__global__ void __launch_bounds__(Block::threads, blocks) channel_states(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Block block(args, arena);
    block.states();
}
template <int K, bool delta>
Kernel states_kernel() {
    using Walk = ChannelWalk<K, delta, WalkTo::states>;
    constexpr int blocks = states_blocks<delta>;
    return {"channel_states",
            reinterpret_cast<const void*>(&channel_states<Walk, blocks>),
            registers_allowed(channel_walk_threads(delta), blocks),
            &shared_memory_of<Walk>,
            &channel_states_work<K, delta>};
}

inline BlockMemory no_memory(const KernelArgs&, std::size_t) { return {0, 0}; }

template <int K, bool delta>
ChannelKernels channel_kernels_of() {
    using Prepare = ChannelPrepare<K, delta>;
    using Walk = ChannelWalk<K, delta>;
    ChannelKernels all{};
    all.prepare = {"channel_prepare", reinterpret_cast<const void*>(&channel_prepare<Prepare>),
                   registers_allowed(block_threads, prepare_blocks), &shared_memory_of<Prepare>,
                   &channel_prepare_work<K, delta>};
    all.walk = {"channel_walk",
                reinterpret_cast<const void*>(&channel_walk<Walk>),
                registers_allowed(channel_walk_threads(delta) + third_group(delta), 1),
                &shared_memory_of<Walk>,
                &channel_walk_work<K, delta>,
                third_group(delta)};
    if constexpr (delta && K == 128) {
        using Blocks = ChannelWalk<K, delta, WalkTo::outputs_of_two>;
        all.walk_of_two = {"channel_walk_two", reinterpret_cast<const void*>(&channel_walk_two<Blocks>),
                           registers_allowed(three_groups, 1), &shared_memory_of<Blocks>,
                           &channel_walk_work<K, delta>};
    }
    if constexpr (delta) {
        all.estimate = {"channel_estimate", reinterpret_cast<const void*>(&channel_estimate<K>),
                        registers_allowed(block_threads, 1), &no_memory, &channel_estimate_work<K>};
        all.prepare_low = {"channel_prepare_low", reinterpret_cast<const void*>(&channel_prepare_low<Prepare>),
                           registers_allowed(block_threads, prepare_blocks), &shared_memory_of<Prepare>,
                           &channel_prepare_low_work<K>};
    }
    return all;
}

template <bool delta>
ChannelKernels channel_kernels(std::int64_t K) {
    return K <= 64 ? channel_kernels_of<64, delta>() : channel_kernels_of<128, delta>();
}

}  // namespace headrace::cuda
