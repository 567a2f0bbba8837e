// warp_products: products of one warp that owns 16 values: what it computes has values as rows and tokens or channels
// as columns and stays in registers, what it multiplies by lies in shared memory. Accumulators become left operands
// where they are.
#pragma once

#include "cuda/tiles/group_products.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// [16 values, 64 tokens] in accumulators (LanePlace). The state, transposed, is [16 values, K channels]: K / 8 tiles.
inline constexpr int token_tiles = 8, token_steps = 4;  // of 8 tokens; of 16, the depth of a product
using TokenSums = float[token_tiles][4];
// Of more channels it takes 128 registers of each thread, which leaves none for what is there before it is needed, nor
// for sums of triangles that groups' products have of their own.
template <int K>
inline constexpr bool small_state = K <= 128;

// A right operand: the sum of two matrices.
struct SplitMatrix {
    Matrix<64> high, low;
};

template <int tiles>
HEADRACE_DEVICE void clear(float (&sums)[tiles][4]) {
#pragma unroll
    for (auto& tile : sums)
        for (float& sum : tile) sum = 0;
}

// Of factors [64] of the tokens, those of a lane's columns.
struct TokenFactors {
    float2 of_tile[token_tiles];

    static HEADRACE_DEVICE TokenFactors load(const float* factors) {
        const LanePlace at;
        TokenFactors all;
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            all.of_tile[tile] = *reinterpret_cast<const float2*>(factors + 8 * tile + at.column);
        return all;
    }
};
HEADRACE_DEVICE TokenFactors operator*(const TokenFactors& a, const TokenFactors& b) {
    TokenFactors all;
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile)
        all.of_tile[tile] = {a.of_tile[tile].x * b.of_tile[tile].x, a.of_tile[tile].y * b.of_tile[tile].y};
    return all;
}
// sums *= factors of their columns
HEADRACE_DEVICE void scale_tokens(TokenSums& sums, const TokenFactors& factors) {
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) {
        const float2 of = factors.of_tile[tile];
        sums[tile][0] *= of.x, sums[tile][1] *= of.y, sums[tile][2] *= of.x, sums[tile][3] *= of.y;
    }
}
HEADRACE_DEVICE void scale_tokens(TokenSums& sums, const float* factors) {
    scale_tokens(sums, TokenFactors::load(factors));
}

// ---- operands ----

// Where this lane reaches into operands of a matrix that begins at a multiple of its row: the one at (row, column),
// multiples of 16, one step away from that at (0, 0).
template <int columns>
struct OperandAt {
    std::uint32_t first;

    // Right operands, depth along rows of the matrix.
    static HEADRACE_DEVICE OperandAt down(Matrix<columns> m, int own = lane()) {
        return {m.piece(own % 16, own / 16 * 8)};
    }
    // Right operands, depth along its columns; left ones of the matrix transposed.
    static HEADRACE_DEVICE OperandAt across(Matrix<columns> m, int own = lane()) {
        return {m.piece(own % 8 + own / 16 * 8, own / 8 % 2 * 8)};
    }
    HEADRACE_DEVICE OperandAt from(int row) const { return {at(row, 0)}; }
    HEADRACE_DEVICE std::uint32_t at(int row, int column) const {
        return Matrix<columns>::moved(first, row, column);
    }
};

// Left operands of 16 columns from 16 step on.

template <class Format = Bf16, int tiles>
HEADRACE_DEVICE SplitA left_operand(const float (&sums)[tiles][4], int step,
                                    const typename Format::RowFactors& rows = {}) {
    SplitA a;
#pragma unroll
    for (int place = 0; place < 4; ++place) {
        const int half = place % 2;
        const float(&tile)[4] = sums[2 * step + place / 2];
        a.set<Format>(place, rows.scaled(tile[2 * half], half), rows.scaled(tile[2 * half + 1], half));
    }
    return a;
}
// The same of columns, which are tokens, times factors.
HEADRACE_DEVICE SplitA left_operand(const TokenSums& sums, int step, const TokenFactors& factors) {
    SplitA a;
#pragma unroll
    for (int place = 0; place < 4; ++place) {
        const int tile = 2 * step + place / 2, half = place % 2;
        a.set(place, sums[tile][2 * half] * factors.of_tile[tile].x,
              sums[tile][2 * half + 1] * factors.of_tile[tile].y);
    }
    return a;
}
// Of m^T, m [64 tokens, 64 values]: Left::high.
HEADRACE_DEVICE SplitA left_operand(Matrix<64> m, int first_value, int step) {
    SplitA a;
    ptx::load_matrix_transposed(a.high, OperandAt<64>::across(m).at(16 * step, first_value));
    return a;
}

// Of m^T, m [64 tokens, 64 values], the values from first_value on, as they came.
struct TransposedRows {
    std::uint32_t pairs[token_steps][4];

    static HEADRACE_DEVICE TransposedRows load(Matrix<64> m, int first_value) {
        TransposedRows rows;
        const auto from = OperandAt<64>::across(m);
#pragma unroll
        for (int step = 0; step < token_steps; ++step)
            ptx::load_matrix_transposed(rows.pairs[step], from.at(16 * step, first_value));
        return rows;
    }
    // A left operand of 16 columns from 16 step on: Left::high.
    HEADRACE_DEVICE SplitA operand(int step) const {
        SplitA a;
#pragma unroll
        for (int place = 0; place < 4; ++place) a.high[place] = pairs[step][place];
        return a;
    }
    // The same of f16 rows as bf16 high and low, which are exact.
    template <class Format>
    HEADRACE_DEVICE SplitA split_operand(int step) const {
        SplitA a;
#pragma unroll
        for (int place = 0; place < 4; ++place)
            a.set(place, Format::first(pairs[step][place]), Format::second(pairs[step][place]));
        return a;
    }
    // sums = m^T
    template <class Format = Bf16>
    HEADRACE_DEVICE void to_sums(TokenSums& sums) const {
        each<Format>(sums, [](float& sum, float x, int, int) { sum = x; });
    }
    // sums += m^T
    template <class Format = Bf16>
    HEADRACE_DEVICE void add_to(TokenSums& sums) const {
        each<Format>(sums, [](float& sum, float x, int, int) { sum += x; });
    }
    // sums = m^T + sums times factors of their columns
    template <class Format = Bf16>
    HEADRACE_DEVICE void add_to_scaled(TokenSums& sums, const TokenFactors& factors) const {
        each<Format>(sums, [&](float& sum, float x, int tile, int odd) {
            sum = fmaf(sum, odd == 0 ? factors.of_tile[tile].x : factors.of_tile[tile].y, x);
        });
    }

  private:
    // take(sum, x, tile of tokens, odd): x of the matrix, of the tile's columns of a lane the first or second
    template <class Format, class Take>
    HEADRACE_DEVICE void each(TokenSums& sums, Take take) const {
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const int tile = 2 * step + pair / 2, half = pair % 2 * 2;
                take(sums[tile][half], Format::first(pairs[step][pair]), tile, 0);
                take(sums[tile][half + 1], Format::second(pairs[step][pair]), tile, 1);
            }
        }
    }
};
template <class Format = Bf16>
HEADRACE_DEVICE void add_transposed(TokenSums& sums, Matrix<64> m, int first_value) {
    TransposedRows::load(m, first_value).template add_to<Format>(sums);
}

// ---- products ----

// Left operands of all steps.
template <int steps, class A>
HEADRACE_DEVICE void each_step(SplitA (&all)[steps], A a) {
#pragma unroll
    for (int step = 0; step < steps; ++step) all[step] = a(step);
}

// Tiles [first, end) of sums += a b, both even; b(registers, column) loads right operands of two tiles.
template <Left left, class Format = Bf16, int tiles, class B>
HEADRACE_DEVICE void multiply_tiles(float (&sums)[tiles][4], const SplitA& a, int first, int end, B load_right) {
    std::uint32_t b[tiles / 2][4];
#pragma unroll
    for (int pair = 0; pair < tiles / 2; ++pair)
        if (2 * pair >= first && 2 * pair < end) load_right(b[pair], 16 * pair);
#pragma unroll
    for (int half = left == Left::high ? 1 : 0; half < (left == Left::low ? 1 : 2); ++half) {
#pragma unroll
        for (int pair = 0; pair < tiles / 2; ++pair) {
            if (2 * pair < first || 2 * pair >= end) continue;
            Format::multiply(sums[2 * pair], half == 0 ? a.low : a.high, {b[pair][0], b[pair][1]});
            Format::multiply(sums[2 * pair + 1], half == 0 ? a.low : a.high, {b[pair][2], b[pair][3]});
        }
    }
}

// sums += S^T rows^T, rows [64,K]; state(step) gives left operands.
template <Left left, class Format = Bf16, int K, class State>
HEADRACE_DEVICE void add_read(TokenSums& sums, State state, Matrix<K> rows) {
    const auto from = OperandAt<K>::across(rows);
#pragma unroll
    for (int d = 0; d < K; d += 16)
        multiply_tiles<left, Format>(sums, state(d / 16), 0, token_tiles,
                                     [&](auto& b, int j) { ptx::load_matrix(b, from.at(j, d)); });
}
// sums = S^T rows^T, of a state whose rows were multiplied by `factors`; meanwhile() while products of groups go on, or
// behind others, in any case when all of state(step) has been asked for.
template <Left left, int K, class Format = Bf16, class State, class Meanwhile = group_products::Nothing>
HEADRACE_DEVICE void read_of(TokenSums& sums, State state, Matrix<K> rows, const typename Format::RowFactors& factors,
                             Meanwhile meanwhile = {}) {
    if constexpr (Format::by_group && !small_state<K>) {
        group_products::read_in_parts<left, Format>(sums, state, rows, meanwhile);
    } else if constexpr (Format::by_group) {
        SplitA a[K / 16];
        each_step(a, state);
        group_products::read<left, Format>(sums, a, rows, meanwhile);
    } else {
        clear(sums);
        add_read<left, Format>(sums, state, rows);
        meanwhile();
    }
    factors.take_back(sums);
}
// The same of the state in registers.
template <Left left, int K, class Format = Bf16>
HEADRACE_DEVICE void read(TokenSums& sums, const float (&state)[K / 8][4], Matrix<K> rows) {
    const auto factors = Format::RowFactors::of(state);
    read_of<left, K, Format>(
        sums, [&](int step) { return left_operand<Format>(state, step, factors); }, rows, factors);
}

// sums = a rows^T of 16 tokens with those of the first blocks of 16 up to `block`, rows [64,K]; a(step) gives left
// operands. What it says of later ones means nothing. meanwhile() as of read_of.
template <int K, class Format, class A, class Meanwhile>
HEADRACE_DEVICE void multiply_lower_rows(TokenSums& sums, A a, Matrix<K> rows, int block, Meanwhile meanwhile) {
    if constexpr (Format::by_group) {
        SplitA of[K / 16];
        each_step(of, a);
        group_products::read<Left::high, Format>(sums, of, rows, meanwhile);
    } else {
        clear(sums);
        const auto from = OperandAt<K>::across(rows);
#pragma unroll
        for (int d = 0; d < K; d += 16) {
            const SplitA left = a(d / 16);
#pragma unroll
            for (int other = 0; other < token_steps; ++other) {
                if (other > block) break;
                multiply_tiles<Left::high, Format>(sums, left, 2 * other, 2 * other + 2,
                                                   [&](auto& b, int j) { ptx::load_matrix(b, from.at(j, d)); });
            }
        }
        meanwhile();
    }
}

// S decay + sum. Tensor cores cut what they add to; the sum with the state rounds.
HEADRACE_DEVICE float decayed(float S, SplitDecay<float> decay, float sum) {
    return fmaf(S, decay.whole, fmaf(S, decay.part, sum));
}
HEADRACE_DEVICE float decayed(float S, float decay, float sum) { return fmaf(S, decay, sum); }
// S^T = decay S^T + sums, of 8 tiles from `first` on; decay(tile, odd) gives that of channel 8 tile +
// LanePlace::column, or of the one behind it: a SplitDecay, or a walk's carried one.
template <int tiles, class Decay>
HEADRACE_DEVICE void decay_and_add_tiles(float (&state)[tiles][4], const float (&sums)[8][4], int first, Decay decay) {
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            float& S = state[first + tile][place];
            S = decayed(S, decay(first + tile, place % 2), sums[tile][place]);
        }
    }
}
// sums += 8 tiles of a rows from `first` on, at a step of the depth; `from` of rows [64,K].
template <Left left, class Format = Bf16, int K>
HEADRACE_DEVICE void add_written(float (&sums)[8][4], const SplitA& a, const OperandAt<K>& from, int step, int first) {
    multiply_tiles<left, Format>(
        sums, a, 0, 8, [&](auto& b, int c) { ptx::load_matrix_transposed(b, from.at(16 * step, 8 * first + c)); });
}
// sums += a rows of all channels, 64 at a time, rows [64,K]; a(step) gives left operands, once for all channels.
// Without `add` sums = a rows.
template <Left left, class Format = Bf16, int groups, class A>
HEADRACE_DEVICE void add_all_written(float (&sums)[groups][8][4], A a, Matrix<64 * groups> rows, bool add = true) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_written<left, Format>(sums, of, rows, add);
    } else {
#pragma unroll
        for (auto& of_group : sums)
            if (!add) clear(of_group);
        const auto from = OperandAt<64 * groups>::down(rows);
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA of = a(step);
#pragma unroll
            for (int group = 0; group < groups; ++group)
                add_written<left, Format>(sums[group], of, from, step, 8 * group);
        }
    }
}
// The same of 64 channels from 64 group on.
template <Left left, class Format = Bf16, int K, class A>
HEADRACE_DEVICE void add_group_written(float (&sums)[8][4], A a, Matrix<K> rows, int group, bool add) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_group_written<left, Format>(sums, of, rows, group, add);
    } else {
        if (!add) clear(sums);
        const auto from = OperandAt<K>::down(rows);
#pragma unroll
        for (int step = 0; step < token_steps; ++step) add_written<left, Format>(sums, a(step), from, step, 8 * group);
    }
}
// S^T = decay S^T + a rows, rows [64,K]; a(step) gives left operands, of rows that were multiplied by `factors`.
// meanwhile() as of read_of.
template <Left left, int K, class Format = Bf16, class A, class Decay, class Meanwhile = group_products::Nothing>
HEADRACE_DEVICE void decay_and_add(float (&state)[K / 8][4], A a, Matrix<K> rows, Decay decay,
                                   const typename Format::RowFactors& factors = {}, Meanwhile meanwhile = {}) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        const auto add = [&](float(&sums)[8][4], int first) {
            factors.take_back(sums);
            decay_and_add_tiles(state, sums, first, decay);
        };
        group_products::each_written<left, Format>(of, rows, add, meanwhile);
    } else {
        const auto from = OperandAt<K>::down(rows);
#pragma unroll
        for (int first = 0; first < K / 8; first += 8) {  // tiles at once: sums that do not wait for each other
            float sums[8][4] = {};
#pragma unroll
            for (int step = 0; step < token_steps; ++step)
                add_written<left, Format>(sums, a(step), from, step, first);
            factors.take_back(sums);
            decay_and_add_tiles(state, sums, first, decay);
        }
        meanwhile();
    }
}

}  // namespace headrace::cuda
