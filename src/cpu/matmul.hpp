// matmul: dst[M,N] (+)= a[M,K] b[K,N] on register tiles; the one loop nest behind every product of the chunk form.
#pragma once

#include <type_traits>

#include "cpu/simd/vec.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Arithmetic of a kernel: the type of tiles, and the unit that one lane multiplies at once.
struct F32 {
    using real = float;
    using unit = float;
    static constexpr int pack = 1;  // tile elements per unit along the contraction
    HEADRACE_INLINE reg<float> multiply_add(reg<float> sum, const float* a, const float* b) {
        return fma(broadcast<float>(*a), load<float>(b), sum);
    }
};
struct F64 {
    using real = double;
    using unit = double;
    static constexpr int pack = 1;
    HEADRACE_INLINE reg<double> multiply_add(reg<double> sum, const double* a, const double* b) {
        return fma(broadcast<double>(*a), load<double>(b), sum);
    }
};
#ifdef HEADRACE_HAS_BF16_DOT
struct Bf16 {  // tiles stay fp32, operands are rounded to pairs of bf16, sums are fp32
    using real = float;
    using unit = std::uint32_t;
    static constexpr int pack = 2;
    HEADRACE_INLINE reg<float> multiply_add(reg<float> sum, const unit* a, const unit* b) { return dot_pairs(sum, *a, b); }
};
#endif

// a[i,k] at data[i * row + k * step], b[k,j] at data[k * row + j]; k counts units.
template <class A>
struct Left {
    const typename A::unit* data;
    long row, step;
};
template <class A>
struct Right {
    const typename A::unit* data;
    long row;
};

// Nothing, or a product of as many rows and columns, that the same sums take in.
template <class A>
struct Alone {
    Alone from(int, int) const { return {}; }
};
template <class A>
struct Joined {
    Left<A> a{};
    Right<A> b{};
    int units = 0;
    Joined from(int row, int column) const { return {{a.data + row * a.row, a.row, a.step}, {b.data + column, b.row}, units}; }
};

// Which part of the product is needed or non-zero. a_lower: a[i,k] = 0 for k > i. a_upper: a[i,k] = 0 for k < i.
// dst_lower: only dst[i,j] with j <= i is read afterwards.
enum class Part { full, a_lower, a_upper, dst_lower };

// What the sums are added to.
template <class T>
struct Start {
    enum Kind { zero, add, decayed } kind = zero;  // 0; source; source * (high + low) row by row
    const T* high = nullptr;                        // [M]
    const T* low = nullptr;                         // [M] what rounding left of the factor
    const T* factor = nullptr;                      // [M] multiplies the sums of each row, or null
    const T* source = nullptr;                      // [M,N], rows source_row apart; null: dst
    long source_row = 0;
};

template <class A, int rows, int columns, class Other = Alone<A>>
HEADRACE_INLINE void matmul_block(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int k_begin, int k_end,
                                  const Start<typename A::real>& start, int first_row, const Other& other = {}) {
    using T = typename A::real;
    constexpr int n = lanes<T>;
    const T* source = start.source != nullptr ? start.source + first_row * start.source_row : dst;
    const long source_row = start.source != nullptr ? start.source_row : dst_row;
    const auto before = [&](int i, int j) __attribute__((always_inline)) {
        if (start.kind == Start<T>::zero) return reg<T>{};
        const reg<T> whole = load<T>(source + i * source_row + j * n);
        if (start.kind == Start<T>::add) return whole;
        const reg<T> decayed = whole * broadcast<T>(start.high[first_row + i]);
        return A::pack == 2 ? decayed : fma(whole, broadcast<T>(start.low[first_row + i]), decayed);  // bf16 rounds more
    };
    reg<T> sums[rows][columns];
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) sums[i][j] = start.factor != nullptr ? reg<T>{} : before(i, j);
    }
    const auto add = [&](const Left<A>& left, const Right<A>& right, int begin, int end) __attribute__((always_inline)) {
        for (int k = begin; k < end; ++k) {
            const typename A::unit* b_row = right.data + k * right.row;
            const typename A::unit* a_column = left.data + k * left.step;
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < columns; ++j) {
                    sums[i][j] = A::multiply_add(sums[i][j], a_column + i * left.row, b_row + j * n);
                }
            }
        }
    };
    add(a, b, k_begin, k_end);
    if constexpr (std::is_same_v<Other, Joined<A>>) add(other.a, other.b, 0, other.units);
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
            if (start.factor != nullptr) sums[i][j] = fma(sums[i][j], broadcast<T>(start.factor[first_row + i]), before(i, j));
            store<T>(dst + i * dst_row + j * n, sums[i][j]);
        }
    }
}

template <class A, int columns, class Work, class Other>
void matmul_columns(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int M, int K, Part part,
                    const Start<typename A::real>& start, const Work& beside, const Other& other) {
    constexpr int rows = row_block;
    for (int i = 0; i < M; i += rows) {
        const int limit = (i + rows + A::pack - 1) / A::pack;
        const int k_begin = part == Part::a_upper ? i / A::pack : 0;
        const int k_end = part == Part::a_lower && limit < K ? limit : K;
        matmul_block<A, rows, columns>(dst + i * dst_row, dst_row, {a.data + i * a.row, a.row, a.step}, b, k_begin, k_end,
                                       start, i, other.from(i, 0));
        beside();
    }
}

// The blocks that touch the lower triangle; those above it become zero. Single columns take twice the rows, which keeps as
// many sums in flight.
template <class A>
void matmul_lower(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int M, int N, int units) {
    constexpr int n = lanes<typename A::real>, rows = row_block, tall = 2 * row_block;
    for (int i = 0; i < M; i += tall) {
        const auto at = [&](int row) { return Left<A>{a.data + row * a.row, a.row, a.step}; };
        int j = 0;
        for (; j + column_block * n <= i + tall; j += column_block * n) {
            for (int row = i; row < i + tall; row += rows) {
                matmul_block<A, rows, column_block>(dst + row * dst_row + j, dst_row, at(row), {b.data + j, b.row}, 0, units, {}, row);
            }
        }
        for (; j < N; j += n) {
            matmul_block<A, tall, 1>(dst + i * dst_row + j, dst_row, at(i), {b.data + j, b.row}, 0, j < i + tall ? units : 0, {}, i);
        }
    }
}

struct NoWork {
    void operator()() const {}
};

// M a multiple of row_block (dst_lower: of 16), N of the vector length, K in tile elements, a multiple of A::pack. `beside` is called after
// each block.
template <class A, class Work = NoWork, class Other = Alone<A>>
void matmul(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int M, int N, int K, Part part = Part::full,
            Start<typename A::real> start = {}, const Work& beside = {}, const Other& other = {}) {
    constexpr int n = lanes<typename A::real>;
    const int units = K / A::pack;
    const auto starting_at = [&](int column) {
        Start<typename A::real> shifted = start;
        if (start.source != nullptr) shifted.source += column;
        return shifted;
    };
    if (part == Part::dst_lower) return matmul_lower<A>(dst, dst_row, a, b, M, N, units);
    int j = 0;
    for (; j + column_block * n <= N; j += column_block * n) {
        matmul_columns<A, column_block>(dst + j, dst_row, a, {b.data + j, b.row}, M, units, part, starting_at(j), beside,
                                        other.from(0, j));
    }
    for (; j < N; j += n) {
        matmul_columns<A, 1>(dst + j, dst_row, a, {b.data + j, b.row}, M, units, part, starting_at(j), beside,
                                  other.from(0, j));
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
