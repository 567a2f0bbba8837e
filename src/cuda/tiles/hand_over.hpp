// HandOver: how stages of shared memory, through which chunks pass one behind the other, go from the warps that fill
// them to those that read them, and back, so that a warp waits for no others than these.
#pragma once

#include "cuda/ptx.hpp"

namespace headrace::cuda {

// The last of a block's 16 barriers are theirs: one for each stage of three ways that a kernel's stages may go.
inline constexpr int most_stages = 3, first_stage_barrier = 7;

// From warps that give a stage to those that take it, `threads` of both, on the `way`-th of the three. None gives one
// again before it has been taken.
template <int way, int threads>
struct HandOver {
    static constexpr int first_barrier = first_stage_barrier + way * most_stages;
    static_assert(first_barrier + most_stages <= 16);
    HEADRACE_DEVICE static void give(int stage) {
        ptx::sync_warp();  // its lanes may have parted
        ptx::arrive_threads(first_barrier + stage, threads);
    }
    HEADRACE_DEVICE static void take(int stage) { ptx::meet_threads(first_barrier + stage, threads); }
};

}  // namespace headrace::cuda
