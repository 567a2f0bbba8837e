// HandOver: how stages of shared memory, through which chunks pass one behind the other, go from the warps that fill
// them to those that read them, and back, so that a warp waits for no others than these.
#pragma once

#include "cuda/ptx.hpp"

namespace headrace::cuda {

inline constexpr int most_stages = 3;

// From warps that give a stage to those that take it, `threads` of both: barriers from `first_barrier` on. None gives
// one again before it has been taken.
template <int first_barrier, int threads>
struct HandOver {
    HEADRACE_DEVICE static void give(int stage) {
        ptx::sync_warp();  // its lanes may have parted
        ptx::arrive_threads(first_barrier + stage, threads);
    }
    HEADRACE_DEVICE static void take(int stage) { ptx::meet_threads(first_barrier + stage, threads); }
};

}  // namespace headrace::cuda
