// Conversions between double and the element types, by arithmetic on values instead of bit tricks: rounding to nearest
// even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "headrace/tensor.hpp"

namespace headrace::harness {

inline double bf16_to_double(std::uint16_t bits) {
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
}

inline double f16_to_double(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    double magnitude = 0;
    if (exponent == 31) {
        magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
        magnitude = std::ldexp(mantissa, -24);
    } else {
        const std::uint64_t wide =
            (static_cast<std::uint64_t>(exponent + 1008) << 52) | (static_cast<std::uint64_t>(mantissa) << 42);
        magnitude = std::bit_cast<double>(wide);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
}

// The bits of |value| rounded once to a 16-bit format with `mantissa_bits` explicit bits: exponents below `least`
// are subnormal; what rounds past the largest exponent becomes infinity. Value is not NaN.
inline std::uint16_t round_to_16_bits(double value, int mantissa_bits, int least) {
    const std::uint16_t infinity = static_cast<std::uint16_t>(0x7fff & ~((1 << mantissa_bits) - 1));
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const std::uint64_t magnitude = std::bit_cast<std::uint64_t>(value) & 0x7fffffffffffffffu;
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (exponent > 1 - least) return static_cast<std::uint16_t>(sign | infinity);
    const int dropped = 52 - mantissa_bits + (exponent < least ? least - exponent : 0);  // low bits to round away
    if (dropped > 53) return sign;
    std::uint64_t significand = (magnitude & 0xfffffffffffffu) | 0x10000000000000u;
    const std::uint64_t odd = (significand >> dropped) & 1;
    significand = (significand + ((std::uint64_t{1} << (dropped - 1)) - 1) + odd) >> dropped;
    // A carry out of the significand raises the exponent, and one out of the largest exponent gives infinity's bits.
    const std::uint64_t biased = exponent < least ? 0 : static_cast<std::uint64_t>(exponent - least) << mantissa_bits;
    return static_cast<std::uint16_t>(sign | (biased + significand));
}

inline std::uint16_t double_to_bf16(double value) {
    return std::isnan(value) ? 0x7fc0 : round_to_16_bits(value, 7, -126);
}

inline std::uint16_t double_to_f16(double value) {
    return std::isnan(value) ? 0x7e00 : round_to_16_bits(value, 10, -14);
}

// An integer element from a double: values beyond the type's range, and NaN, become 0.
template <typename Integer>
Integer double_to_integer(double value) {
    const double bound = std::ldexp(1.0, static_cast<int>(8 * sizeof(Integer)) - 1);
    return value >= -bound && value < bound ? static_cast<Integer>(value) : 0;
}

// values[i] = element at data[i * stride]; the switch is outside of the loop.
inline void load_elements(const void* data, DType dtype, std::int64_t stride, std::int64_t count, double* values) {
    const auto each = [&]<typename Element>(Element, auto convert) {
        const Element* elements = static_cast<const Element*>(data);
        for (std::int64_t i = 0; i < count; ++i) values[i] = convert(elements[i * stride]);
    };
    const auto plain = [](auto element) { return static_cast<double>(element); };
    switch (dtype) {
        case DType::f64: return each(double{}, plain);
        case DType::f32: return each(float{}, plain);
        case DType::bf16: return each(std::uint16_t{}, bf16_to_double);
        case DType::f16: return each(std::uint16_t{}, f16_to_double);
        case DType::i32: return each(std::int32_t{}, plain);
        case DType::i64: return each(std::int64_t{}, plain);
    }
}

// The element at data[i * stride] = values[i], rounded to the type.
inline void store_elements(void* data, DType dtype, std::int64_t stride, std::int64_t count, const double* values) {
    const auto each = [&]<typename Element>(Element, auto convert) {
        Element* elements = static_cast<Element*>(data);
        for (std::int64_t i = 0; i < count; ++i) elements[i * stride] = convert(values[i]);
    };
    switch (dtype) {
        case DType::f64: return each(double{}, [](double value) { return value; });
        case DType::f32: return each(float{}, [](double value) { return static_cast<float>(value); });
        case DType::bf16: return each(std::uint16_t{}, double_to_bf16);
        case DType::f16: return each(std::uint16_t{}, double_to_f16);
        case DType::i32: return each(std::int32_t{}, double_to_integer<std::int32_t>);
        case DType::i64: return each(std::int64_t{}, double_to_integer<std::int64_t>);
    }
}

}  // namespace headrace::harness
