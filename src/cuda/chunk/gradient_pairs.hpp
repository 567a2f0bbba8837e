// gradient_pairs: of a matrix over pairs of tokens in accumulators, the sum over the pairs that span each gate.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// f(tile, place, i, j) by two neighbours in a row, j even, of this lane's accumulators of [16, 8 tiles] at (row,
// column).
template <int tiles, class F>
HEADRACE_DEVICE void each_pair(int row, int column, F f) {
    const LanePlace at;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; place += 2)
            f(tile, place, row + at.row + place / 2 * 8, column + 8 * tile + at.column);
    }
}

// Of M [64,64], 16 rows and 32 columns of it a warp's: the sums over j < m <= i, or m < i, of M_ij for each m. Nothing
// is subtracted: running sums along rows, then down columns (docs/decisions/002).
struct SpanningPairs {
    float* left_sums;  // [C] of the left half of each row
    float* of_rows;    // [4,C] by 16 rows i

    __host__ __device__ void carve(Arena& arena) {
        left_sums = arena.take<float>(tensor_chunk);
        of_rows = arena.take<float>(4 * tensor_chunk);
    }
    HEADRACE_DEVICE static int first_row() { return warp() / 2 * 16; }
    HEADRACE_DEVICE static int first_column() { return warp() % 2 * 32; }

    // M becomes the sums of what lies before it in its half of the row. The next step is behind a barrier.
    HEADRACE_DEVICE void sum_rows(float (&M)[4][4]) const {
        const int t = lane() % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float running = 0;
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
                const float first = M[tile][2 * half];
                float sum = first + M[tile][2 * half + 1];
#pragma unroll
                for (int distance = 1; distance < 4; distance *= 2) {
                    const float earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
                    if (t >= distance) sum += earlier;
                }
                const float left = ptx::shuffle_from(sum, (lane() - 1) & (warp_lanes - 1)),
                            before = running + (t > 0 ? left : 0.0f);
                running += ptx::shuffle_from(sum, lane() | 3);
                M[tile][2 * half] = before;
                M[tile][2 * half + 1] = before + first;
            }
            if (warp() % 2 == 0 && t == 0) left_sums[first_row() + lane() / 4 + 8 * half] = running;
        }
    }
    // `own`: of rows i >= m, else i > m. The sums are there behind a barrier.
    HEADRACE_DEVICE void sum_columns(float (&M)[4][4], bool own) const {
        const LanePlace at;
        float right[2] = {};
        if (warp() % 2 == 1) right[0] = left_sums[first_row() + at.row], right[1] = left_sums[first_row() + at.row + 8];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int m = first_column() + 8 * tile + at.column + side;
                float sum = 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = first_row() + at.row + 8 * half;
                    if (i > m || (own && i == m)) sum += M[tile][2 * half + side] + right[half];
                }
#pragma unroll
                for (int distance = 4; distance < warp_lanes; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
                if (lane() < 4) of_rows[warp() / 2 * tensor_chunk + m] = sum;
            }
        }
    }
    HEADRACE_DEVICE float spanning(int m) const {
        float sum = 0;
#pragma unroll
        for (int rows = 0; rows < 4; ++rows) sum += of_rows[rows * tensor_chunk + m];
        return sum;
    }
};

}  // namespace headrace::cuda
