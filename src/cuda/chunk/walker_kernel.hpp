// WalkerKernel: a thread block walks the chunks of one sequence or segment, value head and some of its values on tensor
// cores; each warp has 16 of the values and needs no other, while the next chunk arrives. With more than 64 channels
// walks to the outputs have as many warps more, which fetch and compute outputs.
#pragma once

#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

// The delta rule with a scalar gate.
template <int K, class Format>
struct WalkerKernel {
    using Ops = WalkerOps<K, Format>;
    static constexpr int channels = K;
    // Numbers of a chunk in a stage: factors, the decay, what tells exactness.
    static constexpr int decay_at = 4 * tensor_chunk, numbers_at = decay_at + 4, exact_at = numbers_at + 4,
                         stage_numbers = exact_at + 4;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> v;
        SplitMatrix scores, solve;  // scores.low of f16
        float* numbers;
    };

    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows q, k, e, v, o;
        ChunkRange sequence;               // all of it
        std::int64_t head;
        std::int64_t tokens, first_place;  // of the sequence; where its first chunk was prepared
        bool last;                         // whether the walk ends with the sequence
        bool whole;                        // whether rows are near, and have all columns of the block's matrices
    };

    const KernelArgs& args;
    Rows* rows;
    char* first_stage;
    std::size_t stage_bytes;  // of its matrices
    float* first_numbers;
    OutputPatch patch;             // of this warp, where it computes its own outputs
    LeftOperands<K, Format> left;  // of all that walk, where others compute outputs
    DeltaExactness exactness;
    Ops ops;

    __host__ __device__ WalkerKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        const std::size_t column = 2 * tensor_chunk, of_outputs = args.o.given ? 1 : 0,
                          of_keys = (args.undecayed_error ? 2 : 1) + of_outputs,
                          of_scores = Format::splits_scores ? 2 * of_outputs : of_outputs;
        const auto stages = static_cast<std::size_t>(args.stages);
        stage_bytes = column * (of_keys * K + (3 + of_scores) * 64);
        first_stage = arena.take<char>(stage_bytes * stages);
        first_numbers = arena.take<float>(stage_numbers * stages);
        rows = arena.take<Rows>(1);
        if (!Ops::leaves_outputs) patch.matrix = Matrix<64>::take(arena, tensor_values);
        if (Ops::leaves_outputs && args.o.given) left = LeftOperands<K, Format>::take(arena, block_warps);
#ifdef __CUDA_ARCH__
        patch.matrix.data += Ops::first_value() * 64;
#endif
    }

    // One value head, values [first, first + 64): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        const Strided entering = in_between ? segment_tensor(args.segments.states, args.V) : args.initial_state;
        const Columns columns{first, args.V, true};
        find_rows(walk, head, columns);
        if (Ops::leaves_outputs && !walks()) {
            assist(walk, columns);
            return;
        }
        load(entering, in_between ? place : walk.n, head, columns);
        // Known at run time only, as ptxas has no registers for wgmma otherwise.
        run<!Ops::leaves_outputs>(walk, columns, Ops::leaves_outputs || args.o.given, false);
        if (rows->last) store(args.final_state, walk.n, head, columns);
    }

    // What leaves the segment of a slot: of its own values, 64 from `first` on; or, behind the blocks of
    // values, of as many channels of the state that enters.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = segment_walk(args, slot);
        if (walk.first_chunk < 0 || walk.last) return;  // what leaves the last one no other needs
        const int values = round_up(args.V, tensor_values);
        const bool transition = first >= values;
        const Columns columns{transition ? first - values : first, transition ? round_up(args.K, 4) : args.V,
                              !transition};
        find_rows(walk, head, columns);
        load({}, 0, 0, columns);
        run<true>(walk, columns, false, transition);
        float* const to = transition ? args.segments.transitions : args.segments.states;
        store(segment_tensor(to, columns.all), slot, head, columns);
    }

  private:
    // Of the state, from `first` on of `all`: values, or channels of the unit matrix that enters a segment.
    struct Columns {
        int first, all;
        bool of_values;
    };

    HEADRACE_DEVICE Strided segment_tensor(float* data, int columns) const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * columns;
        return {reinterpret_cast<char*>(data), {args.HV * head, head, columns, 1}, DType::f32, true};
    }

    HEADRACE_DEVICE bool walks() const { return warp() < block_warps; }
    // The warp that walks with the values whose outputs this one computes.
    HEADRACE_DEVICE int of_other() const { return warp() - block_warps; }

    // The walk's chunks, from the state in registers to that behind them. `exact`: in every chunk; else where the
    // numbers of all chunks of the sequence up to it ask for it, as in a walk without segments.
    template <bool fetches>
    HEADRACE_DEVICE void run(const Walk& walk, Columns columns, bool outputs, bool exact) {
        const int ahead = args.stages - 1;  // what arrives, of what is computed
        const std::int64_t first = walk.first_chunk - ahead;
        HEADRACE_ROLLED
        for (std::int64_t chunk = first; chunk < walk.end_chunk; ++chunk) {
            if (chunk > first) end_copies_of_block();
            if (fetches && chunk + ahead < walk.end_chunk) fetch(columns, chunk + ahead, outputs);
            if (ahead == 0) end_copies_of_block();
            if (chunk == first)
                exactness.template pass<Format>(args.prepared.numbers + 4 * rows->first_place, 4 * args.HV,
                                                walk.first_chunk);
            if (chunk < walk.first_chunk) continue;
            compute(stage_of(chunk), chunk, columns, outputs, exact);
            if constexpr (!Ops::leaves_outputs) {
                if (outputs) store_outputs(stage_of(chunk), chunk, columns, patch, warp());
            }
        }
    }
    // By the warps beside those that walk: chunks arrive one ahead, and outputs.
    HEADRACE_DEVICE void assist(const Walk& walk, Columns columns) const {
        const int ahead = args.stages - 1;
        const std::int64_t first = walk.first_chunk - ahead;
        Arriving arriving(*this, stage_of(0), walk.first_chunk);
        HEADRACE_ROLLED
        for (std::int64_t chunk = first; chunk < walk.end_chunk; ++chunk) {
            if (chunk > first) end_copies_of_block();
            if (const std::int64_t next = chunk + ahead; next < walk.end_chunk) {
                const Stage to = stage_of(next);
                if (is_whole(next)) {
                    arriving.copy(*this);
                } else {
                    fetch_rows(to, columns, next, true);
                }
                fetch_prepared(to, arriving.place, true, arriving.lower);
                arriving.advance(args);
            }
            if (ahead == 0) end_copies_of_block();
            if (chunk >= walk.first_chunk) compute_outputs(stage_of(chunk), chunk, columns);
        }
    }
    // What a thread copies of a chunk whose rows are whole, found once: this is on the way of every chunk.
    struct Arriving {
        WholePieces<K> q, k, e;
        WholePieces<64> v;
        LowerPieces lower;
        std::int64_t place;
        int turn;

        HEADRACE_DEVICE Arriving(const WalkerKernel& of, const Stage& to, std::int64_t chunk)
            : q(to.q, of.rows->q.from(chunk * tensor_chunk), block_threads),
              k(to.k, of.rows->k.from(chunk * tensor_chunk), block_threads),
              e(to.e, of.rows->e.from(chunk * tensor_chunk), block_threads),
              v(to.v, of.rows->v.from(chunk * tensor_chunk), block_threads),
              lower(fetching_warps()),
              place(of.rows->first_place + chunk * of.args.HV),
              turn(of.turn_of(chunk)) {}
        HEADRACE_DEVICE void copy(const WalkerKernel& of) const {
            const auto behind = static_cast<std::uint32_t>(turn) * static_cast<std::uint32_t>(of.stage_bytes);
            q.copy(behind), k.copy(behind), v.copy(behind);
            if (of.args.undecayed_error) e.copy(behind);
        }
        HEADRACE_DEVICE void advance(const KernelArgs& args) {
            q.advance(), k.advance(), e.advance(), v.advance();
            place += args.HV;
            if (args.stages == 2) turn ^= 1;
        }
    };
    // By another warp than that which walks.
    HEADRACE_DEVICE void compute_outputs(const Stage& stage, std::int64_t chunk, Columns columns) const {
        const std::int64_t image = (rows->first_place + chunk * args.HV) * LowerImage::size;
        const ChunkOutputs<K, Format> outputs{stage.q,
                                              stage.numbers,
                                              stage.scores,
                                              reinterpret_cast<const std::int32_t*>(stage.numbers + exact_at),
                                              args.prepared.scores_low + image,
                                              {block_warps, block_warps}};
        const LeftOperands<K, Format> from = left.of_pair(of_other(), stage.solve);
        TokenSums sums;
        ptx::meet_threads(left_state_barrier, 2 * walking_threads);
        outputs.read_state(
            sums, [&](int step) { return from.left_state(step); }, from.left_factors());
        ptx::meet_threads(left_values_barrier, 2 * walking_threads);
        outputs.add_scores(sums, [&](int step) { return from.left_values(step); });
        const OutputPatch of_values = left.patch_of_pair(of_other(), stage.solve);
        ptx::sync_warp();
        of_values.template store<Format>(sums);
        store_outputs(stage, chunk, columns, of_values, of_other());
    }
    HEADRACE_DEVICE void compute(const Stage& stage, std::int64_t chunk, Columns columns, bool outputs, bool exact) {
        exactness.decide<Format>(*reinterpret_cast<const float4*>(stage.numbers + numbers_at), exact);
        ops.exact = reinterpret_cast<const std::int32_t*>(stage.numbers + exact_at);
        // Where keys overlap, what is written are small differences.
        ops.exact_reads = exactness.reads, ops.exact_writes = exactness.writes || ops.exact[0] != 0;
        ops.scores_low = args.prepared.scores_low;
        ops.leaves = Ops::leaves_outputs && outputs;
        if (ops.leaves) ops.left = left.of_pair(warp(), stage.solve);
        ops.place = static_cast<int>(rows->first_place + chunk * args.HV);
        const float2 decay = *reinterpret_cast<const float2*>(stage.numbers + decay_at);
        ops.decay = {decay.x, decay.y};
        const float* const factors = stage.numbers;
        ops.read = factors, ops.erase = factors + tensor_chunk, ops.write = factors + 2 * tensor_chunk;
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, {}, true}; };
        const algorithms::ChunkInputs<Ops> in{
            {stage.q}, {stage.k}, {stage.e}, tile(stage.v), factors + 3 * tensor_chunk, 1.0f, args.undecayed_error};
        const algorithms::ForwardTiles<Ops> tiles{
            {{}, stage.scores, {}, true}, {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<true>(ops, in, tiles, {}, {}, {{}, {}, patch, outputs});
        if (!ops.writes()) advance(ptx::not_before(static_cast<int>(chunk)), columns, outputs);
    }
    // The token from which on the recurrence has the chunk's outputs.
    HEADRACE_DEVICE static int first_of_recurrence(const Stage& stage) {
        return *reinterpret_cast<const std::int32_t*>(stage.numbers + exact_at + 1);
    }
    // The chunk token by token, from the token on that asks for it also its outputs. What is known of the stage is
    // found again, so that nothing waits in registers for a case that is rare.
    HEADRACE_DEVICE void advance(int chunk, Columns columns, bool outputs) {
        const Stage stage = stage_of(chunk);
        const int first_output = outputs ? first_of_recurrence(stage) : tensor_chunk;
        using Recurrence = TokenRecurrence<K, Format>;
        const Recurrence recurrence{ops.state};
        const int own = lane_here(), length = length_of(chunk), value = 16 * (thread_here() / warp_lanes) + own / 4;
        float gates[2] = {};  // of this lane's two tokens
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int i = 2 * own + odd;
            if (i < length)
                gates[odd] = expm1f(token_log_decay(args, rows->sequence, chunk * tensor_chunk + i, rows->head));
        }
        const auto norm = [&](auto row) { return args.l2norm ? Recurrence::inverse_norm(row) : 1.0f; };
        HEADRACE_ROLLED
        for (int i = 0; i < length; ++i) {
            const auto row_of = [&](Matrix<K> rows) {
                return [rows, i, own] {
                    const PairsAt<K> pairs(ptx::not_before(i), 0, own % 4);
                    return [rows, pairs](int tile) { return pairs.of(rows, tile, 0); };
                };
            };
            const auto k = row_of(stage.k), e = row_of(stage.e), q = row_of(stage.q);
            const float gate = ptx::shuffle_from(i % 2 == 0 ? gates[0] : gates[1], i / 2), of_k = norm(k);
            recurrence.advance({stage.numbers[3 * tensor_chunk + i],
                                of_k,
                                args.undecayed_error ? norm(e) : of_k,
                                {Format::first(stage.v.at(i, value)), Format::first(stage.v.at(i, value + 8))}},
                               k, e, [gate](int, int) { return gate; }, args.undecayed_error);
            if (!outputs || i < first_output) continue;
            const float2 found = recurrence.read(q);
            const float factor = static_cast<float>(args.scale) * norm(q);
            store_token(rows->o.from(chunk * tensor_chunk + i), columns, own, {factor * found.x, factor * found.y});
        }
    }

    // ---- what arrives ----
    HEADRACE_DEVICE int turn_of(std::int64_t chunk) const { return args.stages == 2 ? static_cast<int>(chunk % 2) : 0; }
    HEADRACE_DEVICE Stage stage_of(std::int64_t chunk) const {
        const int turn = turn_of(chunk);
        char* at = first_stage + static_cast<std::size_t>(turn) * stage_bytes;
        const auto take = [&](int columns) {
            std::uint16_t* const matrix = reinterpret_cast<std::uint16_t*>(at);
            at += 2 * tensor_chunk * columns;
            return matrix;
        };
        Stage stage{};
        stage.k.data = take(K);
        stage.e.data = args.undecayed_error ? take(K) : stage.k.data;
        stage.q.data = args.o.given ? take(K) : stage.k.data;
        stage.scores.high.data = args.o.given ? take(64) : stage.k.data;
        if (Format::splits_scores) stage.scores.low.data = args.o.given ? take(64) : stage.k.data;
        stage.v.data = take(64);
        stage.solve.high.data = take(64), stage.solve.low.data = take(64);
        stage.numbers = first_numbers + turn * stage_numbers;
        return stage;
    }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, Columns columns) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            const std::int64_t key_head = quotient(head, args.group);
            const int first = columns.of_values ? columns.first : 0;
            *rows = {rows_of(args.q, all, key_head, 0),
                     rows_of(args.k, all, key_head, 0),
                     rows_of(args.undecayed_error ? args.p : args.k, all, key_head, 0),
                     rows_of(args.v, all, head, first),
                     rows_of(args.o, all, head, first),
                     all,
                     head,
                     s.end - s.begin,
                     saved_place(args, s, walk.n, head, 0, tensor_chunk),
                     walk.last,
                     false};
            rows->whole = args.K == K && columns.of_values && columns.all - columns.first >= tensor_values &&
                          rows->q.near() && rows->k.near() && rows->e.near() && rows->v.near();
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE int length_of(std::int64_t chunk) const {
        const std::int64_t left = rows->tokens - chunk * tensor_chunk;
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }
    HEADRACE_DEVICE void fetch(Columns columns, std::int64_t chunk, bool outputs) const {
        const Stage stage = stage_of(chunk);
        const Warps by = fetching_warps();
        if (is_whole(chunk)) {
            const std::int64_t first = chunk * tensor_chunk;
            const int thread = by.first * warp_lanes;
            if (outputs) copy_whole(stage.q, rows->q.from(first), thread);
            copy_whole(stage.k, rows->k.from(first), thread);
            if (args.undecayed_error) copy_whole(stage.e, rows->e.from(first), thread);
            copy_whole(stage.v, rows->v.from(first), thread);
        } else {
            fetch_rows(stage, columns, chunk, outputs);
        }
        fetch_prepared(stage, rows->first_place + chunk * args.HV, outputs, LowerPieces(by));
    }
    HEADRACE_DEVICE bool is_whole(std::int64_t chunk) const { return rows->whole && length_of(chunk) == tensor_chunk; }
    HEADRACE_DEVICE void fetch_rows(const Stage& stage, Columns columns, std::int64_t chunk, bool outputs) const {
        const std::int64_t first = chunk * tensor_chunk;
        const int length = length_of(chunk), values = columns.of_values ? columns.all - columns.first : 0;
        const Warps by = fetching_warps();
        HEADRACE_ROLLED
        for (int which = outputs ? 0 : 1; which < (args.undecayed_error ? 3 : 2); ++which) {
            const Matrix<K> to = which == 0 ? stage.q : which == 1 ? stage.k : stage.e;
            const TokenRows& from = which == 0 ? rows->q : which == 1 ? rows->k : rows->e;
            copy_rows<K, 0>(to, from.from(first), length, tensor_chunk, args.K, K, by);
        }
        copy_rows<64, 0>(stage.v, rows->v.from(first), length, tensor_chunk, values, tensor_values, by);
    }
    HEADRACE_DEVICE void fetch_prepared(const Stage& stage, std::int64_t place, bool outputs,
                                        const LowerPieces& pieces) const {
        const Prepared& from = args.prepared;
        pieces.copy(stage.solve.high, from.solve_high, place), pieces.copy(stage.solve.low, from.solve_low, place);
        if (outputs) pieces.copy(stage.scores.high, from.scores, place);
        if (Format::splits_scores && outputs) pieces.copy(stage.scores.low, from.scores_low, place);
        copy_numbers(stage.numbers, from, place, fetching_warps());
        ptx::end_copies();
    }
    HEADRACE_DEVICE static void copy_numbers(float* to, const Prepared& from, std::int64_t place, Warps by) {
        copy_bytes<16 * tensor_chunk>(to, from.factors + 4 * tensor_chunk * place, by);
        const int own = static_cast<int>(threadIdx.x) - by.first * warp_lanes;
        if (own < 2) {
            ptx::copy_4(ptx::shared_address(to + decay_at + own), from.decay + 2 * place + own, 4);
            ptx::copy_4(ptx::shared_address(to + exact_at + own), from.exact + 2 * place + own, 4);
        }
        if (own == 0) ptx::copy_16(ptx::shared_address(to + numbers_at), from.numbers + 4 * place, 16);
    }

    // ---- what leaves ----
    // Up to those of the recurrence.
    HEADRACE_DEVICE void store_outputs(const Stage& stage, std::int64_t chunk, Columns columns, OutputPatch patch,
                                       int of_warp) const {
        const int length = length_of(chunk), end = first_of_recurrence(stage);
        ptx::sync_warp();
        cuda::store_outputs(args.o, rows->o.from(chunk * tensor_chunk), patch, length < end ? length : end,
                            columns.all - columns.first, 16 * of_warp);
    }
    // Of a token the two values that a lane's quad has.
    HEADRACE_DEVICE static void store_token(TokenRows o, Columns columns, int own, float2 values) {
        const int half = own % 4, value = 16 * (thread_here() / warp_lanes) + own / 4 + 8 * half;
        if (half < 2 && value < columns.all - columns.first)
            *reinterpret_cast<std::uint16_t*>(o.first + 2 * value) =
                static_cast<std::uint16_t>(Format::round(half == 0 ? values.x : values.y, 0));
    }

    // ---- the state: from a tensor, or without one zeros, or columns of the unit matrix ----
    HEADRACE_DEVICE static int own(Columns columns) { return columns.first + Ops::first_value(); }
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, Columns columns) {
        if (columns.of_values) {
            load_values(ops.state, tensor, n, head, args.K, own(columns), columns.all);
            return;
        }
        each_state_element<K / 8>(
            ops.state, [&](float& S, int c, int j) { S = c == own(columns) + j && c < args.K ? 1.0f : 0.0f; });
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n, std::int64_t head, Columns columns) const {
        store_values(tensor, ops.state, n, head, args.K, own(columns), columns.all);
    }
};

}  // namespace headrace::cuda
