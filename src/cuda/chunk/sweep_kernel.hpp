// SweepKernel: the walks of a backward of the delta rule on tensor cores: states from the first chunk to the last, and
// their gradients back, by warps that own 16 values each. They leave SweptChunks, d_v and the initial state's gradient.
#pragma once

#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

// Where keys overlap that much, gradients of queries are small differences of what a chunk adds up.
HEADRACE_DEVICE bool keys_overlap(const KernelArgs& args, std::int64_t place) {
    constexpr float most = 64 * 63 / 2 / 16.0f;  // 1/16 on the mean of the pairs; of random unit keys it is 1/K
    return !(args.prepared.overlap[place] < most);
}

// Everything here is multiplied with 16 bits on one side: roundings of reads and writes come back in both walks, and
// what keys of few directions read in a gradient is far below its roundings (docs/decisions/003).
template <int K>
struct SweepKernel {
    static constexpr int state_tiles = K / 8;
    // Of a chunk: rows as they came, and what was prepared.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> rows;                     // v or d_o
        SplitMatrix P, solve;                // P of gradients only
        float *read, *erase, *write, *beta;  // [C] one behind the other
        float* decay;                        // [2]
    };

    const KernelArgs& args;
    Stage first_stage;
    std::int64_t stage_bytes;  // from a stage to the next
    Matrix<64> patches;        // [16 warps,64] OutputPatch of each warp
    float state[state_tiles][4];

    __host__ __device__ SweepKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
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
        load(args.initial_state, n, head, first);
        const std::int64_t chunks = chunks_of(sequence);
        if (chunks > 0) fetch<false>(sequence, n, head, first, 0, 0);
        HEADRACE_ROLLED
        for (std::int64_t c = 0; c < chunks; ++c) {
            const bool more = c + 1 < chunks;
            begin_chunk();
            if (more && args.stages == 2) fetch<false>(sequence, n, head, first, c + 1, c + 1);
            advance(stage_of(c), saved_place(args, sequence, n, head, c, tensor_chunk), first);
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch<false>(sequence, n, head, first, c + 1, c + 1);
            }
        }
    }
    HEADRACE_DEVICE void adjoints(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        load(args.d_final_state, n, head, first);
        const std::int64_t chunks = chunks_of(sequence);
        if (chunks > 0) fetch<true>(sequence, n, head, first, chunks - 1, 0);
        HEADRACE_ROLLED
        for (std::int64_t turn = 0; turn < chunks; ++turn) {
            const std::int64_t c = chunks - 1 - turn;
            begin_chunk();
            if (c > 0 && args.stages == 2) fetch<true>(sequence, n, head, first, c - 1, turn + 1);
            retreat(stage_of(turn), chunk_range(args, sequence, c),
                    saved_place(args, sequence, n, head, c, tensor_chunk), head, first);
            if (c > 0 && args.stages == 1) {
                ptx::sync_block();
                fetch<true>(sequence, n, head, first, c - 1, turn + 1);
            }
        }
        store(args.d_initial_state, n, head, first);
    }

  private:
    HEADRACE_DEVICE static int warp_value() { return 16 * warp(); }
    HEADRACE_DEVICE static std::int64_t chunks_of(const TokenRange& s) {
        return (s.end - s.begin + tensor_chunk - 1) / tensor_chunk;
    }
    HEADRACE_DEVICE int count_of(int first) const {
        return args.V - first < args.value_columns ? args.V - first : args.value_columns;
    }
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
    HEADRACE_DEVICE static void begin_chunk() {
        ptx::wait_for_copies<0>();
        ptx::sync_block();
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
        save(args.swept.states, state, place, first);
        TokenSums sums = {};
        add_read<Left::both, K>(sums, state, now.e);
        scale_tokens(sums, now.erase);
        add_transposed(sums, now.rows, warp_value());
        TokenSums written;
        copy(written, sums);
        scale_tokens(written, now.beta);
        add_lower_transposed(
            sums, [&](int step) { return left_operand(written, step); }, now.solve);
        save(args.swept.residuals, sums, place, first);
        save_low(args.swept.residuals_low, sums, place, first);
        scale_tokens(sums, now.beta);
        scale_tokens(sums, now.write);
        const SplitDecay<float> decay{now.decay[0], now.decay[1]};
        decay_and_add<Left::both, K>(
            state, [&](int step) { return left_operand(sums, step); }, now.k, [&](int, int) { return decay; });
    }
    // From the gradient of the state that leaves to that of the one that enters: with y' that of what is written,
    // y = (I + Diag(beta) l)^-T y' = y' + N^T Diag(beta) y'.
    HEADRACE_DEVICE void retreat(const Stage& now, const ChunkRange& range, std::int64_t place, std::int64_t head,
                                 int first) {
        save(args.swept.adjoints, state, place, first);
        TokenSums y = {}, written;
        add_read<Left::both, K>(y, state, now.k);
        scale_tokens(y, now.write);
        add_lower_of_rows(y, now);
        copy(written, y);
        scale_tokens(written, now.beta);
        add_lower(
            y, [&](int step) { return left_operand(written, step); }, now.solve);
        save(args.swept.d_written, y, place, first);
        save_low(args.swept.d_written_low, y, place, first);
        scale_tokens(y, now.beta);
        store_rows(y, range, head, first);
        scale_tokens(y, now.erase);
        decay_and_add_both(y, now);
    }
    // x += d_o^T P
    HEADRACE_DEVICE static void add_lower_of_rows(TokenSums& x, const Stage& now) {
        const auto rows = [&](int step) { return left_operand(now.rows, warp_value(), step); };
        add_lower<Left::high>(x, rows, now.P.low);
        add_lower<Left::high>(x, rows, now.P.high);
    }
    HEADRACE_DEVICE static void copy(TokenSums& to, const TokenSums& from) {
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            for (int place = 0; place < 4; ++place) to[tile][place] = from[tile][place];
    }
    // D = decay D + d_o^T (reads q) + z^T (erases e)
    HEADRACE_DEVICE void decay_and_add_both(const TokenSums& erased, const Stage& now) {
        const auto q = OperandAt<K>::down(now.q), e = OperandAt<K>::down(now.e);
        const SplitDecay<float> decay{now.decay[0], now.decay[1]};
        constexpr int group = 8;
#pragma unroll
        for (int first = 0; first < state_tiles; first += group) {
            float sums[group][4] = {};
#pragma unroll
            for (int step = 0; step < token_steps; ++step) {
                multiply_tiles<Left::both>(sums, read_rows(now, step), 0, group, [&](auto& b, int c) {
                    ptx::load_matrix_transposed(b, q.at(16 * step, 8 * first + c));
                });
                multiply_tiles<Left::both>(sums, left_operand(erased, step), 0, group, [&](auto& b, int c) {
                    ptx::load_matrix_transposed(b, e.at(16 * step, 8 * first + c));
                });
            }
#pragma unroll
            for (int tile = 0; tile < group; ++tile) {
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    float& D = state[first + tile][place];
                    D = fmaf(D, decay.whole, fmaf(D, decay.part, sums[tile][place]));
                }
            }
        }
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

    // ---- what is left for the gradients ----
    // Lines of this warp's values, which begin before V.
    template <int tiles>
    HEADRACE_DEVICE void save(std::uint16_t* to, const float (&sums)[tiles][4], std::int64_t place, int first) const {
        const LanePlace at;
        const int value = first + warp_value();
        if (to == nullptr || value >= args.V) return;
        std::uint16_t* const line = to + (place * round_up(args.V, 16) + value + at.row) * (8 * tiles) + at.column;
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<std::uint32_t*>(line + half * 8 * 8 * tiles + 8 * tile) =
                    ptx::round_to_bf16(sums[tile][2 * half], sums[tile][2 * half + 1]);
            }
        }
    }
    HEADRACE_DEVICE void save_low(std::uint16_t* to, const TokenSums& sums, std::int64_t place, int first) const {
        if (to == nullptr || !keys_overlap(args, place)) return;
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
    // d_v
    HEADRACE_DEVICE void store_rows(const TokenSums& rows, const ChunkRange& range, std::int64_t head,
                                    int first) const {
        if (!args.d_v.given) return;
        const OutputPatch patch{{patches.data + warp() * 16 * 64}};
        ptx::sync_warp();
        patch.store(rows);
        ptx::sync_warp();
        store_outputs(args.d_v, rows_of(args.d_v, range, head, first), patch, range.length, count_of(first));
    }

    // ---- states ----
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, int first) {
        load_values(state, tensor, n, head, args.K, first + warp_value(), args.V);
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n, std::int64_t head, int first) const {
        cuda::store_values(tensor, state, n, head, args.K, first + warp_value(), args.V);
    }
};

}  // namespace headrace::cuda
