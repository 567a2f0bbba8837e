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

// sums += a m^T, m [64,64] lower triangular: token i takes of tokens up to i. Blocks above the diagonal are not read: so
// products of a step have fewer columns than those of the step before, and sums of their own.
struct LowerSums {
    float second[6][4], third[4][4], fourth[2][4];
};
// sums += part, from tile `first` on
template <int first, int tiles>
HEADRACE_DEVICE void add_tiles(Sums& sums, const float (&part)[tiles][4]) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; ++place) sums[first + tile][place] += part[tile][place];
    }
}
template <class Meanwhile = Nothing>
HEADRACE_DEVICE void end_lower(Sums& sums, LowerSums& others, Meanwhile meanwhile = {}) {
    ptx::end_products();
    meanwhile();
    ptx::wait_for_products<0>(sums), ptx::wait_for_products<0>(others.second);
    ptx::wait_for_products<0>(others.third), ptx::wait_for_products<0>(others.fourth);
}
template <Left left>
HEADRACE_DEVICE void multiply_lower_transposed(Sums& sums, LowerSums& others, const SplitA (&a)[4], Matrix<64> m,
                                               bool add, bool add_others) {
    const GroupOperandAt<64> from(m);
    multiply<left, false, Bf16>(sums, a[0], from.at(0, 0), add);
    multiply<left, false, Bf16>(others.second, a[1], from.at(16, 16), add_others);
    multiply<left, false, Bf16>(others.third, a[2], from.at(32, 32), add_others);
    multiply<left, false, Bf16>(others.fourth, a[3], from.at(48, 48), add_others);
}
// sums += a m^T: of the steps behind the first one, tokens from 16, 32 and 48 on.
template <class Meanwhile = Nothing>
HEADRACE_DEVICE void end_lower_transposed(Sums& sums, LowerSums& others, Meanwhile meanwhile = {}) {
    end_lower(sums, others, meanwhile);
    add_tiles<2>(sums, others.second), add_tiles<4>(sums, others.third), add_tiles<6>(sums, others.fourth);
}
template <Left left, class Meanwhile = Nothing>
HEADRACE_DEVICE void add_lower_transposed(Sums& sums, const SplitA (&a)[4], Matrix<64> m, Meanwhile meanwhile = {}) {
    LowerSums others;
    ptx::begin_products(sums);
    multiply_lower_transposed<left>(sums, others, a, m, true, false);
    end_lower_transposed(sums, others, meanwhile);
}
// `left`: of the operands of the high one.
template <Left left, class Meanwhile = Nothing>
HEADRACE_DEVICE void add_lower_transposed(Sums& sums, const SplitA (&a)[4], Matrix<64> high, Matrix<64> low,
                                          Meanwhile meanwhile = {}) {
    LowerSums others;
    ptx::begin_products(sums);
    multiply_lower_transposed<Left::high>(sums, others, a, low, true, false);
    multiply_lower_transposed<left>(sums, others, a, high, true, true);
    end_lower_transposed(sums, others, meanwhile);
}
// sums += a m: token j takes of tokens from j on; of the steps before the last one, tokens up to 48, 32 and 16.
template <Left left>
HEADRACE_DEVICE void multiply_lower(Sums& sums, LowerSums& others, const SplitA (&a)[4], Matrix<64> m, bool add,
                                    bool add_others) {
    const GroupOperandAt<64> from(m);
    multiply<left, true, Bf16>(sums, a[3], from.at(48, 0), add);
    multiply<left, true, Bf16>(others.second, a[2], from.at(32, 0), add_others);
    multiply<left, true, Bf16>(others.third, a[1], from.at(16, 0), add_others);
    multiply<left, true, Bf16>(others.fourth, a[0], from.at(0, 0), add_others);
}
// Without `add` = a m.
template <Left left>
HEADRACE_DEVICE void add_lower(Sums& sums, const SplitA (&a)[4], Matrix<64> m, bool add) {
    LowerSums others;
    ptx::begin_products(sums);
    multiply_lower<left>(sums, others, a, m, add, false);
    end_lower(sums, others);
    add_tiles<0>(sums, others.second), add_tiles<0>(sums, others.third), add_tiles<0>(sums, others.fourth);
}
// `left`: of the operands of the high one.
template <Left left>
HEADRACE_DEVICE void add_lower(Sums& sums, const SplitA (&a)[4], Matrix<64> high, Matrix<64> low, bool add) {
    LowerSums others;
    ptx::begin_products();
    multiply_lower<Left::high>(sums, others, a, low, add, false);
    multiply_lower<left>(sums, others, a, high, true, true);
    end_lower(sums, others);
    add_tiles<0>(sums, others.second), add_tiles<0>(sums, others.third), add_tiles<0>(sums, others.fourth);
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
