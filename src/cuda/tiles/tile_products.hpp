// tile_products: products of tiles and solutions of triangular systems by a thread block, as tile_ops: in multiply-adds
// of fp32, or of doubles on tensor cores.
#pragma once

#include "cuda/tiles/tile_ops.hpp"

namespace headrace::cuda {

// Which terms d of sum_d a(i,d) b(d,j) are not zero: all, d <= i, or d >= i. Or all, of sums with j <= i; the others
// are not wanted.
enum class Part { full, a_lower, a_upper, lower_sums };

// leave(i, j, sum_d a(i, d) b(d, j)); what leave writes must be no operand. Sizes are multiples of 16. A warp has 4
// rows of 32 `parts` columns at once, a lane 4 x `parts` sums: few_columns for scores, wide for rows of keys and
// values. Doubles are multiplied on tensor cores: a warp has 8 rows, of `wide` ones 16, and 16 columns at once.
inline constexpr int few_columns = 1, wide = 4;

template <int row_tiles, class A, class B, class Leave>
HEADRACE_DEVICE void multiply_doubles(A a, B b, int rows, int columns, int depth, Part part, Leave leave) {
    const int own = lane_here(), g = own / 4, t = own % 4, across = columns / 16, height = 8 * row_tiles;
    HEADRACE_ROLLED
    for (int tile = warp_here(); tile < rows / height * across; tile += warps()) {
        const int i = tile / across * height, j = tile % across * 16;
        double sums[row_tiles][2][2] = {};
        const bool nothing = part == Part::lower_sums && j >= i + height;
        const int begin = part == Part::a_upper ? i / 16 * 16 : 0,
                  full = part == Part::a_lower ? i / 16 * 16 + 16 : depth, end = nothing ? 0 : full;
        HEADRACE_ROLLED
        for (int first = begin; first < end; first += 16) {
#pragma unroll
            for (int d = first; d < first + 16; d += 4) {
                double left[row_tiles], right[2];
#pragma unroll
                for (int r = 0; r < row_tiles; ++r) left[r] = a(i + 8 * r + g, d + t);
#pragma unroll
                for (int c = 0; c < 2; ++c) right[c] = b(d + t, j + 8 * c + g);
#pragma unroll
                for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) ptx::multiply_f64(sums[r][c], left[r], right[c]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
            for (int c = 0; c < 4; ++c) leave(i + 8 * r + g, j + 8 * (c / 2) + 2 * t + c % 2, sums[r][c / 2][c % 2]);
        }
    }
    ptx::sync_block();
}

template <int parts, class A, class B, class Leave>
HEADRACE_DEVICE void multiply_floats(A a, B b, int rows, int columns, int depth, Part part, Leave leave) {
    const int row_blocks = (rows + 4 * block_warps - 1) / (4 * block_warps);
    HEADRACE_ROLLED
    for (int step = 0; step < row_blocks; ++step) {
        const int i = 4 * (step * block_warps + warp());
        HEADRACE_ROLLED
        for (int first = 0; first < columns; first += warp_lanes * parts) {
            float sums[4][parts] = {};
            const int begin = part == Part::a_upper ? i : 0,
                      end = part == Part::a_lower && i + 4 < depth ? i + 4 : depth;
            HEADRACE_ROLLED
            for (int d = begin; d < end && i < rows; ++d) {
                float left[4];
                for (int r = 0; r < 4; ++r) left[r] = a(i + r, d);
                for (int p = 0; p < parts; ++p) {
                    const int j = first + p * warp_lanes + lane();
                    const float right = j < columns ? b(d, j) : 0.0f;
                    for (int r = 0; r < 4; ++r) sums[r][p] = fma(left[r], right, sums[r][p]);
                }
            }
            for (int p = 0; p < parts && i < rows; ++p) {
                const int j = first + p * warp_lanes + lane();
                for (int r = 0; r < 4 && j < columns; ++r) leave(i + r, j, sums[r][p]);
            }
        }
    }
    ptx::sync_block();
}

template <class T, int parts, class A, class B, class Leave>
HEADRACE_DEVICE void multiply(A a, B b, int rows, int columns, int depth, Part part, Leave leave) {
    if constexpr (sizeof(T) == 8) {
        multiply_doubles<(parts < wide ? 1 : 2)>(a, b, rows, columns, depth, part, leave);
    } else {
        multiply_floats<parts>(a, b, rows, columns, depth, part, leave);
    }
}

// x <- (I - n)^-1 x, or with the transposed matrix; n [rows, rows] strictly lower, x [rows, columns]; sizes are
// multiples of 16. A thread has a column; of doubles a warp has 8 columns, of which 8 rows at once take products of
// those that are solved, and are then solved among themselves, in registers.
enum class Side { lower, transposed };

template <Side side>
HEADRACE_DEVICE void solve_doubles(Tile<double> x, Tile<double> n, int rows, int columns) {
    constexpr bool lower = side == Side::lower;
    const int own = lane_here(), g = own / 4, t = own % 4;
    const auto of = [&](int i, int m) { return lower ? n.at(i, m) : n.at(m, i); };  // what x_i takes of x_m
    HEADRACE_ROLLED
    for (int j = 8 * warp_here(); j < columns; j += 8 * warps()) {
        HEADRACE_ROLLED
        for (int step = 0; step < rows / 8; ++step) {
            const int first = lower ? 8 * step : rows - 8 * (step + 1);
            double factors[8], sums[2] = {x.at(first + g, j + 2 * t), x.at(first + g, j + 2 * t + 1)};
#pragma unroll
            for (int m = 0; m < 8; ++m) factors[m] = of(first + g, first + m);
            const int begin = lower ? 0 : first + 8, end = lower ? first : rows;
            HEADRACE_ROLLED
            for (int d = begin; d < end; d += 8) {
                ptx::multiply_f64(sums, of(first + g, d + t), x.at(d + t, j + g));
                ptx::multiply_f64(sums, of(first + g, d + 4 + t), x.at(d + 4 + t, j + g));
            }
#pragma unroll
            for (int each = 0; each < 7; ++each) {
                const int m = lower ? each : 7 - each;
                const double even = ptx::shuffle_from(sums[0], 4 * m + t), odd = ptx::shuffle_from(sums[1], 4 * m + t);
                const bool takes = lower ? g > m : g < m;
                sums[0] = takes ? fma(factors[m], even, sums[0]) : sums[0];
                sums[1] = takes ? fma(factors[m], odd, sums[1]) : sums[1];
            }
            x.at(first + g, j + 2 * t) = sums[0];
            x.at(first + g, j + 2 * t + 1) = sums[1];
            ptx::sync_warp();
        }
    }
    ptx::sync_block();
}

template <Side side>
HEADRACE_DEVICE void solve_floats(Tile<float> x, Tile<float> n, int rows, int columns) {
    each(columns, [&](int j) {
        HEADRACE_ROLLED
        for (int step = 1; step < rows; ++step) {
            const int i = side == Side::lower ? step : rows - 1 - step;
            float value = x.at(i, j);
            if (side == Side::lower) {
                HEADRACE_ROLLED
                for (int m = 0; m < i; ++m) value = fma(n.at(i, m), x.at(m, j), value);
            } else {
                HEADRACE_ROLLED
                for (int m = i + 1; m < rows; ++m) value = fma(n.at(m, i), x.at(m, j), value);
            }
            x.at(i, j) = value;
        }
    });
    ptx::sync_block();
}

template <Side side, class T>
HEADRACE_DEVICE void solve_unit_lower(Tile<T> x, Tile<T> n, int rows, int columns) {
    if constexpr (sizeof(T) == 8) {
        solve_doubles<side>(x, n, rows, columns);
    } else {
        solve_floats<side>(x, n, rows, columns);
    }
}

}  // namespace headrace::cuda
