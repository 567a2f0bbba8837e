// Arithmetic of f16, bf16 and their pairs against exact sums of products.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/faults.hpp"
#include "tests/lane_checks.hpp"

namespace headrace::ptx {
namespace {

using Row = std::vector<std::uint64_t>;
__extension__ typedef __float128 Quad;

struct Half {
    const char* name;
    int fraction_bits, bias, infinity;
};
const Half f16{"f16", 10, 15, 0x7c00}, bf16{"bf16", 7, 127, 0x7f80};

double value_of(const Half& half, std::uint64_t bits) {
    const int magnitude = static_cast<int>(bits & 0x7fff), exponent = magnitude >> half.fraction_bits,
              fraction = magnitude & ((1 << half.fraction_bits) - 1);
    const double value =
        magnitude > half.infinity    ? NAN
        : magnitude == half.infinity ? INFINITY
        : exponent == 0 ? std::ldexp(fraction, 1 - half.bias - half.fraction_bits)
                        : std::ldexp(fraction + (1 << half.fraction_bits), exponent - half.bias - half.fraction_bits);
    return (bits & 0x8000) != 0 ? -value : value;
}

// high + low (exact), to the nearest even.
std::uint64_t nearest(const Half& half, Quad high, Quad low) {
    const bool negative = high < 0;
    const Quad magnitude = negative ? -high : high, rest = negative ? -low : low;
    int below = 0, above = half.infinity;
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        const Quad value = static_cast<Quad>(value_of(half, static_cast<std::uint64_t>(middle)));
        (value < magnitude || (value == magnitude && rest >= 0) ? below : above) = middle;
    }
    const Quad bottom = static_cast<Quad>(value_of(half, static_cast<std::uint64_t>(below)));
    const Quad top = above == half.infinity
                         ? bottom + (bottom - static_cast<Quad>(value_of(half, static_cast<std::uint64_t>(below - 1))))
                         : static_cast<Quad>(value_of(half, static_cast<std::uint64_t>(above)));
    const Quad twice = (magnitude - bottom) - (top - magnitude);
    const bool up = twice + 2 * rest > 0 || (twice + 2 * rest == 0 && (below & 1) != 0);
    return static_cast<std::uint64_t>(up ? above : below) | (negative ? 0x8000 : 0);
}

std::uint64_t fma_reference(const Half& half, std::uint64_t a, std::uint64_t b, std::uint64_t c) {
    const double x = value_of(half, a), y = value_of(half, b), z = value_of(half, c);
    const double plain = x * y + z;
    if (!std::isfinite(x) || !std::isfinite(y) || !std::isfinite(z))
        return plain != plain ? 0x7fff : static_cast<std::uint64_t>(half.infinity) | (plain < 0 ? 0x8000 : 0);
    const Quad product = static_cast<Quad>(x) * static_cast<Quad>(y), sum = product + static_cast<Quad>(z);
    const Quad part = sum - product, low = (product - (sum - part)) + (static_cast<Quad>(z) - part);
    if (sum == 0) return std::signbit(plain) ? 0x8000 : 0;
    return nearest(half, sum, low);
}

const Row halves{0,      0x8000, 1,      0x8001, 0x3ff,  0x400,  0x8400, 0x3c00, 0xbc00, 0x3c01, 0x3bff, 0x5555,
                 0xd555, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x0200, 0x1234, 0x9abc, 0x6400, 0x3555};
// With 0x3f81 * 0x3fc0, a tie, the last two decide the rounding from 100 bits below.
const Row brains{0,      0x8000, 1,      0x8001, 0x7f,   0x80,   0x8080, 0x3f80, 0xbf80,
                 0x3f81, 0x3f7f, 0x5555, 0xd555, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0,
                 0x0040, 0x1234, 0x9abc, 0x4380, 0x3eaa, 0x3fc0, 0x0d80, 0x8d80};

void check(const Row& values, const std::string& body,
           const std::function<std::uint64_t(std::uint64_t, std::uint64_t, std::uint64_t)>& expect) {
    check_rows<std::uint16_t>(product({values, values, values}), {"u16", "u16", "u16"}, {"%h1", "%h2", "%h3"}, body,
                              "u16", "%h9", [&](const Row& r) { return expect(r[0], r[1], r[2]); });
}

TEST(Halves, FmaAndItsCases) {
    check(halves, "fma.rn.f16 %h9, %h1, %h2, %h3;", [](auto a, auto b, auto c) { return fma_reference(f16, a, b, c); });
    check(brains, "fma.rn.bf16 %h9, %h1, %h2, %h3;",
          [](auto a, auto b, auto c) { return fma_reference(bf16, a, b, c); });
    check(halves, "add.f16 %h9, %h1, %h2;", [](auto a, auto b, auto) { return fma_reference(f16, a, 0x3c00, b); });
    check(halves, "sub.rn.f16 %h9, %h1, %h2;",
          [](auto a, auto b, auto) { return fma_reference(f16, a, 0x3c00, b ^ 0x8000); });
    check(halves, "mul.f16 %h9, %h1, %h2;", [](auto a, auto b, auto) { return fma_reference(f16, a, b, 0x8000); });
    check(brains, "mul.rn.bf16 %h9, %h1, %h2;", [](auto a, auto b, auto) { return fma_reference(bf16, a, b, 0x8000); });
    check(halves, "fma.rn.relu.f16 %h9, %h1, %h2, %h3;", [](auto a, auto b, auto c) {
        const std::uint64_t result = fma_reference(f16, a, b, c);
        return (result & 0x8000) != 0 ? 0 : result;
    });
    check(halves, "fma.rn.sat.f16 %h9, %h1, %h2, %h3;", [](auto a, auto b, auto c) -> std::uint64_t {
        const std::uint64_t result = fma_reference(f16, a, b, c);
        return (result & 0x8000) != 0 || result > 0x7c00 ? 0 : std::min<std::uint64_t>(result, 0x3c00);
    });
    const auto flushed = [](std::uint64_t bits) { return (bits & 0x7c00) == 0 ? bits & 0x8000 : bits; };
    check(halves, "fma.rn.ftz.f16 %h9, %h1, %h2, %h3;",
          [&](auto a, auto b, auto c) { return flushed(fma_reference(f16, flushed(a), flushed(b), flushed(c))); });
}

TEST(Halves, Extremes) {
    const auto extreme = [](const Half& half, bool largest, bool or_nan) {
        return [&half, largest, or_nan](std::uint64_t a, std::uint64_t b, std::uint64_t) -> std::uint64_t {
            const double x = value_of(half, a), y = value_of(half, b);
            if (x != x || y != y) return or_nan || (x != x && y != y) ? 0x7fff : x != x ? b : a;
            if (x == y) return (std::signbit(x) != largest) ? a : b;
            return (x > y) == largest ? a : b;
        };
    };
    check(halves, "min.f16 %h9, %h1, %h2;", extreme(f16, false, false));
    check(halves, "max.NaN.f16 %h9, %h1, %h2;", extreme(f16, true, true));
    check(brains, "max.bf16 %h9, %h1, %h2;", extreme(bf16, true, false));
    check(brains, "min.NaN.bf16 %h9, %h1, %h2;", extreme(bf16, false, true));
    check(halves, "abs.f16 %h9, %h1;", [](auto a, auto, auto) { return a & 0x7fff; });
    check(brains, "neg.bf16 %h9, %h1;", [](auto a, auto, auto) { return a ^ 0x8000; });
}

TEST(Halves, Pairs) {
    const Row pairs{0x3c000001, 0xbc017bff, 0x55558400, 0x7e003c00, 0x12349abc};
    check_rows<std::uint32_t>(product({pairs, pairs, pairs}), {"u32", "u32", "u32"}, {"%r1", "%r2", "%r3"},
                              "fma.rn.f16x2 %r9, %r1, %r2, %r3;", "u32", "%r9", [](const Row& r) {
                                  return fma_reference(f16, r[0] >> 16, r[1] >> 16, r[2] >> 16) << 16 |
                                         fma_reference(f16, r[0] & 0xffff, r[1] & 0xffff, r[2] & 0xffff);
                              });
    check_rows<std::uint32_t>(product({pairs, pairs, pairs}), {"u32", "u32", "u32"}, {"%r1", "%r2", "%r3"},
                              "fma.rn.bf16x2 %r9, %r1, %r2, %r3;", "u32", "%r9", [](const Row& r) {
                                  return fma_reference(bf16, r[0] >> 16, r[1] >> 16, r[2] >> 16) << 16 |
                                         fma_reference(bf16, r[0] & 0xffff, r[1] & 0xffff, r[2] & 0xffff);
                              });
}

TEST(Halves, Approximations) {
    const auto through = [](const Half& half, double (*f)(double)) {
        return [&half, f](std::uint64_t a, std::uint64_t, std::uint64_t) -> std::uint64_t {
            const double value = f(value_of(half, a));
            if (value != value) return 0x7fff;
            if (value == 0) return std::signbit(value) ? 0x8000 : 0;
            return std::isinf(value) ? static_cast<std::uint64_t>(half.infinity)
                                     : nearest(half, static_cast<Quad>(value), 0);
        };
    };
    check(halves, "ex2.approx.f16 %h9, %h1;", through(f16, [](double x) { return std::exp2(x); }));
    check(halves, "tanh.approx.f16 %h9, %h1;", through(f16, [](double x) { return std::tanh(x); }));
    check(brains, "tanh.approx.bf16 %h9, %h1;", through(bf16, [](double x) { return std::tanh(x); }));
}

}  // namespace
}  // namespace headrace::ptx
