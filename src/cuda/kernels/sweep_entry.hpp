// sweep_entry: the kernels that sweep over chunks for a backward on tensor cores, along sequences or segments of these.
#pragma once

#include "cuda/chunk/channel_sweep.hpp"
#include "cuda/chunk/sweep_kernel.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

template <int K>
inline constexpr int sweep_threads = most_sweep_threads + fetching_threads(K);

template <class Sweep>
HEADRACE_DEVICE void sweep_block(const KernelArgs& args) {
    Arena arena = block_arena();
    Sweep sweep(args, arena);
    const SweptBlock block(args, Sweep::leaves_segments);
    if (!block.is_wanted()) return;
    block.back ? sweep.adjoints(block) : sweep.states(block);
}

}  // namespace headrace::cuda
