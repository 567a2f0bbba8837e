// gradient_pairs: of a matrix over pairs of tokens in accumulators, the sum over the pairs that span each gate.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// Of M [64,64], 32 rows and 16 columns of it one of eight warps': the sums over j < m <= i, or m < i, of M_ij for each
// m. Nothing is subtracted: running sums along rows, then down columns (docs/decisions/002).
struct SpanningPairs {
    using Sums = float[2][2][4];  // accumulators of 16 rows and 8 columns

    float* of_quarters;  // [4,C] of 16 columns of each row
    float* of_halves;    // [2,C] of 32 rows of each column

    __host__ __device__ void carve(Arena& arena) {
        of_quarters = arena.take<float>(4 * tensor_chunk);
        of_halves = arena.take<float>(2 * tensor_chunk);
    }
    HEADRACE_DEVICE static int first_row() { return warp() / 4 * 32 + lane() / 4; }  // of this lane

    // M becomes the sums of what lies before it in its quarter of the row. The next step is behind a barrier.
    HEADRACE_DEVICE void sum_rows(Sums& M) const {
        const int t = lane() % 4;
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const int half = row % 2;
            float running = 0;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float(&of)[4] = M[row / 2][tile];
                const float first = of[2 * half];
                float sum = first + of[2 * half + 1];
#pragma unroll
                for (int distance = 1; distance < 4; distance *= 2) {
                    const float earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
                    if (t >= distance) sum += earlier;
                }
                const float left = ptx::shuffle_from(sum, (lane() - 1) & (warp_lanes - 1)),
                            before = running + (t > 0 ? left : 0.0f);
                running += ptx::shuffle_from(sum, lane() | 3);
                of[2 * half] = before;
                of[2 * half + 1] = before + first;
            }
            if (t == 0) of_quarters[warp() % 4 * tensor_chunk + first_row() + 8 * row] = running;
        }
    }
    // `own`: of rows i >= m, else i > m. The sums are there behind a barrier.
    HEADRACE_DEVICE void sum_columns(const Sums& M, bool own) const {
        float left[4] = {};
#pragma unroll
        for (int quarter = 0; quarter < 3; ++quarter) {
            if (quarter >= warp() % 4) break;
#pragma unroll
            for (int row = 0; row < 4; ++row) left[row] += of_quarters[quarter * tensor_chunk + first_row() + 8 * row];
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int m = warp() % 4 * 16 + 8 * tile + LanePlace().column + side;
                float sum = 0;
#pragma unroll
                for (int row = 0; row < 4; ++row) {
                    const int i = first_row() + 8 * row;
                    if (i > m || (own && i == m)) sum += M[row / 2][tile][row % 2 * 2 + side] + left[row];
                }
#pragma unroll
                for (int distance = 4; distance < warp_lanes; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
                if (lane() < 4) of_halves[warp() / 4 * tensor_chunk + m] = sum;
            }
        }
    }
    HEADRACE_DEVICE float spanning(int m) const { return of_halves[m] + of_halves[tensor_chunk + m]; }
};

}  // namespace headrace::cuda
