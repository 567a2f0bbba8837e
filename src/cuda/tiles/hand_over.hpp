// HandOver: how stages of shared memory, through which chunks pass one behind the other, go from the warps that fill
// them to those that read them, and back, so that a warp waits for no others than these.
#pragma once

#include "cuda/tiles/tile_ops.hpp"

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

// Stages that the third of a block's groups of warps fills, as far ahead as there are stages, for the two others, of
// which each waits for what it reads alone.
struct FilledStages {
    using Filled = HandOver<0, 2 * block_threads>;   // for the first group and, `beside` it, for the second
    using Emptied = HandOver<2, 3 * block_threads>;  // that both have read
    static constexpr int beside = most_stages;

    int turn = 0;  // of a group of warps

    // By the third group: fill(chunk) for each, when there is room for it, until what it copies has come.
    template <class Fill>
    HEADRACE_DEVICE void fill_each(int first, int end, int stages, Fill fill) {
        HEADRACE_ROLLED
        for (int chunk = first; chunk < end; ++chunk) {
            if (chunk - first >= stages) Emptied::take(turn);
            fill(chunk);
            ptx::publish_to_products();
            Filled::give(turn), Filled::give(beside + turn);
            next_turn(stages);
        }
    }
    // By the others: compute(chunk) for each that it has filled.
    template <class Compute>
    HEADRACE_DEVICE void each_filled(int first, int end, int stages, Compute compute) {
        HEADRACE_ROLLED
        for (int chunk = first; chunk < end; ++chunk) {
            Filled::take(warp_here() < block_warps ? turn : beside + turn);
            compute(chunk);
            if (chunk + stages < end) Emptied::give(turn);
            next_turn(stages);
        }
    }

  private:
    HEADRACE_DEVICE void next_turn(int stages) {
        if (++turn == stages) turn = 0;
    }
};

}  // namespace headrace::cuda
