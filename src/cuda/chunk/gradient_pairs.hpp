// gradient_pairs: matrices over pairs of tokens in accumulators: which warp has what of them, and the sum over the
// pairs that span each gate.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// Of M [64,64], needed on and below its diagonal, four warps have 16 rows each: eight from either end, so that all need
// nine blocks of 8 x 8. Eight warps have two such matrices, four each.
struct TokenPairs {
    using Sums = float[8][4];  // accumulators of 16 rows and 8 columns: [tile][2 h], [tile][2 h + 1] of half h
    static constexpr int blocks = 9, warps = 8;

    HEADRACE_DEVICE static int matrix() { return warp_here() / 4; }  // this warp's, of two
    HEADRACE_DEVICE static int first_row(int half, int of_warp = warp()) {
        return half == 0 ? of_warp % 4 * 8 : tensor_chunk - 8 - of_warp % 4 * 8;
    }
    HEADRACE_DEVICE static int row(int half) { return first_row(half) + lane() / 4; }  // this lane's
    // f(half, tile, place, on_diagonal) for this warp's blocks, whose places count them. One of each half is on the
    // diagonal.
    template <class F>
    HEADRACE_DEVICE static void each_block(F f) {
        const int of_first = warp_here() % 4;
#pragma unroll
        for (int block = 0; block < 12; ++block) {
            const int half = block < 4 ? 0 : 1, tile = block - 4 * half;
            const int last = half == 0 ? of_first : 7 - of_first;
            if (tile <= last) f(half, tile, tile + half * (of_first + 1), tile == last);
        }
    }
};

// The sums over j < m <= i, or m < i, of M_ij for each m, of both matrices together. Nothing is subtracted: running
// sums along rows, then down columns (docs/decisions/002).
struct SpanningPairs {
    float* of_warps;  // [8,C] of the 16 rows of a warp

    __host__ __device__ void carve(Arena& arena) { of_warps = arena.take<float>(TokenPairs::warps * tensor_chunk); }

    // `own`: of rows i >= m, else i > m. The sums are there behind a barrier.
    HEADRACE_DEVICE void add_up(TokenPairs::Sums& M, bool own) const {
        sum_rows(M);
        sum_columns(M, own);
    }
    // Of tokens 2 lane and 2 lane + 1.
    HEADRACE_DEVICE float2 spanning() const {
        float2 sum = {};
#pragma unroll
        for (int of_warp = 0; of_warp < TokenPairs::warps; ++of_warp) {
            const float2 of = *reinterpret_cast<const float2*>(of_warps + of_warp * tensor_chunk + 2 * lane());
            sum.x += of.x, sum.y += of.y;
        }
        return sum;
    }

  private:
    // M becomes the sums of what lies before it in its row.
    HEADRACE_DEVICE static void sum_rows(TokenPairs::Sums& M) {
        const int t = lane() % 4;
        float running[2] = {};
        TokenPairs::each_block([&](int half, int tile, int, bool) {
            float(&of)[4] = M[tile];
            const float first = of[2 * half];
            float sum = first + of[2 * half + 1];
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
                const float earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
                if (t >= distance) sum += earlier;
            }
            const float left = ptx::shuffle_from(sum, (lane() - 1) & (warp_lanes - 1)),
                        before = running[half] + (t > 0 ? left : 0.0f);
            running[half] += ptx::shuffle_from(sum, lane() | 3);
            of[2 * half] = before;
            of[2 * half + 1] = before + first;
        });
    }
    // A lane's sums of two rows in 16 columns become those of 16 rows in two, as lanes give each other half of what
    // they have left.
    HEADRACE_DEVICE void sum_columns(const TokenPairs::Sums& M, bool own) const {
        const LanePlace at;
        float sums[8][2] = {};
        TokenPairs::each_block([&](int half, int tile, int, bool on_diagonal) {
            const int i = lane() / 4;
            float left = M[tile][2 * half], right = M[tile][2 * half + 1];
            if (on_diagonal) {
                left = at.column < i || (own && at.column == i) ? left : 0.0f;
                right = at.column + 1 < i || (own && at.column + 1 == i) ? right : 0.0f;
            }
            sums[tile][0] += left, sums[tile][1] += right;
        });
#pragma unroll
        for (int left = 4; left > 0; left /= 2) {  // tiles
            const bool upper = (lane() & 4 * left) != 0;
#pragma unroll
            for (int tile = 0; tile < left; ++tile) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const float kept = upper ? sums[tile + left][side] : sums[tile][side],
                                given = upper ? sums[tile][side] : sums[tile + left][side];
                    sums[tile][side] = kept + ptx::shuffle_xor(given, 4 * left);
                }
            }
        }
        const int tile = lane() / 4;
        *reinterpret_cast<float2*>(of_warps + warp_here() * tensor_chunk + 8 * tile + at.column) = {sums[0][0],
                                                                                                    sums[0][1]};
    }
};

}  // namespace headrace::cuda
