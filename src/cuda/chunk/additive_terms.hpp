// additive_terms: what the walks of the additive rule's backward leave for the gradient of a scalar gate (GateWalk), of
// a chunk and the 16 values of a warp.
#pragma once

#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// Products of outputs with rows of values, token by token.
template <class Format>
struct PartnerDots {
    Matrix<64> rows;  // [C,64 values]

    // to [C]
    HEADRACE_DEVICE void store(float* to, const TokenSums& sums, int first_value) const {
        float dots[2 * token_tiles];
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA a = left_operand(rows, first_value, step);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int tile = 2 * step + half;
                const float(&sum)[4] = sums[tile];
                const std::uint32_t upper = a.high[2 * half], lower = a.high[2 * half + 1];
                dots[2 * tile] = fmaf(sum[0], Format::first(upper), sum[2] * Format::first(lower));
                dots[2 * tile + 1] = fmaf(sum[1], Format::second(upper), sum[3] * Format::second(lower));
            }
        }
        // Over the eight lanes with the same tokens, each of which keeps a tile's two in the end: lane g that of tile
        // g.
        add_halves<token_tiles>(dots), add_halves<token_tiles / 2>(dots), add_halves<token_tiles / 4>(dots);
        *reinterpret_cast<float2*>(to + 2 * lane()) = {dots[0], dots[1]};
    }

  private:
    // Of two lanes one keeps the sums of the first `left`, the other those of as many behind them.
    template <int left>
    HEADRACE_DEVICE static void add_halves(float (&dots)[2 * token_tiles]) {
        const bool upper = (lane() & 2 * left) != 0;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const float own = upper ? dots[left + i] : dots[i], other = upper ? dots[i] : dots[left + i];
            dots[i] = own + ptx::shuffle_xor(other, 2 * left);
        }
    }
};

// Accumulators that one launch leaves to another, in f32 or bf16, in the order of the four warps that have them.
template <int tiles, bool or_bf16 = false>
struct SavedTiles {
    char* data = nullptr;
    bool is_bf16 = false;
    uint2 pairs[tiles];

    HEADRACE_DEVICE void save(const float (&values)[tiles][4]) const {
        if (or_bf16 && is_bf16) {
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const float(&S)[4] = values[tile];
                reinterpret_cast<uint2*>(data)[at(tile)] = {ptx::round_to_bf16(S[0], S[1]),
                                                            ptx::round_to_bf16(S[2], S[3])};
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const float(&S)[4] = values[tile];
                reinterpret_cast<float4*>(data)[at(tile)] = {S[0], S[1], S[2], S[3]};
            }
        }
    }
    // Before the dot, which then waits for nothing; not in f32, as registers are few.
    HEADRACE_DEVICE void load() {
        if constexpr (or_bf16) {
            if (!is_bf16) return;
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) pairs[tile] = reinterpret_cast<const uint2*>(data)[at(tile)];
        }
    }
    // to += this, f32
    HEADRACE_DEVICE void add_to(float (&to)[tiles][4]) const {
        float4 of[tiles];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) of[tile] = reinterpret_cast<const float4*>(data)[at(tile)];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
            to[tile][0] += of[tile].x, to[tile][1] += of[tile].y, to[tile][2] += of[tile].z, to[tile][3] += of[tile].w;
    }
    // <this, state>, of the warp's part.
    HEADRACE_DEVICE float dot(const float (&state)[tiles][4]) const {
        float sums[4] = {};  // side by side: of one each addition would wait for the last
        const auto add = [&](int tile, float4 S) {
            const float(&D)[4] = state[tile];
            sums[0] = fmaf(S.x, D[0], sums[0]), sums[1] = fmaf(S.y, D[1], sums[1]);
            sums[2] = fmaf(S.z, D[2], sums[2]), sums[3] = fmaf(S.w, D[3], sums[3]);
        };
        if (or_bf16 && is_bf16) {
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const uint2 of = pairs[tile];
                add(tile, {low_half(of.x), high_half(of.x), low_half(of.y), high_half(of.y)});
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) add(tile, reinterpret_cast<const float4*>(data)[at(tile)]);
        }
        return sum_of_warp((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }

  private:
    HEADRACE_DEVICE static int at(int tile) {
        return tile * block_threads + static_cast<int>(threadIdx.x) % block_threads;
    }
};

}  // namespace headrace::cuda
