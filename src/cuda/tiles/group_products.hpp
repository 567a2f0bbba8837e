// group_products: the products of warp_products by a warpgroup (ptx.hpp), whose four warps, the block's first or
// second four, own 16 values each. They come to each of these functions together, and right operands begin at
// multiples of 1024 bytes.
#pragma once

#include "cuda/ptx.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda::group_products {

// [16 values, 64 tokens or channels] in accumulators.
using Sums = float[8][4];

// Of a matrix the right operand at (row, column): one addition from that at (0, 0).
template <int columns>
struct GroupOperandAt {
    std::uint32_t first;

    HEADRACE_DEVICE explicit GroupOperandAt(Matrix<columns> m)
        : first(ptx::group_operand_place(ptx::shared_address(m.data))) {}
    HEADRACE_DEVICE std::uint64_t at(int row, int column) const {
        using M = Matrix<columns>;
        return ptx::group_operand(first + 2 * (row * M::row + column % M::row + column / M::row * M::half) / 16);
    }
};

// sums = a b, or with `add` sums + a b, of the halves of a that `left` names, low ones first.
template <Left left, bool transposed, class Format, int tiles>
HEADRACE_DEVICE void multiply(float (&sums)[tiles][4], const SplitA& a, std::uint64_t b, bool add) {
    if constexpr (left != Left::high) Format::template multiply_group<transposed>(sums, a.low, b, add);
    if constexpr (left != Left::low)
        Format::template multiply_group<transposed>(sums, a.high, b, add || left == Left::both);
}

// What there is to do while products go on, of those that find nothing.
struct Nothing {
    HEADRACE_DEVICE void operator()() const {}
};

// sums = S^T rows^T, rows [64,K]; state[step] are left operands.
template <Left left, class Format, int K, class Meanwhile = Nothing>
HEADRACE_DEVICE void read(Sums& sums, const SplitA (&state)[K / 16], Matrix<K> rows, Meanwhile meanwhile = {}) {
    const GroupOperandAt<K> from(rows);
    ptx::begin_products();
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
        multiply<left, false, Format>(sums, state[step], from.at(0, 16 * step), step > 0);
    ptx::end_products();
    meanwhile();
    ptx::wait_for_products<0>(sums);
}

// The same of two matrices' rows at once, of upper halves.
template <class Format, int K, class Meanwhile>
HEADRACE_DEVICE void read_two(Sums& sums, Sums& others, const SplitA (&state)[K / 16], Matrix<K> rows,
                              Matrix<K> other_rows, Meanwhile meanwhile) {
    const GroupOperandAt<K> from(rows), of_others(other_rows);
    ptx::begin_products();
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
        multiply<Left::high, false, Format>(sums, state[step], from.at(0, 16 * step), step > 0);
    ptx::end_products();
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
        multiply<Left::high, false, Format>(others, state[step], of_others.at(0, 16 * step), step > 0);
    ptx::end_products();
    meanwhile();
    ptx::wait_for_products<0>(sums);
    ptx::wait_for_products<0>(others);
}

// The same of more channels than there are registers for operands of: 64 at a time, which state(step) gives.
template <Left left, class Format, int K, class State, class Meanwhile = Nothing>
HEADRACE_DEVICE void read_in_parts(Sums& sums, State state, Matrix<K> rows, Meanwhile meanwhile = {}) {
    const GroupOperandAt<K> from(rows);
#pragma unroll
    for (int first = 0; first < K / 16; first += 4) {
        SplitA of[4];
#pragma unroll
        for (int step = 0; step < 4; ++step) of[step] = state(first + step);
        ptx::begin_products(sums);
#pragma unroll
        for (int step = 0; step < 4; ++step)
            multiply<left, false, Format>(sums, of[step], from.at(0, 16 * (first + step)), first + step > 0);
        ptx::end_products();
        if (first + 4 == K / 16) meanwhile();
        ptx::wait_for_products<0>(sums);
    }
}

// Of lower triangular matrices m [64,64], whose blocks of 16 x 16 above the diagonal are zeros: what products take of
// them costs less than sums of their own that leave them out, which then are to be added up.

// sums + a m^T: token i takes of tokens up to i.
template <Left left>
HEADRACE_DEVICE void multiply_lower_transposed(Sums& sums, const SplitA (&a)[4], Matrix<64> m) {
    const GroupOperandAt<64> from(m);
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply<left, false, Bf16>(sums, a[step], from.at(0, 16 * step), true);
}
// sums = a m, or with `add` sums + a m: token j takes of tokens from j on.
template <Left left>
HEADRACE_DEVICE void multiply_lower(Sums& sums, const SplitA (&a)[4], Matrix<64> m, bool add) {
    const GroupOperandAt<64> from(m);
#pragma unroll
    for (int step = 0; step < 4; ++step)
        multiply<left, true, Bf16>(sums, a[step], from.at(16 * step, 0), add || step > 0);
}
// sums += a m^T, or without `transposed` a m, without `add` = a m. Of operands of 16 bits and a high and a low matrix
// `left` names those of the high one.
template <Left left, bool transposed, class Meanwhile = Nothing>
HEADRACE_DEVICE void add_lower(Sums& sums, const SplitA (&a)[4], const Matrix<64>& high, const Matrix<64>* low,
                               bool add, Meanwhile meanwhile = {}) {
    ptx::begin_products(sums);
    if constexpr (transposed) {
        if (low != nullptr) multiply_lower_transposed<Left::high>(sums, a, *low);
        multiply_lower_transposed<left>(sums, a, high);
    } else {
        if (low != nullptr) multiply_lower<Left::high>(sums, a, *low, add);
        multiply_lower<left>(sums, a, high, add || low != nullptr);
    }
    ptx::end_products();
    meanwhile();
    ptx::wait_for_products<0>(sums);
}

// sums = a rows, or with `add` sums + a rows, 64 channels at a time, rows [64 tokens, 64 * parts].
template <Left left, class Format, int parts>
HEADRACE_DEVICE void add_written(float (&sums)[parts][8][4], const SplitA (&a)[4], Matrix<64 * parts> rows, bool add) {
    const GroupOperandAt<64 * parts> from(rows);
    ptx::begin_products();
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
            multiply<left, true, Format>(sums[part], a[step], from.at(16 * step, 64 * part), add || step > 0);
    }
    ptx::end_products();
#pragma unroll
    for (int part = 0; part < parts; ++part) ptx::wait_for_products<0>(sums[part]);
}

// The same of 64 channels from 64 group on, rows [64,K].
template <Left left, class Format, int K>
HEADRACE_DEVICE void add_group_written(float (&sums)[8][4], const SplitA (&a)[4], Matrix<K> rows, int group, bool add) {
    const GroupOperandAt<K> from(rows);
    ptx::begin_products(sums);
#pragma unroll
    for (int step = 0; step < 4; ++step)
        multiply<left, true, Format>(sums, a[step], from.at(16 * step, 64 * group), add || step > 0);
    ptx::end_products();
    ptx::wait_for_products<0>(sums);
}

// add(sums, first) for each 8 of the K / 8 tiles of a rows from `first` on, rows [64,K]: the next ones' products go on
// meanwhile where there are registers for two, and while meanwhile() does something.
template <Left left, class Format, int K, class Add, class Meanwhile = Nothing>
HEADRACE_DEVICE void each_written(const SplitA (&a)[4], Matrix<K> rows, Add add, Meanwhile meanwhile = {}) {
    constexpr int parts = K / 64, together = parts == 2 ? 2 : 1;
    const GroupOperandAt<K> from(rows);
    Sums sums[together];
    const auto begin = [&](int part) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
            multiply<left, true, Format>(sums[part % together], a[step], from.at(16 * step, 64 * part), step > 0);
        ptx::end_products();
    };
    ptx::begin_products();
#pragma unroll
    for (int part = 0; part < together; ++part) begin(part);
    meanwhile();
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        Sums& of_part = sums[part % together];
        together == 2 && part + 1 < parts ? ptx::wait_for_products<1>(of_part) : ptx::wait_for_products<0>(of_part);
        add(of_part, 8 * part);
        if (part + together < parts) ptx::begin_products(), begin(part + together);
    }
}

}  // namespace headrace::cuda::group_products
