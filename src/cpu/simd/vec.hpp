// vec<T>: one register of the ISA that the file is compiled for, on compiler vectors: load, store, fma, shuffles, exp.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/types.hpp"
#include "cpu/isa/isa.hpp"

#ifdef HEADRACE_CHECK_EXP
// Sees every argument of every exponential: a test asserts that none is positive.
extern "C" void headrace_exp_argument(double argument);
#endif

namespace headrace::cpu::inline HEADRACE_ISA {

#define HEADRACE_VECTOR(T) __attribute__((vector_size(register_bytes), may_alias)) T
typedef HEADRACE_VECTOR(float) FloatRegister;
typedef HEADRACE_VECTOR(double) DoubleRegister;
typedef HEADRACE_VECTOR(std::int32_t) Int32Register;
typedef HEADRACE_VECTOR(std::int64_t) Int64Register;
#undef HEADRACE_VECTOR

template <class T>
struct vec;
template <>
struct vec<float> {
    using type = FloatRegister;
    using integer = Int32Register;
    using bits = std::int32_t;
    static constexpr int mantissa_bits = 23, exponent_bias = 127;
    static constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    static constexpr float log2e = 1.44269504088896341f, ln2_high = 0.693145751953125f, ln2_low = 1.42860677e-6f;
    static constexpr float smallest = -87.33654f;  // exp below it is subnormal
    static constexpr int exp_terms = 7, log_terms = 8;
};
template <>
struct vec<double> {
    using type = DoubleRegister;
    using integer = Int64Register;
    using bits = std::int64_t;
    static constexpr int mantissa_bits = 52, exponent_bias = 1023;
    static constexpr double rounder = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double log2e = 1.4426950408889634074, ln2_high = 0.693147180369123816490,
                            ln2_low = 1.90821492927058770002e-10;
    static constexpr double smallest = -708.39641853226408;
    static constexpr int exp_terms = 13, log_terms = 17;
};

template <class T>
using reg = typename vec<T>::type;

template <class T>
constexpr int lanes = register_bytes / static_cast<int>(sizeof(T));
constexpr int line_bytes = 64;  // of a cache

template <class T>
HEADRACE_INLINE reg<T> load(const T* source) {
    reg<T> value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

template <class T>
HEADRACE_INLINE void store(T* destination, reg<T> value) {
    std::memcpy(destination, &value, sizeof value);
}

template <class T>
HEADRACE_INLINE reg<T> broadcast(T value) {
    return value - reg<T>{};
}

// a * b + c, rounded once where the ISA has an instruction for it: left to the compiler, some sums would be rounded
// twice, depending on the code around them.
template <class R>
HEADRACE_INLINE R fma(R a, R b, R c) {
    if constexpr (requires { fused_multiply_add(a, b, c); }) {
        return fused_multiply_add(a, b, c);
    } else {
        return a * b + c;
    }
}

// body(i, j) for all i < rows, j < columns, both of them constants: only so does the compiler keep arrays of sums in
// registers around a loop. Lambdas that are passed say always_inline.
template <int rows, int columns, class Body>
HEADRACE_INLINE void unroll(const Body& body) {
    [&]<int... index>(std::integer_sequence<int, index...>) __attribute__((always_inline)) {
        (body(std::integral_constant<int, index / columns>{}, std::integral_constant<int, index % columns>{}), ...);
    }(std::make_integer_sequence<int, rows * columns>{});
}

// Lanes first, first + 1, ... that are below limit; the others become zero.
template <class T>
HEADRACE_INLINE reg<T> keep_below(reg<T> value, int first, int limit) {
    typename vec<T>::integer lane;
    for (int i = 0; i < lanes<T>; ++i) lane[i] = i;
    return lane < static_cast<typename vec<T>::bits>(limit - first) ? value : reg<T>{};
}

// Lane i of the result is lane index[i] of a and b laid end to end.
template <class R, int... Index>
HEADRACE_INLINE R pick(R a, R b, std::integer_sequence<int, Index...>) {
    return __builtin_shufflevector(a, b, Index...);
}

// Index lists of the shuffles below, for n lanes and blocks of `width` lanes.
template <int n, int width, int... I>
constexpr auto fold_index(std::integer_sequence<int, I...>) {
    return std::integer_sequence<int, (I ^ width)...>{};
}
template <int n, int width, int... I>
constexpr auto low_index(std::integer_sequence<int, I...>) {
    return std::integer_sequence<int, ((I & width) == 0 ? I : n + I - width)...>{};
}
template <int n, int width, int... I>
constexpr auto high_index(std::integer_sequence<int, I...>) {
    return std::integer_sequence<int, ((I & width) == 0 ? I + width : n + I)...>{};
}

template <class T, int width = lanes<T> / 2>
HEADRACE_INLINE T sum(reg<T> value) {
    if constexpr (width == 0) {
        return value[0];
    } else {
        constexpr int n = lanes<T>;
        using Index = decltype(fold_index<n, width>(std::make_integer_sequence<int, n>{}));
        return sum<T, width / 2>(value + pick(value, value, Index{}));
    }
}

// Whether any bit of a comparison's result is set.
template <class T, int width = lanes<T> / 2>
HEADRACE_INLINE bool any(typename vec<T>::integer value) {
    if constexpr (width == 0) {
        return value[0] != 0;
    } else {
        constexpr int n = lanes<T>;
        using Index = decltype(fold_index<n, width>(std::make_integer_sequence<int, n>{}));
        return any<T, width / 2>(value | pick(value, value, Index{}));
    }
}

// A lanes x lanes transpose in registers: exchanges the off-diagonal blocks of every width.
template <class T, int width = lanes<T> / 2>
HEADRACE_INLINE void transpose(reg<T>* rows) {
    if constexpr (width > 0) {
        constexpr int n = lanes<T>;
        using Low = decltype(low_index<n, width>(std::make_integer_sequence<int, n>{}));
        using High = decltype(high_index<n, width>(std::make_integer_sequence<int, n>{}));
        for (int i = 0; i < n; ++i) {
            if ((i & width) != 0) continue;
            const reg<T> a = rows[i], b = rows[i + width];
            rows[i] = pick(a, b, Low{});
            rows[i + width] = pick(a, b, High{});
        }
        transpose<T, width / 2>(rows);
    }
}

// Lane i of the result is the sum of all lanes of rows[i]. Destroys rows.
template <class T, int width = lanes<T> / 2>
HEADRACE_INLINE reg<T> sum_each(reg<T>* rows) {
    if constexpr (width == 0) {
        return rows[0];
    } else {
        constexpr int n = lanes<T>;
        using Low = decltype(low_index<n, width>(std::make_integer_sequence<int, n>{}));
        using High = decltype(high_index<n, width>(std::make_integer_sequence<int, n>{}));
        for (int i = 0; i < width; ++i) rows[i] = pick(rows[i], rows[i + width], Low{}) + pick(rows[i], rows[i + width], High{});
        return sum_each<T, width / 2>(rows);
    }
}

// e^x = scale (1 + r + r^2 / 2 ...), scale a power of two; for x <= 0 (-inf included) and for x up to the type's limit.
template <class T>
struct ReducedExp {
    reg<T> r, n, scale;
    typename vec<T>::integer underflow;  // below the normal range: 0

    HEADRACE_INLINE_MEMBER static ReducedExp of(reg<T> x) {
#ifdef HEADRACE_CHECK_EXP
        for (int i = 0; i < lanes<T>; ++i) headrace_exp_argument(static_cast<double>(x[i]));
#endif
        using V = vec<T>;
        using I = typename V::integer;
        ReducedExp result;
        const reg<T> floor = broadcast<T>(V::smallest);
        result.underflow = x < floor;
        const reg<T> clamped = result.underflow ? floor : x;
        const reg<T> shifted = fma(clamped, broadcast<T>(V::log2e), broadcast<T>(V::rounder));
        result.n = shifted - V::rounder;
        result.r = fma(result.n, broadcast<T>(-V::ln2_high), clamped);
        result.r = fma(result.n, broadcast<T>(-V::ln2_low), result.r);
        I integer;
        std::memcpy(&integer, &shifted, sizeof integer);
        const I scale_bits = (integer + V::exponent_bias) << V::mantissa_bits;  // the rounder's own bits fall off the left
        std::memcpy(&result.scale, &scale_bits, sizeof scale_bits);
        return result;
    }
    // sum of r^i / (i + first)! for all terms; |r| <= ln2 / 2 leaves less than half an ulp
    template <int first>
    HEADRACE_INLINE_MEMBER reg<T> series() const {
        T factorial = 1;
        T inverse[vec<T>::exp_terms + 1];
        for (int i = 0; i <= vec<T>::exp_terms; ++i) {
            if (i > 0) factorial *= static_cast<T>(i);
            inverse[i] = static_cast<T>(1) / factorial;
        }
        reg<T> sum = broadcast<T>(inverse[vec<T>::exp_terms]);
        for (int i = vec<T>::exp_terms - 1; i >= first; --i) sum = fma(sum, r, broadcast<T>(inverse[i]));
        return sum;
    }
};

template <class T>
HEADRACE_INLINE reg<T> exp(reg<T> x) {
    const ReducedExp<T> reduced = ReducedExp<T>::of(x);
    const reg<T> result = reduced.template series<0>() * reduced.scale;
    return reduced.underflow ? reg<T>{} : result;
}

// e^x as whole + part with whole 0 or 1: 1 + (e^x - 1) where x is near 0, 0 + e^x elsewhere. `part` is accurate in its
// own digits.
template <class T>
struct ExpParts {
    reg<T> whole, part;
};
template <class T>
HEADRACE_INLINE ExpParts<T> exp_parts(reg<T> x) {
    const ReducedExp<T> reduced = ReducedExp<T>::of(x);
    const reg<T> less_one = reduced.r * reduced.template series<1>(), one = broadcast<T>(1);
    const typename vec<T>::integer near = reduced.n == reg<T>{};
    const reg<T> far_part = reduced.underflow ? reg<T>{} : fma(less_one, reduced.scale, reduced.scale);
    return {near ? one : reg<T>{}, near ? less_one : far_part};
}

HEADRACE_INLINE double exp(double x) { return exp<double>(broadcast<double>(x))[0]; }

// 1 / (1 + e^-x); only exponentials of numbers <= 0.
template <class T>
HEADRACE_INLINE reg<T> sigmoid(reg<T> x) {
    const reg<T> e = exp<T>(x < reg<T>{} ? x : -x);
    const reg<T> one = broadcast<T>(1);
    return (x < reg<T>{} ? e : one) / (one + e);
}

// sigmoid(x) (1 - sigmoid(x)) = e / (1 + e)^2 with e = e^-|x|: nothing cancels.
template <class T>
HEADRACE_INLINE reg<T> sigmoid_slope(reg<T> x) {
    const reg<T> e = exp<T>(x < reg<T>{} ? x : -x), sum = e + broadcast<T>(1);
    return e / (sum * sum);
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), log1p(y) = 2 artanh(y / (2 + y)).
template <class T>
HEADRACE_INLINE reg<T> softplus(reg<T> x) {
    const reg<T> y = exp<T>(x < reg<T>{} ? x : -x);
    const reg<T> z = y / (y + broadcast<T>(2)), zz = z * z;
    reg<T> series = broadcast<T>(static_cast<T>(1) / (2 * vec<T>::log_terms + 1));
    for (int i = vec<T>::log_terms - 1; i >= 0; --i) {
        series = fma(series, zz, broadcast<T>(static_cast<T>(1) / static_cast<T>(2 * i + 1)));
    }
    return (x < reg<T>{} ? reg<T>{} : x) + 2 * z * series;
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
