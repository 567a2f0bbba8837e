// lower_blocks: the blocks of a lower triangular [64,64] that four warps hold in accumulators.
#pragma once

#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// Blocks of 16 x 16 on and below the diagonal, up to three for each of four warps that follow each other, one after
// another. By rows and columns of blocks: (3,2) (3,1) (3,0); (2,2) (2,1) (2,0); (1,0) (1,1); (3,3) (0,0). So a warp's
// first one is next to the diagonal, or on it, and those of rows 2 and 3 have columns 1 and 0 at the same turn.
struct LowerBlock {
    static constexpr int turns = 3;
    int row, column;  // of its first element
    int number;       // in a LowerImage
    bool there, new_rows;
    // Of a warp of the four.
    HEADRACE_DEVICE LowerBlock(int turn, int own) {
        // A byte for each warp, the first one's lowest.
        const auto of_warp = [own](std::uint32_t bytes) {
            return static_cast<int>(__byte_perm(bytes, 0, 0x4440 + static_cast<unsigned>(own)));
        };
        row = of_warp(turn == 0 ? 0x30102030 : turn == 1 ? 0x00102030 : 0x00002030);
        column = of_warp(turn == 0 ? 0x30002020 : turn == 1 ? 0x00101010 : 0);
        number = of_warp(turn == 0 ? 0x09010508 : turn == 1 ? 0x00020407 : 0x00000306);
        there = turn < 2 || own < 2;
        new_rows = turn == 0 || own == 3;
    }
    HEADRACE_DEVICE bool on_diagonal() const { return row == column; }
};

// The number of this warp, anew: what follows from it is not kept, as registers are few.
HEADRACE_DEVICE int warp_of_blocks() { return warp_here() % block_warps; }
// f(turn, block) for the blocks of this warp
template <class F>
HEADRACE_DEVICE void each_block(F f) {
    const int own = warp_of_blocks();
#pragma unroll
    for (int turn = 0; turn < LowerBlock::turns; ++turn) {
        const LowerBlock block(turn, own);
        if (block.there) f(turn, block);
    }
}
// f(tile, place, i, j) for this lane's accumulators of a block, by two neighbours in a row.
template <class F>
HEADRACE_DEVICE void each_pair(LowerBlock block, F f) {
    const LanePlace at;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; place += 2)
            f(tile, place, block.row + at.row + place / 2 * 8, block.column + 8 * tile + at.column);
    }
}

}  // namespace headrace::cuda
