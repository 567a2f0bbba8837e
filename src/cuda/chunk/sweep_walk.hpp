// SweepWalk: what the sweeps of a backward on tensor cores share: a walk over the chunks of a sequence and value head
// by warps that own 16 values each, and what it leaves of every chunk (SweptChunks).
#pragma once

#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

HEADRACE_DEVICE bool keys_overlap(const KernelArgs& args, std::int64_t place) {
    return args.prepared.overlap[place] != static_cast<std::int32_t>(KeyOverlap::none);
}

// With the state in registers, or the gradient of one. `saves_apart`: warps beside those that walk save what these
// leave them in shared memory.
template <int K, class Format, bool has_others, bool saves_apart = false>
struct SweepWalk {
    struct Nothing {
        HEADRACE_DEVICE void operator()(int, int) const {}
    };
    static constexpr int state_tiles = K / 8;
    static constexpr int left_rows_barrier = 8;  // of the warps that walk and those that save

    // In shared memory, as registers are few.
    struct Sequence {
        TokenRows rows, d_v;               // v or d_o; of the block's values
        std::int64_t tokens, first_place;  // of the sequence; of its first chunk in what is prepared and saved
        std::int64_t n, head;
    };

    const KernelArgs& args;
    Matrix<64> patches;  // [16 warps,64] OutputPatch of each warp
    Sequence* of_sequence;
    float state[state_tiles][4];

    HEADRACE_DEVICE static int warp_value() { return 16 * warp(); }
    HEADRACE_DEVICE int count_of(int first) const {
        return args.V - first < args.value_columns ? args.V - first : args.value_columns;
    }

    // By one thread: where the tokens lie of sequence n and a value head, values from `first` on.
    template <bool gradients>
    HEADRACE_DEVICE void find_sequence(const TokenRange& s, std::int64_t n, std::int64_t head, int first) const {
        const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
        *of_sequence = {rows_of(gradients ? args.d_o : args.v, all, head, first),
                        rows_of(args.d_v, all, head, first),
                        s.end - s.begin,
                        saved_place(args, s, n, head, 0, tensor_chunk),
                        n,
                        head};
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

    // The chunks of a sequence, from the first one or the last: fetch(chunk, turn) queues copies of what
    // compute(chunk, turn) reads, args.stages turns at once; where there are two stages before(chunk, turn) comes
    // first. All warps of a block meet in every turn, whichever of these they have.
    template <bool from_end, class Fetch, class Compute, class Before = Nothing>
    HEADRACE_DEVICE void each_chunk(const TokenRange& sequence, Fetch fetch, Compute compute, Before before = {}) {
        const int chunks = chunks_of(sequence);
        const auto chunk_of = [&](int turn) { return from_end ? chunks - 1 - turn : turn; };
        const auto meet = [] { std::is_same_v<Fetch, Nothing> ? wait_for_block() : end_copies_of_block(); };
        const int ahead = args.stages - 1;  // what arrives, of what is computed
        HEADRACE_ROLLED
        for (int turn = -ahead; turn < chunks; ++turn) {
            if (turn > -ahead) meet();
            HEADRACE_ROLLED
            for (int step = 0; step < 2; ++step) {
                if (step != ahead) {
                    if (turn >= 0) before(chunk_of(turn), turn);
                    continue;
                }
                if (turn + ahead < chunks) fetch(chunk_of(turn + ahead), turn + ahead);
                if (ahead == 0) meet();
            }
            if (turn >= 0) compute(chunk_of(turn), turn);
        }
    }
    HEADRACE_DEVICE static int chunks_of(const TokenRange& sequence) {
        return static_cast<int>((sequence.end - sequence.begin + tensor_chunk - 1) / tensor_chunk);
    }

    // x += rows^T P, or without `add` x = rows^T P, rows [64 tokens, 64 values] from `value` on
    HEADRACE_DEVICE static void add_lower_of_rows(TokenSums& x, Matrix<64> rows, int value, const SplitMatrix& P,
                                                  bool add = true) {
        const auto left = [&](int step) { return left_operand(rows, value, step); };
        add_lower<Left::high, Format>(x, left, P, add);
    }

    // With N of `solve` (math.md, section 5): from what a chunk's tokens find to its residuals r = x + N Diag(beta) x,
    // and from gradients y' of what is written to y = (I + Diag(beta) l)^-T y' = y' + N^T Diag(beta) y'. They are left
    // for the gradients, and become d = beta r and z = beta y. `overlap`, a KeyOverlap, says whether N has a rest,
    // which takes the place of its lower part; find() finds the stage again for it, as registers are few.
    template <class Beta, class Find>
    HEADRACE_DEVICE void solve_residuals(TokenSums& x, const SplitMatrix& solve, const Beta& beta, std::int32_t overlap,
                                         Find find, std::int64_t place, int first) const {
        TokenSums scaled;
        scale_into(scaled, x, beta);
        const auto left = [&](int step) { return left_operand(scaled, step); };
        add_lower_transposed<Format>(x, left, solve);
        if (overlap == static_cast<std::int32_t>(KeyOverlap::reflected)) {
            const Matrix<64> low = find().solve.low;
            add_lower_transposed<Left::low>(x, left, low);
            take_rest(low, place);
            add_lower_transposed<Left::high>(x, left, low);
        }
        save_or_leave(args.swept.residuals, x, place, first);
        if (overlap != static_cast<std::int32_t>(KeyOverlap::none)) save_low(args.swept.residuals_low, x, place, first);
        scale_tokens(x, beta);
    }
    template <class Beta, class Find>
    HEADRACE_DEVICE void solve_gradients(TokenSums& y, const SplitMatrix& solve, const Beta& beta, std::int32_t overlap,
                                         Find find, std::int64_t place, int first) const {
        TokenSums scaled;
        scale_into(scaled, y, beta);
        const auto left = [&](int step) { return left_operand(scaled, step); };
        add_lower<Left::both, Format>(y, left, solve);
        if (overlap == static_cast<std::int32_t>(KeyOverlap::reflected)) {
            const Matrix<64> low = find().solve.low;
            add_lower<Left::low>(y, left, low);
            take_rest(low, place);
            add_lower<Left::high>(y, left, low);
        }
        save_or_leave(args.swept.d_written, y, place, first);
        if (overlap != static_cast<std::int32_t>(KeyOverlap::none)) save_low(args.swept.d_written_low, y, place, first);
        scale_tokens(y, beta);
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
        if (to == nullptr || value >= args.V) return;
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
        if constexpr (saves_apart) {
            own_patch().store_lines(sums);
            ptx::arrive_threads(left_rows_barrier, 2 * walking_threads);
        } else {
            save(to, sums, place, first);
        }
    }
    HEADRACE_DEVICE OutputPatch own_patch() const { return OutputPatch::of(patches, warp_here()); }
    HEADRACE_DEVICE void save_low(std::uint16_t* to, const TokenSums& sums, std::int64_t place, int first) const {
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
    HEADRACE_DEVICE void store_rows(const TokenSums& rows, int chunk, int first) const {
        if (!args.d_v.given) return;
        const OutputPatch patch = own_patch();
        ptx::sync_warp();
        patch.store(rows);
        ptx::sync_warp();
        store_outputs(args.d_v, of_sequence->d_v.from(token_of(chunk)), patch, length_of(chunk), count_of(first));
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
