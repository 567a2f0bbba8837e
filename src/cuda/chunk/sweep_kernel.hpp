// SweepKernel: the walks of a backward of the delta rule on tensor cores: states from the first chunk to the last, and
// their gradients back, by warps that own 16 values each. They leave SweptChunks, d_v and the initial state's gradient.
// With more than 64 channels warps beside them fetch, and compute what no gradient of a state enters; where there are
// four more, these fetch, and save what those that walk leave them.
// over 400 lines: both walks, whose roles hand each other chunk after chunk.
#pragma once

#include "cuda/chunk/sweep_walk.hpp"

namespace headrace::cuda {

template <int K, bool leaves>
inline constexpr Saved sweep_saved = leaves               ? Saved::not_at_all
                                     : has_third_group<K> ? Saved::by_others
                                                          : Saved::by_walkers;

// Chunks are multiplied with 16 bits on one side where their keys overlap, as what keys of few directions read in a
// gradient is far below its roundings, and where what came before them in the walk says that roundings of reads and
// writes would come back (DeltaExactness, docs/decisions/003).
// `leaves`: what leaves segments, and nothing else (SweptBlock).
template <int K, class Format, bool leaves>
struct SweepKernel : SweepWalk<K, Format, (fetching_threads(K) > 0), sweep_saved<K, leaves>> {
    using Base = SweepWalk<K, Format, (fetching_threads(K) > 0), sweep_saved<K, leaves>>;
    using Base::args, Base::patches, Base::of_sequence, Base::state, Base::state_tiles, Base::warp_value;
    using Base::length_of, Base::place_of, Base::token_of, Base::left_rows_barrier;
    using typename Base::Chunks;

    static constexpr bool has_others = fetching_threads(K) > 0, fetches_apart = has_third_group<K>,
                          saves_apart = fetches_apart && !leaves;
    // Of 64 channels; barriers of the warps beside, or of them and those that walk back.
    static constexpr int groups = K / 64, beside_barrier = 4, scored_barrier = 5, taken_barrier = 6, reads_barrier = 7;
    // Of those that walk and those that save: the state, d_v.
    static constexpr int left_state_barrier = 9, left_d_v_barrier = 10;
    static constexpr int fetched_barrier = 11;  // of those that fetch: what they found of a chunk's numbers is there
    // Of their threads; together with the group's beside what registers_allowed gives all.
    static constexpr int walking_registers = 240, saving_registers = 2 * group_registers - walking_registers;

    // Of a chunk: rows as they came, and what was prepared.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> rows;                     // v or d_o
        SplitMatrix P, solve;                // P of gradients only
        float *read, *erase, *write, *beta;  // [C] one behind the other
        float* decay;                        // [2], the first of which becomes that of the walk (CarriedDecay)
        std::int32_t* overlap;               // KeyOverlap
        float* numbers;                      // [4] Prepared::numbers
        std::int32_t* fine;                  // SweptFinely
    };
    // Where the sequence's rows of keys lie: in shared memory, as registers are few.
    struct Keys {
        TokenRows q, k, e;
        bool whole;  // whether all rows are near, and have all columns of the block's matrices
    };

    // Numbers of a chunk in a stage: factors, the decay, Prepared::numbers; KeyOverlap and what follows from all of
    // them, apart, as the compiler loads neighbours together.
    static constexpr int decay_at = 4 * tensor_chunk, stage_numbers = decay_at + 12;

    Keys* keys;
    char* first_stage;
    std::uint32_t stage_bytes;  // of its matrices
    float* first_numbers;
    Matrix<K> left_states;  // [64 values, K] to those that save, in bf16
    Matrix<64> left_d_v;    // [16 warps,64] OutputPatch of each warp
    typename Base::Nothing nothing;

    __host__ __device__ SweepKernel(const KernelArgs& arguments, Arena& arena) : Base{arguments, {}, {}, {}} {
        constexpr std::uint32_t column = 2 * tensor_chunk;
        const auto stages = static_cast<std::size_t>(args.stages);
        stage_bytes = column * ((args.undecayed_error ? 3 : 2) * K + 5 * 64);
        first_stage = arena.take<char>(stage_bytes * stages);
        patches = Matrix<64>::take(arena, tensor_values);
        if constexpr (saves_apart) {  // beside what the host counts: left_to_third_group
            left_d_v = Matrix<64>::take(arena, tensor_values);
            left_states = Matrix<K>::take(arena, tensor_values);
        }
        first_numbers = arena.take<float>(stage_numbers * stages);
        of_sequence = arena.take<typename Base::Sequence>(1);
        keys = arena.take<Keys>(1);
    }

    HEADRACE_DEVICE void states(const SweptBlock& block) {
        const int first = block.columns.first;
        const Chunks chunks(block.walk);
        find_rows(block);
        if (!this->walks()) return assist<false>(block, chunks, nothing, nothing);
        if constexpr (fetches_apart) ptx::take_registers<walking_registers>();
        this->template enter<false>(block);
        walk_all<false>(block, chunks, [&](int chunk, int turn) {
            const Stage now = stage_of(turn);
            is_fine(now) ? advance<true>(now, chunk, first) : advance<false>(now, chunk, first);
        });
        this->template leave<false>(block);
    }
    HEADRACE_DEVICE void adjoints(const SweptBlock& block) {
        const int first = block.columns.first;
        const Chunks chunks(block.walk);
        find_rows(block);
        if (!this->walks())
            return assist<true>(
                block, chunks, [&](int, int turn) { leave_scored(stage_of(turn)); },
                [&](int, int turn) { leave_reads(stage_of(turn)); });
        if constexpr (fetches_apart) ptx::take_registers<walking_registers>();
        this->template enter<true>(block);
        walk_all<true>(block, chunks, [&](int chunk, int turn) {
            const Stage now = stage_of(turn);
            is_fine(now) ? retreat<true>(now, chunk, first) : retreat<false>(now, chunk, first);
        });
        this->template leave<true>(block);
    }

  private:
    HEADRACE_DEVICE std::uint32_t number_of(int turn) const {
        return args.stages == 2 ? static_cast<std::uint32_t>(turn) % 2 : 0;
    }
    HEADRACE_DEVICE Stage stage_of(int turn) const {
        const std::uint32_t number = number_of(turn);
        char* at = first_stage + number * stage_bytes;
        const auto take = [&](int columns) {
            std::uint16_t* const matrix = reinterpret_cast<std::uint16_t*>(at);
            at += 2 * tensor_chunk * columns;
            return matrix;
        };
        Stage s{};
        s.q.data = take(K), s.k.data = take(K), s.rows.data = take(64);
        s.P.high.data = take(64), s.P.low.data = take(64), s.solve.high.data = take(64), s.solve.low.data = take(64);
        s.e.data = args.undecayed_error ? take(K) : s.k.data;
        s.read = first_numbers + number * stage_numbers, s.erase = s.read + tensor_chunk;
        s.write = s.erase + tensor_chunk, s.beta = s.write + tensor_chunk, s.decay = s.read + decay_at;
        s.numbers = s.decay + 4;
        s.overlap = reinterpret_cast<std::int32_t*>(s.numbers + 4), s.fine = s.overlap + 1;
        return s;
    }
    // Of a transition rows of values are zero, and none are copied.
    HEADRACE_DEVICE void find_rows(const SweptBlock& block) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = block.walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            const std::int64_t key_head = quotient(block.head, args.group);
            this->find_sequence(block);
            *keys = {rows_of(args.q, all, key_head, 0), rows_of(args.k, all, key_head, 0),
                     rows_of(args.undecayed_error ? args.p : args.k, all, key_head, 0), false};
            keys->whole = args.K == K && (!block.columns.of_values || of_sequence->values >= tensor_values) &&
                          keys->q.near() && keys->k.near() && keys->e.near() && of_sequence->rows.near();
        }
        if (leaves && !block.columns.of_values) {
            HEADRACE_ROLLED
            for (int turn = 0; turn < args.stages; ++turn)
                each(tensor_chunk * tensor_values / 2,
                     [&](int i) { reinterpret_cast<std::uint32_t*>(stage_of(turn).rows.data)[i] = 0; });
        }
        ptx::sync_block();
    }
    // ---- the warps with values, and those beside them, or the same, which fetch ----
    template <bool gradients, class Compute>
    HEADRACE_DEVICE void walk_all(const SweptBlock& block, Chunks chunks, Compute compute) {
        if constexpr (has_others) {
            this->template each_chunk<gradients>(chunks, nothing, compute);
        } else {
            fetch_all<gradients>(block, chunks, nothing, compute);
        }
    }
    // Those beside, which compute that.
    template <bool gradients, class Before, class Behind>
    HEADRACE_DEVICE void assist(const SweptBlock& block, Chunks chunks, Before before, Behind behind) {
        if constexpr (!fetches_apart) {
            fetch_all<gradients>(block, chunks, before, behind);
        } else if (is_beside()) {
            this->template each_chunk<gradients>(chunks, nothing, behind, before);
        } else {
            ptx::keep_registers<saving_registers>();
            fetch_all<gradients>(block, chunks, nothing, [&, first = block.columns.first](int chunk, int) {
                if constexpr (saves_apart) save_left<gradients>(chunk, first);
            });
        }
    }
    template <bool gradients, class Before, class Behind>
    HEADRACE_DEVICE void fetch_all(const SweptBlock& block, Chunks chunks, Before before, Behind behind) {
        auto exactness = SweepExactness<gradients>::of_entering(gradients ? args.rounded_gradient : args.rounded_state);
        Arriving arriving(*this, stage_of(0), gradients ? chunks.end - 1 : chunks.first);
        const auto fetch = [&](int chunk, int turn) {
            const Stage to = stage_of(turn);
            if (keys->whole && length_of(chunk) == tensor_chunk) {
                arriving.template copy<gradients>(*this, turn);
            } else {
                fetch_rows<gradients>(to, chunk);
            }
            fetch_prepared<gradients>(to, place_of(chunk), arriving.lower);
            arriving.template advance<gradients>();
            if (!leaves && turn == 0) pass(exactness, chunks);
        };
        CarriedDecay carried;
        const auto arrived = [&](int chunk, int turn) {
            const Stage now = stage_of(turn);
            if constexpr (!leaves) decide(exactness, now);
            if (fetcher() == 0) *now.decay = carried.next({now.decay[0], now.decay[1]});
            if constexpr (!leaves) fetch_low<gradients>(now, place_of(chunk), arriving.lower);
        };
        this->template each_chunk<gradients>(chunks, fetch, behind, before, arrived);
    }
    // Past the chunks that another segment has, in the order of the walk, by the first of the warps that fetch.
    template <bool gradients>
    HEADRACE_DEVICE void pass(SweepExactness<gradients>& exactness, Chunks own) const {
        const std::int64_t step = 4 * args.HV, last = parts_of(of_sequence->tokens, tensor_chunk) - 1,
                           chunks = gradients ? last + 1 - own.end : own.first;
        if (chunks == 0 || fetcher() >= warp_lanes) return;
        const float* const first = args.prepared.numbers + 4 * of_sequence->first_place;
        exactness.template pass<Format>(gradients ? first + last * step : first, gradients ? -step : step, chunks);
    }
    // By the thread that has queued its numbers, when these are there.
    template <bool gradients>
    HEADRACE_DEVICE static void decide(SweepExactness<gradients>& exactness, const Stage& now) {
        if (fetcher() != 0) return;
        const float4 numbers = *reinterpret_cast<const float4*>(now.numbers);
        *now.fine = static_cast<std::int32_t>(
            exactness.template decide<Format>(numbers, static_cast<KeyOverlap>(*now.overlap)));
    }
    HEADRACE_DEVICE static int fetcher() { return static_cast<int>(threadIdx.x) - fetching_warps().first * warp_lanes; }
    HEADRACE_DEVICE static bool is_fine(const Stage& now, SweptFinely what = SweptFinely::all) {
        return leaves || *now.fine >= static_cast<std::int32_t>(what);
    }
    // What a thread copies of a chunk whose rows are whole, found once: this is on the way of every chunk.
    struct Arriving {
        static constexpr int first = fetches_apart ? 2 * block_threads
                                     : has_others  ? block_threads
                                                   : 0;  // of the threads
        WholePieces<K> q, k, e;
        WholePieces<64> rows;
        LowerPieces lower;

        HEADRACE_DEVICE Arriving(const SweepKernel& of, const Stage& to, int chunk)
            : q(to.q, of.keys->q.from(of.token_of(chunk)), first),
              k(to.k, of.keys->k.from(of.token_of(chunk)), first),
              e(to.e, of.keys->e.from(of.token_of(chunk)), first),
              rows(to.rows, of.of_sequence->rows.from(of.token_of(chunk)), first),
              lower(fetching_warps()) {}
        template <bool gradients>
        HEADRACE_DEVICE void copy(const SweepKernel& of, int turn) const {
            const std::uint32_t behind = of.number_of(turn) * of.stage_bytes;
            if (gradients) q.copy(behind);
            k.copy(behind);
            if (gradients || !leaves || of.of_sequence->values > 0) rows.copy(behind);
            if (of.args.undecayed_error) e.copy(behind);
        }
        template <bool gradients>
        HEADRACE_DEVICE void advance() {
            constexpr int chunks = gradients ? -1 : 1;
            q.advance(chunks), k.advance(chunks), e.advance(chunks), rows.advance(chunks);
        }
    };
    template <bool gradients>
    HEADRACE_DEVICE void fetch_rows(const Stage& stage, int chunk) const {
        const std::int64_t token = token_of(chunk);
        const int length = length_of(chunk);
        const Warps by = fetching_warps();
        HEADRACE_ROLLED
        for (int which = gradients ? 0 : 1; which < (args.undecayed_error ? 3 : 2); ++which) {
            const Matrix<K> to = which == 0 ? stage.q : which == 1 ? stage.k : stage.e;
            const TokenRows& from = which == 0 ? keys->q : which == 1 ? keys->k : keys->e;
            copy_rows<K, 0>(to, from.from(token), length, tensor_chunk, args.K, K, by);
        }
        copy_rows<64, 0>(stage.rows, of_sequence->rows.from(token), length, tensor_chunk, of_sequence->values,
                         tensor_values, by);
    }
    template <bool gradients>
    HEADRACE_DEVICE void fetch_prepared(const Stage& stage, std::int64_t place, const LowerPieces& pieces) const {
        const Prepared& from = args.prepared;
        const Warps by = fetching_warps();
        pieces.copy(stage.solve.high, from.solve_high, place);
        if (gradients) pieces.copy(stage.P.high, from.scores, place);
        if constexpr (leaves) copy_low<gradients>(stage, place, pieces);
        copy_bytes<16 * tensor_chunk>(stage.read, from.factors + place * 4 * tensor_chunk, by);
        if (fetcher() == 0) {
            ptx::copy_8(ptx::shared_address(stage.decay), from.decay + 2 * place, 8);
            ptx::copy_4(ptx::shared_address(stage.overlap), from.overlap + place, 4);
            ptx::copy_16(ptx::shared_address(stage.numbers), from.numbers + 4 * place, 16);
        }
        ptx::end_copies();
    }

    template <bool gradients>
    HEADRACE_DEVICE void copy_low(const Stage& stage, std::int64_t place, const LowerPieces& pieces) const {
        pieces.copy(stage.solve.low, args.prepared.solve_low, place);
        if (gradients) pieces.copy(stage.P.low, args.prepared.scores_low, place);
    }
    // The lower halves of both, of a chunk whose numbers are there and ask for them; by the warps that fetch, together.
    template <bool gradients>
    HEADRACE_DEVICE void fetch_low(const Stage& stage, std::int64_t place, const LowerPieces& pieces) const {
        ptx::sync_warp();
        ptx::sync_threads(fetched_barrier, block_threads);
        if (!is_fine(stage)) return;
        copy_low<gradients>(stage, place, pieces);
        ptx::end_copies();
        ptx::wait_for_copies<0>();
    }

    // ---- chunks ----
    template <bool fine>
    static constexpr Left left_of = fine ? Left::both : Left::high;
    // From the state that enters to the one that leaves.
    template <bool fine>
    HEADRACE_DEVICE void advance(const Stage& now, int chunk, int first) {
        TokenSums sums;
        TokenFactors of_rows;
        Betas beta;
        TransposedRows rows;
        std::int32_t overlap;
        save_and_read<left_of<fine>>(args.swept.states, sums, now.e, chunk, first, [&] {
            of_rows = TokenFactors::load(now.erase), rows = TransposedRows::load(now.rows, warp_value());
            beta = betas(now), overlap = *now.overlap;
        });
        rows.add_to_scaled(sums, of_rows);
        this->template solve_residuals<fine>(
            sums, now.solve, beta, overlap, [&] { return now; }, place_of(chunk));
        this->template leave_residuals<fine>(sums, overlap, place_of(chunk), first);
        scale_tokens(sums, TokenFactors::load(now.write) * TokenFactors::load(now.beta));
        const float decay = *now.decay;
        decay_and_add<left_of<fine>, K, Format>(
            state, [&](int step) { return left_operand(sums, step); }, now.k, [&](int, int) { return decay; });
    }
    // From the gradient of the state that leaves to that of the one that enters.
    template <bool fine>
    HEADRACE_DEVICE void retreat(const Stage& now, int chunk, int first) {
        TokenSums y;
        TokenFactors of_rows;
        Betas beta;
        std::int32_t overlap;
        const auto meanwhile = [&] {
            of_rows = TokenFactors::load(now.write), beta = betas(now), overlap = *now.overlap;
        };
        if (fine || is_fine(now, SweptFinely::reads)) {
            save_and_read<Left::both>(args.swept.adjoints, y, now.k, chunk, first, meanwhile);
        } else {
            save_and_read<Left::high>(args.swept.adjoints, y, now.k, chunk, first, meanwhile);
        }
        if constexpr (has_others) {
            meet(scored_barrier);
            scale_and_add_sums(y, of_rows, left_sums(now.P.high, warp()));
            ptx::arrive_threads(taken_barrier, 2 * walking_threads);
        } else {
            scale_tokens(y, of_rows);
            Base::template add_lower_of_rows<fine>(y, now.rows, warp_value(), now.P);
        }
        this->template solve_gradients<fine>(
            y, now.solve, beta, overlap, [&] { return now; }, place_of(chunk));
        this->template leave_gradients<fine>(y, overlap, place_of(chunk), first);
        scale_tokens(y, now.beta);
        if constexpr (saves_apart) {
            OutputPatch::of(left_d_v, warp_here()).store(y);
            ptx::arrive_threads(left_d_v_barrier, 2 * walking_threads);
        } else {
            this->store_rows(y, chunk, first);
        }
        scale_tokens(y, now.erase);
        decay_and_add_both<fine>(y, now);
    }
    using Betas = std::conditional_t<small_state<K>, TokenFactors, const float*>;
    HEADRACE_DEVICE static Betas betas(const Stage& now) {
        if constexpr (small_state<K>) {
            return TokenFactors::load(now.beta);
        } else {
            return now.beta;
        }
    }
    // The state, or gradient of one, is saved; sums = S^T rows^T.
    template <Left left_of_state, class Meanwhile>
    HEADRACE_DEVICE void save_and_read(std::uint16_t* to, TokenSums& sums, Matrix<K> rows, int chunk, int first,
                                       Meanwhile meanwhile) const {
        if constexpr (saves_apart) {
            const int own = lane_here();  // which has the address of a row of one of four matrices
            const std::uint32_t first = left_states.piece(warp_value() + own % 16, own / 16 * 8);
            const auto factors = Format::RowFactors::of(state);
            const auto of_state = [&](int step) {
                const SplitA a = left_operand<Format>(state, step, factors);
                ptx::store_matrix(Matrix<K>::moved(first, 0, 16 * step), a.high);
                return a;
            };
            const auto left_all = [] { ptx::arrive_threads(left_state_barrier, 2 * walking_threads); };
            if constexpr (small_state<K>) {
                SplitA a[K / 16];
                each_step(a, of_state);
                left_all();
                read_of<left_of_state, K, Format>(
                    sums, [&](int step) { return a[step]; }, rows, factors, meanwhile);
            } else {
                read_of<left_of_state, K, Format>(sums, of_state, rows, factors, left_all);
                meanwhile();
            }
        } else {
            this->save(to, state, place_of(chunk), first);
            read<left_of_state, K, Format>(sums, state, rows);
            meanwhile();
        }
    }
    // D = decay D + d_o^T (reads q) + z^T (erases e)
    template <bool fine>
    HEADRACE_DEVICE void decay_and_add_both(const TokenSums& erased, const Stage& now) {
        const float decay = *now.decay;
        if constexpr (!small_state<K>) return decay_and_add_groups<fine>(erased, now, decay);
        float sums[groups][8][4];
        if constexpr (has_others) {
            meet(reads_barrier);
#pragma unroll
            for (int group = 0; group < groups; ++group)
                take_sums(sums[group], left_sums(left_reads(now, group), warp()));
        } else {
            read_queries<fine>(sums, now, warp_value());
        }
        add_all_written<left_of<fine>, Format>(
            sums, [&](int step) { return left_operand(erased, step); }, now.e);
#pragma unroll
        for (int group = 0; group < groups; ++group)
            decay_and_add_tiles(state, sums[group], 8 * group, [&](int, int) { return decay; });
    }
    // The same 64 channels at a time, of which the warps beside have left what multiplies q.
    template <bool fine>
    HEADRACE_DEVICE void decay_and_add_groups(const TokenSums& erased, const Stage& now, float decay) {
        SplitA erases[token_steps];
        each_step(erases, [&](int step) { return left_operand(erased, step); });
        meet(reads_barrier);
        const LeftRows left = LeftRows::of(now, warp());
#pragma unroll
        for (int group = 0; group < groups; ++group) {
            float sums[8][4];
            add_group_written<left_of<fine>, Format>(
                sums, [&](int step) { return left.template load<fine>(step); }, now.q, group, false);
            add_group_written<left_of<fine>, Format>(
                sums, [&](int step) { return erases[step]; }, now.e, group, true);
            decay_and_add_tiles(state, sums, 8 * group, [&](int, int) { return decay; });
        }
    }
    // sums = d_o^T (reads q) of the values from `value` on.
    template <bool fine>
    HEADRACE_DEVICE static void read_queries(float (&sums)[groups][8][4], const Stage& now, int value) {
        add_all_written<left_of<fine>, Format>(
            sums, [&](int step) { return read_rows(now, step, value); }, now.q, false);
    }
    // d_o^T Diag(read)
    HEADRACE_DEVICE static SplitA read_rows(const Stage& now, int step, int value) {
        const SplitA rows = left_operand(now.rows, value, step);
        const LanePlace at;
        SplitA scaled;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 read = *reinterpret_cast<const float2*>(now.read + 16 * step + pair / 2 * 8 + at.column);
            scaled.set(pair, low_half(rows.high[pair]) * read.x, high_half(rows.high[pair]) * read.y);
        }
        return scaled;
    }

    // ---- what the warps beside leave to those that walk back: sums as lanes hold them, where the operands were ----
    HEADRACE_DEVICE void meet(int barrier) const { ptx::meet_threads(barrier, 2 * walking_threads); }
    // The warp that has the values which this one's sums are of, or none.
    HEADRACE_DEVICE int of_other() const { return warp() - block_warps; }
    HEADRACE_DEVICE bool is_beside() const { return has_others && of_other() < block_warps; }

    // ---- what those that walk leave to those that save ----
    template <bool gradients>
    HEADRACE_DEVICE void save_left(int chunk, int first) const {
        const int pair = warp() - 2 * block_warps, value = first + 16 * pair;
        const bool is_given = value < args.V;
        const std::int64_t line = place_of(chunk) * round_up(args.V, 16) + value;
        meet(left_state_barrier);
        std::uint16_t* const states = gradients ? args.swept.adjoints : args.swept.states;
        if (is_given && states != nullptr) save_left_state(states + line * K, pair);
        meet(left_rows_barrier);
        std::uint16_t* const rows = gradients ? args.swept.d_written : args.swept.residuals;
        if (is_given && rows != nullptr)
            OutputPatch::of(patches, pair).template save_lines<tensor_chunk>(rows + line * tensor_chunk);
        if constexpr (gradients) {
            meet(left_d_v_barrier);
            if (args.d_v.given)
                store_outputs(args.d_v, of_sequence->d_v.from(token_of(chunk)), OutputPatch::of(left_d_v, pair),
                              length_of(chunk), this->count_of(first), 16 * pair);
        }
    }
    // [16 values, K], of the pair's values: one or two of their rows at a time.
    HEADRACE_DEVICE void save_left_state(std::uint16_t* to, int pair) const {
        constexpr int pieces = K / 8, together = warp_lanes / pieces;
        const int row = lane_here() / pieces, column = lane_here() % pieces * 8;
        const int place = Matrix<K>::place(16 * pair + row, column);
        to += row * K + column;
#pragma unroll
        for (int down = 0; down < 16; down += together) {
            const int below = (place ^ down % 8 * 8) + down * Matrix<K>::row;
            *reinterpret_cast<uint4*>(to + down * K) = *reinterpret_cast<const uint4*>(left_states.data + below);
        }
    }
    HEADRACE_DEVICE static float4* left_sums(Matrix<64> memory, int pair) {
        return reinterpret_cast<float4*>(memory.data) + pair * token_tiles * warp_lanes + lane_here();
    }
    // Left operands of 64 tokens, as lanes hold them, in place of P.
    struct LeftRows {
        uint4* high;
        static constexpr int low = token_steps * block_warps * warp_lanes;  // behind the upper halves
        HEADRACE_DEVICE static LeftRows of(const Stage& now, int pair) {
            return {reinterpret_cast<uint4*>(now.P.high.data) + pair * token_steps * warp_lanes + lane_here()};
        }
        template <bool fine>
        HEADRACE_DEVICE void leave(int step, const SplitA& a) const {
            high[step * warp_lanes] = {a.high[0], a.high[1], a.high[2], a.high[3]};
            if (fine) high[step * warp_lanes + low] = {a.low[0], a.low[1], a.low[2], a.low[3]};
        }
        template <bool fine>
        HEADRACE_DEVICE SplitA load(int step) const {
            const uint4 of = high[step * warp_lanes], rest = fine ? high[step * warp_lanes + low] : uint4{};
            return {{of.x, of.y, of.z, of.w}, {rest.x, rest.y, rest.z, rest.w}};
        }
    };
    // In place of q's first half, and of P.
    HEADRACE_DEVICE static Matrix<64> left_reads(const Stage& now, int group) {
        return group == 0 ? Matrix<64>{now.q.data} : now.P.high;
    }
    HEADRACE_DEVICE static void leave_sums(float4* to, const float (&sums)[8][4]) {
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
            to[tile * warp_lanes] = {sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]};
    }
    HEADRACE_DEVICE static void take_sums(float (&sums)[8][4], const float4* from) {
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const float4 of = from[tile * warp_lanes];
            sums[tile][0] = of.x, sums[tile][1] = of.y, sums[tile][2] = of.z, sums[tile][3] = of.w;
        }
    }
    // sums = what was left + sums times factors of their columns
    HEADRACE_DEVICE static void scale_and_add_sums(TokenSums& sums, const TokenFactors& factors, const float4* from) {
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile) {
            const float4 of = from[tile * warp_lanes];
            const float2 by = factors.of_tile[tile];
            sums[tile][0] = fmaf(sums[tile][0], by.x, of.x), sums[tile][1] = fmaf(sums[tile][1], by.y, of.y);
            sums[tile][2] = fmaf(sums[tile][2], by.x, of.z), sums[tile][3] = fmaf(sums[tile][3], by.y, of.w);
        }
    }
    // d_o^T P
    HEADRACE_DEVICE void leave_scored(const Stage& now) const {
        if (!is_beside()) return;
        is_fine(now) ? leave_scored<true>(now) : leave_scored<false>(now);
    }
    template <bool fine>
    HEADRACE_DEVICE void leave_scored(const Stage& now) const {
        TokenSums y;
        Base::template add_lower_of_rows<fine>(y, now.rows, 16 * of_other(), now.P, false);
        ptx::sync_threads(beside_barrier, walking_threads);  // all have read P
        leave_sums(left_sums(now.P.high, of_other()), y);
        ptx::arrive_threads(scored_barrier, 2 * walking_threads);
    }
    HEADRACE_DEVICE void leave_reads(const Stage& now) const {
        if (!is_beside()) return;
        is_fine(now) ? leave_reads<true>(now) : leave_reads<false>(now);
    }
    template <bool fine>
    HEADRACE_DEVICE void leave_reads(const Stage& now) const {
        if constexpr (!small_state<K>) return leave_read_rows<fine>(now);
        float sums[groups][8][4];
        read_queries<fine>(sums, now, 16 * of_other());
        meet(taken_barrier);  // all have read q, and what was left before is taken
#pragma unroll
        for (int group = 0; group < groups; ++group)
            leave_sums(left_sums(left_reads(now, group), of_other()), sums[group]);
        ptx::arrive_threads(reads_barrier, 2 * walking_threads);
    }
    // Of more channels what multiplies q, as there is no room for the products.
    template <bool fine>
    HEADRACE_DEVICE void leave_read_rows(const Stage& now) const {
        SplitA rows[token_steps];
        each_step(rows, [&](int step) { return read_rows(now, step, 16 * of_other()); });
        meet(taken_barrier);
        const LeftRows left = LeftRows::of(now, of_other());
#pragma unroll
        for (int step = 0; step < token_steps; ++step) left.template leave<fine>(step, rows[step]);
        ptx::arrive_threads(reads_barrier, 2 * walking_threads);
    }
};

}  // namespace headrace::cuda
