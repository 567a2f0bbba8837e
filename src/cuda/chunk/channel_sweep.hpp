// ChannelSweep: the walks of a backward under channel gates on tensor cores, from what ChannelPrepare left: states from
// the first chunk to the last, and their gradients back.
#pragma once

#include "cuda/chunk/additive_terms.hpp"
#include "cuda/chunk/sweep_walk.hpp"

namespace headrace::cuda {

// As SweepKernel, with rows that come decayed. States and sums enter products with 16 bits, v and d_o with the 8 that
// they have. Rows erased and written have 16 in chunks that need them (ChannelEstimate), 8 in all others: without, 2000
// tokens of beta 2 brought d_v to 3 times its bar, with 16 bits in every chunk it is where it is with those alone. The
// gradients of states go by the same chunks: what the others add, with what decays in between, is the same from either
// end.
template <int K, bool delta, bool leaves>
struct ChannelSweep : SweepWalk<K, ByGroup<Bf16>, false, leaves ? Saved::not_at_all : Saved::by_walkers, delta> {
    using Format = ByGroup<Bf16>;
    using Base = SweepWalk<K, Format, false, leaves ? Saved::not_at_all : Saved::by_walkers, delta>;
    using Base::args, Base::patches, Base::of_sequence, Base::state, Base::state_tiles, Base::warp_value;
    using Base::length_of, Base::place_of, Base::token_of;
    using typename Base::Chunks;
    static constexpr std::int64_t matrix_size = tensor_chunk * tensor_chunk, rows_size = tensor_chunk * K;

    struct Stage {
        Matrix<K> reads, writes, erases;
        Matrix<64> rows;                // v or d_o, 64 values behind the other; of this warp where it computes
        SplitMatrix scores, solve;      // scores of gradients only
        float *decay, *beta, *numbers;  // [K,2], [C], [4]
        std::int32_t* overlap;          // KeyOverlap
    };

    Stage first_stage{};
    int stage_bytes;  // from a stage to the next

    __host__ __device__ ChannelSweep(const KernelArgs& arguments, Arena& arena) : Base{arguments, {}, {}, {}} {
        const std::size_t before = arena.shared_used;
        for (Matrix<K>* matrix : {&first_stage.reads, &first_stage.writes})
            *matrix = Matrix<K>::take(arena, tensor_chunk);
        for (Matrix<64>* matrix : {&first_stage.scores.high, &first_stage.scores.low})
            *matrix = Matrix<64>::take(arena, tensor_chunk);
        if (delta) {
            first_stage.erases = Matrix<K>::take(arena, tensor_chunk);
            for (Matrix<64>* matrix : {&first_stage.solve.high, &first_stage.solve.low})
                *matrix = Matrix<64>::take(arena, tensor_chunk);
            first_stage.beta = arena.take<float>(tensor_chunk);
            first_stage.numbers = arena.take<float>(8);
            first_stage.overlap = reinterpret_cast<std::int32_t*>(first_stage.numbers + 4);
        }
        first_stage.decay = arena.take<float>(2 * K);
        // Behind all others, whose places the compiler knows.
        first_stage.rows = Matrix<64>::take(arena, tensor_chunk * value_groups());
        take_padding(arena);
        stage_bytes = static_cast<int>(arena.shared_used - before);
        if (args.stages == 2) arena.take<char>(static_cast<std::size_t>(stage_bytes));
        patches = Matrix<64>::take(arena, args.value_columns);
        of_sequence = arena.take<typename Base::Sequence>(1);
    }

    HEADRACE_DEVICE void states(const SweptBlock& block) {
        const int first = block.columns.first;
        begin(block);
        if (leaves && !delta && !block.columns.of_values) return leave_decays(block);
        this->template enter<false>(block);
        this->template each_chunk<false>(
            Chunks(block.walk), [&](int chunk, int turn) { fetch<false>(chunk, turn); },
            [&](int chunk, int turn) { advance(turn, place_of(chunk), first); });
        this->template leave<false>(block);
    }
    HEADRACE_DEVICE void adjoints(const SweptBlock& block) {
        const int first = block.columns.first;
        begin(block);
        this->template enter<true>(block);
        this->template each_chunk<true>(
            Chunks(block.walk), [&](int chunk, int turn) { fetch<true>(chunk, turn); },
            [&](int chunk, int turn) { retreat(turn, chunk, first); });
        this->template leave<true>(block);
    }

  private:
    HEADRACE_DEVICE Stage stage_of(int turn) const {
        const int bytes = args.stages == 2 ? turn % 2 * stage_bytes : 0, elements = bytes / 2, floats = bytes / 4;
        Stage s = first_stage;
        for (Matrix<K>* matrix : {&s.reads, &s.writes, &s.erases}) matrix->data += elements;
        for (Matrix<64>* matrix : {&s.rows, &s.scores.high, &s.scores.low, &s.solve.high, &s.solve.low})
            matrix->data += elements;
        for (float** vector : {&s.decay, &s.beta, &s.numbers}) *vector += floats;
        s.overlap += floats;
        return s;
    }
    HEADRACE_DEVICE Stage stage_of_warp(int turn) const {
        Stage s = stage_of(turn);
        s.rows.data += warp_value() / 64 * matrix_size;
        return s;
    }
    // The same from here on: kept from before, its places had no registers.
    HEADRACE_DEVICE Stage found_again(int turn) const { return stage_of_warp(ptx::not_before(turn % 2)); }
    HEADRACE_DEVICE static int value_in_rows() { return warp_value() % 64; }
    __host__ __device__ int value_groups() const { return (args.value_columns + 63) / 64; }
    HEADRACE_DEVICE void begin(const SweptBlock& block) const {
        if (threadIdx.x == 0) this->find_sequence(block);
        ptx::sync_block();
    }
    // The additive rule's transition: in double, as decays may all be one and near 1.
    HEADRACE_DEVICE void leave_decays(const SweptBlock& block) const {
        double* const to = args.segments.decays + (block.place * args.HV + block.head) * args.K;
        const Chunks chunks(block.walk);
        each(args.K, [&](int c) {
            double passed = 1;
            HEADRACE_ROLLED
            for (int chunk = chunks.first; chunk < chunks.end; ++chunk) {
                const float2 decay =
                    *reinterpret_cast<const float2*>(args.prepared.decay + 2 * (place_of(chunk) * K + c));
                passed *= static_cast<double>(decay.x) + static_cast<double>(decay.y);
            }
            to[c] = passed;
        });
    }
    template <bool gradients>
    HEADRACE_DEVICE void fetch(int chunk, int turn) const {
        const Stage stage = stage_of(turn);
        const Prepared& from = args.prepared;
        const std::int64_t place = place_of(chunk);
        HEADRACE_ROLLED
        for (int group = 0; group < value_groups(); ++group) {
            const int count = of_sequence->values - 64 * group;  // zeros where there are none
            TokenRows rows = of_sequence->rows.from(token_of(chunk));
            if (count > 0) rows.first += 2 * 64 * group;
            copy_rows(Matrix<64>{stage.rows.data + group * matrix_size}, rows, length_of(chunk), tensor_chunk,
                      count > 0 ? count : 0);
        }
        copy_bytes<2 * rows_size>(stage.writes.data, from.writes + place * rows_size);
        copy_bytes<8 * K>(stage.decay, from.decay + place * 2 * K);
        if (gradients) {
            copy_bytes<2 * rows_size>(stage.reads.data, from.reads + place * rows_size);
            copy_lower(all_warps(), LowerCopy{stage.scores.high, from.scores + place * LowerImage::size},
                       LowerCopy{stage.scores.low, from.scores_low + place * LowerImage::size});
        }
        if (delta) {
            copy_bytes<2 * rows_size>(stage.erases.data, from.erases + place * rows_size);
            copy_lower(all_warps(), LowerCopy{stage.solve.high, from.solve_high + place * LowerImage::size},
                       LowerCopy{stage.solve.low, from.solve_low + place * LowerImage::size});
            copy_bytes<4 * tensor_chunk>(stage.beta, from.factors + (place * 4 + 3) * tensor_chunk);
            copy_bytes<16>(stage.numbers, from.numbers + place * 4);
            if (threadIdx.x == 0) ptx::copy_4(ptx::shared_address(stage.overlap), from.overlap + place, 4);
        }
        ptx::end_copies();
    }

    // ---- chunks ----
    // From the state that enters to the one that leaves.
    HEADRACE_DEVICE void advance(int turn, std::int64_t place, int first) {
        Stage now = stage_of_warp(turn);
        this->save(args.swept.states, state, place, first);
        if constexpr (!delta) {
            decay_and_add<Left::high, K, Format>(
                state, [&](int step) { return left_operand(now.rows, value_in_rows(), step); }, now.writes,
                decay_of(now));
        } else {
            TokenSums sums;
            read<Left::both, K, Format>(sums, state, now.erases);
            if (now.numbers[2] != 0) {
                replace_rows(now.erases, rest_of(args.prepared.erases_low, place), static_cast<int>(blockDim.x));
                add_rest_of_rows(sums, now.erases);
            }
            add_transposed(sums, now.rows, value_in_rows());
            const std::int32_t overlap = *now.overlap;
            this->solve_residuals(
                sums, now.solve, now.beta, overlap, [&] { return found_again(turn); }, place);
            this->leave_residuals(sums, overlap, place, first);
            scale_tokens(sums, now.beta);
            now = found_again(turn);
            const auto left = [&](int step) { return left_operand(sums, step); };
            decay_and_add<Left::both, K, Format>(state, left, now.writes, decay_of(now));
            if (now.numbers[1] != 0) {
                replace_rows(now.writes, rest_of(args.prepared.writes_low, place), static_cast<int>(blockDim.x));
                decay_and_add<Left::high, K>(state, left, now.writes, kept);
            }
        }
    }
    // From the gradient of the state that leaves to that of the one that enters.
    HEADRACE_DEVICE void retreat(int turn, int chunk, int first) {
        Stage now = stage_of_warp(turn);
        this->save(args.swept.adjoints, state, place_of(chunk), first);
        TokenSums y;
        read<Left::both, K, Format>(y, state, now.writes);
        if (delta && now.numbers[1] != 0) {
            replace_rows(now.writes, rest_of(args.prepared.writes_low, place_of(chunk)), static_cast<int>(blockDim.x));
            add_rest_of_rows(y, now.writes);
        }
        Base::add_lower_of_rows(y, now.rows, value_in_rows(), now.scores);
        if constexpr (delta) {
            const std::int32_t overlap = *now.overlap;
            this->solve_gradients(
                y, now.solve, now.beta, overlap, [&] { return found_again(turn); }, place_of(chunk));
            this->leave_gradients(y, overlap, place_of(chunk), first);
            scale_tokens(y, now.beta);
        }
        leaves_sums() ? leave_sums(y, place_of(chunk), first + warp_value()) : this->store_rows(y, chunk, first);
        now = found_again(turn);
        const auto rows = [&](int step) { return left_operand(now.rows, value_in_rows(), step); };
        float sums[K / 64][8][4];
        if constexpr (delta) {
            SplitA operands[token_steps];
            each_step(operands, [&](int step) { return left_operand(y, step); });
            const auto erased = [&](int step) { return operands[step]; };
            add_all_written<Left::both, Format>(sums, erased, now.erases, false);
            if (now.numbers[2] != 0) {
                replace_rows(now.erases, rest_of(args.prepared.erases_low, place_of(chunk)),
                             static_cast<int>(blockDim.x));
                add_all_written<Left::high>(sums, erased, now.erases);
            }
        }
        add_all_written<Left::high, Format>(sums, rows, now.reads, delta);
#pragma unroll
        for (int group = 0; group < K / 64; ++group) decay_and_add_tiles(state, sums[group], 8 * group, decay_of(now));
    }
    // Of d_v as fp32 sums, for a launch behind, in the order of a walk's threads with 64 values.
    HEADRACE_DEVICE bool leaves_sums() const { return !delta && !leaves && args.added.sums != nullptr; }
    HEADRACE_DEVICE void leave_sums(const TokenSums& y, std::int64_t place, int value) const {
        if (value >= args.V) return;
        const std::int64_t block = args.added.first_block + value / tensor_values;
        const int other_threads = (value % tensor_values / 16 - warp() % block_warps) * warp_lanes;
        SavedTiles<token_tiles> left;
        left.data = reinterpret_cast<char*>(
            args.added.sums + (block * args.added.chunks * args.HV + place) * added_outputs + 4 * other_threads);
        left.save(y);
    }
    HEADRACE_DEVICE static auto decay_of(const Stage& now) {
        const float2* const decay = reinterpret_cast<const float2*>(now.decay) + lane() % 4 * 2;
        return [decay](int tile, int odd) {
            const float2 of = decay[8 * tile + odd];
            return SplitDecay<float>{of.x, of.y};
        };
    }
    HEADRACE_DEVICE void add_rest_of_rows(TokenSums& sums, Matrix<K> rows) const {
        add_read<Left::high>(sums, [&](int step) { return left_operand(state, step); }, rows);
    }
    HEADRACE_DEVICE static SplitDecay<float> kept(int, int) { return {1, 0}; }
    HEADRACE_DEVICE static const std::uint16_t* rest_of(const std::uint16_t* rows, std::int64_t place) {
        return rows + place * rows_size;
    }
};

}  // namespace headrace::cuda
