// ChannelWalkOps: the primitives of the algorithm page chunk_states on tensor cores under channel gates, by warps that
// own 16 values each. Rows come decayed and normalised (ChannelPrepare). Of the delta rule other warps compute the
// outputs (walker_outputs.hpp), unless two groups walk.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/additive_terms.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

template <int K, bool delta, WalkTo walks_to>
struct ChannelWalkOps : WalkingWarps<walks_to> {
    using Walking = WalkingWarps<walks_to>;
    using Walking::of_two, Walking::walking_warps, Walking::first_value, Walking::own_values;
    static constexpr int threads = walking_warps * warp_lanes;  // that walk
    using T = float;
    using Format = ByGroup<Bf16>;
    struct Rows {
        Matrix<K> matrix;
        const std::uint16_t* low;  // what 8 bits leave of them, in global memory, of the chunk at `place`
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
    using Inputs = algorithms::ChunkInputs<ChannelWalkOps>;

    float state[K / 8][4];
    TokenSums values;                // the delta rule's residual, then d
    bool exact_reads, exact_writes;  // of this chunk: by all warps of the block
    const std::int32_t* exact;       // delta rule: Prepared::exact of this chunk, in shared memory
    const float2* decay;             // [K] SplitDecay
    int place;                       // where the chunk was prepared, of kilobytes each
    SavedTiles<token_tiles> sums;    // additive rule: outputs that are not complete, in place of those in rows
    LeftOperands<K, Format> left;    // delta rule: to this warp's other, where outputs are wanted
    bool leaves, waits;              // whether they are; whether for what was left of the chunk before to be taken
    // Of two groups q S, whose products go on with those of e S, and q; scores_low of all chunks.
    TokenSums of_queries;
    Matrix<K> queries;
    const std::uint16_t* scores_low;

    // Else the state stays as it enters.
    HEADRACE_DEVICE bool writes() const { return exact[1] == tensor_chunk; }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Rows reads(const Inputs& in) const { return in.q; }
    HEADRACE_DEVICE Rows erases(const Inputs& in) const { return in.e; }
    HEADRACE_DEVICE Rows to_end(Rows x) const { return x; }

    // values = v + x S
    HEADRACE_DEVICE void add_read(Tile, Tile v, Rows x, State) {
        TokenSums of_read;  // sums of their own, not those of the chunk before, leave registers
        TransposedRows of_v;
        if (waits) ptx::meet_threads(taken_barrier, 2 * walking_threads);
        const auto operand = [&](int step) {
            const SplitA a = left_operand(state, step);
            if (leaves) left.leave_state(step, a);
            return a;
        };
        const auto meanwhile = [&] {
            if (leaves) ptx::arrive_threads(left_state_barrier, 2 * walking_threads);
            of_v = TransposedRows::load(own_values(v.matrix), first_value());
        };
        if constexpr (of_two) {
            SplitA of_state[K / 16];
            each_step(of_state, operand);
            group_products::read_two<Format>(of_read, of_queries, of_state, x.matrix, queries, meanwhile);
        } else {
            read_of<Left::high, K, Format>(of_read, operand, x.matrix, {}, meanwhile);
        }
        if (exact_reads) {
            each_rest(x, [&](bool of_state) {
                const auto rest = [&](int step) { return part(left_operand(state, step), of_state); };
                cuda::add_read<Left::high>(of_read, rest, x.matrix);
            });
        }
        of_v.add_to(of_read);
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            for (int place = 0; place < 4; ++place) values[tile][place] = of_read[tile][place];
    }
    // values += N values, with which I + N is the inverse
    HEADRACE_DEVICE void solve(Tile, Tile solver) {
        SplitA of[token_steps];
        each_step(of, [&](int step) { return left_operand(values, step); });
        add_lower_transposed<Format>(
            values, [&](int step) -> const SplitA& { return of[step]; }, solver.split);
    }
    HEADRACE_DEVICE void scale_value_rows(Tile, Tile, const float* factors) { scale_tokens(values, factors); }
    HEADRACE_DEVICE void read_and_score(Tile o, Rows x, State, Tile P, Tile b) {
        if constexpr (of_two) {
            const ChunkOutputs<K, Format, false> outputs{x.matrix,
                                                         nullptr,
                                                         {P.matrix, {}},
                                                         exact[0] < tensor_chunk,
                                                         scores_low + ptx::not_before(place) * LowerImage::size,
                                                         {0, walking_warps}};
            outputs.add_scores(of_queries, [&](int step) { return left_operand(values, step); });
            o.patch.store(of_queries);
        } else if constexpr (!delta) {
            TokenSums found;
            read<Left::high, K, Format>(found, state, x.matrix);
            add_lower_transposed<Left::high, Format>(
                found, [&](int step) { return left_operand(b.matrix, first_value(), step); }, P.matrix);
            sums.data != nullptr ? sums.save(found) : o.patch.store(found);
        }
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Rows x, Tile b) {
        if (delta && !writes()) return leave_values();
        const auto written = [&](int step) {
            if constexpr (delta) return left_operand(values, step);
            return left_operand(b.matrix, first_value(), step);
        };
        const auto of_channel = [&](int tile, int odd) {
            const float2 of = decay[8 * tile + lane() % 4 * 2 + odd];
            return SplitDecay<float>{of.x, of.y};
        };
        const auto meanwhile = [&] {
            if constexpr (delta) leave_values();
        };
        decay_and_add<Left::high, K, Format>(state, written, x.matrix, of_channel, {}, meanwhile);
        if constexpr (delta) {
            if (!exact_writes) return;
            each_rest(x, [&](bool of_values) {
                decay_and_add<Left::high, K>(
                    state, [&](int step) { return part(left_operand(values, step), of_values); }, x.matrix,
                    [](int, int) {
                        return SplitDecay<float>{1, 0};
                    });
            });
        }
    }

  private:
    // To this warp's other, if there is one.
    HEADRACE_DEVICE void leave_values() const {
        if (!leaves) return;
        ptx::sync_threads(solved_barrier, walking_threads);
        left.leave_values(values);
        ptx::arrive_threads(left_values_barrier, 2 * walking_threads);
    }
    // What 8 bits leave of a product: f(true) multiplies the rest of the left operand, f(false) the operand by that of
    // the rows, which takes their place.
    template <class F>
    HEADRACE_DEVICE void each_rest(Rows x, F f) const {
        HEADRACE_ROLLED
        for (int turn = 0; turn < 2; ++turn) {
            const std::int64_t first = static_cast<std::int64_t>(ptx::not_before(place)) * tensor_chunk * K;
            if (turn == 1) replace_rows<solved_barrier>(x.matrix, x.low + first, threads);
            f(turn == 0);
        }
    }
    HEADRACE_DEVICE static SplitA part(const SplitA& of, bool rest) {
        SplitA a;
#pragma unroll
        for (int n = 0; n < 4; ++n) a.high[n] = rest ? of.low[n] : of.high[n];
        return a;
    }
};

}  // namespace headrace::cuda
