// gradient_products: products with tokens or channels as rows, 16 for each warp, into accumulators: of groups of four
// warps, which go on by themselves, where there are such products (group_products.hpp), else of each warp.
#pragma once

#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// Functions `load(a, step)` give this lane's part of 16 columns of a left operand, from 16 step on.
template <bool by_group>
struct GradientProducts {
    // Whether products with `add` at run time take no more instructions.
    static constexpr bool may_begin = by_group;

    // sums = a m, or with `add` sums + a m: 64 deep, of the columns of m from `first` on. They are there when waited
    // for.
    template <int tiles, int columns, class Load>
    HEADRACE_DEVICE static void multiply(float (&sums)[tiles][4], Load load, Matrix<columns> m, int first, bool add) {
        multiply_steps<4, true>(sums, load, m, first, add);
    }
    // sums = a m^T, or with `add` sums + a m^T, K deep.
    template <int tiles, int K, class Load>
    HEADRACE_DEVICE static void multiply_transposed(float (&sums)[tiles][4], Load load, Matrix<K> m, bool add = false) {
        multiply_steps<K / 16, false>(sums, load, m, 0, add);
    }
    // For all products but those that ended last, `pending` times.
    template <int pending, int... tiles>
    HEADRACE_DEVICE static void wait(float (&... sums)[tiles][4]) {
        if constexpr (by_group) (ptx::wait_for_products<pending>(sums), ...);
    }

  private:
    // `down`: of the rows of m, of columns from `first` on; else of its columns, of all rows.
    template <int steps, bool down, int tiles, int columns, class Load>
    HEADRACE_DEVICE static void multiply_steps(float (&sums)[tiles][4], Load load, Matrix<columns> m, int first,
                                               bool add) {
        if constexpr (by_group) {
            std::uint32_t a[steps][4];
#pragma unroll
            for (int step = 0; step < steps; ++step) load(a[step], step);
            const group_products::GroupOperandAt<columns> from(m);
            ptx::begin_products(sums);
#pragma unroll
            for (int step = 0; step < steps; ++step)
                ptx::multiply_group_bf16<down>(sums, a[step], down ? from.at(16 * step, first) : from.at(0, 16 * step),
                                               add || step > 0);
            ptx::end_products();
        } else {
            if (!add) clear(sums);
            const int own = lane_here();
            const OperandAt<columns> from{down ? OperandAt<columns>::down(m, own).at(0, first)
                                               : OperandAt<columns>::across(m, own).first};
            HEADRACE_ROLLED
            for (int step = 0; step < steps; ++step) {
                std::uint32_t a[4], b[4];
                load(a, step);
#pragma unroll
                for (int tile = 0; tile < tiles; tile += 2) {
                    if constexpr (down) {
                        ptx::load_matrix_transposed(b, from.at(16 * step, 8 * tile));
                    } else {
                        ptx::load_matrix(b, from.at(8 * tile, 16 * step));
                    }
                    ptx::multiply_bf16(sums[tile], a, {b[0], b[1]});
                    ptx::multiply_bf16(sums[tile + 1], a, {b[2], b[3]});
                }
            }
        }
    }
};

}  // namespace headrace::cuda
