// SweepWalk: what the sweeps of a backward on tensor cores share: a walk over the chunks of a sequence and value head
// by warps that own 16 values each, and what it leaves of every chunk (SweptChunks).
#pragma once

#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

HEADRACE_DEVICE bool keys_overlap(const KernelArgs& args, std::int64_t place) {
    return args.prepared.overlap[place] >= static_cast<std::int32_t>(KeyOverlap::some);
}

// What a block of a launch of sweeps has: the chunks of a sequence or segment, of one value head and some columns of
// its state, or of the gradient of one, from the last chunk back. Blocks of the gradients come first. Where sequences
// are cut into segments, a launch before `leaves` what segments alone make of their tokens and, for both directions,
// their transitions: of the additive rule decays.
struct SweptBlock {
    Walk walk;
    std::int64_t place, head;  // of a segment its slot, else the sequence
    WalkedColumns columns;
    bool back, leaves;

    HEADRACE_DEVICE SweptBlock(const KernelArgs& args, bool leaves_segments) : leaves(leaves_segments) {
        const int width = args.value_columns, of_values = (args.V + width - 1) / width;
        const Task task = task_of(blockIdx.x, args.HV, leaves ? args.segments.blocks : of_values);
        place = task.place, head = task.head;
        int part = static_cast<int>(task.part);
        bool is_transition = false;
        if (leaves) {
            const int of_states = args.segments.states != nullptr ? of_values : 0;
            back = part < of_values;
            is_transition = part >= of_values + of_states;
            if (!back) part -= is_transition ? of_values + of_states : of_values;
        } else {
            const std::int64_t places = args.segments.tokens > 0 ? args.segments.slots : args.N;
            back = place < places;
            if (!back) place -= places;
        }
        columns = {part * width, is_transition ? round_up(args.K, 4) : args.V, !is_transition};
        walk = walk_of(args, place);
    }
    // Whether there is such a segment, and another that needs what it leaves.
    HEADRACE_DEVICE bool is_wanted() const {
        const bool first = walk.first_chunk == 0, alone = first && walk.last,
                   unasked = !columns.of_values ? alone
                             : back             ? first
                                                : walk.last;
        return walk.first_chunk >= 0 && !(leaves && unasked);
    }
};

// Who saves SweptChunks: warps that walk, or others beside them, to whom these leave it in shared memory.
enum class Saved { by_walkers, by_others, not_at_all };

// With the state in registers, or the gradient of one. Where nothing is saved, what leaves segments is all that is
// wanted; `has_transitions`: columns of the unit matrix may take the place of a state.
template <int K, class Format, bool has_others, Saved saved, bool has_transitions = true>
struct SweepWalk {
    static constexpr bool leaves_segments = saved == Saved::not_at_all;
    struct Nothing {
        HEADRACE_DEVICE void operator()(int, int) const {}
    };
    static constexpr int state_tiles = K / 8;
    static constexpr int left_rows_barrier = 8;  // of the warps that walk and those that save

    // In shared memory, as registers are few.
    struct Sequence {
        TokenRows rows, d_v;               // v or d_o; of the block's values
        std::int64_t tokens, first_place;  // of the sequence; of its first chunk in what is prepared and saved
        int values;                        // of the rows from the block's first on, of a transition none
    };

    const KernelArgs& args;
    Matrix<64> patches;  // [16 warps,64] OutputPatch of each warp
    Sequence* of_sequence;
    float state[state_tiles][4];

    HEADRACE_DEVICE static int warp_value() { return 16 * warp(); }
    HEADRACE_DEVICE int count_of(int first) const {
        return args.V - first < args.value_columns ? args.V - first : args.value_columns;
    }

    // By one thread: where the tokens of the block's sequence and its value head lie.
    HEADRACE_DEVICE void find_sequence(const SweptBlock& block) const {
        const TokenRange& s = block.walk.sequence;
        const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
        const int first = block.columns.of_values ? block.columns.first : 0;
        *of_sequence = {rows_of(block.back ? args.d_o : args.v, all, block.head, first),
                        rows_of(args.d_v, all, block.head, first), s.end - s.begin,
                        saved_place(args, s, block.walk.n, block.head, 0, tensor_chunk), block.columns.values()};
    }
    // Of a chunk, found where it stands.
    HEADRACE_DEVICE std::int64_t place_of(int chunk) const {
        return of_sequence->first_place + std::int64_t{ptx::not_before(chunk)} * args.HV;
    }
    HEADRACE_DEVICE static std::int64_t token_of(int chunk) {
        return std::int64_t{ptx::not_before(chunk)} * tensor_chunk;
    }
    HEADRACE_DEVICE int length_of(int chunk) const {
        const std::int64_t left = of_sequence->tokens - token_of(chunk);
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }

    // Which warps have values; the others, where there are any, fetch.
    HEADRACE_DEVICE bool walks() const { return !has_others || warp() < block_warps; }

    // Those of a walk, as few registers hold them.
    struct Chunks {
        int first, end;
        HEADRACE_DEVICE explicit Chunks(const Walk& walk)
            : first(static_cast<int>(walk.first_chunk)), end(static_cast<int>(walk.end_chunk)) {}
    };
    // The chunks of a walk, from the first one or the last: fetch(chunk, turn) queues copies of what
    // compute(chunk, turn) reads, args.stages turns at once; where there are two stages before(chunk, turn) comes
    // first. All warps of a block meet in every turn, whichever of these they have; those that fetch have
    // arrived(chunk, turn) before others read a chunk.
    template <bool from_end, class Fetch, class Compute, class Before = Nothing, class Arrived = Nothing>
    HEADRACE_DEVICE void each_chunk(Chunks of, Fetch fetch, Compute compute, Before before = {}, Arrived arrived = {}) {
        const int chunks = of.end - of.first;
        const auto chunk_of = [&](int turn) { return from_end ? of.end - 1 - turn : of.first + turn; };
        const int ahead = args.stages - 1;  // what arrives, of what is computed
        int turn = -ahead;
        const auto meet = [&](bool chunk_arrives) {
            if constexpr (std::is_same_v<Fetch, Nothing>) {
                wait_for_block();
            } else {
                ptx::wait_for_copies<0>();
                if (chunk_arrives && turn >= 0) arrived(chunk_of(turn), turn);
                meet_block();
            }
        };
        if (!leaves_segments && turn >= chunks) return;  // of a segment there are some
        HEADRACE_ROLLED
        do {
            if (turn > -ahead) meet(ahead > 0);
            HEADRACE_ROLLED
            for (int step = 0; step < 2; ++step) {
                if (step != ahead) {
                    if (turn >= 0) before(chunk_of(turn), turn);
                    continue;
                }
                if (turn + ahead < chunks) fetch(chunk_of(turn + ahead), turn + ahead);
                if (ahead == 0) meet(true);
            }
            if (turn >= 0) compute(chunk_of(turn), turn);
        } while (++turn < chunks);
    }

    // x += rows^T P, or without `add` x = rows^T P, rows [64 tokens, 64 values] from `value` on. Here and below `fine`:
    // of 16 bits of what P or N is, and of left operands that were computed.
    template <bool fine = true>
    HEADRACE_DEVICE static void add_lower_of_rows(TokenSums& x, Matrix<64> rows, int value, const SplitMatrix& P,
                                                  bool add = true) {
        const auto left = [&](int step) { return left_operand(rows, value, step); };
        if constexpr (fine) {
            add_lower<Left::high, Format>(x, left, P, add);
        } else {
            add_lower<Left::high, Format>(x, left, P.high, add);
        }
    }

    // With N of `solve` (math.md, section 5): from what a chunk's tokens find to its residuals r = x + N Diag(beta) x,
    // of which beta r is d, and from gradients y' of what is written to y = (I + Diag(beta) l)^-T y' = y' + N^T
    // Diag(beta) y', of which beta y is z. `overlap`, a KeyOverlap, says whether N has a rest, which takes the place of
    // its lower part; find() finds the stage again for it, as registers are few.
    template <bool fine = true, class Beta, class Find>
    HEADRACE_DEVICE void solve_residuals(TokenSums& x, const SplitMatrix& solve, const Beta& beta, std::int32_t overlap,
                                         Find find, std::int64_t place) const {
        TokenSums scaled;
        scale_into(scaled, x, beta);
        const auto left = [&](int step) { return left_operand(scaled, step); };
        if constexpr (!fine) return add_lower_transposed<Left::high, Format>(x, left, solve.high);
        add_lower_transposed<Format>(x, left, solve);
        if (overlap != static_cast<std::int32_t>(KeyOverlap::reflected)) return;
        const Matrix<64> low = find().solve.low;
        add_lower_transposed<Left::low>(x, left, low);
        take_rest(low, place);
        add_lower_transposed<Left::high>(x, left, low);
    }
    template <bool fine = true, class Beta, class Find>
    HEADRACE_DEVICE void solve_gradients(TokenSums& y, const SplitMatrix& solve, const Beta& beta, std::int32_t overlap,
                                         Find find, std::int64_t place) const {
        TokenSums scaled;
        scale_into(scaled, y, beta);
        const auto left = [&](int step) { return left_operand(scaled, step); };
        if constexpr (!fine) return add_lower<Left::high, Format>(y, left, solve.high);
        add_lower<Left::both, Format>(y, left, solve);
        if (overlap != static_cast<std::int32_t>(KeyOverlap::reflected)) return;
        const Matrix<64> low = find().solve.low;
        add_lower<Left::low>(y, left, low);
        take_rest(low, place);
        add_lower<Left::high>(y, left, low);
    }
    // r and y, for the gradients.
    template <bool fine = true>
    HEADRACE_DEVICE void leave_residuals(const TokenSums& x, std::int32_t overlap, std::int64_t place,
                                         int first) const {
        save_or_leave(args.swept.residuals, x, place, first);
        if constexpr (fine) save_low(args.swept.residuals_low, x, overlap, place, first);
    }
    template <bool fine = true>
    HEADRACE_DEVICE void leave_gradients(const TokenSums& y, std::int32_t overlap, std::int64_t place,
                                         int first) const {
        save_or_leave(args.swept.d_written, y, place, first);
        if constexpr (fine) save_low(args.swept.d_written_low, y, overlap, place, first);
    }
    HEADRACE_DEVICE void take_rest(Matrix<64> low, std::int64_t place) const {
        replace_lower(low, LowerImage{args.prepared.solve_rest}.of(place).first,
                      {0, has_others ? block_warps : warps()});
    }
    template <class Factors>
    HEADRACE_DEVICE static void scale_into(TokenSums& to, const TokenSums& from, const Factors& factors) {
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            for (int place = 0; place < 4; ++place) to[tile][place] = from[tile][place];
        scale_tokens(to, factors);
    }

    // ---- what is left for the gradients ----
    // Lines of this warp's values, which begin before V, in pieces of 16 bytes.
    template <int tiles>
    HEADRACE_DEVICE void save(std::uint16_t* to, const float (&sums)[tiles][4], std::int64_t place, int first) const {
        const LanePlace at;
        const int value = first + warp_value();
        if (saved == Saved::not_at_all || to == nullptr || value >= args.V) return;
        // Else its patch is another's to read, or registers are too few.
        if constexpr (ptx::stores_matrices && saved == Saved::by_walkers && small_state<K>) {
            const OutputPatch patch = own_patch();
            const int own = lane_here();
            std::uint16_t* const lines = to + (place * round_up(args.V, 16) + value) * (8 * tiles);
#pragma unroll
            for (int first_tile = 0; first_tile < tiles; first_tile += token_tiles) {
                ptx::sync_warp();
                patch.store_lines(reinterpret_cast<const TokenSums&>(sums[first_tile]), own);
                ptx::sync_warp();
                patch.save_lines<8 * tiles>(lines + 8 * first_tile, own);
            }
            return;
        }
        std::uint16_t* const line = to + (place * round_up(args.V, 16) + value + at.row) * (8 * tiles) + 4 * at.column;
#pragma unroll
        for (int four = 0; four < tiles; four += 4) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                std::uint32_t pairs[4];
#pragma unroll
                for (int tile = 0; tile < 4; ++tile)
                    pairs[tile] = ptx::round_to_bf16(sums[four + tile][2 * half], sums[four + tile][2 * half + 1]);
                transpose_of_four_lanes(pairs);
                *reinterpret_cast<uint4*>(line + half * 8 * 8 * tiles + 8 * four) = {pairs[0], pairs[1], pairs[2],
                                                                                     pairs[3]};
            }
        }
    }
    HEADRACE_DEVICE void save_or_leave(std::uint16_t* to, const TokenSums& sums, std::int64_t place, int first) const {
        if constexpr (saved == Saved::by_others) {
            own_patch().store_lines(sums);
            ptx::arrive_threads(left_rows_barrier, 2 * walking_threads);
        } else {
            save(to, sums, place, first);
        }
    }
    HEADRACE_DEVICE OutputPatch own_patch() const { return OutputPatch::of(patches, warp_here()); }
    // What 8 bits leave of them, of chunks whose keys overlap.
    HEADRACE_DEVICE void save_low(std::uint16_t* to, const TokenSums& sums, std::int32_t overlap, std::int64_t place,
                                  int first) const {
        if constexpr (saved != Saved::not_at_all) {
            if (overlap < static_cast<std::int32_t>(KeyOverlap::some)) return;
            TokenSums rest;
#pragma unroll
            for (int tile = 0; tile < token_tiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 4; half += 2) {
                    const std::uint32_t high = ptx::round_to_bf16(sums[tile][half], sums[tile][half + 1]);
                    rest[tile][half] = sums[tile][half] - low_half(high);
                    rest[tile][half + 1] = sums[tile][half + 1] - high_half(high);
                }
            }
            save(to, rest, place, first);
        }
    }
    // d_v
    HEADRACE_DEVICE void store_rows(const TokenSums& rows, int chunk, int first) const {
        if (saved == Saved::not_at_all || !args.d_v.given) return;
        const OutputPatch patch = own_patch();
        ptx::sync_warp();
        patch.store(rows);
        ptx::sync_warp();
        store_outputs(args.d_v, of_sequence->d_v.from(token_of(chunk)), patch, length_of(chunk), count_of(first));
    }

    // ---- states ----
    // What enters the chunks of a block, and what leaves them, to other segments or the caller.
    template <bool back>
    HEADRACE_DEVICE void enter(const SweptBlock& block) {
        const int own = block.columns.first + warp_value();
        if constexpr (leaves_segments) {
            if (has_transitions && !back && !block.columns.of_values)
                return load_unit_columns<state_tiles>(state, args.K, own);
            load_values(state, {}, 0, 0, args.K, own, args.V);
        } else {
            const bool in_segments = args.segments.tokens > 0;
            const Strided given = in_segments ? of_segments<back>() : back ? args.d_final_state : args.initial_state;
            load_values(state, given, in_segments ? block.place : block.walk.n, block.head, args.K, own, args.V);
        }
    }
    template <bool back>
    HEADRACE_DEVICE void leave(const SweptBlock& block) const {
        const int own = block.columns.first + warp_value(), all = block.columns.all;
        if constexpr (!leaves_segments) {
            if (back && block.walk.first_chunk == 0)
                store_values(args.d_initial_state, state, block.walk.n, block.head, args.K, own, all);
        } else if (!has_transitions || back || block.columns.of_values) {
            store_values(of_segments<back>(), state, block.place, block.head, args.K, own, all);
        } else {
            if (args.segments.states != nullptr)
                store_values(segment_tensor(args, args.segments.transitions, all), state, block.place, block.head,
                             args.K, own, all);
            Strided transposed = segment_tensor(args, args.segments.transposed_transitions, all);
            transposed.stride[2] = 1, transposed.stride[3] = all;
            store_values(transposed, state, block.place, block.head, all, own, args.K);
        }
    }
    template <bool back>
    HEADRACE_DEVICE Strided of_segments() const {
        return segment_tensor(args, back ? args.segments.adjoints : args.segments.states, args.V);
    }
};

}  // namespace headrace::cuda
