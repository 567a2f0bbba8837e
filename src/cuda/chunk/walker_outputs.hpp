// walker_outputs: a chunk's outputs of a walk on tensor cores, by the warps that walk or by others beside them, so that
// what leads from state to state does not wait for outputs.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/lower_products.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// What a warp's outputs pass through on their way to rows of values: 16 values of 64 tokens. Where a warp stores
// matrices at once they are turned on the way: a token's values lie in two pieces, which change places every four
// tokens so that eight lie in all banks. Elsewhere, and where lines of values are wanted, values lie in such rows that
// the four pairs which a matrix is loaded from, and the eight values that a store has, lie in all banks.
struct OutputPatch {
    static constexpr bool turns = ptx::stores_matrices;
    static constexpr std::uint32_t token_bytes = 32;
    Matrix<64> matrix;  // [16,64], or [64,16]

    // Of a warp with values, of all those of a block.
    HEADRACE_DEVICE static OutputPatch of(Matrix<64> patches, int warp) { return {{patches.data + warp * 16 * 64}}; }
    HEADRACE_DEVICE static int row(int value) { return value ^ (value / 8 * 2); }
    // Of a token's pieces.
    HEADRACE_DEVICE std::uint32_t place(int token, int piece) const {
        return ptx::shared_address(matrix.data) + token_bytes * token + 16 * (piece ^ (token / 4 % 2));
    }
    template <class Format = Bf16>
    HEADRACE_DEVICE void store(const TokenSums& sums) const {
        if constexpr (turns) {
            const int own = lane_here();
            const std::uint32_t first = place(own / 16 * 8 + own % 8, own / 8 % 2);
            each_matrix<Format>(sums, [&](int tile, const std::uint32_t(&pairs)[4]) {
                ptx::store_matrix_transposed(first + token_bytes * 8 * tile, pairs);
            });
        } else {
            store_lines<Format>(sums);
        }
    }
    // As lines of values.
    template <class Format = Bf16>
    HEADRACE_DEVICE void store_lines(const TokenSums& sums, int own = lane_here()) const {
        if constexpr (ptx::stores_matrices) {
            const std::uint32_t first = matrix.piece(row(own % 16), own / 16 * 8);
            return each_matrix<Format>(sums, [&](int tile, const std::uint32_t(&pairs)[4]) {
                ptx::store_matrix(first ^ static_cast<std::uint32_t>(16 * tile), pairs);
            });
        }
        const LanePlace at(own);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint32_t first = matrix.piece(row(at.row + 8 * half), at.column);  // a matrix begins with a row
#pragma unroll
            for (int tile = 0; tile < token_tiles; ++tile)
                ptx::store(first ^ static_cast<std::uint32_t>(16 * tile),
                           Format::round(sums[tile][2 * half], sums[tile][2 * half + 1]));
        }
    }
    // Lines of values in global memory, so many elements apart.
    template <int step>
    HEADRACE_DEVICE void save_lines(std::uint16_t* to, int own = lane_here()) const {
        const int first = own / 8, column = own % 8 * 8;
        const auto place = static_cast<std::uint32_t>(Matrix<64>::place(first, column));
        to += first * step + column;
#pragma unroll
        for (int value = 0; value < 16; value += 4) {
            // Of row(first + value), first below four, from that of row(first).
            const std::uint32_t piece = value % 8 * 8, half = value / 8 * (2 * Matrix<64>::row + 2 * 8);
            *reinterpret_cast<uint4*>(to + value * step) =
                *reinterpret_cast<const uint4*>(matrix.data + ((place ^ piece ^ half) + value * Matrix<64>::row));
        }
    }
    // Of one token, the two values that this lane's quad has.
    template <class Format>
    HEADRACE_DEVICE void store_token(int i, float first, float second) const {
        const int own = lane_here(), half = own % 4;
        if (half >= 2) return;
        const auto rounded = static_cast<std::uint16_t>(Format::round(half == 0 ? first : second, 0));
        if constexpr (turns) {
            const std::uint32_t at = token_bytes * i + 16 * (half ^ (i / 4 % 2));
            matrix.data[at / 2 + own / 4] = rounded;
        } else {
            matrix.at(row(own / 4 + 8 * half), i) = rounded;
        }
    }
    // Values [4 t, 4 t + 4), t = lane % 4, of tokens 16 step + g and 16 step + 8 + g, g = lane / 4: registers 0 and 1,
    // 2 and 3.
    HEADRACE_DEVICE void load(std::uint32_t (&values)[4], int step, int own) const {  // of the lane
        const int of_matrix = own % 8, which = own / 8;
        const int value = of_matrix / 2 * 4 + which % 2 * 2 + of_matrix % 2;
        ptx::load_matrix_transposed(values, matrix.piece(row(value), 16 * step + which / 2 * 8));
    }

  private:
    // f(tile, pairs) for each four matrices of eight values and tokens, from a tile of tokens on: of the first eight
    // values and the others, then the same of the next tile. Lane 8 m + n has the address of row n of matrix m.
    template <class Format, class F>
    HEADRACE_DEVICE static void each_matrix(const TokenSums& sums, F f) {
#pragma unroll
        for (int tile = 0; tile < token_tiles; tile += 2) {
            std::uint32_t pairs[4];
#pragma unroll
            for (int which = 0; which < 4; ++which) {
                const float(&of)[4] = sums[tile + which / 2];
                pairs[which] = Format::round(of[which % 2 * 2], of[which % 2 * 2 + 1]);
            }
            f(tile, pairs);
        }
    }
};

// sums = scale (q e^G) S + P d of a chunk (algorithms/chunk.hpp), for a warp's 16 values; with the betas in P, d is r.
// `has_factors`: else rows of q have them.
template <int K, class Format, bool has_factors = true>
struct ChunkOutputs {
    Matrix<K> q;
    const float* read;   // [C] factors of its rows
    SplitMatrix P;       // low of f16
    bool exact;          // whether some of its rows need 16 bits (Prepared::exact)
    const std::uint16_t* scores_low;  // LowerImage, read where `exact` says that it is there
    Warps by;                         // that compute outputs of this block

    // First q S: state(step) gives left operands, of which upper halves do as nothing follows from an output's own
    // roundings, of rows that were multiplied by `factors`.
    template <class State>
    HEADRACE_DEVICE void read_state(TokenSums& sums, State state, const typename Format::RowFactors& factors) const {
        TokenFactors of_rows;
        read_of<Left::high, K, Format>(sums, state, q, factors, [&] {
            if constexpr (has_factors) of_rows = TokenFactors::load(read);
        });
        if constexpr (has_factors) scale_tokens(sums, of_rows);
    }
    // Then P d, of left operands d(step).
    template <class D>
    HEADRACE_DEVICE void add_scores(TokenSums& sums, D d) const {
        if constexpr (Format::splits_scores && Format::by_group) {
            add_lower_transposed<Left::both, Format>(sums, d, P.low);
            add_lower_transposed<Left::both, Format>(sums, d, P.high);
        } else if constexpr (Format::splits_scores) {
            add_lower_transposed<Format>(sums, d, P);
        } else {
            add_lower_transposed<Left::both, Format>(sums, d, P.high);
            if (!exact) return;
            replace_lower(P.high, scores_low, by);
            add_lower_transposed<Left::both, Format>(sums, d, P.high);
        }
    }
};

// Of a block that walks with 64 values.
inline constexpr int walking_threads = block_warps * warp_lanes;

// What a block walks to: the outputs of 64 values, which others compute where these fetch; of 128 values, by two groups
// of warps that compute their own while a third fetches; or states of segments.
enum class WalkTo { outputs, outputs_of_two, states };

// The warps that walk, of which each has 16 values.
template <WalkTo walks_to>
struct WalkingWarps {
    static constexpr bool of_two = walks_to == WalkTo::outputs_of_two;
    static constexpr int walking_warps = of_two ? 2 * block_warps : block_warps;

    // Of its group's.
    HEADRACE_DEVICE static int first_value() { return 16 * (warp() % block_warps); }
    // Where two groups walk to outputs, so much of each before this warp's; their values' matrices are neighbours.
    HEADRACE_DEVICE static int before_group(int of_each) {
        return of_two && warp_here() >= block_warps ? of_each : 0;
    }
    HEADRACE_DEVICE static Matrix<64> own_values(Matrix<64> of_block) {
        return {of_block.data + before_group(tensor_chunk * 64)};
    }
};

// What a warp with 16 values leaves, as its lanes hold it, to one that computes its outputs: left operands of the state
// that enters a chunk, their upper halves, and d in fp32, where the solver was. Both pass the barriers below, one for
// each, so that the other reads the state while this one solves.
template <int K, class Format>
struct LeftOperands {
    using RowFactors = typename Format::RowFactors;
    static constexpr int of_step = warp_lanes,  // pieces of 16 bytes
        of_state = of_step * (K / 16), of_values = of_step * token_tiles;

    uint4* state;
    float4* values;
    float2* factors;  // [8] of f16: what the state's rows are multiplied by at last, those of each four lanes

    static __host__ __device__ LeftOperands take(Arena& arena, int warps) {
        const auto count = static_cast<std::size_t>(warps);
        LeftOperands all{arena.take<uint4>(of_state * count), nullptr, nullptr};
        if (Format::splits_scores) all.factors = arena.take<float2>(warp_lanes / 4 * count);
        return all;
    }
    // Of the pair of warps with that number, of all; `solver`: high and low, one behind the other.
    HEADRACE_DEVICE LeftOperands of_pair(int pair, SplitMatrix solver) const {
        const int own = lane_here();
        return {state + pair * of_state + own, reinterpret_cast<float4*>(solver.high.data) + pair * of_values + own,
                Format::splits_scores ? factors + (pair * warp_lanes + own) / 4 : nullptr};
    }

    HEADRACE_DEVICE void leave_state(int step, const SplitA& a) const {
        state[step * of_step] = {a.high[0], a.high[1], a.high[2], a.high[3]};
    }
    HEADRACE_DEVICE SplitA left_state(int step) const {
        const uint4 of = state[step * of_step];
        return {{of.x, of.y, of.z, of.w}, {}};
    }
    HEADRACE_DEVICE void leave_values(const TokenSums& d) const {
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            values[tile * of_step] = {d[tile][0], d[tile][1], d[tile][2], d[tile][3]};
    }
    HEADRACE_DEVICE SplitA left_values(int step) const {
        float tiles[2][4];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const float4 of = values[(2 * step + odd) * of_step];
            tiles[odd][0] = of.x, tiles[odd][1] = of.y, tiles[odd][2] = of.z, tiles[odd][3] = of.w;
        }
        return left_operand(tiles, 0);
    }
    HEADRACE_DEVICE void leave_factors(const RowFactors& of) const {
        if constexpr (Format::splits_scores) {
            if (lane_here() % 4 == 0) *factors = {of.inverse[0], of.inverse[1]};
        }
    }
    HEADRACE_DEVICE RowFactors left_factors() const {
        RowFactors of{};
        if constexpr (Format::splits_scores) of.inverse[0] = factors->x, of.inverse[1] = factors->y;
        return of;
    }

    // The values' memory, once they are taken over.
    HEADRACE_DEVICE static OutputPatch patch_of_pair(int pair, SplitMatrix solver) {
        return {{solver.high.data + pair * of_values * 8}};
    }
};

// Between the threads that walk: all have read the solver. Between them and as many others: the state's operands, and
// those of d, are there; where the others may be a chunk behind, those have read the former and will read the latter.
inline constexpr int solved_barrier = 4, left_state_barrier = 5, left_values_barrier = 6, taken_barrier = 1;

// The outputs of the warp that walks as the `pair`-th, by another: from what it leaves of a chunk, of which `solver`
// was. `gives_back`: it waits for that before it leaves more.
template <int K, class Format, bool has_factors>
HEADRACE_DEVICE OutputPatch left_outputs(const ChunkOutputs<K, Format, has_factors>& outputs,
                                         const LeftOperands<K, Format>& left, int pair, SplitMatrix solver,
                                         bool gives_back) {
    const LeftOperands<K, Format> from = left.of_pair(pair, solver);
    TokenSums sums;
    ptx::meet_threads(left_state_barrier, 2 * walking_threads);
    outputs.read_state(
        sums, [&](int step) { return from.left_state(step); }, from.left_factors());
    ptx::meet_threads(left_values_barrier, 2 * walking_threads);
    if (gives_back) ptx::arrive_threads(taken_barrier, 2 * walking_threads);
    outputs.add_scores(sums, [&](int step) { return from.left_values(step); });
    const OutputPatch of_values = left.patch_of_pair(pair, solver);
    ptx::sync_warp();
    of_values.template store<Format>(sums);
    return of_values;
}

}  // namespace headrace::cuda
