// cvt between all types, in all roundings, against searches among the numbers of a type.
#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>

#include "tests/faults.hpp"
#include "tests/lane_checks.hpp"

namespace headrace::ptx {
namespace {

using Row = std::vector<std::uint64_t>;

struct Kind {
    std::string name;  // "s32"
    int bits;
    bool is_float, is_signed;
};
const std::vector<Kind> integer_kinds{{"u8", 8, false, false},   {"s8", 8, false, true},    {"u16", 16, false, false},
                                      {"s16", 16, false, true},  {"u32", 32, false, false}, {"s32", 32, false, true},
                                      {"u64", 64, false, false}, {"s64", 64, false, true}};
const std::vector<Kind> float_kinds{
    {"f16", 16, true, true}, {"bf16", 16, true, true}, {"f32", 32, true, true}, {"f64", 64, true, true}};

std::string register_of(const Kind& kind, const std::string& number) {
    return (kind.name == "f32"   ? "%f"
            : kind.name == "f64" ? "%fd"
            : kind.bits <= 16    ? "%h"
            : kind.bits == 32    ? "%r"
                                 : "%rd") +
           number;
}
std::string load_of(const Kind& kind) { return "b" + std::to_string(kind.bits); }

// The value of a type's bits, exact: x87 numbers hold 64-bit integers and all f64.
long double value_of(const Kind& kind, std::uint64_t bits) {
    if (!kind.is_float) {
        const auto sign = std::uint64_t{1} << (kind.bits - 1);
        if (kind.is_signed && (bits & sign) != 0) return -static_cast<long double>((~bits + 1) & (sign | (sign - 1)));
        return static_cast<long double>(bits);
    }
    if (kind.name == "f64") return static_cast<long double>(std::bit_cast<double>(bits));
    if (kind.name == "f32") return static_cast<long double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    if (kind.name == "bf16")
        return static_cast<long double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits << 16)));
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    const long double magnitude = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                  : exponent == 0
                                      ? std::ldexp(static_cast<long double>(fraction), -24)
                                      : std::ldexp(static_cast<long double>(1024 + fraction), exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

std::uint64_t nan_of(const Kind& kind) { return (std::uint64_t{1} << (kind.bits - 1)) - 1; }

// The bits of a value in a float type, by a search among the type's numbers: mode 0 nearest even, 1 zero, 2 down, 3 up.
std::uint64_t bits_of_float(const Kind& kind, long double value, int mode) {
    if (value != value) return nan_of(kind);
    const std::uint64_t sign = std::signbit(value) ? std::uint64_t{1} << (kind.bits - 1) : 0;
    const long double magnitude = std::fabs(value);
    const std::uint64_t infinity = kind.name == "f16"    ? 0x7c00
                                   : kind.name == "bf16" ? 0x7f80
                                   : kind.name == "f32"  ? 0x7f800000
                                                         : 0x7ff0000000000000;
    std::uint64_t low = 0,
                  high = infinity;  // value_of(low) <= magnitude, and high is the least that is above, or equal to low
    while (high - low > 1) {
        const std::uint64_t middle = low + (high - low) / 2;
        (value_of(kind, middle) <= magnitude ? low : high) = middle;
    }
    if (value_of(kind, high) <= magnitude) return sign | high;
    if (value_of(kind, low) == magnitude) return sign | low;
    const bool negative = sign != 0;
    bool up = mode == 3 ? !negative : mode == 2 ? negative : false;
    if (mode == 0) {
        // Beyond the largest number the unit goes on as if the type did.
        const long double below = value_of(kind, low);
        const long double above = high == infinity ? below + (below - value_of(kind, low - 1)) : value_of(kind, high);
        const long double to_low = magnitude - below, to_high = above - magnitude;
        up = to_high < to_low || (to_high == to_low && (low & 1) != 0);
    }
    return sign | (up ? high : low);
}

std::uint64_t bits_of_integer(const Kind& to, const Kind& from, long double value, int mode) {
    const std::uint64_t mask = to.bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << to.bits) - 1,
                        top = std::uint64_t{1} << (to.bits - 1);
    if (value != value) return from.name == "f64" || to.bits == 64 ? top : 0;
    const int host[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(host[mode]);
    volatile long double input = value;
    const long double whole = std::nearbyint(input);
    std::fesetround(FE_TONEAREST);
    const long double least = to.is_signed ? -static_cast<long double>(top) : 0,
                      most = static_cast<long double>(to.is_signed ? top - 1 : mask);
    if (whole <= least) return to.is_signed ? top : 0;
    if (whole >= most) return to.is_signed ? top - 1 : mask;
    return (whole < 0 ? ~static_cast<std::uint64_t>(-whole) + 1 : static_cast<std::uint64_t>(whole)) & mask;
}

Row integers_of(const Kind& kind) {
    const std::uint64_t mask = kind.bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << kind.bits) - 1;
    Row values;
    for (const std::uint64_t value : Row{0,
                                         1,
                                         2,
                                         3,
                                         100,
                                         127,
                                         128,
                                         129,
                                         255,
                                         256,
                                         257,
                                         2049,
                                         2051,
                                         4097,
                                         32767,
                                         32768,
                                         65535,
                                         65519,
                                         65520,
                                         65536,
                                         0xffffff,
                                         0x1000001,
                                         0x1000003,
                                         0x7fffffff,
                                         0x80000000,
                                         0xffffffff,
                                         0x7fffff80,
                                         0x80000080,
                                         0x20000000000001,
                                         0x20000000000003,
                                         0x7fffffffffffffff,
                                         0x8000000000000000,
                                         0x8000000000000401,
                                         ~std::uint64_t{0},
                                         0xfffffffffffffc00,
                                         0x123456789abcdef0}) {
        values.push_back(value & mask);
    }
    return values;
}
Row floats_of(const Kind& kind) {
    Row values;
    for (const double value : {0.0,           0.5,
                               0.4999999,     1.5,
                               2.5,           3.5,
                               1.0,           0.1,
                               127.5,         128.5,
                               255.5,         256.0,
                               32767.5,       65504.0,
                               65519.9,       65520.0,
                               2147483647.0,  2147483648.0,
                               4294967295.5,  9.2e18,
                               1.9e19,        1e30,
                               1e300,         6e-8,
                               2.9e-8,        6.1e-5,
                               6.09e-5,       1.0009765,
                               1.00048828125, 1.00146484375,
                               1.0 + 0x1p-8,  1.0 + 3 * 0x1p-8,
                               1.0 + 0x1p-24, 1.0 + 3 * 0x1p-24,
                               1e-40,         1e-46,
                               1.2e-38,       3.4028235677973366e38,
                               3.39e38,       0x1.fffffep-127}) {
        values.push_back(bits_of_float(kind, static_cast<long double>(value), 0));
        values.push_back(bits_of_float(kind, static_cast<long double>(-value), 0));
    }
    values.push_back(bits_of_float(kind, INFINITY, 0));
    values.push_back(bits_of_float(kind, -INFINITY, 0));
    values.push_back(nan_of(kind));
    return values;
}
std::vector<Row> rows_of(const Kind& kind) { return product({kind.is_float ? floats_of(kind) : integers_of(kind)}); }

// The test's registers: those of 8-bit types have 16 bits, whose upper half gets the sign or zeros.
void check(const Kind& to, const Kind& from, const std::string& modifiers,
           const std::function<std::uint64_t(std::uint64_t)>& expect) {
    const std::string body = "cvt" + modifiers + "." + to.name + "." + from.name + " " + register_of(to, "29") + ", " +
                             register_of(from, "21") + ";";
    const auto expect_row = [&](const Row& row) { return expect(row[0]); };
    const std::vector<std::string> loads{load_of(from)}, registers{register_of(from, "21")};
    if (to.bits <= 16)
        check_rows<std::uint16_t>(rows_of(from), loads, registers, body, "b16", register_of(to, "29"), expect_row);
    else if (to.bits == 32)
        check_rows<std::uint32_t>(rows_of(from), loads, registers, body, "b32", register_of(to, "29"), expect_row);
    else
        check_rows<std::uint64_t>(rows_of(from), loads, registers, body, "b64", register_of(to, "29"), expect_row);
}

std::uint64_t extended(const Kind& to, std::uint64_t bits) {  // into a 16-bit register
    return to.name == "s8" && (bits & 0x80) != 0 ? bits | 0xff00 : bits;
}

TEST(Convert, IntegersToIntegers) {
    for (const Kind& to : integer_kinds) {
        for (const Kind& from : integer_kinds) {
            const std::uint64_t mask = to.bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << to.bits) - 1;
            check(to, from, "", [&](std::uint64_t bits) {
                const long double value = value_of(from, bits);
                const std::uint64_t word =
                    value < 0 ? ~static_cast<std::uint64_t>(-value) + 1 : static_cast<std::uint64_t>(value);
                return extended(to, word & mask);
            });
            check(to, from, ".sat",
                  [&](std::uint64_t bits) { return extended(to, bits_of_integer(to, from, value_of(from, bits), 1)); });
        }
    }
}

TEST(Convert, FloatsToIntegers) {
    const char* modes[] = {".rni", ".rzi", ".rmi", ".rpi"};
    for (const Kind& to : integer_kinds) {
        for (const Kind& from : float_kinds) {
            for (int mode = 0; mode < 4; ++mode) {
                check(to, from, modes[mode], [&](std::uint64_t bits) {
                    return extended(to, bits_of_integer(to, from, value_of(from, bits), mode));
                });
            }
        }
    }
}

TEST(Convert, IntegersToFloats) {
    const char* modes[] = {".rn", ".rz", ".rm", ".rp"};
    for (const Kind& to : float_kinds) {
        for (const Kind& from : integer_kinds) {
            for (int mode = 0; mode < 4; ++mode) {
                check(to, from, modes[mode],
                      [&](std::uint64_t bits) { return bits_of_float(to, value_of(from, bits), mode); });
            }
        }
    }
}

TEST(Convert, FloatsToFloats) {
    const char* modes[] = {".rn", ".rz", ".rm", ".rp"};
    const auto order = [](const Kind& kind) { return kind.name == "f64" ? 3 : kind.name == "f32" ? 2 : 1; };
    for (const Kind& to : float_kinds) {
        for (const Kind& from : float_kinds) {
            const bool widens = order(to) > order(from) || to.name == from.name;
            for (int mode = 0; mode < (widens ? 1 : 4); ++mode) {
                check(to, from, widens ? "" : modes[mode], [&](std::uint64_t bits) {
                    // A NaN's payload goes along to f64 only; the host's way is as good as another.
                    if (value_of(from, bits) != value_of(from, bits) && to.name == "f64" && from.name == "f32")
                        return std::bit_cast<std::uint64_t>(
                            static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits))));
                    return bits_of_float(to, value_of(from, bits), mode);
                });
            }
        }
    }
}

TEST(Convert, ToIntegralValues) {
    const char* modes[] = {".rni", ".rzi", ".rmi", ".rpi"};
    const int host[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    for (const Kind& kind : float_kinds) {
        for (int mode = 0; mode < 4; ++mode) {
            check(kind, kind, modes[mode], [&](std::uint64_t bits) {
                std::fesetround(host[mode]);
                volatile long double input = value_of(kind, bits);
                const long double whole = std::nearbyint(input);
                std::fesetround(FE_TONEAREST);
                return bits_of_float(kind, whole, 0);
            });
        }
    }
}

TEST(Convert, SaturationFlushingRelu) {
    const Kind &f16 = float_kinds[0], &bf16 = float_kinds[1], &f32 = float_kinds[2], &f64 = float_kinds[3],
               &s32 = integer_kinds[5];
    const auto clamped = [](long double x) { return x > 0 ? std::fmin(x, 1.0L) : 0.0L; };
    const auto flushed = [](long double x) { return std::fabs(x) < 0x1p-126L ? std::copysign(0.0L, x) : x; };
    check(f32, f32, ".sat", [&](std::uint64_t bits) { return bits_of_float(f32, clamped(value_of(f32, bits)), 0); });
    check(f16, f32, ".rn.sat", [&](std::uint64_t bits) { return bits_of_float(f16, clamped(value_of(f32, bits)), 0); });
    check(f32, f64, ".rz.sat", [&](std::uint64_t bits) { return bits_of_float(f32, clamped(value_of(f64, bits)), 1); });
    check(f32, s32, ".rn.sat", [&](std::uint64_t bits) { return bits_of_float(f32, clamped(value_of(s32, bits)), 0); });
    check(f64, f32, ".ftz", [&](std::uint64_t bits) {
        const long double x = value_of(f32, bits);
        return x != x ? 0x7fffffffffffffffu : bits_of_float(f64, flushed(x), 0);
    });
    check(f32, f64, ".rp.ftz", [&](std::uint64_t bits) {
        const std::uint64_t result = bits_of_float(f32, value_of(f64, bits), 3);
        return (result & 0x7f800000) == 0 ? result & 0x80000000 : result;
    });
    check(s32, f32, ".rpi.ftz",
          [&](std::uint64_t bits) { return bits_of_integer(s32, f32, flushed(value_of(f32, bits)), 3); });
    for (const Kind* to : {&f16, &bf16}) {
        check(*to, f32, ".rn.relu", [&](std::uint64_t bits) {
            const long double x = value_of(f32, bits);
            return x != x ? 0x7fff : std::signbit(x) ? 0 : bits_of_float(*to, x, 0);
        });
    }
}

TEST(Convert, PairsAndTf32) {
    const Kind& f32 = float_kinds[2];
    const Row values = floats_of(f32);
    for (const Kind& kind : {float_kinds[0], float_kinds[1]}) {
        for (const std::string mode : {"rn", "rz"}) {
            check_rows<std::uint32_t>(product({values, {0x3f800000, 0xff800000, 0x33333333}}), {"f32", "f32"},
                                      {"%f1", "%f2"}, "cvt." + mode + "." + kind.name + "x2.f32 %r9, %f1, %f2;", "u32",
                                      "%r9", [&](const Row& r) {
                                          const int how = mode == "rn" ? 0 : 1;
                                          return bits_of_float(kind, value_of(f32, r[0]), how) << 16 |
                                                 bits_of_float(kind, value_of(f32, r[1]), how);
                                      });
        }
    }
    check_rows<std::uint32_t>(product({values}), {"f32"}, {"%f1"}, "cvt.rna.tf32.f32 %r9, %f1;", "u32", "%r9",
                              [&](const Row& r) -> std::uint64_t {
                                  if ((r[0] & 0x7fffffff) > 0x7f800000) return 0x7fffe000;
                                  if ((r[0] & 0x7fffffff) == 0x7f800000) return r[0];
                                  return (r[0] + 0x1000) & 0xffffe000;
                              });
}

TEST(Convert, RegistersWiderThanTypes) {
    check_rows<std::uint32_t>(product({{0x12345680, 0xff, 0x7f}}), {"u32"}, {"%r1"}, "cvt.s32.s8 %r9, %r1;", "u32",
                              "%r9",
                              [](const Row& r) { return static_cast<std::uint64_t>(static_cast<std::int8_t>(r[0])); });
    check_rows<std::uint64_t>(product({{0x12345680, 0xff8000, 0x7f}}), {"u32"}, {"%r1"}, "cvt.s16.s32 %rd29, %r1;",
                              "u64", "%rd29",
                              [](const Row& r) { return static_cast<std::uint64_t>(static_cast<std::int16_t>(r[0])); });
    check_rows<std::uint32_t>(product({{0x1234567890}}), {"u64"}, {"%rd21"},
                              "cvt.u16.u64 %h1, %rd21;\ncvt.u32.u16 %r9, %h1;", "u32", "%r9",
                              [](const Row& r) { return r[0] & 0xffff; });
    check_rows<std::uint64_t>({{0}}, {"u32"}, {"%r1"}, "cvt.u64.u32 %rd29, %tid.x;", "u64", "%rd29",
                              [](const Row&) { return 0u; });
}

}  // namespace
}  // namespace headrace::ptx
