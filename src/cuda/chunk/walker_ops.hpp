// WalkerOps: the primitives of the algorithm page chunk_states on tensor cores, by warps that own 16 values each.
//
// A warp holds its part of the state, [16 values, K channels], and of a chunk's residuals in fp32 registers, and reads
// the chunk's rows and what was prepared of it (Prepared) in shared memory: nothing on the way from state to state
// passes between warps. With more than 64 channels it leaves the outputs to another warp (walker_outputs.hpp).
// docs/decisions/003 says what the delta rule computes with 16 bits in place of 8.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/walker_outputs.hpp"

namespace headrace::cuda {

// Of a block that walks with 64 values.
inline constexpr int walking_threads = block_warps * warp_lanes;
// Whether walks and sweeps with a scalar gate have four warps more, which then fetch.
template <int K>
inline constexpr bool has_third_group = fetching_threads(K) > 0 && ptx::groups_share_registers;

// loads_early: what products are multiplied by or added to arrives while they go on, where there are registers for it.
template <int K, class Format, bool loads_early = false>
struct WalkerOps {
    // Whether others compute the outputs, which are those that fetch.
    static constexpr bool leaves_outputs = fetching_threads(K) > 0;
    using T = float;
    struct Rows {
        Matrix<K> matrix;
    };
    struct Decayed {
        Rows x;
        const float* factors;  // [C] of the rows
    };
    // Rows of values, the prepared matrices, or a tag of what lies in registers.
    struct Tile {
        Matrix<64> matrix;
        SplitMatrix split;
        OutputPatch patch;
        bool given = false;
        HEADRACE_DEVICE explicit operator bool() const { return given; }
    };
    struct State {};  // the one in registers
    using Inputs = algorithms::ChunkInputs<WalkerOps>;

    float state[K / 8][4];
    TokenSums values;                   // the delta rule's residual, then d
    bool exact_reads, exact_writes;     // of this chunk
    bool writes;                        // else the state stays as it enters
    const float *read, *erase, *write, *beta;  // [C] factors of the rows
    TokenFactors own_beta, own_writes;         // those that this lane needs, loaded before they are
    SplitDecay<float> decay;            // of this chunk
    // Looked up where they are needed, as registers are few: Prepared::exact of this chunk, in shared memory;
    // scores_low of all chunks, and where this one was prepared; the warps that walk.
    const std::int32_t* exact;
    const std::uint16_t* scores_low;
    int place;
    LeftOperands<K, Format> left;  // to this warp's other, where outputs are wanted of it
    bool leaves;                   // whether they are
    bool waits;                    // whether for what it has left of the chunk before to be taken

    HEADRACE_DEVICE static int first_value() { return 16 * (warp() % block_warps); }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed erases(const Inputs& in) const { return {in.e, erase}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    // values = v + x S
    HEADRACE_DEVICE void add_read(Tile, Tile v, Decayed x, State) {
        const auto factors = Format::RowFactors::of(state);
        if (waits) ptx::meet_threads(taken_barrier, 2 * walking_threads);
        if (leaves) left.leave_factors(factors);
        // Upper halves, which all chunks need, are found before it is known which this is.
        constexpr bool upper_first = loads_early && !Format::splits_scores;
        const auto leave = [&](int step) {
            const SplitA a = left_operand<Format>(state, step, factors);
            if (leaves) left.leave_state(step, a);
            return a;
        };
        SplitA upper[K / 16] = {};
        if constexpr (upper_first) each_step(upper, leave);
        const auto operand = [&](int step) {
            return upper_first ? left_operand<Format>(state, step, factors) : leave(step);
        };
        TokenFactors of_rows;
        TransposedRows of_v;
        const auto meanwhile = [&] {
            if (leaves) ptx::arrive_threads(left_state_barrier, 2 * walking_threads);
            if constexpr (loads_early)
                of_rows = TokenFactors::load(x.factors), of_v = TransposedRows::load(v.matrix, first_value());
        };
        if (exact_reads) {
            read_of<Left::both, K, Format>(values, operand, x.x.matrix, factors, meanwhile);
        } else {
            const auto known = [&](int step) { return upper_first ? upper[step] : leave(step); };
            read_of<Left::high, K, Format>(values, known, x.x.matrix, factors, meanwhile);
        }
        if constexpr (!loads_early)
            of_rows = TokenFactors::load(x.factors), of_v = TransposedRows::load(v.matrix, first_value());
        scale_tokens(values, of_rows);
        of_v.template add_to<Format>(values);
    }
    // values <- solver values
    HEADRACE_DEVICE void solve(Tile, Tile solver) {
        TokenSums solved;
        const auto meanwhile = [&] {
            if constexpr (loads_early) own_beta = TokenFactors::load(beta), own_writes = TokenFactors::load(write);
        };
        add_lower_transposed<Format>(
            solved, [&](int step) { return left_operand(values, step); }, solver.split, false, meanwhile);
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            for (int place = 0; place < 4; ++place) values[tile][place] = solved[tile][place];
    }
    HEADRACE_DEVICE void scale_value_rows(Tile, Tile, const float* factors) {
        // What is stored for others behind this would hold up loads.
        if constexpr (has_third_group<K> && !loads_early) own_writes = TokenFactors::load(write);
        if constexpr (loads_early) {
            scale_tokens(values, own_beta);
        } else {
            scale_tokens(values, factors);
        }
    }
    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile) {
        const auto d = [&](int step) { return left_operand(values, step); };
        if constexpr (leaves_outputs) {
            ptx::sync_threads(solved_barrier, walking_threads);
#pragma unroll
            for (int step = 0; step < token_steps; ++step) left.leave_values(step, d(step));
            ptx::arrive_threads(left_values_barrier, 2 * walking_threads);
        } else {
            const auto factors = Format::RowFactors::of(state);
            TokenSums sums;
            const ChunkOutputs<K, Format> outputs{x.x.matrix,
                                                  x.factors,
                                                  P.split,
                                                  exact[0] != 0,
                                                  scores_low + ptx::not_before(place) * LowerImage::size,
                                                  {0, block_warps}};
            outputs.read_state(
                sums, [&](int step) { return left_operand<Format>(state, step, factors); }, factors);
            outputs.add_scores(sums, d);
            o.patch.template store<Format>(sums);
        }
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile) {
        if (!writes) return;
        if constexpr (has_third_group<K>) {
            scale_tokens(values, own_writes);
        } else {
            scale_tokens(values, x.factors);
        }
        const auto factors = Format::RowFactors::of(values);
        const auto written = [&](int step) { return left_operand<Format>(values, step, factors); };
        const auto of_all = [&](int, int) { return decay; };
        if (exact_writes) {
            decay_and_add<Left::both, K, Format>(state, written, x.x.matrix, of_all, factors);
        } else {
            decay_and_add<Left::high, K, Format>(state, written, x.x.matrix, of_all, factors);
        }
    }
};

}  // namespace headrace::cuda
