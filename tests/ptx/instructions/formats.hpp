// Formats: f16, bf16, tf32, f32 and f64 as bits: exact widening, and rounding to them in PTX's modes.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace headrace::ptx {

// rna: to nearest, ties away from zero.
enum class Rounding : std::uint8_t { rn, rz, rm, rp, rna };

inline constexpr std::uint32_t nan_f32 = 0x7fffffff;  // the NaN that PTX's operations of less than 64 bits make
inline constexpr std::uint16_t nan_16 = 0x7fff;       // of f16 and of bf16

struct Format {
    int precision;  // bits of the significand, the hidden one too
    int least;      // exponent of the smallest normal number
    int most;       // exponent of the largest
    int bits;
};
inline constexpr Format format_f16{11, -14, 15, 16}, format_bf16{8, -126, 127, 16}, format_f32{24, -126, 127, 32},
    format_f64{53, -1022, 1023, 64}, format_tf32{11, -126, 127, 19};

// (-1)^negative * significand * 2^exponent, plus less than one unit of the last place if `sticky`, rounded to the
// format. Infinity where it overflows (the largest number where the mode rounds towards zero there). Bits of the
// format.
inline std::uint64_t round_to(const Format& format, Rounding mode, bool negative, std::uint64_t significand,
                              int exponent, bool sticky = false) {
    const std::uint64_t sign = negative ? std::uint64_t{1} << (format.bits - 1) : 0;
    const std::uint64_t infinity = static_cast<std::uint64_t>(format.most - format.least + 2) << (format.precision - 1);
    if (significand == 0) return sign;
    const int length = 64 - std::countl_zero(significand);
    // The unit of the result's last place, 2^unit: by precision, but never below that of the subnormal numbers.
    int unit = exponent + length - format.precision;
    if (unit < format.least - format.precision + 1) unit = format.least - format.precision + 1;
    const int drop = unit - exponent;
    std::uint64_t kept = 0;
    int half = 0;  // of what is dropped against half a unit: -1, 0, 1
    bool inexact = sticky;
    if (drop <= 0) {
        kept = significand << -drop;
        half = -1;
    } else if (drop > 64) {
        inexact = true;
        half = -1;
    } else {
        kept = drop == 64 ? 0 : significand >> drop;
        const std::uint64_t rest = drop == 64 ? significand : significand & ((std::uint64_t{1} << drop) - 1);
        const std::uint64_t middle = std::uint64_t{1} << (drop - 1);
        inexact = inexact || rest != 0;
        half = rest > middle || (rest == middle && sticky) ? 1 : rest == middle ? 0 : -1;
    }
    bool up = false;
    switch (mode) {
        case Rounding::rn: up = half > 0 || (half == 0 && (kept & 1) != 0); break;
        case Rounding::rna: up = half >= 0; break;
        case Rounding::rz: break;
        case Rounding::rm: up = inexact && negative; break;
        case Rounding::rp: up = inexact && !negative; break;
    }
    kept += up ? 1 : 0;
    // A carry out of the significand moves on into the exponent by itself.
    const std::uint64_t hidden = std::uint64_t{1} << (format.precision - 1);
    std::uint64_t bits = kept;
    if (kept >= hidden) {
        const int field = unit + format.precision - 1 - format.least + 1;
        bits = (static_cast<std::uint64_t>(field) << (format.precision - 1)) + (kept - hidden);
    }
    if (bits >= infinity) {
        const bool stays =
            mode == Rounding::rz || (mode == Rounding::rm && !negative) || (mode == Rounding::rp && negative);
        bits = stays ? infinity - 1 : infinity;
    }
    return sign | bits;
}

// A finite double, rounded.
inline std::uint64_t round_to(const Format& format, Rounding mode, double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const int field = static_cast<int>(bits >> 52 & 0x7ff);
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    const std::uint64_t significand = field == 0 ? fraction : fraction | std::uint64_t{1} << 52;
    return round_to(format, mode, bits >> 63 != 0, significand, (field == 0 ? 1 : field) - 1075);
}

// Widening is exact. f16 by integer arithmetic: the exponent is moved by a multiplication, which subnormal numbers need
// too.
inline float f16_to_f32(std::uint16_t half) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
    const std::uint32_t scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const std::uint32_t special = magnitude | 0x7f800000u;  // infinities and NaNs keep their fraction
    const std::uint32_t bits = magnitude >= 0x0f800000u ? special : scaled;
    return std::bit_cast<float>(bits | static_cast<std::uint32_t>(half & 0x8000u) << 16);
}
inline float bf16_to_f32(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// To nearest even, as loops over lanes want it: no branches.
inline std::uint16_t f32_to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan_16 : rounded);
}
inline std::uint16_t f32_to_f16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    // Normal results: round at bit 13, move the exponent. Below 2^-14: the addition of 0.5 puts the unit of the
    // subnormal f16 (2^-24) where the unit of the sum is.
    const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? nan_16 : result;
    return static_cast<std::uint16_t>(magnitude > 0x7f800000u ? result : sign | result);
}

// a + b, or to odd where it is not exact: rounding the result to half its precision or less is then as good as rounding
// the exact sum.
inline double add_to_odd(double a, double b) {
    const double sum = a + b;
    const double part = sum - a;
    const double error = (a - (sum - part)) + (b - part);
    auto bits = std::bit_cast<std::int64_t>(sum);
    if (error != 0 && error == error && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return std::bit_cast<double>(bits);
}

}  // namespace headrace::ptx
