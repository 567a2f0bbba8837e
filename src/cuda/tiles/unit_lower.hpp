// unit_lower: the inverse of I - n, n [64,64] strictly lower, as exactly as fp32 tells it.
#pragma once

#include "cuda/tiles/tile_ops.hpp"

namespace headrace::cuda {

// inverse <- (I - n)^-1, its blocks of 16 x 16 on and below the diagonal; the others are not written. By substitution,
// and a step of Newton's then leaves the rounding to fp32 alone. Changes n above its diagonal. Ends with a barrier.
struct UnitLowerInverse {
    Tile<float> n, inverse;

    HEADRACE_DEVICE void compute() const {
        each(size, [&](int j) {
            HEADRACE_ROLLED
            for (int i = j / 16 * 16; i < size; ++i) {
                float sum = i == j ? 1.0f : 0.0f;
                HEADRACE_ROLLED
                for (int m = j; m < i; ++m) sum = fmaf(n.at(i, m), inverse.at(m, j), sum);
                inverse.at(i, j) = sum;
            }
        });
        ptx::sync_block();
        refine();
    }

  private:
    static constexpr int size = 64;

    // inverse += inverse R, R = I - (I - n) inverse in double, kept above n's diagonal. Warps have rows.
    HEADRACE_DEVICE void refine() const {
        constexpr int own_columns = size / warp_lanes;
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
};

}  // namespace headrace::cuda
