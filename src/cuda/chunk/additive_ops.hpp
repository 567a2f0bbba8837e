// AdditiveOps: the primitives of the algorithm page chunk_states on tensor cores for the additive rule, by warps that
// own 16 values each (WalkerOps).
//
// Rows of values are left operands as they came. Rounded on the way are the scores P, what is read of the state and
// what is written into it.
#pragma once

#include "cuda/chunk/additive_terms.hpp"
#include "cuda/chunk/walker_ops.hpp"

namespace headrace::cuda {

template <int K, class Format>
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
        Matrix<64> matrix, low;  // low of scores in 16 bits
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
    // Of a gate's terms, where they are wanted.
    PartnerDots<Format> dots;
    bool dots_wanted = false;
    // The state that entered this chunk in the other walk, in bf16 for no tensors but those of bf16.
    SavedTiles<K / 8, !Format::splits_scores> crossed;
    float* crossing;               // [1] its product with the one that enters here, of this warp, or null
    SavedTiles<token_tiles> left;  // outputs that are not complete, in place of those in rows, or nowhere

    HEADRACE_DEVICE static int first_value() { return 16 * warp(); }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile v) const {
        TokenSums sums;
        cuda::read<Left::high, K, Format>(sums, state, x.x.matrix);
        scale_tokens(sums, x.factors);
        if (dots_wanted) dots.store(dots.from_state, sums, first_value());
        add_scored(sums, P, v);
        if (dots_wanted) dots.store(dots.in_all, sums, first_value());
        if (diagonal != nullptr) add_diagonal(sums, v);
        left.data != nullptr ? left.save(sums) : o.patch.template store<Format>(sums);
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile v) {
        if (crossing != nullptr) {
            const float sum = crossed.dot(state);
            if (lane() == 0) *crossing = sum;
        }
        TokenSums values;
        const LanePlace at;
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA rows = left_operand(v.matrix, first_value(), step);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 of = *reinterpret_cast<const float2*>(x.factors + 16 * step + pair / 2 * 8 + at.column);
                float(&tile)[4] = values[2 * step + pair / 2];
                tile[pair % 2 * 2] = Format::first(rows.high[pair]) * of.x;
                tile[pair % 2 * 2 + 1] = Format::second(rows.high[pair]) * of.y;
            }
        }
        const auto factors = Format::RowFactors::of(values);
        SplitA written[token_steps];
#pragma unroll
        for (int step = 0; step < token_steps; ++step) written[step] = left_operand<Format>(values, step, factors);
        decay_and_add<Left::high, K, Format>(
            state, [&](int step) -> const SplitA& { return written[step]; }, x.x.matrix,
            [&](int, int) { return decay; }, factors);
    }

  private:
    HEADRACE_DEVICE static void add_scored(TokenSums& sums, Tile P, Tile v) {
        if constexpr (Format::splits_scores) {
            add_lower_transposed<Format>(
                sums, [&](int step) { return split_operand<Format>(v.matrix, first_value(), step); },
                SplitMatrix{P.matrix, P.low});
        } else {
            add_lower_transposed<Left::high, Format>(
                sums, [&](int step) { return left_operand(v.matrix, first_value(), step); }, P.matrix);
        }
    }
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
                    tile[2 * row] = fmaf(of.x, Format::first(pair), tile[2 * row]);
                    tile[2 * row + 1] = fmaf(of.y, Format::second(pair), tile[2 * row + 1]);
                }
            }
        }
    }
};

}  // namespace headrace::cuda
