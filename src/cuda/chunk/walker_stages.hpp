// WalkerStages: what a walk of the delta rule with a scalar gate reads of its chunks, and how it arrives: in stages of
// shared memory, one chunk ahead where there are two. Where a third group of warps fetches, it is as far ahead as there
// are stages, and the others wait for what they read alone.
#pragma once

#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/warp_values.hpp"
#include "cuda/tiles/hand_over.hpp"

namespace headrace::cuda {

template <int K, class Format, bool of_two = false>
struct WalkerStages : FilledStages {
    static constexpr int block_values = of_two ? 2 * tensor_values : tensor_values;  // but where states leave segments
    // Numbers of a chunk in a stage: factors, the decay, which becomes that of the walk (CarriedDecay), what tells
    // exactness: as floats, and Prepared::exact and what follows of the chunk (Exactness).
    static constexpr int decay_at = 4 * tensor_chunk, numbers_at = decay_at + 4, exact_at = numbers_at + 4,
                         stage_numbers = exact_at + 4;
    static constexpr bool has_third_group = cuda::has_third_group<K>;
    // Of the warps that fetch: what they found of a chunk's numbers is there. One that no turns or no stages need.
    static constexpr int fetched_barrier = has_third_group ? meeting_barrier : first_stage_barrier;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> v[2];            // of each group that walks (Segments::groups)
        SplitMatrix scores, solve;  // scores.low of f16; solve.low where a chunk asks for it (fetch_low)
        float* numbers;
    };

    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows q, k, e, v, o;
        ChunkRange sequence;  // all of it
        std::int64_t head;
        std::int64_t tokens, first_place;  // of the sequence; where its first chunk was prepared
        bool last;                         // whether the walk ends with the sequence
        bool whole;                        // whether rows of keys are near, and have all columns of their matrices
    };

    const KernelArgs& args;
    Rows* rows;
    char* first_stage;
    std::size_t stage_bytes;  // of its matrices
    float* first_numbers;

    __host__ __device__ void carve(Arena& arena) {
        const std::size_t column = 2 * tensor_chunk, of_outputs = args.o.given ? 1 : 0,
                          of_keys = (args.undecayed_error ? 2 : 1) + of_outputs,
                          groups = of_two || args.segments.groups > 1 ? 2 : 1,
                          of_scores = Format::splits_scores ? 2 * of_outputs : of_outputs;
        const auto stages = static_cast<std::size_t>(args.stages);
        stage_bytes = column * (of_keys * K + (2 + groups + of_scores) * 64);
        first_stage = arena.take<char>(stage_bytes * stages);
        first_numbers = arena.take<float>(stage_numbers * stages);
        rows = arena.take<Rows>(1);
    }

    HEADRACE_DEVICE int turn_of(int chunk) const {
        if constexpr (has_third_group) return turn;
        return args.stages == 2 ? chunk & 1 : 0;
    }
    HEADRACE_DEVICE Stage stage_of(int chunk) const {
        const int turn = turn_of(chunk);
        char* at = first_stage + static_cast<std::size_t>(turn) * stage_bytes;
        const auto take = [&](int columns) {
            std::uint16_t* const matrix = reinterpret_cast<std::uint16_t*>(at);
            at += 2 * tensor_chunk * columns;
            return matrix;
        };
        Stage stage{};
        // Those that are always there first, at places known to the compiler.
        stage.k.data = take(K), stage.v[0].data = take(64);
        if (of_two) stage.v[1].data = take(64);  // behind the other, as of one matrix
        stage.solve.high.data = take(64), stage.solve.low.data = take(64);
        if (!of_two) stage.v[1].data = args.segments.groups > 1 ? take(64) : stage.v[0].data;
        stage.e.data = args.undecayed_error ? take(K) : stage.k.data;
        stage.q.data = args.o.given ? take(K) : stage.k.data;
        stage.scores.high.data = args.o.given ? take(64) : stage.k.data;
        if (Format::splits_scores) stage.scores.low.data = args.o.given ? take(64) : stage.k.data;
        stage.numbers = first_numbers + turn * stage_numbers;
        return stage;
    }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, WalkedColumns columns) const {
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
            rows->whole = args.K == K && rows->q.near() && rows->k.near() && rows->e.near() && rows->v.near();
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE int length_of(int chunk) const {
        const std::int64_t left = rows->tokens - static_cast<std::int64_t>(chunk) * tensor_chunk;
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }
    HEADRACE_DEVICE static std::int64_t first_token(int chunk) {
        return static_cast<std::int64_t>(chunk) * tensor_chunk;
    }

    // ---- turns ----
    // fetch(chunk) for each chunk of the walk, one ahead where there are two stages, by warps that fetch;
    // compute(chunk). All warps of a block meet in every turn, whichever of these they have. Here and below `exact`: of
    // walks that solve with 16 bits in every chunk.
    template <bool fetches, class Fetch, class Compute>
    HEADRACE_DEVICE void each_chunk(const Walk& walk, bool exact, Fetch fetch, Compute compute) const {
        const int ahead = args.stages - 1;  // what arrives, of what is computed
        const int first_chunk = static_cast<int>(walk.first_chunk), end = static_cast<int>(walk.end_chunk),
                  first = first_chunk - ahead;
        Exactness exactness(*this, exact);
        HEADRACE_ROLLED
        for (int chunk = first; chunk < end; ++chunk) {
            if (chunk > first) meet<fetches>(exactness, chunk, ahead > 0);
            if (fetches && chunk + ahead < end) fetch(chunk + ahead);
            if (fetches && chunk == first) exactness.pass(first_chunk);
            if (ahead == 0) meet<fetches>(exactness, chunk, true);
            if (chunk >= first_chunk) compute(chunk);
        }
    }
    // By a third group: fetch.queue(chunk) for each, when there is room for it.
    template <class Fetch>
    HEADRACE_DEVICE void fill_stages(const Walk& walk, bool exact, Fetch& fetch) {
        const int first = static_cast<int>(walk.first_chunk), end = static_cast<int>(walk.end_chunk);
        Exactness exactness(*this, exact);
        fill_each(first, end, args.stages, [&](int chunk) {
            fetch.queue(*this, chunk);
            if (chunk == first) exactness.pass(first);
            ptx::wait_for_copies<0>();
            exactness.decide(chunk);
            fetch_low(chunk, exact);
        });
    }
    // By the other groups: compute(chunk) for each that it has filled.
    template <class Compute>
    HEADRACE_DEVICE void each_filled(const Walk& walk, Compute compute) {
        FilledStages::each_filled(static_cast<int>(walk.first_chunk), static_cast<int>(walk.end_chunk), args.stages,
                                  compute);
    }
    // What a walk makes of its chunks' numbers, by the first of the warps that fetch: it has each chunk's before
    // others.
    struct Exactness {
        const WalkerStages& of;
        const bool always;
        DeltaExactness so_far;
        CarriedDecay carried;

        HEADRACE_DEVICE Exactness(const WalkerStages& stages, bool exact)
            : of(stages), always(exact), so_far(DeltaExactness::of_entering(of.args.rounded_state)) {}
        HEADRACE_DEVICE static int own() { return static_cast<int>(threadIdx.x) - fetching_warps().first * warp_lanes; }
        // Past the first chunks of the sequence, which another walk has.
        HEADRACE_DEVICE void pass(std::int64_t chunks) {
            if (own() < warp_lanes)
                so_far.template pass<Format>(of.args.prepared.numbers + 4 * of.rows->first_place, 4 * of.args.HV,
                                             chunks);
        }
        // Of the next chunk, by the thread that has queued its numbers, when these are there.
        HEADRACE_DEVICE void decide(int chunk) {
            if (own() != 0) return;
            float* const numbers = of.stage_of(chunk).numbers;
            so_far.template decide<Format>(*reinterpret_cast<const float4*>(numbers + numbers_at));
            *reinterpret_cast<int2*>(numbers + exact_at + 2) = {so_far.reads ? 1 : 0, so_far.writes ? 1 : 0};
            const float2 decay = *reinterpret_cast<const float2*>(numbers + decay_at);
            numbers[decay_at] = carried.next({decay.x, decay.y});
        }
    };
    // Of all threads. `arrives`: the chunk, of which these have queued something or nothing.
    template <bool fetches>
    HEADRACE_DEVICE static void meet(Exactness& exactness, int chunk, bool arrives) {
        if constexpr (fetches) {
            ptx::wait_for_copies<0>();
            if (arrives) exactness.decide(chunk), exactness.of.fetch_low(chunk, exactness.always);
            ptx::publish_to_products();
        }
        wait_for_block();
    }

    // ---- what arrives ----
    // What a thread copies of a chunk whose rows are whole, found once: this is on the way of every chunk.
    struct Arriving {
        static constexpr int first = has_third_group ? 2 * block_threads : block_threads;  // of the threads
        static constexpr int image_lines = 2 * LowerImage::size / 128;
        static_assert(2 * LowerImage::size % 128 == 0 && 3 * image_lines + 8 == block_threads);  // of 1 KB of factors
        std::conditional_t<small_state<K> && !of_two, PlacedPieces<K>, WholePieces<K>> q, k;
        WholePieces<K> e;
        std::conditional_t<of_two, WholePieces<block_values>, PlacedPieces<block_values>> v;
        LowerPieces lower;
        const char *solve_high, *scores, *solve_low, *scores_low;  // in the images of the chunk; low ones of f16
        const char *q_line, *k_line, *v_line, *prepared_line;      // of the next chunk, by a third group
        std::int64_t place;
        WalkedColumns columns;
        int whole_chunks;  // of the sequence, up to which all rows are copied in one way

        // With outputs.
        HEADRACE_DEVICE Arriving(const WalkerStages& of, const Stage& to, std::int64_t chunk, WalkedColumns of_columns)
            : q(to.q, of.rows->q.from(chunk * tensor_chunk), first),
              k(to.k, of.rows->k.from(chunk * tensor_chunk), first),
              e(to.e, of.rows->e.from(chunk * tensor_chunk), first),
              v({to.v[0].data}, of.rows->v.from(chunk * tensor_chunk), first),
              lower(fetching_warps()),
              place(of.rows->first_place + chunk * of.args.HV),
              columns(of_columns) {
            const Prepared& from = of.args.prepared;
            const auto image = [&](const std::uint16_t* images) {
                return reinterpret_cast<const char*>(images + place * LowerImage::size) + lower.from;
            };
            solve_high = image(from.solve_high), scores = image(from.scores);
            solve_low = Format::splits_scores ? image(from.solve_low) : nullptr;
            scores_low = Format::splits_scores ? image(from.scores_low) : nullptr;
            const bool rows_are = of.rows->whole && columns.values() >= block_values;
            whole_chunks = rows_are ? static_cast<int>(of.rows->tokens / tensor_chunk) : 0;
            if constexpr (has_third_group) {
                const int own = thread_here() - first;
                q_line = line_of<K>(of.rows->q.from(chunk * tensor_chunk), own);
                k_line = line_of<K>(of.rows->k.from(chunk * tensor_chunk), own);
                v_line = line_of<block_values>(of.rows->v.from(chunk * tensor_chunk), own % block_values);
                const int which = own / image_lines;
                prepared_line = which == 3 ? reinterpret_cast<const char*>(from.factors + 4 * tensor_chunk * place)
                                           : reinterpret_cast<const char*>((which == 0   ? from.solve_high
                                                                            : which == 1 ? from.scores
                                                                                         : from.solve_low) +
                                                                           place * LowerImage::size);
                prepared_line += own % image_lines * 128;
            }
        }
        HEADRACE_DEVICE void queue(const WalkerStages& of, int chunk) {
            const Stage to = of.stage_of(chunk);
            if (chunk < whole_chunks) {
                const auto behind =
                    static_cast<std::uint32_t>(of.turn_of(chunk)) * static_cast<std::uint32_t>(of.stage_bytes);
                q.copy(behind), k.copy(behind), v.copy(behind);
                if (of.args.undecayed_error) e.copy(behind);
            } else {
                of.fetch_keys(to, chunk, true);
                of.fetch_values(to.v[0], chunk, columns, of.rows->v);
                if (of_two) {
                    const WalkedColumns of_second{columns.first + tensor_values, columns.all, true};
                    of.fetch_values(to.v[1], chunk, of_second, of.rows->v.right(tensor_values));
                }
            }
            lower.copy(to.solve.high, solve_high), lower.copy(to.scores.high, scores);
            if (Format::splits_scores) lower.copy(to.solve.low, solve_low), lower.copy(to.scores.low, scores_low);
            copy_numbers(to.numbers, of.args.prepared, place, fetching_warps());
            ptx::end_copies();
            q.advance(), k.advance(), e.advance(), v.advance();
            place += of.args.HV;
            const std::int64_t images = 2 * LowerImage::size * of.args.HV;
            for (const char** image : {&solve_high, &solve_low, &scores, &scores_low}) *image += images;
            if constexpr (has_third_group)
                ask_ahead(chunk + 1 < whole_chunks, images, std::int64_t{16} * tensor_chunk * of.args.HV);
        }
        // For the next chunk's lines, where it is whole; what was prepared of it is as far behind this one's as said.
        HEADRACE_DEVICE void ask_ahead(bool whole, std::int64_t images, std::int64_t factors) {
            const int own = thread_here() - first;
            q_line += q.rows(), k_line += k.rows(), v_line += v.rows();
            prepared_line += own < 3 * image_lines ? images : factors;
            if (!whole) return;
            ptx::prefetch(q_line), ptx::prefetch(k_line);
            if (Format::splits_scores || own / image_lines != 2) ptx::prefetch(prepared_line);
            if (K > 128) ptx::prefetch(q_line + 128), ptx::prefetch(k_line + 128);
            if (own < block_values) ptx::prefetch(v_line);
        }
    };
    // The same of walks that leave states, by a third group.
    template <int groups>
    struct ArrivingOfStates {
        WalkedColumns columns[groups];
        HEADRACE_DEVICE void queue(const WalkerStages& of, int chunk) const { of.fetch(chunk, columns, false); }
    };
    // Of `groups` that walk with columns from `columns` on.
    template <int groups>
    HEADRACE_DEVICE void fetch(int chunk, const WalkedColumns (&columns)[groups], bool outputs) const {
        const Stage to = stage_of(chunk);
        fetch_keys(to, chunk, outputs);
#pragma unroll
        for (int group = 0; group < groups; ++group) {
            if (group >= args.segments.groups && groups > 1) break;
            fetch_values(to.v[group], chunk, columns[group],
                         rows->v.right(columns[group].of_values ? tensor_values * group : 0));
        }
        fetch_prepared(to, rows->first_place + static_cast<std::int64_t>(chunk) * args.HV, outputs,
                       LowerPieces(fetching_warps()));
    }
    HEADRACE_DEVICE void fetch_keys(const Stage& stage, int chunk, bool outputs) const {
        const std::int64_t first = first_token(chunk);
        const int length = length_of(chunk);
        const Warps by = fetching_warps();
        if (rows->whole && length == tensor_chunk) {
            const int thread = by.first * warp_lanes;
            if (outputs) copy_whole(stage.q, rows->q.from(first), thread);
            copy_whole(stage.k, rows->k.from(first), thread);
            if (args.undecayed_error) copy_whole(stage.e, rows->e.from(first), thread);
            return;
        }
        HEADRACE_ROLLED
        for (int which = outputs ? 0 : 1; which < (args.undecayed_error ? 3 : 2); ++which) {
            const Matrix<K> to = which == 0 ? stage.q : which == 1 ? stage.k : stage.e;
            const TokenRows& from = which == 0 ? rows->q : which == 1 ? rows->k : rows->e;
            copy_rows<K, 0>(to, from.from(first), length, tensor_chunk, args.K, K, by);
        }
    }
    HEADRACE_DEVICE void fetch_values(Matrix<64> to, int chunk, WalkedColumns columns, const TokenRows& v) const {
        const int length = length_of(chunk), values = columns.values();
        const Warps by = fetching_warps();
        const TokenRows from = v.from(first_token(chunk));
        if (rows->whole && length == tensor_chunk && values >= tensor_values) {
            copy_whole(to, from, by.first * warp_lanes);
        } else {
            copy_rows<64, 0>(to, from, length, tensor_chunk, values, tensor_values, by);
        }
    }
    HEADRACE_DEVICE void fetch_prepared(const Stage& stage, std::int64_t place, bool outputs,
                                        const LowerPieces& pieces) const {
        const Prepared& from = args.prepared;
        pieces.copy(stage.solve.high, from.solve_high, place);
        if (outputs) pieces.copy(stage.scores.high, from.scores, place);
        if (Format::splits_scores) {
            pieces.copy(stage.solve.low, from.solve_low, place);
            if (outputs) pieces.copy(stage.scores.low, from.scores_low, place);
        }
        copy_numbers(stage.numbers, from, place, fetching_warps());
        ptx::end_copies();
    }
    // Of the numbers from exact_at on: whether some tokens of the chunk are solved with 16 bits.
    HEADRACE_DEVICE static bool solves_finely(int4 known, bool always) {
        return always || known.z != 0 || known.x < tensor_chunk;
    }
    // The lower half of N, of a chunk whose numbers are there and ask for it; by the warps that fetch, together.
    HEADRACE_DEVICE void fetch_low(int chunk, bool always) const {
        if constexpr (Format::splits_scores) return;
        ptx::sync_warp();
        ptx::sync_threads(fetched_barrier, block_threads);
        const Stage to = stage_of(chunk);
        const int4 known = *reinterpret_cast<const int4*>(to.numbers + exact_at);
        if (!solves_finely(known, always)) return;
        LowerPieces(fetching_warps())
            .copy(to.solve.low, args.prepared.solve_low,
                  rows->first_place + static_cast<std::int64_t>(chunk) * args.HV);
        ptx::end_copies();
        ptx::wait_for_copies<0>();
    }
    HEADRACE_DEVICE static void copy_numbers(float* to, const Prepared& from, std::int64_t place, Warps by) {
        copy_bytes<16 * tensor_chunk>(to, from.factors + 4 * tensor_chunk * place, by);
        const int own = static_cast<int>(threadIdx.x) - by.first * warp_lanes;
        if (own != 0) return;
        ptx::copy_8(ptx::shared_address(to + decay_at), from.decay + 2 * place, 8);
        ptx::copy_8(ptx::shared_address(to + exact_at), from.exact + 2 * place, 8);
        ptx::copy_16(ptx::shared_address(to + numbers_at), from.numbers + 4 * place, 16);
    }
};

}  // namespace headrace::cuda
