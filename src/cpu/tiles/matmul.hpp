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

// Which part of the product is needed or non-zero. a_lower: a[i,k] = 0 for k > i. a_upper: a[i,k] = 0 for k < i.
// dst_lower: only dst[i,j] with j <= i is read afterwards.
enum class Part { full, a_lower, a_upper, dst_lower };

// The units [begin, end) of a contraction that a block of rows from `row` on takes part in.
struct Units {
    int begin, end;
};
template <class A>
Units units_of_rows(Part part, int row, int units) {
    const int limit = (row + row_block + A::pack - 1) / A::pack;
    return {part == Part::a_upper ? row / A::pack : 0, part == Part::a_lower && limit < units ? limit : units};
}

// Nothing, or a product of as many rows and columns, that the same sums take in; its arithmetic may be another one's.
struct Alone {
    Alone from_row(int) const { return {}; }
    Alone from_column(int) const { return {}; }
};
template <class B>
struct Joined {
    Left<B> a{};
    Right<B> b{};
    int units = 0;
    Part part = Part::full;  // or a_lower, a_upper
    Joined from_row(int row) const {
        const auto [begin, end] = units_of_rows<B>(part, row, units);
        return {{a.data + row * a.row + begin * a.step, a.row, a.step}, {b.data + begin * b.row, b.row}, end - begin, part};
    }
    Joined from_column(int column) const { return {a, {b.data + column, b.row}, units, part}; }
};

// Where the result is also left in bf16, as operands of later products; not where null. Only for A::pack == 2.
template <class A>
struct Copies {
    typename A::unit* right = nullptr;  // pairs of rows, right_row apart
    long right_row = 0;
    typename A::unit* left = nullptr;   // pairs of columns in rows left_row apart
    long left_row = 0;
    Copies from(int row, int column) const {
        return {right == nullptr ? nullptr : right + row / A::pack * right_row + column, right_row,
                left == nullptr ? nullptr : left + row * left_row + column / A::pack, left_row};
    }
};

// What the sums are added to.
template <class T>
struct Start {
    enum Kind { zero, add, decayed } kind = zero;  // 0; source; source * (whole + part) row by row, added last
    const T* decay = nullptr;                       // [M] the same as one number: what bf16, which rounds more, multiplies by
    const T* whole = nullptr;                       // [M]
    const T* part = nullptr;                        // [M]
    const T* factor = nullptr;                      // [M] multiplies the sums of each row, or null
    const T* source = nullptr;                      // [M,N], rows source_row apart; null: dst
    long source_row = 0;
};

template <class A, int rows, int columns, class Other = Alone>
HEADRACE_INLINE void matmul_block(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int k_begin, int k_end,
                                  const Start<typename A::real>& start, int first_row, const Other& other = {},
                                  const Copies<A>& copies = {}) {
    using T = typename A::real;
    constexpr int n = lanes<T>;
    const T* source = start.source != nullptr ? start.source + first_row * start.source_row : dst;
    const long source_row = start.source != nullptr ? start.source_row : dst_row;
    reg<T> sums[rows][columns];
    const auto each = [](const auto& body) __attribute__((always_inline)) { unroll<rows, columns>(body); };
    const auto source_at = [&](int i, int j) __attribute__((always_inline)) { return load<T>(source + i * source_row + j * n); };
    // sums[i][j] = made(i, j, what it begins with)
    const auto begin_with = [&](const auto& made) __attribute__((always_inline)) {
        if (start.kind == Start<T>::add) {
            each([&](auto i, auto j) __attribute__((always_inline)) { sums[i][j] = made(i, j, source_at(i, j)); });
        } else {
            each([&](auto i, auto j) __attribute__((always_inline)) { sums[i][j] = made(i, j, reg<T>{}); });
        }
    };
    const auto add = [&]<class B>(const Left<B>& left, const Right<B>& right, int begin, int end) __attribute__((always_inline)) {
        for (int k = begin; k < end; ++k) {
            const typename B::unit* b_row = right.data + k * right.row;
            const typename B::unit* a_column = left.data + k * left.step;
            each([&](auto i, auto j) __attribute__((always_inline)) {
                sums[i][j] = B::multiply_add(sums[i][j], a_column + i * left.row, b_row + j * n);
            });
        }
    };
    if (start.factor == nullptr) {
        begin_with([](auto, auto, reg<T> before) __attribute__((always_inline)) { return before; });
        add(a, b, k_begin, k_end);
    } else {
        each([&](auto i, auto j) __attribute__((always_inline)) { sums[i][j] = reg<T>{}; });
        add(a, b, k_begin, k_end);
        begin_with([&](auto i, auto j, reg<T> before) __attribute__((always_inline)) {
            return fma(sums[i][j], broadcast<T>(start.factor[first_row + i]), before);
        });
    }
    if constexpr (!std::is_same_v<Other, Alone>) add(other.a, other.b, 0, other.units);
    if (start.kind == Start<T>::decayed) {
        // Last, so that the sum rounds once: a decay by less than half a unit in the last place, rounded alone, would
        // be lost every time.
        each([&](auto i, auto j) __attribute__((always_inline)) {
            const reg<T> before = source_at(i, j);
            if constexpr (A::pack == 2) {
                sums[i][j] = fma(before, broadcast<T>(start.decay[first_row + i]), sums[i][j]);
            } else {
                sums[i][j] = fma(before, broadcast<T>(start.part[first_row + i]), sums[i][j]);
                sums[i][j] = fma(before, broadcast<T>(start.whole[first_row + i]), sums[i][j]);
            }
        });
    }
    each([&](auto i, auto j) __attribute__((always_inline)) { store<T>(dst + i * dst_row + j * n, sums[i][j]); });
    if constexpr (A::pack == 2) {
        if (copies.right != nullptr) {
            unroll<rows / 2, columns>([&](auto i, auto j) __attribute__((always_inline)) {
                store_pairs(copies.right + i * copies.right_row + j * n, sums[2 * i][j], sums[2 * i + 1][j]);
            });
        }
        if (copies.left != nullptr) {
            each([&](auto i, auto j) __attribute__((always_inline)) {
                store_pairs_of(copies.left + i * copies.left_row + j * n / 2, sums[i][j]);
            });
        }
    }
}

template <class A, int columns, class Work, class Other>
void matmul_columns(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int M, int K, Part part,
                    const Start<typename A::real>& start, const Work& beside, const Other& other, const Copies<A>& copies) {
    constexpr int rows = row_block;
    for (int i = 0; i < M; i += rows) {
        const auto [begin, end] = units_of_rows<A>(part, i, K);
        matmul_block<A, rows, columns>(dst + i * dst_row, dst_row, {a.data + i * a.row, a.row, a.step}, b, begin, end, start, i,
                                       other.from_row(i), copies.from(i, 0));
        beside();
    }
}

// The blocks that touch the lower triangle; those above it become zero. Single columns take twice the rows, which keeps
// as many sums in flight.
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

// M a multiple of row_block (dst_lower: of 16), N of the vector length, K in tile elements, a multiple of A::pack.
// `beside` is called after each block.
template <class A, class Work = NoWork, class Other = Alone>
void matmul(typename A::real* dst, long dst_row, Left<A> a, Right<A> b, int M, int N, int K, Part part = Part::full,
            Start<typename A::real> start = {}, const Work& beside = {}, const Other& other = {}, const Copies<A>& copies = {}) {
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
                                        other.from_column(j), copies.from(0, j));
    }
    for (; j < N; j += n) {
        matmul_columns<A, 1>(dst + j, dst_row, a, {b.data + j, b.row}, M, units, part, starting_at(j), beside,
                                  other.from_column(j), copies.from(0, j));
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
