// lower_products: products of a warp's accumulators with lower triangular matrices of a chunk's tokens in shared memory.
#pragma once

#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// sums += a m^T, m [64,64] lower triangular: token i takes of tokens up to i. meanwhile() as of read_of.
template <Left left, class Format = Bf16, class A, class Meanwhile = group_products::Nothing>
HEADRACE_DEVICE void add_lower_transposed(TokenSums& sums, A a, Matrix<64> m, Meanwhile meanwhile = {}) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_lower<left, true>(sums, of, m, nullptr, true, meanwhile);
    } else {
        const auto from = OperandAt<64>::across(m);
#pragma unroll
        for (int step = 0; step < token_steps; ++step)
            multiply_tiles<left>(sums, a(step), 2 * step, token_tiles,
                                 [&](auto& b, int i) { ptx::load_matrix(b, from.at(i, 16 * step)); });
        meanwhile();
    }
}
// sums += a m, or without `add` = a m: token j takes of tokens from j on.
template <Left left, class Format = Bf16, class A>
HEADRACE_DEVICE void add_lower(TokenSums& sums, A a, Matrix<64> m, bool add = true) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_lower<left, false>(sums, of, m, nullptr, add);
    } else {
        if (!add) clear(sums);
        const auto from = OperandAt<64>::down(m);
#pragma unroll
        for (int step = 0; step < token_steps; ++step)
            multiply_tiles<left>(sums, a(step), 0, 2 * step + 2,
                                 [&](auto& b, int j) { ptx::load_matrix_transposed(b, from.at(16 * step, j)); });
    }
}
// The same of operands and matrices of 16 bits.
template <class Format = Bf16, Left left_of_high = Left::both, class A, class Meanwhile = group_products::Nothing>
HEADRACE_DEVICE void add_lower_transposed(TokenSums& sums, A a, SplitMatrix m, Meanwhile meanwhile = {}) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_lower<left_of_high, true>(sums, of, m.high, &m.low, true, meanwhile);
    } else {
        const auto high = OperandAt<64>::across(m.high), low = OperandAt<64>::across(m.low);
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA left = a(step);
            multiply_tiles<Left::high>(sums, left, 2 * step, token_tiles,
                                       [&](auto& b, int i) { ptx::load_matrix(b, low.at(i, 16 * step)); });
            multiply_tiles<left_of_high>(sums, left, 2 * step, token_tiles,
                                         [&](auto& b, int i) { ptx::load_matrix(b, high.at(i, 16 * step)); });
        }
        meanwhile();
    }
}
template <Left left_of_high = Left::both, class Format = Bf16, class A>
HEADRACE_DEVICE void add_lower(TokenSums& sums, A a, SplitMatrix m, bool add = true) {
    if constexpr (Format::by_group) {
        SplitA of[token_steps];
        each_step(of, a);
        group_products::add_lower<left_of_high, false>(sums, of, m.high, &m.low, add);
    } else {
        if (!add) clear(sums);
        const auto high = OperandAt<64>::down(m.high), low = OperandAt<64>::down(m.low);
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA left = a(step);
            multiply_tiles<Left::high>(sums, left, 0, 2 * step + 2,
                                       [&](auto& b, int j) { ptx::load_matrix_transposed(b, low.at(16 * step, j)); });
            multiply_tiles<left_of_high>(sums, left, 0, 2 * step + 2,
                                       [&](auto& b, int j) { ptx::load_matrix_transposed(b, high.at(16 * step, j)); });
        }
    }
}

}  // namespace headrace::cuda
