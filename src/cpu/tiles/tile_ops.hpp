// tile_ops: the primitives of the algorithm pages on a CPU: tiles in memory, products on registers, solves.
#pragma once

#include "cpu/tiles/matmul.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

constexpr int round_up(long value, int multiple) { return static_cast<int>((value + multiple - 1) / multiple * multiple); }

// A matrix in scratch memory: element (i, j) at data[i * row + j]. Sizes are multiples of 16, padded with zeros.
template <class T>
struct Tile {
    T* data = nullptr;
    long row = 0;
    T* at(int i) const { return data + i * row; }
    // The part that begins at element (i, j).
    Tile from(int i, int j) const { return {at(i) + j, row}; }
    explicit operator bool() const { return data != nullptr; }
    bool operator==(const Tile&) const = default;
};

// Hands out aligned pieces of a thread's scratch memory; without memory it measures.
struct Arena {
    char* base = nullptr;
    std::size_t used = 0;

    template <class T>
    T* take(std::size_t count) {
        T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
        used += (count * sizeof(T) + 127) / 128 * 128;
        return piece;
    }
    // Rows 16 elements longer than the matrix: rows a power of two apart would share few cache sets.
    template <class T>
    Tile<T> tile(int rows, int columns) {
        const long row = round_up(columns, 16) + 16;
        return {take<T>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(row)), row};
    }
};

// ---- element by element: dst first; columns a multiple of 16 ----

template <class T, class F>
HEADRACE_INLINE void for_each(Tile<T> dst, int rows, int columns, F value) {
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; j += lanes<T>) store<T>(dst.at(i) + j, value(i, j));
    }
}

template <class T>
void fill(Tile<T> dst, T value, int rows, int columns) {
    for_each(dst, rows, columns, [&](int, int) { return broadcast<T>(value); });
}

template <class T>
void copy(Tile<T> dst, Tile<T> a, int rows, int columns) {
    for_each(dst, rows, columns, [&](int i, int j) { return load<T>(a.at(i) + j); });
}

// dst += a
template <class T>
void add(Tile<T> dst, Tile<T> a, int rows, int columns) {
    for_each(dst, rows, columns, [&](int i, int j) { return load<T>(dst.at(i) + j) + load<T>(a.at(i) + j); });
}

// dst = factor * factors[i] * a
template <class T>
void scale_rows(Tile<T> dst, Tile<T> a, const T* factors, T factor, int rows, int columns) {
    for_each(dst, rows, columns, [&](int i, int j) { return load<T>(a.at(i) + j) * broadcast<T>(factor * factors[i]); });
}

// dst = factor * a * b
template <class T>
void multiply(Tile<T> dst, Tile<T> a, Tile<T> b, T factor, int rows, int columns) {
    for_each(dst, rows, columns, [&](int i, int j) { return load<T>(a.at(i) + j) * load<T>(b.at(i) + j) * factor; });
}

// dst[i,j] = a[i,j] factors[j]
template <class T>
void scale_columns(Tile<T> dst, Tile<T> a, const T* factors, int rows, int columns) {
    for_each(dst, rows, columns, [&](int i, int j) { return load<T>(a.at(i) + j) * load<T>(factors + j); });
}

// sum_j a[i,j] b[i,j]
template <class T>
T row_dot(Tile<T> a, Tile<T> b, int i, int columns) {
    reg<T> total = {};
    for (int j = 0; j < columns; j += lanes<T>) total = fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), total);
    return sum<T>(total);
}

// dst[i] = the sum of row i, of whose elements from j on add(sums, i, j) returns the sums; rows a multiple of 16
template <class T, class Add>
HEADRACE_INLINE void row_sums(T* dst, int rows, int columns, const Add& add) {
    constexpr int n = lanes<T>;
    for (int i = 0; i < rows; i += n) {
        reg<T> sums[n];
        for (int lane = 0; lane < n; ++lane) sums[lane] = add(reg<T>{}, i + lane, 0);
        for (int j = n; j < columns; j += n) {
            for (int lane = 0; lane < n; ++lane) sums[lane] = add(sums[lane], i + lane, j);
        }
        store<T>(dst + i, sum_each<T>(sums));
    }
}

// dst[i] = sum_j a[i,j] b[i,j]; rows a multiple of 16
template <class T>
void row_dots(T* dst, Tile<T> a, Tile<T> b, int rows, int columns) {
    row_sums(dst, rows, columns, [&](reg<T> sum, int i, int j) { return fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), sum); });
}

template <class T>
T sum_of(const T* values, int count) {
    reg<T> total = {};
    for (int i = 0; i < count; i += lanes<T>) total += load<T>(values + i);
    return sum<T>(total);
}

// The largest magnitude in a; 0 if all is NaN.
template <class T>
T largest(Tile<T> a, int rows, int columns) {
    reg<T> most = {};
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; j += lanes<T>) {
            const reg<T> x = load<T>(a.at(i) + j), magnitude = x < reg<T>{} ? -x : x;
            most = magnitude > most ? magnitude : most;
        }
    }
    T result = 0;
    for (int lane = 0; lane < lanes<T>; ++lane) result = most[lane] > result ? most[lane] : result;
    return result;
}

// The power of two in (x / 2, x], kept within 2^-100 and 2^100.
template <class T>
T power_of_two_below(T x) {
    int exponent = 0;
    if (!(x < T(1e30))) return T(0x1p100);
    __builtin_frexp(static_cast<double>(x), &exponent);
    if (exponent < -99) return T(0x1p-100);
    return static_cast<T>(__builtin_ldexp(1.0, exponent - 1));
}

// dst[j,i] = value(i,j); dst has rows of `dst_row` elements; both sizes multiples of 16
template <class T, class Value>
void transpose_into(T* dst, long dst_row, const Value& value, int rows, int columns) {
    constexpr int n = lanes<T>;
    for (int i = 0; i < rows; i += n) {
        for (int j = 0; j < columns; j += n) {
            reg<T> block[n];
            for (int r = 0; r < n; ++r) block[r] = value(i + r, j);
            transpose<T>(block);
            for (int r = 0; r < n; ++r) store<T>(dst + (j + r) * dst_row + i, block[r]);
        }
    }
}

template <class T>
void transpose_into(T* dst, long dst_row, const T* a, long a_row, int rows, int columns) {
    transpose_into<T>(dst, dst_row, [&](int i, int j) { return load<T>(a + i * a_row + j); }, rows, columns);
}

// A register of doubles from elements of T.
template <class T>
HEADRACE_INLINE reg<double> widen(const T* source) {
    if constexpr (requires { widen_floats(source); }) return widen_floats(source);
    typedef T Narrow __attribute__((vector_size(lanes<double> * sizeof(T)), may_alias));
    Narrow part;
    std::memcpy(&part, source, sizeof part);
    return __builtin_convertvector(part, reg<double>);
}

// The doubles, rounded to T.
template <class T>
HEADRACE_INLINE void store_narrow(T* destination, reg<double> value) {
    typedef T Narrow __attribute__((vector_size(lanes<double> * sizeof(T)), may_alias));
    const Narrow part = __builtin_convertvector(value, Narrow);
    std::memcpy(destination, &part, sizeof part);
}

// A decay x as one number, and as whole + part with whole 0 or 1: y whole + y part + z rounds the digits of y only in
// its last sum, even without fused multiply-adds. Rounded alone, a constant x near 1 would be off in the same direction
// at every token.
template <class T>
HEADRACE_INLINE void store_decay(T* all, T* whole, T* part, reg<double> x) {
    const reg<double> one = broadcast<double>(1), w = x >= broadcast<double>(0.5) ? one : reg<double>{};
    store_narrow<T>(all, x);
    store_narrow<T>(whole, w);
    store_narrow<T>(part, x - w);
}

// ---- rows of q, k and e ----

// Row i stands for rows[i,:] * norm[i]; norm null: 1. Scalar gates leave the l2norm to the sums.
template <class T>
struct KeyRows {
    Tile<T> rows;
    const T* norm;
};

// Decayed rows: rows[i,j] * factor[i], or scale * rows[i,j] * weights[i,j].
template <class T>
struct DecayedRows {
    Tile<T> rows;
    const T* factor;  // [rows] or null
    Tile<T> weights;  // [rows, columns] or empty
    T scale;
};

// What the scores of a chunk are made of.
template <class T>
struct ScoreRows {
    KeyRows<T> q, k, e;
    T scale;
    bool undecayed_error;
};

// ---- triangular solves ----

// inverse (16 x 16, unit lower) of I - n; n strictly lower.
template <class T>
void invert_unit_lower_16(Tile<T> inverse, Tile<T> n) {
    constexpr int parts = 16 / lanes<T>;
    reg<T> x[16][parts];
    const reg<T> one = broadcast<T>(1);
    unroll<16, parts>([&](auto i, auto p) __attribute__((always_inline)) {
        x[i][p] = keep_below<T>(one, p * lanes<T>, i + 1) - keep_below<T>(one, p * lanes<T>, i);
    });
    unroll<16, 16>([&](auto j, auto i) __attribute__((always_inline)) {
        if constexpr (i > j) {
            const reg<T> factor = broadcast<T>(n.at(i)[j]);
            for (int p = 0; p < parts; ++p) x[i][p] = fma(factor, x[j][p], x[i][p]);
        }
    });
    unroll<16, parts>([&](auto i, auto p) __attribute__((always_inline)) { store<T>(inverse.at(i) + p * lanes<T>, x[i][p]); });
}

enum class Side { lower, transposed };

// x <- (I - n)^-1 x, or with the transposed matrix; n [rows, rows] strictly lower, x [rows, columns].
// 16 x 16 diagonal blocks are inverted, the rest is substitution by blocks. The product with an inverse replaces its
// rows in the order in which no later one needs them.
template <class A>
void solve_unit_lower(Tile<typename A::real> x, Tile<typename A::real> n, Tile<typename A::real> inverse, int rows,
                      int columns, Side side) {
    using T = typename A::real;
    const int blocks = rows / 16;
    for (int step = 0; step < blocks; ++step) {
        const int b = side == Side::lower ? step : blocks - 1 - step;
        const Tile<T> x_b{x.at(16 * b), x.row}, n_bb{n.at(16 * b) + 16 * b, n.row};
        invert_unit_lower_16<T>(inverse, n_bb);
        if (side == Side::lower) {
            if (b > 0) {
                matmul<A>(x_b.data, x_b.row, {n.at(16 * b), n.row, 1}, {x.data, x.row}, 16, columns, 16 * b, Part::full,
                          {Start<T>::add});
            }
            for (int i = 16 - row_block; i >= 0; i -= row_block) {
                matmul<A>(x_b.at(i), x_b.row, {inverse.at(i), inverse.row, 1}, {x_b.data, x_b.row}, row_block, columns,
                          i + row_block);
            }
        } else {
            const int below = 16 * (b + 1);
            if (below < rows) {
                matmul<A>(x_b.data, x_b.row, {n.at(below) + 16 * b, 1, n.row}, {x.at(below), x.row}, 16, columns,
                          rows - below, Part::full, {Start<T>::add});
            }
            matmul<A>(x_b.data, x_b.row, {inverse.data, 1, inverse.row}, {x_b.data, x_b.row}, 16, columns, 16, Part::a_upper);
        }
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
