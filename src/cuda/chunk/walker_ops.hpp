// WalkerOps: the primitives of the algorithm page chunk_states on tensor cores, by warps that own 16 values each.
//
// A warp holds its part of the state, [16 values, K channels], and of a chunk's residuals in fp32 registers, and reads
// the chunk's rows and what was prepared of it (Prepared) in shared memory: nothing on the way from state to state
// passes between warps. With more than 64 channels it leaves the outputs to another warp (walker_outputs.hpp), unless
// two groups walk.
// docs/decisions/003 says what the delta rule computes with 16 bits in place of 8.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/walker_outputs.hpp"

namespace headrace::cuda {

// Whether walks and sweeps with a scalar gate have four warps more, which then fetch.
template <int K>
inline constexpr bool has_third_group = fetching_threads(K) > 0 && ptx::groups_share_registers;

template <int K, class Format, WalkTo walks_to>
struct WalkerOps : WalkingWarps<walks_to> {
    using Walking = WalkingWarps<walks_to>;
    using Walking::of_two, Walking::walking_warps, Walking::first_value, Walking::own_values;
    static constexpr bool to_outputs = walks_to != WalkTo::states;
    // Whether what products are multiplied by or added to arrives while they go on; factors of what is written.
    static constexpr bool loads_writes = has_third_group<K> && small_state<K> && !of_two,
                          loads_early = to_outputs && loads_writes;
    // Whether others compute the outputs, which are those that fetch.
    static constexpr bool leaves_outputs = fetching_threads(K) > 0 && !of_two;
    // Then products of groups go on while what is left to the others is stored, but for f16, whose operands take its
    // place.
    static constexpr bool leaves_late = leaves_outputs && Format::by_group && !Format::splits_scores && small_state<K>;
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
    TokenSums values;                   // v + e S, then the delta rule's residual r, of which beta r is d
    // Of two groups q S, whose products go on with those of e S, where registers are left (reads_together), and q.
    TokenSums of_queries;
    Matrix<K> queries;
    bool exact_reads, exact_writes;     // of this chunk
    int first_exact;                    // token from which on its solve is, tensor_chunk for none
    bool writes;                        // else the state stays as it enters
    const float *read, *erase, *write;  // [C] factors of the rows; of those written with the betas, as the scores are
    TokenFactors own_writes;            // those that this lane needs, loaded before they are
    float decay;                        // of this chunk (CarriedDecay)
    // Looked up where they are needed, as registers are few: Prepared::exact of this chunk, in shared memory;
    // scores_low of all chunks, and where this one was prepared; the warps that walk.
    const std::int32_t* exact;
    const std::uint16_t* scores_low;
    int place;
    LeftOperands<K, Format> left;  // to this warp's other, where outputs are wanted of it
    bool leaves;                   // whether they are
    bool waits;                    // whether for what it has left of the chunk before to be taken

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed erases(const Inputs& in) const { return {in.e, erase}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    // values = v + x S
    HEADRACE_DEVICE void add_read(Tile, Tile v, Decayed x, State) {
        // Sums of their own, not those of the chunk before, leave registers; but for f16 without outputs.
        constexpr bool in_values = Format::splits_scores && !to_outputs;
        TokenSums of_read;
        TokenSums& sums = in_values ? values : of_read;
        const auto factors = Format::RowFactors::of(state);
        if (waits) ptx::meet_threads(taken_barrier, 2 * walking_threads);
        if (leaves) left.leave_factors(factors);
        // Upper halves, which all chunks need, are found before it is known which this is.
        constexpr bool upper_first = (loads_early || of_two) && !Format::splits_scores;
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
            read_of<Left::both, K, Format>(sums, operand, x.x.matrix, factors, meanwhile);
        } else if (reads_together()) {
            if constexpr (of_two)
                group_products::read_two<Format>(sums, of_queries, upper, x.x.matrix, queries, meanwhile);
        } else {
            const auto known = [&](int step) { return upper_first ? upper[step] : leave(step); };
            read_of<Left::high, K, Format>(sums, known, x.x.matrix, factors, meanwhile);
        }
        if constexpr (!loads_early)
            of_rows = TokenFactors::load(x.factors), of_v = TransposedRows::load(own_values(v.matrix), first_value());
        of_v.template add_to_scaled<Format>(sums, of_rows);
        if constexpr (!in_values) {
#pragma unroll
            for (int tile = 0; tile < token_tiles; ++tile)
                for (int place = 0; place < 4; ++place) values[tile][place] = sums[tile][place];
        }
    }
    // values += N values, with which I + N is the inverse: products with 8 bits of both do, as N is small and values
    // are there in fp32, but where keys overlap, or reads are exact (docs/decisions/003).
    HEADRACE_DEVICE void solve(Tile, Tile solver) {
        const auto meanwhile = [&] {
            if constexpr (loads_writes) own_writes = TokenFactors::load(write);
        };
        SplitA of[token_steps];
        const auto operand = [&](int step) -> const SplitA& { return of[step]; };
        each_step(of, [&](int step) { return left_operand(values, step); });
        if (!Format::splits_scores && first_exact == tensor_chunk) {
            add_lower_transposed<Left::high, Format>(values, operand, solver.split.high, meanwhile);
        } else if constexpr (Format::splits_scores || !to_outputs) {
            add_lower_transposed<Format>(values, operand, solver.split, meanwhile);
        } else {
            SplitA both[token_steps];
            each_step(both, [&](int step) { return left_operand(values, step); });
            add_lower_transposed<Left::high, Format>(values, operand, solver.split.high, meanwhile);
            clear_rows(solver.split, first_exact);
            add_lower_transposed<Bf16, Left::low>(
                values, [&](int step) -> const SplitA& { return both[step]; }, solver.split);
        }
    }
    HEADRACE_DEVICE void scale_value_rows(Tile, Tile, const float*) const {}  // by what the scores and factors have
    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile) {
        if constexpr (leaves_outputs) {
            if constexpr (!leaves_late) leave_values();
        } else {
            const auto factors = Format::RowFactors::of(state);
            TokenSums of_read;
            TokenSums& sums = of_two ? of_queries : of_read;
            const ChunkOutputs<K, Format> outputs{x.x.matrix,
                                                  x.factors,
                                                  P.split,
                                                  exact[0] < tensor_chunk,
                                                  scores_low + ptx::not_before(place) * LowerImage::size,
                                                  {0, walking_warps}};
            if (reads_together()) {
                scale_tokens(sums, x.factors);
            } else {
                outputs.read_state(
                    sums, [&](int step) { return left_operand<Format>(state, step, factors); }, factors);
            }
            outputs.add_scores(sums, [&](int step) { return left_operand(values, step); });
            o.patch.template store<Format>(sums);
        }
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile) {
        if (!writes) {
            if constexpr (leaves_late) leave_values();
            return;
        }
        exact_writes ? add_written<Left::both>(x) : add_written<Left::high>(x);
    }

  private:
    HEADRACE_DEVICE bool reads_together() const { return of_two && !exact_reads && first_exact == tensor_chunk; }
    template <Left left_of>
    HEADRACE_DEVICE void add_written(Decayed x) {
        if constexpr (!leaves_late) {
            if constexpr (loads_writes) {
                scale_tokens(values, own_writes);
            } else {
                scale_tokens(values, x.factors);
            }
        }
        const auto factors = Format::RowFactors::of(values);
        const auto written = [&](int step) {
            if constexpr (leaves_late) return left_operand(values, step, own_writes);
            return left_operand<Format>(values, step, factors);
        };
        const auto meanwhile = [&] {
            if constexpr (leaves_late) leave_values();
        };
        decay_and_add<left_of, K, Format>(
            state, written, x.x.matrix, [&](int, int) { return decay; }, factors, meanwhile);
    }
    // To this warp's other, if there is one.
    HEADRACE_DEVICE void leave_values() const {
        if (!leaves) return;
        ptx::sync_threads(solved_barrier, walking_threads);
        left.leave_values(values);
        ptx::arrive_threads(left_values_barrier, 2 * walking_threads);
    }
    // Of both matrices the rows before `first`, when all warps that walk have read them.
    HEADRACE_DEVICE static void clear_rows(SplitMatrix m, int first) {
        if (first == 0) return;
        constexpr int threads = walking_warps * warp_lanes, of_row = threads / tensor_chunk, columns = 64 / of_row;
        ptx::sync_threads(solved_barrier, threads);
        const int thread = thread_here() % threads, row = thread / of_row;
        if (row < first) {
            HEADRACE_ROLLED
            for (int column = thread % of_row * columns, end = column + columns; column < end; column += 8) {
                *reinterpret_cast<uint4*>(&m.high.pair(row, column)) = {};
                *reinterpret_cast<uint4*>(&m.low.pair(row, column)) = {};
            }
        }
        ptx::publish_to_products();
        ptx::sync_threads(solved_barrier, threads);
    }
};

}  // namespace headrace::cuda
