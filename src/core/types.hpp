// Scalar conversions between float, bf16 and f16 bit patterns; exact where the target holds it, else to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

#define HEADRACE_INLINE [[gnu::always_inline]] static inline
#define HEADRACE_INLINE_MEMBER [[gnu::always_inline]] inline

// Functions of the algorithm pages, which every backend compiles for its own target. HEADRACE_PAGES_ON_HOST: nvcc too for
// the host, to count what they do.
#if defined(__CUDACC__) && !defined(HEADRACE_PAGES_ON_HOST)
#define HEADRACE_PAGE __device__ __forceinline__
#else
#define HEADRACE_PAGE
#endif

HEADRACE_INLINE float bf16_to_float(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

HEADRACE_INLINE std::uint16_t float_to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

HEADRACE_INLINE float f16_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    std::uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu, wide;
    if (exponent == 0x1f) {
        wide = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent == 0) {  // subnormal: mantissa * 2^-24, exact in float
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        std::memcpy(&wide, &magnitude, 4);
        wide |= sign;
    } else {
        wide = sign | ((exponent + 112) << 23) | (mantissa << 13);
    }
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

HEADRACE_INLINE std::uint16_t float_to_f16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
        float absolute, half = 0.5f;
        std::memcpy(&absolute, &magnitude, 4);
        absolute += half;
        std::uint32_t sum;
        std::memcpy(&sum, &absolute, 4);
        return static_cast<std::uint16_t>(sign | (sum - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace headrace
