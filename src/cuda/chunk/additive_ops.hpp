// AdditiveOps: the primitives of the algorithm page chunk_states on tensor cores for the additive rule, by warps that
// own 16 values each (WalkerOps).
//
// Rows of values are left operands as they came. Rounded to bf16 on the way are the scores P, what is read of the state
// and what is written into it.
#pragma once

#include "cuda/chunk/walker_ops.hpp"

namespace headrace::cuda {

// Products of a warp's values with rows of values, token by token.
struct PartnerDots {
    Matrix<64> rows;             // [C,64 values]
    float *from_state, *in_all;  // [C] of the outputs' part from the state, and of all

    HEADRACE_DEVICE void store(float* to, const TokenSums& sums, int first_value) const {
        float dots[2 * token_tiles];
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA a = left_operand(rows, first_value, step);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float(&tile)[4] = sums[2 * step + half];
                const std::uint32_t upper = a.high[2 * half], lower = a.high[2 * half + 1];
                float* const of = dots + 2 * (2 * step + half);
                of[0] = fmaf(tile[0], low_half(upper), tile[2] * low_half(lower));
                of[1] = fmaf(tile[1], high_half(upper), tile[3] * high_half(lower));
            }
        }
        // Over the eight lanes with the same tokens, each of which keeps a tile's two in the end: lane g that of tile g.
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

template <int K>
struct AdditiveOps {
    using T = float;
    struct Rows {
        Matrix<K> matrix;
    };
    struct Decayed {
        Rows x;
        const float* factors;  // [C] of the rows
    };
    // Rows of values, scores, or where outputs go.
    struct Tile {
        Matrix<64> matrix;
        OutputPatch patch;
        bool given = false;
        HEADRACE_DEVICE explicit operator bool() const { return given; }
    };
    struct State {};  // the one in registers
    using Inputs = algorithms::ChunkInputs<AdditiveOps>;

    float state[K / 8][4];
    const float *read, *write;  // [C] factors of the rows
    SplitDecay<float> decay;    // of this chunk
    // A pair of a token with itself spans no gate: its score is kept from their sums, where its rounding would show.
    const float* diagonal;  // [C], or null
    PartnerDots dots;
    bool dots_wanted;

    HEADRACE_DEVICE static int first_value() { return 16 * warp(); }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile v) const {
        TokenSums sums = {};
        cuda::add_read<Left::high, K>(sums, state, x.x.matrix);
        scale_tokens(sums, x.factors);
        if (dots_wanted) dots.store(dots.from_state, sums, first_value());
        add_lower_transposed<Left::high>(
            sums, [&](int step) { return left_operand(v.matrix, first_value(), step); }, P.matrix);
        if (dots_wanted) dots.store(dots.in_all, sums, first_value());
        if (diagonal != nullptr) add_diagonal(sums, v);
        o.patch.store(sums);
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile v) {
        SplitA written[token_steps];
        const LanePlace at;
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            written[step] = left_operand(v.matrix, first_value(), step);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 of = *reinterpret_cast<const float2*>(x.factors + 16 * step + pair / 2 * 8 + at.column);
                std::uint32_t& values = written[step].high[pair];
                values = ptx::round_to_bf16(low_half(values) * of.x, high_half(values) * of.y);
            }
        }
        decay_and_add<Left::high, K>(
            state, [&](int step) -> const SplitA& { return written[step]; }, x.x.matrix,
            [&](int, int) { return decay; });
    }

  private:
    HEADRACE_DEVICE void add_diagonal(TokenSums& sums, Tile v) const {
        const LanePlace at;
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA values = left_operand(v.matrix, first_value(), step);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 of = *reinterpret_cast<const float2*>(diagonal + 16 * step + 8 * half + at.column);
                float(&tile)[4] = sums[2 * step + half];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const std::uint32_t pair = values.high[2 * half + row];
                    tile[2 * row] = fmaf(of.x, low_half(pair), tile[2 * row]);
                    tile[2 * row + 1] = fmaf(of.y, high_half(pair), tile[2 * row + 1]);
                }
            }
        }
    }
};

}  // namespace headrace::cuda
