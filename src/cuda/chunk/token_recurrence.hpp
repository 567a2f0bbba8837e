// TokenRecurrence: the delta rule token by token, as it is defined, by a warp that has 16 values of the state.
//
// Where tokens reflect the state again and again along a few directions (beta near 2, hardly any forgetting), the
// inverse of I + l Diag(beta) has large elements that alternate in sign: what a chunk writes is then a small difference
// of its products, and the state keeps the roundings of all chunks (docs/decisions/003, "Reflections along few keys").
#pragma once

#include "cuda/chunk/walker_ops.hpp"
#include "cuda/tiles/unit_lower_blocks.hpp"

namespace headrace::cuda {

// The squares of a row of the inverse add up to that much at most; else the recurrence takes over from its token on.
inline constexpr float largest_inverse_row = 16;

// The first such row of an inverse that was computed with squares, tensor_chunk where there is none: by four warps,
// each of which has 16 rows. of_warps: [4] of the block.
HEADRACE_DEVICE int first_large_row(const UnitLowerBlocks& inverse, float* of_warps) {
    ptx::sync_block();
    const int i = 16 * (warp() % block_warps) + lane() / 2;
    float sum = inverse.squares_of(i, lane() % 2);
    sum += ptx::shuffle_xor(sum, 1);
    float first = sum > largest_inverse_row ? static_cast<float>(i) : float{tensor_chunk};
#pragma unroll
    for (int distance = 2; distance < warp_lanes; distance *= 2)
        first = fminf(first, ptx::shuffle_xor(first, distance));
    if (lane() == 0) of_warps[warp_here()] = first;
    ptx::sync_block();
    return static_cast<int>(fminf(fminf(of_warps[0], of_warps[1]), fminf(of_warps[2], of_warps[3])));
}

template <int K, class Format>
struct TokenRecurrence {
    using State = float[K / 8][4];
    // A token's beta and the factors of its rows; its two values of this lane.
    struct Token {
        float beta, key, erase;
        float2 v;
    };

    State& state;

    // S <- decay S (I - beta e k^T) + beta v k^T, or with the erasure before the decay (Comba). row() finds a row, each
    // time anew, as registers are few: a function of tiles that gives the pair of channels at this lane's column.
    // decay(tile, odd) is e^g - 1 of a channel.
    template <class Row, class Erase, class Decay>
    HEADRACE_DEVICE void advance(const Token& token, Row k, Erase e, Decay decay, bool undecayed_error) const {
        if (!undecayed_error) apply(decay);
        const float2 found = read(e);
        if (undecayed_error) apply(decay);
        const float factor = token.beta * token.key;
        write(k, {factor * (token.v.x - token.erase * found.x), factor * (token.v.y - token.erase * found.y)});
    }
    // S^T row, of the two values that this lane's quad has, in each of its lanes.
    template <class Row>
    HEADRACE_DEVICE float2 read(Row row) const {
        float2 sums{};
        const auto pair_of = row();
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
            const std::uint32_t pair = pair_of(tile);
            const float first = Format::first(pair), second = Format::second(pair);
            sums.x = fmaf(state[tile][1], second, fmaf(state[tile][0], first, sums.x));
            sums.y = fmaf(state[tile][3], second, fmaf(state[tile][2], first, sums.y));
        }
        return {sum_of_quad(sums.x), sum_of_quad(sums.y)};
    }
    // Of a row of l2norm, without the subroutines of inverse_norm, for which registers would be stored.
    template <class Row>
    HEADRACE_DEVICE static float inverse_norm(Row row) {
        float sum = 0;
        const auto pair_of = row();
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
            const float first = Format::first(pair_of(tile)), second = Format::second(pair_of(tile));
            sum = fmaf(second, second, fmaf(first, first, sum));
        }
        const float square = sum_of_quad(sum) + 1e-6f, half = 0.5f * square, y = rsqrtf(square);
        return fmaf(y, fmaf(-half * y, y, 0.5f), y);
    }

  private:
    template <class Decay>
    HEADRACE_DEVICE void apply(Decay decay) const {
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place)
                state[tile][place] = fmaf(state[tile][place], decay(tile, place % 2), state[tile][place]);
        }
    }
    template <class Row>
    HEADRACE_DEVICE void write(Row row, float2 d) const {
        const auto pair_of = row();
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
            const std::uint32_t pair = pair_of(tile);
            const float first = Format::first(pair), second = Format::second(pair);
            state[tile][0] = fmaf(first, d.x, state[tile][0]), state[tile][1] = fmaf(second, d.x, state[tile][1]);
            state[tile][2] = fmaf(first, d.y, state[tile][2]), state[tile][3] = fmaf(second, d.y, state[tile][3]);
        }
    }
};

}  // namespace headrace::cuda
