// ChannelWalk: a thread block walks the chunks of one sequence or segment, value head and some of its values under
// channel gates, from what ChannelPrepare left of them; each warp has 16 of the values and needs no other, while the
// next chunk arrives. Of the delta rule four or eight more warps decay the next chunk's rows meanwhile.
#pragma once

#include "cuda/chunk/channel_rows.hpp"
#include "cuda/chunk/channel_walk_ops.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/chunk/warp_values.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// gives_outputs: else it is never asked for more than states.
template <int K, bool delta, bool gives_outputs = true>
struct ChannelWalk {
    using Ops = ChannelWalkOps<K, delta>;
    // Whether more warps decay rows than walk; registers of their threads and of those that walk, together what
    // registers_allowed gives all.
    static constexpr bool has_third_group = delta && ptx::groups_share_registers;
    static constexpr int walking_registers = 248, decaying_registers = (3 * group_registers - walking_registers) / 2;
    static constexpr int threads = channel_walk_threads(delta) + (has_third_group ? launched_threads : 0),
                         decaying = delta ? threads - block_threads : block_threads;
    using OwnRows = ChannelRows<K, decaying>;
    static constexpr std::int64_t rows_size = tensor_chunk * K;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> reads, erases, writes;
        Matrix<64> v, scores;
        SplitMatrix solve;
        float *decay, *beta, *numbers;  // [K,2], [C], [4]
        std::int32_t* exact;            // [2]
    };

    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows v, o;
        std::int64_t n, tokens, first_place;  // of the sequence; where its first chunk was prepared
        int first_chunk, end_chunk, head;     // of the walk
        int first, values;                    // its first column; values from there on
        bool last;                            // whether the walk ends with the sequence
        ChannelInputs::Sources sources;       // delta rule
    };

    const KernelArgs& args;
    Rows* rows;
    char* first_stage;
    std::size_t stage_bytes;
    Matrix<64> patches;  // [value_columns,64] OutputPatch of each warp with values
    typename OwnRows::Shared* shared_of_rows;
    Ops ops;
    double passed = 1;  // of a segment: the decay of all chunks so far, of the channel threadIdx.x

    __host__ __device__ ChannelWalk(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        stage_at(nullptr, with_outputs(), &stage_bytes);
        first_stage = arena.take<char>(stage_bytes * static_cast<std::size_t>(args.stages));
        patches = Matrix<64>::take(arena, wants_outputs() ? args.value_columns : 0);
        rows = arena.take<Rows>(1);
        shared_of_rows = arena.take<typename OwnRows::Shared>(delta ? 1 : 0);
    }

    // One value head, values [first, first + value_columns): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        find_rows(walk, head, first, args.V - first);
        if (decays()) return;
        load_values(ops.state, in_between ? segment_tensor(args, args.segments.states, args.V) : args.initial_state,
                    in_between ? place : walk.n, head, args.K, first + Ops::first_value(), args.V);
        run<false>();
        if (rows->last)
            store_values(args.final_state, ops.state, rows->n, rows->head, args.K, rows->first + Ops::first_value(),
                         args.V);
    }

    // What leaves the segment of a slot, or, of a summary of the delta rule, a sequence, of these columns: of its own
    // values, or, of the delta rule, behind those, channels of the state that enters.
    HEADRACE_DEVICE void states() {
        const States of = states_of_block();
        const Walk walk = walk_of(args, of.place);
        if (walk.first_chunk < 0 || (in_segments() && walk.last && !args.segments.to_end)) return;  // nobody needs that
        find_rows(walk, of.head, of.transition ? 0 : of.first, of.transition ? 0 : args.V - of.first);
        if (decays()) return;
        const int own = of.first + Ops::first_value();
        if (of.transition) {
            load_unit_columns<K / 8>(ops.state, args.K, own);
        } else {
            Strided entering = args.initial_state;
            entering.given = !in_segments() && entering.given;
            load_values(ops.state, entering, of.place, of.head, args.K, own, args.V);
        }
        run<!delta>();
        leave_states(delta ? states_of_block() : of);  // found again, as registers are few
    }

  private:
    HEADRACE_DEVICE bool in_segments() const { return !delta || args.segments.tokens > 0; }  // where states() is asked
    // What a block of states() leaves: columns of a segment's or sequence's state, or of its transition, which a walk
    // without values finds from those of the unit matrix.
    struct States {
        std::int64_t place, head;
        int first;
        bool transition;
    };
    HEADRACE_DEVICE States states_of_block() const {
        const Task task = task_of(ptx::not_before(static_cast<int>(blockIdx.x)), args.HV, args.segments.blocks);
        const int column = task.part * args.value_columns, values = round_up(args.V, tensor_values);
        const bool transition = delta && column >= values;
        return {task.place, task.head, transition ? column - values : column, transition};
    }
    HEADRACE_DEVICE void leave_states(const States& of) const {
        const int channels = in_segments() ? round_up(args.K, 4) : args.K, columns = of.transition ? channels : args.V,
                  c = static_cast<int>(threadIdx.x);
        Strided to = segment_tensor(args, of.transition ? args.segments.transitions : args.segments.states, columns);
        if (!in_segments()) to = of.transition ? args.transition : args.final_state;
        store_values(to, ops.state, of.place, of.head, args.K, of.first + Ops::first_value(), columns);
        if (!delta && of.first == 0 && c < args.K)
            args.segments.decays[(of.place * args.HV + of.head) * args.K + c] = passed;
    }
    static constexpr int fetching = delta ? block_warps : 0;  // the first of the warps that fetch: those that have time
    // By all warps, before the state is there: the delta rule's beside those that walk do all that is theirs.
    HEADRACE_DEVICE bool decays() const {
        if constexpr (delta) {
            if (warp() >= block_warps) {
                if constexpr (has_third_group) ptx::keep_registers<decaying_registers>();
                decay_all();
                return true;
            }
            if constexpr (has_third_group) ptx::take_registers<walking_registers>();
        }
        return false;
    }
    // Those of the delta rule are laid out in one way only: its rows are decayed together.
    __host__ __device__ bool with_outputs() const { return delta || wants_outputs(); }
    __host__ __device__ bool wants_outputs() const { return gives_outputs && args.o.given; }
    // Where outputs are left as fp32 sums, for a launch behind.
    HEADRACE_DEVICE bool leaves_sums() const { return !delta && args.added.sums != nullptr; }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, int first, int values) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            *rows = {rows_of(args.v, all, head, first),
                     rows_of(args.o, all, head, first),
                     walk.n,
                     s.end - s.begin,
                     saved_place(args, s, walk.n, head, 0, tensor_chunk),
                     static_cast<int>(walk.first_chunk),
                     static_cast<int>(walk.end_chunk),
                     static_cast<int>(head),
                     first,
                     values,
                     walk.last,
                     {}};
            if constexpr (delta) inputs().find(all, static_cast<int>(head));
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE std::int64_t place_of(int chunk) const { return rows->first_place + chunk * args.HV; }
    HEADRACE_DEVICE static std::int64_t first_token(int chunk) {
        return static_cast<std::int64_t>(chunk) * tensor_chunk;
    }
    HEADRACE_DEVICE int length_of(int chunk) const {
        const std::int64_t left = rows->tokens - first_token(chunk);
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }
    HEADRACE_DEVICE ChannelInputs inputs() const { return {args, &rows->sources}; }

    // ---- turns ----
    // The walk's chunks, from the state in registers to that behind them; of `states` alone also their decay.
    template <bool states>
    HEADRACE_DEVICE void run() {
        const bool outputs = !states && wants_outputs();
        const auto compute_and_store = [&](int chunk) {
            const Stage stage = stage_of(chunk);
            if (states) pass(stage);
            compute(stage, chunk, outputs);
            if (!outputs || leaves_sums()) return;
            ptx::sync_warp();
            store(chunk);
        };
        const auto nothing = [](int) {};
        if constexpr (delta) {
            each_chunk<false, false>(compute_and_store, nothing);
        } else {
            each_chunk<states, true>(compute_and_store, [&](int chunk) { fetch(chunk); });
        }
    }
    // By the warps that have no values: each chunk's rows while the others walk the one before.
    HEADRACE_DEVICE void decay_all() const {
        const OwnRows of{inputs(), shared_of_rows};
        // What a thread copies, found once: this is on the way of every chunk.
        WholePieces<64, decaying> v(stage_of(0).v, rows->v.from(first_token(rows->first_chunk)), fetching * warp_lanes);
        const LowerPieces lower(warps_from(fetching));
        const bool whole = rows->v.near() && rows->values >= tensor_values;
        const auto fetch_and_decay = [&](int chunk) {
            typename OwnRows::Own own;
            of.load(own, first_token(chunk), length_of(chunk), place_of(chunk));
            // while these rows arrive
            const Stage to = stage_of(ptx::not_before(chunk));
            if (whole && length_of(chunk) == tensor_chunk) {
                v.copy(number_of(chunk) * static_cast<std::uint32_t>(stage_bytes));
            } else {
                fetch_values(to, chunk);
            }
            v.advance();
            fetch_prepared(to, place_of(chunk), lower);
            const int next = ptx::not_before(chunk) + 1;
            if (next < rows->end_chunk) of.inputs.template prefetch<K, decaying>(first_token(next), length_of(next));
            of.decay({to.reads, to.erases, to.writes}, own);
        };
        each_chunk<false, true>([](int) {}, fetch_and_decay);
    }
    // Of this warp, found where it is needed, as registers are few.
    HEADRACE_DEVICE OutputPatch patch() const { return {{patches.data + 16 * warp_here() * 64}}; }
    HEADRACE_DEVICE void store(int chunk) const {
        store_outputs(args.o, rows->o.from(first_token(chunk)), patch(), length_of(chunk), args.V - rows->first);
    }
    // compute(chunk) for each, of which `some` says that there are some; arrive(chunk), by warps that write or queue
    // what others read, one chunk ahead where there are two stages, behind it else.
    template <bool some, bool arrives, class Compute, class Arrive>
    HEADRACE_DEVICE void each_chunk(Compute compute, Arrive arrive) const {
        const auto meet = [] { arrives ? end_copies_of_block() : wait_for_block(); };
        const int first_chunk = rows->first_chunk, end_chunk = rows->end_chunk;
        const int ahead = args.stages - 1, first = first_chunk - ahead;
        if (!some && first >= end_chunk) return;
        int chunk = first;
        HEADRACE_ROLLED
        do {
            if (chunk > first) meet();
            // What follows from the chunk is computed where it stands, as registers are few.
            if (chunk + ahead < end_chunk) arrive(ptx::not_before(chunk + ahead));
            if (ahead == 0) meet();
            if (chunk >= first_chunk) compute(ptx::not_before(chunk));
        } while (++chunk < end_chunk);
    }
    // Threads have a channel each, in double as its decays may all be one and near 1.
    HEADRACE_DEVICE void pass(const Stage& stage) {
        static_assert(K <= 2 * tensor_values);
        if (threadIdx.x >= K) return;
        const float2 decay = reinterpret_cast<const float2*>(stage.decay)[threadIdx.x];
        passed *= static_cast<double>(decay.x) + static_cast<double>(decay.y);
    }
    HEADRACE_DEVICE void compute(const Stage& stage, int chunk, bool outputs) {
        ops.exact_writes = delta && stage.numbers[1] != 0, ops.exact_reads = delta && stage.numbers[2] != 0;
        ops.exact = stage.exact, ops.scores_low = args.prepared.scores_low;
        ops.decay = reinterpret_cast<const float2*>(stage.decay), ops.place = static_cast<int>(place_of(chunk));
        if constexpr (!delta) {
            ops.left.data = nullptr;
            if (leaves_sums()) {
                const std::int64_t block = args.added.first_block + rows->first / tensor_values,
                                   of = block * args.added.chunks * args.HV + ops.place;
                ops.left.data = reinterpret_cast<char*>(args.added.sums + of * added_outputs);
            }
        }
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, {}, true}; };
        const algorithms::ChunkInputs<Ops> in{{stage.reads, nullptr},
                                              {stage.writes, args.prepared.writes_low},
                                              {stage.erases, args.prepared.erases_low},
                                              tile(stage.v),
                                              stage.beta,
                                              1.0f,
                                              false};
        const algorithms::ForwardTiles<Ops> tiles{tile(stage.scores), {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<delta>(ops, in, tiles, {}, {}, {{}, {}, patch(), outputs});
        if constexpr (delta) {
            if (!ops.writes()) {
                advance(ptx::not_before(chunk));
            }
        }
    }
    // The chunk token by token, by the warps with values, from the token on that asks for it also its outputs. Rows as
    // they came and decays less one lie where the decayed rows were, of 16 tokens at a time.
    HEADRACE_DEVICE void advance(int chunk) {
        const Stage stage = stage_of(chunk);
        const int first_output = wants_outputs() ? stage.exact[1] : tensor_chunk;
        using Recurrence = TokenRecurrence<K, Bf16>;
        constexpr int group = 16;
        const Recurrence recurrence{ops.state};
        const int own = thread_here();
        const LanePlace at(own % warp_lanes);
        float* const decays = reinterpret_cast<float*>(stage.writes.data);                  // [group,K]
        std::uint32_t* const pairs = reinterpret_cast<std::uint32_t*>(decays + group * K);  // [2,group,K/2]
        const float* const factors = args.prepared.factors + place_of(chunk) * 4 * tensor_chunk;
        const int length = length_of(chunk), value = 16 * (own / warp_lanes) + at.row;
        HEADRACE_ROLLED
        for (int first = 0; first < length; first += group) {
            ptx::sync_threads(replacing_barrier, block_threads);
            load_tokens(first_token(chunk) + first, decays, pairs);
            ptx::sync_threads(replacing_barrier, block_threads);
            HEADRACE_ROLLED
            for (int n = 0; n < group && first + n < length; ++n) {
                const int i = first + n;
                const auto row_of = [&](int kind) {
                    return [=, column = at.column] {
                        const std::uint32_t* const row =
                            pairs + ptx::not_before(kind * group + n) * (K / 2) + column / 2;
                        return [row](int tile) { return row[4 * tile]; };
                    };
                };
                const auto decay = [row = decays + n * K + at.column](int tile, int odd) {
                    return row[8 * tile + odd];
                };
                const float norm = factors[2 * tensor_chunk + i];
                recurrence.advance(
                    {stage.beta[i], norm, norm, {low_half(stage.v.at(i, value)), low_half(stage.v.at(i, value + 8))}},
                    row_of(1), row_of(1), decay, false);
                if (!gives_outputs || i < first_output) continue;
                const float2 found = recurrence.read(row_of(0));
                patch().template store_token<Bf16>(i, factors[i] * found.x, factors[i] * found.y);
            }
        }
        ptx::sync_warp();
    }
    // Queries, keys and decays less one of 16 tokens from `first` on.
    HEADRACE_DEVICE void load_tokens(std::int64_t first, float* decays, std::uint32_t* pairs) const {
        constexpr int pieces = K / lane_channels, group = 16;
        const ChannelInputs from = inputs();
        HEADRACE_ROLLED
        for (int place = thread_here(); place < group * pieces; place += block_threads) {
            const int n = place / pieces, c = place % pieces * lane_channels;
            const Piece q = from.load_piece(args.q, rows->sources.q, first + n, c, rows->tokens),
                        k = from.load_piece(args.k, rows->sources.k, first + n, c, rows->tokens);
            float gates[lane_channels];
            from.load_log_decays(gates, first + n, c, rows->tokens);
            std::uint32_t* const to = pairs + n * (K / 2) + c / 2;
            to[0] = q.pairs[0], to[1] = q.pairs[1];
            to[group * (K / 2)] = k.pairs[0], to[group * (K / 2) + 1] = k.pairs[1];
#pragma unroll
            for (int channel = 0; channel < lane_channels; ++channel)
                decays[n * K + c + channel] = expm1f(gates[channel]);
        }
    }

    // ---- what arrives ----
    static __host__ __device__ Stage stage_at(char* first, bool outputs, std::size_t* bytes) {
        std::size_t used = 0;
        const auto take = [&](std::size_t size) {
            used += size;
            return first + used - size;
        };
        const auto matrix = [&](std::size_t columns) {
            return reinterpret_cast<std::uint16_t*>(take(2 * tensor_chunk * columns));
        };
        Stage stage{};
        stage.writes.data = matrix(K);
        stage.reads.data = outputs ? matrix(K) : stage.writes.data;
        stage.erases.data = delta ? matrix(K) : nullptr;
        stage.v.data = matrix(64);
        stage.scores.data = outputs ? matrix(64) : stage.v.data;
        if (delta) stage.solve.high.data = matrix(64), stage.solve.low.data = matrix(64);
        stage.decay = reinterpret_cast<float*>(take(8 * K));
        if (delta) {
            stage.beta = reinterpret_cast<float*>(take(4 * tensor_chunk));
            stage.numbers = reinterpret_cast<float*>(take(16));
            stage.exact = reinterpret_cast<std::int32_t*>(take(8));
        }
        if (bytes != nullptr) *bytes = (used + group_multiple - 1) / group_multiple * group_multiple;
        return stage;
    }
    HEADRACE_DEVICE std::uint32_t number_of(int chunk) const {
        return args.stages == 2 ? static_cast<std::uint32_t>(chunk % 2) : 0;
    }
    HEADRACE_DEVICE Stage stage_of(int chunk) const {
        return stage_at(first_stage + number_of(chunk) * stage_bytes, with_outputs(), nullptr);
    }
    // By all warps of the additive rule, whose prepared rows are decayed.
    HEADRACE_DEVICE void fetch(int chunk) const {
        const std::int64_t place = place_of(chunk);
        const Stage stage = stage_of(chunk);
        const Prepared& from = args.prepared;
        fetch_values(stage, chunk);
        if (wants_outputs()) copy_bytes<2 * rows_size>(stage.reads.data, from.reads + place * rows_size);
        copy_bytes<2 * rows_size>(stage.writes.data, from.writes + place * rows_size);
        copy_bytes<8 * K>(stage.decay, from.decay + place * 2 * K);
        if (wants_outputs()) copy_lower(all_warps(), LowerCopy{stage.scores, from.scores + place * LowerImage::size});
        ptx::end_copies();
    }
    HEADRACE_DEVICE void fetch_values(const Stage& to, int chunk) const {
        copy_rows(to.v, rows->v.from(first_token(chunk)), length_of(chunk), tensor_chunk, rows->values,
                  args.value_columns, warps_from(fetching));
    }
    HEADRACE_DEVICE void fetch_prepared(const Stage& to, std::int64_t place, const LowerPieces& pieces) const {
        const Prepared& from = args.prepared;
        const Warps by = warps_from(fetching);
        pieces.copy(to.solve.high, from.solve_high, place), pieces.copy(to.solve.low, from.solve_low, place),
            pieces.copy(to.scores, from.scores, place);
        copy_bytes<8 * K>(to.decay, from.decay + place * 2 * K, by);
        copy_bytes<4 * tensor_chunk>(to.beta, from.factors + (place * 4 + 3) * tensor_chunk, by);
        copy_bytes<16>(to.numbers, from.numbers + place * 4, by);
        if (const int own = static_cast<int>(threadIdx.x) - fetching * warp_lanes; own < 2)
            ptx::copy_4(ptx::shared_address(to.exact + own), from.exact + place * 2 + own, 4);
        ptx::end_copies();
    }
};

}  // namespace headrace::cuda
