// StateColumns: a few columns of a state in the registers of one warp, and the primitives of the page of one token on
// them.
#pragma once

#include "algorithms/recurrent.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// How the recurrent form lays K rows over a warp: pieces of rows of 16 bytes, two of which fill a sector of memory; one
// where registers would not do.
struct StateShape {
    int rows, columns, column_lanes;
    constexpr int warp_columns() const { return columns * column_lanes; }
    constexpr int row_lanes() const { return warp_lanes / column_lanes; }
};
template <class T>
constexpr StateShape state_shape(std::int64_t K) {
    constexpr int columns = 16 / sizeof(T), most_in_pairs = sizeof(T) == 8 ? 64 : 128;
    if (K <= most_in_pairs) return {K <= 64 ? 4 : 8, columns, 2};
    return {K <= 128 ? 4 : 8, columns, 1};
}

// A lane has `rows` rows from row() on, of `columns` columns from column() on: `column_lanes` lanes side by side share
// rows, the others share columns. Sums over all rows leave a lane that of one of its columns, own_column(); this is the
// one that the page sees. Row vectors of keys are the lane's rows of them, those of values point to its own column's.
template <class T, int key_channels>
struct StateColumns {
    using Tile = cuda::Tile<T>;
    static constexpr StateShape shape = state_shape<T>(key_channels);
    static constexpr int rows = shape.rows, columns = shape.columns, column_lanes = shape.column_lanes,
                         warp_columns = shape.warp_columns();

    T state[rows][columns];
    bool value_decays;  // of other than 1

    HEADRACE_DEVICE static int row() { return lane() / column_lanes * rows; }
    HEADRACE_DEVICE static int column() { return lane() % column_lanes * columns; }
    HEADRACE_DEVICE static int own_column() {
        int j = column();
#pragma unroll
        for (int width = columns / 2, bit = column_lanes; width > 0; width /= 2, bit *= 2)
            j += (lane() & bit) != 0 ? width : 0;
        return j;
    }
    // The lane among the first warp_columns that has column j of this lane's columns.
    HEADRACE_DEVICE static int owner(int j) {
        int at = lane() % column_lanes;
#pragma unroll
        for (int width = columns / 2, bit = column_lanes; width > 0; width /= 2, bit *= 2)
            at += (j & width) != 0 ? bit : 0;
        return at;
    }

    // Over the lanes that share a column.
    HEADRACE_DEVICE static T sum_over_rows(T value) {
#pragma unroll
        for (int bit = column_lanes; bit < warp_lanes; bit *= 2) value += ptx::shuffle_xor(value, bit);
        return value;
    }
    // The same of all its columns at once, of which each lane keeps its own: half of the sums at each step.
    HEADRACE_DEVICE static T own_sum(T (&sums)[columns]) {
        int bit = column_lanes;
#pragma unroll
        for (int width = columns / 2; width > 0; width /= 2, bit *= 2) {
            const bool upper = (lane() & bit) != 0;
#pragma unroll
            for (int j = 0; j < width; ++j) {
                const T leaves = upper ? sums[j] : sums[j + width], stays = upper ? sums[j + width] : sums[j];
                sums[j] = stays + ptx::shuffle_xor(leaves, bit);
            }
        }
        T sum = sums[0];
#pragma unroll
        for (; bit < warp_lanes; bit *= 2) sum += ptx::shuffle_xor(sum, bit);
        return sum;
    }

    struct Columns {
        StateColumns& ops;

        HEADRACE_DEVICE T values(const T* own) const { return *own; }
        HEADRACE_DEVICE void store_values(T* own, T value) const { *own = value; }
        // S^T a and S^T b
        struct Two {
            T a, b;
        };
        HEADRACE_DEVICE Two read_two(const T* a, const T* b) const {
            T of_a[columns] = {}, of_b[columns] = {};
#pragma unroll
            for (int i = 0; i < rows; ++i) {
#pragma unroll
                for (int j = 0; j < columns; ++j) {
                    of_a[j] = fma(ops.state[i][j], a[i], of_a[j]);
                    of_b[j] = fma(ops.state[i][j], b[i], of_b[j]);
                }
            }
            return {own_sum(of_a), own_sum(of_b)};
        }
        // S <- decayed S + k d^T
        HEADRACE_DEVICE void write(const algorithms::Token<T>& token, T own_d) const {
            T d[columns];
#pragma unroll
            for (int j = 0; j < columns; ++j) d[j] = ptx::shuffle_from(own_d, owner(j));
            if (ops.value_decays) {
#pragma unroll
                for (int j = 0; j < columns; ++j) {
                    const T whole_value = ptx::shuffle_from(*token.value_whole, owner(j)),
                            part_value = ptx::shuffle_from(*token.value_part, owner(j));
#pragma unroll
                    for (int i = 0; i < rows; ++i) {
                        const T whole = token.decay_whole[i], part = token.decay_part[i],
                                both = fma(part, part_value, fma(whole, part_value, part * whole_value));
                        T& S = ops.state[i][j];
                        S = fma(S, whole * whole_value, fma(S, both, token.k[i] * d[j]));
                    }
                }
                return;
            }
#pragma unroll
            for (int i = 0; i < rows; ++i) {
#pragma unroll
                for (int j = 0; j < columns; ++j) {
                    T& S = ops.state[i][j];
                    S = fma(S, token.decay_whole[i], fma(S, token.decay_part[i], token.k[i] * d[j]));
                }
            }
        }
        HEADRACE_DEVICE T read_and_write(const T* q, const algorithms::Token<T>& token, T d) const {
            T sums[columns] = {};
#pragma unroll
            for (int i = 0; i < rows; ++i) {
#pragma unroll
                for (int j = 0; j < columns; ++j) sums[j] = fma(ops.state[i][j], q[i], sums[j]);
            }
            const T sum = own_sum(sums);
            write(token, d);
            return sum;
        }
    };

    HEADRACE_DEVICE void multiply_keys(T* dst, const T* a, const T* b) const {
#pragma unroll
        for (int i = 0; i < rows; ++i) dst[i] = a[i] * b[i];
    }
    template <class Body>
    HEADRACE_DEVICE void for_columns(Tile, Tile, const Body& body) {
        body(Columns{*this});
    }
};

}  // namespace headrace::cuda
