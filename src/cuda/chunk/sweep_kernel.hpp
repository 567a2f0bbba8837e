// SweepKernel: the walks of a backward of the delta rule on tensor cores: states from the first chunk to the last, and
// their gradients back, by warps that own 16 values each. They leave SweptChunks, d_v and the initial state's gradient.
#pragma once

#include "cuda/chunk/sweep_walk.hpp"

namespace headrace::cuda {

// Everything here is multiplied with 16 bits on one side: roundings of reads and writes come back in both walks, and
// what keys of few directions read in a gradient is far below its roundings (docs/decisions/003).
template <int K>
struct SweepKernel : SweepWalk<K> {
    using Base = SweepWalk<K>;
    using Base::args, Base::patches, Base::state, Base::state_tiles, Base::warp_value;

    // Of a chunk: rows as they came, and what was prepared.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> rows;                     // v or d_o
        SplitMatrix P, solve;                // P of gradients only
        float *read, *erase, *write, *beta;  // [C] one behind the other
        float* decay;                        // [2]
    };

    Stage first_stage;
    std::int64_t stage_bytes;  // from a stage to the next

    __host__ __device__ SweepKernel(const KernelArgs& arguments, Arena& arena) : Base{arguments, {}, {}} {
        const std::size_t before = arena.shared_used;
        first_stage.k = Matrix<K>::take(arena, tensor_chunk);
        first_stage.q = Matrix<K>::take(arena, tensor_chunk);
        first_stage.e = args.undecayed_error ? Matrix<K>::take(arena, tensor_chunk) : first_stage.k;
        for (Matrix<64>* matrix : {&first_stage.rows, &first_stage.P.high, &first_stage.P.low, &first_stage.solve.high,
                                   &first_stage.solve.low})
            *matrix = Matrix<64>::take(arena, tensor_chunk);
        first_stage.read = arena.take<float>(4 * tensor_chunk);
        first_stage.decay = arena.take<float>(tensor_chunk);  // 256 bytes, as matrices begin at multiples (OperandAt)
        stage_bytes = static_cast<std::int64_t>(arena.shared_used - before);
        if (args.stages == 2) arena.take<char>(static_cast<std::size_t>(stage_bytes));
        patches = Matrix<64>::take(arena, args.value_columns);
    }

    // ---- sequence n, one value head, values [first, first + args.value_columns) ----
    HEADRACE_DEVICE void states(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        this->load(args.initial_state, n, head, first);
        this->template each_chunk<false>(
            sequence,
            [&](std::int64_t chunk, std::int64_t turn) { fetch<false>(sequence, n, head, first, chunk, turn); },
            [&](std::int64_t chunk, std::int64_t turn) {
                advance(stage_of(turn), saved_place(args, sequence, n, head, chunk, tensor_chunk), first);
            });
    }
    HEADRACE_DEVICE void adjoints(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        this->load(args.d_final_state, n, head, first);
        this->template each_chunk<true>(
            sequence,
            [&](std::int64_t chunk, std::int64_t turn) { fetch<true>(sequence, n, head, first, chunk, turn); },
            [&](std::int64_t chunk, std::int64_t turn) {
                retreat(stage_of(turn), chunk_range(args, sequence, chunk),
                        saved_place(args, sequence, n, head, chunk, tensor_chunk), head, first);
            });
        this->store(args.d_initial_state, n, head, first);
    }

  private:
    HEADRACE_DEVICE Stage stage_of(std::int64_t turn) const {
        const std::int64_t bytes = args.stages == 2 ? turn % 2 * stage_bytes : 0, elements = bytes / 2,
                           floats = bytes / 4;
        Stage s = first_stage;
        s.q.data += elements, s.k.data += elements, s.e.data += elements, s.rows.data += elements;
        s.P.high.data += elements, s.P.low.data += elements;
        s.solve.high.data += elements, s.solve.low.data += elements;
        s.read += floats, s.decay += floats;
        s.erase = s.read + tensor_chunk, s.write = s.erase + tensor_chunk, s.beta = s.write + tensor_chunk;
        return s;
    }
    template <bool gradients>
    HEADRACE_DEVICE void fetch(const TokenRange& sequence, std::int64_t n, std::int64_t head, int first,
                               std::int64_t chunk, std::int64_t turn) const {
        const ChunkRange range = chunk_range(args, sequence, chunk);
        const Stage stage = stage_of(turn);
        const std::int64_t key_head = head / args.group,
                           place = saved_place(args, sequence, n, head, chunk, tensor_chunk);
        copy_tokens(stage.k, args.k, range, key_head, 0, args.K);
        if (gradients) copy_tokens(stage.q, args.q, range, key_head, 0, args.K);
        if (args.undecayed_error) copy_tokens(stage.e, args.p, range, key_head, 0, args.K);
        copy_tokens(stage.rows, gradients ? args.d_o : args.v, range, head, first, args.V - first);
        const Prepared& from = args.prepared;
        const std::int64_t matrix = place * 64 * tensor_chunk;
        const LowerCopy high{stage.solve.high, from.solve_high + matrix}, low{stage.solve.low, from.solve_low + matrix};
        if constexpr (gradients) {
            copy_lower(high, low, LowerCopy{stage.P.high, from.scores + matrix},
                       LowerCopy{stage.P.low, from.scores_low + matrix});
        } else {
            copy_lower(high, low);
        }
        const float* const factors = from.factors + place * 4 * tensor_chunk;
        each(tensor_chunk, [&](int i) { ptx::copy_16(ptx::shared_address(stage.read + 4 * i), factors + 4 * i, 16); });
        if (threadIdx.x < 2)
            ptx::copy_4(ptx::shared_address(stage.decay + threadIdx.x), from.decay + 2 * place + threadIdx.x, 4);
        ptx::end_copies();
    }

    // ---- chunks ----
    // From the state that enters to the one that leaves.
    HEADRACE_DEVICE void advance(const Stage& now, std::int64_t place, int first) {
        this->save(args.swept.states, state, place, first);
        TokenSums sums = {};
        add_read<Left::both, K>(sums, state, now.e);
        scale_tokens(sums, now.erase);
        add_transposed(sums, now.rows, warp_value());
        this->solve_residuals(sums, now.solve, now.beta, place, first);
        scale_tokens(sums, now.write);
        const SplitDecay<float> decay{now.decay[0], now.decay[1]};
        decay_and_add<Left::both, K>(
            state, [&](int step) { return left_operand(sums, step); }, now.k, [&](int, int) { return decay; });
    }
    // From the gradient of the state that leaves to that of the one that enters.
    HEADRACE_DEVICE void retreat(const Stage& now, const ChunkRange& range, std::int64_t place, std::int64_t head,
                                 int first) {
        this->save(args.swept.adjoints, state, place, first);
        TokenSums y = {};
        add_read<Left::both, K>(y, state, now.k);
        scale_tokens(y, now.write);
        Base::add_lower_of_rows(y, now.rows, warp_value(), now.P);
        this->solve_gradients(y, now.solve, now.beta, place, first);
        this->store_rows(y, range, head, first);
        scale_tokens(y, now.erase);
        decay_and_add_both(y, now);
    }
    // D = decay D + d_o^T (reads q) + z^T (erases e)
    HEADRACE_DEVICE void decay_and_add_both(const TokenSums& erased, const Stage& now) {
        const auto q = OperandAt<K>::down(now.q), e = OperandAt<K>::down(now.e);
        const SplitDecay<float> decay{now.decay[0], now.decay[1]};
        decay_and_add_sums<K>(
            state,
            [&](float(&sums)[8][4], int first) {
#pragma unroll
                for (int step = 0; step < token_steps; ++step) {
                    add_written<Left::both>(sums, read_rows(now, step), q, step, first);
                    add_written<Left::both>(sums, left_operand(erased, step), e, step, first);
                }
            },
            [&](int, int) { return decay; });
    }
    // d_o^T Diag(read)
    HEADRACE_DEVICE static SplitA read_rows(const Stage& now, int step) {
        const SplitA rows = left_operand(now.rows, warp_value(), step);
        const LanePlace at;
        SplitA scaled;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 read = *reinterpret_cast<const float2*>(now.read + 16 * step + pair / 2 * 8 + at.column);
            scaled.set(pair, low_half(rows.high[pair]) * read.x, high_half(rows.high[pair]) * read.y);
        }
        return scaled;
    }
};

}  // namespace headrace::cuda
