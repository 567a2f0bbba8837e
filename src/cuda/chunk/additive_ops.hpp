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
    float decay;                // of this chunk (CarriedDecay)
    // Of v, this warp's values, and factors that this lane needs: loaded before they are, where there are registers.
    static constexpr bool loads_factors = !Format::splits_scores;
    TransposedRows rows;
    TokenFactors own_read;
    // A pair of a token with itself spans no gate: its score is kept from their sums, where its rounding would show.
    const float* diagonal;  // [C]
    bool adds_diagonal;
    // Of a gate's terms, where they are wanted.
    PartnerDots<Format> dots;
    float *from_state, *in_all;  // [C] of the outputs' part from the state, or null, and of all
    bool dots_wanted = false;
    // The state that entered this chunk in the other walk, in bf16 for no tensors but those of bf16.
    SavedTiles<K / 8, !Format::splits_scores> crossed;
    float* crossing;               // [1] its product with the one that enters here, of this warp, or null
    SavedTiles<token_tiles> left;  // outputs that are not complete, in place of those in rows, or nowhere

    HEADRACE_DEVICE static int first_value() { return 16 * warp(); }
    HEADRACE_DEVICE void load(Matrix<64> v, bool outputs) {
        rows = TransposedRows::load(v, first_value());
        if (outputs && loads_factors) own_read = TokenFactors::load(read);
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile v) const {
        TokenSums sums;
        cuda::read<Left::high, K, Format>(sums, state, x.x.matrix);
        scale_tokens(sums, loads_factors ? own_read : TokenFactors::load(read));
        if (dots_wanted && from_state != nullptr) dots.store(from_state, sums, first_value());
        add_scored(sums, P);
        if (dots_wanted) dots.store(in_all, sums, first_value());
        if (adds_diagonal) add_diagonal(sums);
        left.data != nullptr ? left.save(sums) : o.patch.template store<Format>(sums);
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile) {
        if (crossing != nullptr) {
            const float sum = crossed.dot(state);
            if (lane() == 0) *crossing = sum;
        }
        TokenSums values;
        rows.template to_sums<Format>(values);
        scale_tokens(values, x.factors);
        const auto factors = Format::RowFactors::of(values);
        SplitA written[token_steps];
#pragma unroll
        for (int step = 0; step < token_steps; ++step) written[step] = left_operand<Format>(values, step, factors);
        decay_and_add<Left::high, K, Format>(
            state, [&](int step) -> const SplitA& { return written[step]; }, x.x.matrix,
            [&](int, int) { return decay; }, factors);
    }

  private:
    HEADRACE_DEVICE void add_scored(TokenSums& sums, Tile P) const {
        if constexpr (Format::splits_scores) {
            add_lower_transposed<Format>(
                sums, [&](int step) { return rows.template split_operand<Format>(step); },
                SplitMatrix{P.matrix, P.low});
        } else {
            add_lower_transposed<Left::high, Format>(
                sums, [&](int step) { return rows.operand(step); }, P.matrix);
        }
    }
    HEADRACE_DEVICE void add_diagonal(TokenSums& sums) const {
        const LanePlace at;
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 of = *reinterpret_cast<const float2*>(diagonal + 16 * step + 8 * half + at.column);
                float(&tile)[4] = sums[2 * step + half];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const std::uint32_t pair = rows.pairs[step][2 * half + row];
                    tile[2 * row] = fmaf(of.x, Format::first(pair), tile[2 * row]);
                    tile[2 * row + 1] = fmaf(of.y, Format::second(pair), tile[2 * row + 1]);
                }
            }
        }
    }
};

}  // namespace headrace::cuda
