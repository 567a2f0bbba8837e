// unit_lower: the inverse of I - n, n [64,64] strictly lower, in fp32 and on tensor cores.
#pragma once

#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// inverse <- (I - n)^-1, its blocks of 16 on and below the diagonal; the others are not written. Diagonal blocks by
// substitution in fp32, then [[A, 0], [-B, D]]^-1 = [[A^-1, 0], [D^-1 B A^-1, D^-1]] twice, from 16 to 32 and 64 rows,
// with operands of 16 bits; `exactly`, two steps of Newton's then leave the rounding to fp32 alone. Called by four warps
// or more; ends with a barrier.
struct UnitLowerInverse {
    Tile<float> n, inverse;

    HEADRACE_DEVICE void compute(bool exactly) const {
        if (warp() < 2) invert_diagonal(32 * warp() + lane() / 16 * 16);
        ptx::sync_block();
        if (warp() < 4) join_16(32 * (warp() / 2), 8 * (warp() % 2));
        ptx::sync_block();
        if (warp() < 4) join_32(32 + 16 * (warp() / 2), 16 * (warp() % 2));
        ptx::sync_block();
        if (exactly) refine(), refine();
    }

  private:
    // A lane has a column of one of two blocks.
    HEADRACE_DEVICE void invert_diagonal(int first) const {
        const int column = lane() % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < 15; ++m) {
#pragma unroll
            for (int i = m + 1; i < 16; ++i) x[i] = fmaf(n.at(first + i, first + m), x[m], x[i]);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) inverse.at(first + i, first + column) = x[i];
    }
    // Rows [first + 16, first + 32), columns [first + j, first + j + 8).
    HEADRACE_DEVICE void join_16(int first, int j) const {
        float y[2][4] = {}, z[4] = {};
        const SplitA lower = split_a(inverse, first + 16, first + 16);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) multiply(y[tile], lower, split_b(n, first + 16, first + 8 * tile));
        multiply(z, split_a(y[0], y[1]), split_b(inverse, first, first + j));
        store(first + 16, first + j, z);
    }
    // Rows [i, i + 16), i 32 or 48, columns [j, j + 16), j 0 or 16.
    HEADRACE_DEVICE void join_32(int i, int j) const {
        float y[4][4] = {}, z[2][4] = {};
        HEADRACE_ROLLED
        for (int d = 32; d <= i; d += 16) {
            const SplitA lower = split_a(inverse, i, d);
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) multiply(y[tile], lower, split_b(n, d, 8 * tile));
        }
        const SplitA first = split_a(y[0], y[1]), second = split_a(y[2], y[3]);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            if (j == 0) multiply(z[tile], first, split_b(inverse, 0, 8 * tile));
            multiply(z[tile], second, split_b(inverse, 16, j + 8 * tile));
            store(i, j + 8 * tile, z[tile]);
        }
    }
    // inverse += inverse R, R = I - (I - n) inverse in double, kept above n's diagonal. Warps have rows.
    HEADRACE_DEVICE void refine() const {
        constexpr int size = 64, own_columns = size / warp_lanes;
        HEADRACE_ROLLED
        for (int i = warp(); i < size; i += warps()) {
            HEADRACE_ROLLED
            for (int j = lane(); j < i; j += warp_lanes) {
                double sum = -static_cast<double>(inverse.at(i, j));
                HEADRACE_ROLLED
                for (int m = j; m < i; ++m)
                    sum = fma(static_cast<double>(n.at(i, m)), static_cast<double>(inverse.at(m, j)), sum);
                n.at(j, i) = static_cast<float>(sum);
            }
        }
        ptx::sync_block();
        HEADRACE_ROLLED
        for (int i = warp(); i < size; i += warps()) {
            float sums[own_columns] = {};
#pragma unroll
            for (int own = 0; own < own_columns; ++own) {
                const int j = lane() + own * warp_lanes;
                HEADRACE_ROLLED
                for (int d = j + 1; d <= i; ++d) sums[own] = fmaf(inverse.at(i, d), n.at(j, d), sums[own]);
            }
            ptx::sync_warp();
#pragma unroll
            for (int own = 0; own < own_columns; ++own) {
                const int j = lane() + own * warp_lanes;
                if (j < i) inverse.at(i, j) += sums[own];
            }
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE void store(int i, int j, const float (&z)[4]) const {
        const LanePlace at;
#pragma unroll
        for (int place = 0; place < 4; ++place)
            inverse.at(i + at.row + place / 2 * 8, j + at.column + place % 2) = z[place];
    }
};

}  // namespace headrace::cuda
