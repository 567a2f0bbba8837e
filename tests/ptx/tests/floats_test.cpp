// Arithmetic of f32 and f64 against exact sums, products, quotients and roots: edge values, every rounding mode,
// partial masks.
#include <bit>
#include <cmath>
#include <limits>

#include "tests/faults.hpp"
#include "tests/pairs.hpp"

namespace headrace::ptx {
namespace {

__extension__ typedef __float128 Quad;

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class T>
std::vector<std::uint64_t> floats() {
    using L = std::numeric_limits<T>;
    std::vector<T> values{T(0),
                          T(1),
                          T(0.5),
                          T(1.5),
                          T(3),
                          T(1) / T(3),
                          T(0.1),
                          T(1e10),
                          T(1e-10),
                          L::min(),
                          L::min() / 2,
                          L::denorm_min(),
                          L::min() + L::denorm_min(),
                          L::max(),
                          L::max() / 2,
                          L::infinity(),
                          T(1) + L::epsilon(),
                          T(1) - L::epsilon() / 2,
                          L::epsilon() / 2,
                          L::quiet_NaN(),
                          T(16777215),
                          T(123456.789)};
    std::vector<std::uint64_t> bits;
    for (const T value : values) {
        bits.push_back(std::bit_cast<Bits<T>>(value));
        bits.push_back(std::bit_cast<Bits<T>>(-value));
    }
    return bits;
}

// high + low, exact, rounded to T in a mode: 1 towards zero, 2 down, 3 up. (0, to nearest, is the host's own.)
template <class T>
T rounded(Quad high, Quad low, int mode) {
    T near = static_cast<T>(high);
    if (std::isinf(near)) near = std::copysign(std::numeric_limits<T>::max(), near);
    // The largest T that is not above, and its successor.
    const auto above = [&](T value) {
        return static_cast<Quad>(value) > high || (static_cast<Quad>(value) == high && low < 0);
    };
    const auto equal = [&](T value) { return static_cast<Quad>(value) == high && low == 0; };
    T down = near;
    while (!equal(down) && above(down)) down = std::nextafter(down, -std::numeric_limits<T>::infinity());
    for (T up = down; !equal(down) && !above(up = std::nextafter(down, std::numeric_limits<T>::infinity()));) down = up;
    if (equal(down)) return down;
    const T up = std::nextafter(down, std::numeric_limits<T>::infinity());
    const T zero_down = high > 0 ? std::copysign(down, T(1)) : down,
            zero_up = high < 0 || (high == 0 && low < 0) ? std::copysign(up, T(-1)) : up;
    if (mode == 2) return zero_down;
    if (mode == 3) return zero_up;
    return high > 0 || (high == 0 && low > 0) ? zero_down : zero_up;
}

Quad error_of_sum(Quad a, Quad b, Quad sum) {
    const Quad part = sum - a;
    return (a - (sum - part)) + (b - part);
}

template <class T>
std::uint64_t canonical(T value) {
    if (sizeof(T) == 4 && value != value) return 0x7fffffff;
    return std::bit_cast<Bits<T>>(value);
}

// a * b + c in a mode; zeros by IEEE's rule for their sign.
template <class T>
std::uint64_t fma_reference(T a, T b, T c, int mode) {
    const T nearest = std::fma(a, b, c);
    const bool exceptional = !std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c);
    if (mode == 0 || exceptional) return canonical(nearest);
    const Quad product = static_cast<Quad>(a) * static_cast<Quad>(b);
    const Quad sum = product + static_cast<Quad>(c);
    const Quad low = error_of_sum(product, static_cast<Quad>(c), sum);
    if (sum == 0 && low == 0) {
        const bool product_negative = std::signbit(a) != std::signbit(b);
        const bool same = product_negative == std::signbit(c) && c == 0;
        return canonical(same ? std::copysign(T(0), c) : std::copysign(T(0), mode == 2 ? T(-1) : T(1)));
    }
    return canonical(rounded<T>(sum, low, mode));
}

template <class T>
class Floats : public ::testing::Test {
  public:
    static constexpr bool single = sizeof(T) == 4;
    const std::string t = single ? ".f32" : ".f64", type = single ? "f32" : "f64", r = single ? "%f" : "%fd";
    const std::string minus_zero = single ? "0f80000000" : "0d8000000000000000",
                      one = single ? "0f3F800000" : "0d3FF0000000000000";

    void test(const std::string& body, const std::function<std::uint64_t(T, T)>& f) {
        for_pairs<Bits<T>>(
            {floats<T>(), type, r}, body, type, r + "1", [&](std::uint64_t a, std::uint64_t b, std::uint64_t result) {
                const T x = std::bit_cast<T>(static_cast<Bits<T>>(a)), y = std::bit_cast<T>(static_cast<Bits<T>>(b));
                const std::uint64_t should = f(x, y);
                const T value = std::bit_cast<T>(static_cast<Bits<T>>(should)),
                        is = std::bit_cast<T>(static_cast<Bits<T>>(result));
                if (!single && value != value && is != is) return std::string();  // f64: any NaN
                return expected(result, should);
            });
    }
};
using FloatTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Floats, FloatTypes);

TYPED_TEST(Floats, AddMulFmaInAllModes) {
    using T = TypeParam;
    const char* modes[] = {".rn", ".rz", ".rm", ".rp"};
    for (int mode = 0; mode < 4; ++mode) {
        const std::string m = modes[mode];
        this->test("add" + m + this->t + " $d, $a, $b;", [&](T a, T b) { return fma_reference(a, T(1), b, mode); });
        this->test("sub" + m + this->t + " $d, $a, $b;", [&](T a, T b) { return fma_reference(a, T(1), -b, mode); });
        this->test("mul" + m + this->t + " $d, $a, $b;", [&](T a, T b) {
            return fma_reference(a, b, std::signbit(a) == std::signbit(b) ? T(0) : T(-0.0), mode);
        });
        this->test("fma" + m + this->t + " $d, $a, $b, $a;", [&](T a, T b) { return fma_reference(a, b, a, mode); });
        this->test("fma" + m + this->t + " $d, $a, $b, $b;", [&](T a, T b) { return fma_reference(a, b, b, mode); });
    }
    this->test("add" + this->t + " $d, $a, $b;", [](T a, T b) { return canonical(a + b); });
    this->test("mul" + this->t + " $d, $a, $b;", [](T a, T b) { return canonical(a * b); });
    this->test("sub" + this->t + " $d, $a, $b;", [](T a, T b) { return canonical(a - b); });
}

TYPED_TEST(Floats, QuotientsAndRootsInAllModes) {
    using T = TypeParam;
    const char* modes[] = {".rn", ".rz", ".rm", ".rp"};
    // A quotient of two T's that is no T itself differs from every T by more than the error of a division in 113 bits.
    const auto quotient = [](T a, T b, int mode) {
        const T nearest = a / b;
        if (mode == 0 || !std::isfinite(a) || !std::isfinite(b) || b == 0 || a == 0) return canonical(nearest);
        return canonical(rounded<T>(static_cast<Quad>(a) / static_cast<Quad>(b), 0, mode));
    };
    for (int mode = 0; mode < 4; ++mode) {
        const std::string m = modes[mode];
        this->test("div" + m + this->t + " $d, $a, $b;", [&](T a, T b) { return quotient(a, b, mode); });
        this->test("rcp" + m + this->t + " $d, $b;", [&](T, T b) { return quotient(T(1), b, mode); });
        this->test("sqrt" + m + this->t + " $d, $a;", [&](T a, T) {
            const T nearest = std::sqrt(a);
            if (mode == 0 || !(nearest == nearest) || std::isinf(a) || a == 0) return canonical(nearest);
            const T over = std::nextafter(nearest, std::numeric_limits<T>::infinity()),
                    under = std::nextafter(nearest, T(0));
            const Quad square = static_cast<Quad>(nearest) * static_cast<Quad>(nearest);
            if (square == static_cast<Quad>(a)) return canonical(nearest);
            if (mode == 3) return canonical(square < static_cast<Quad>(a) ? over : nearest);
            return canonical(square < static_cast<Quad>(a) ? nearest : under);
        });
    }
}

TYPED_TEST(Floats, SignsAndExtremes) {
    using T = TypeParam;
    const auto bits = [](T value) -> std::uint64_t { return std::bit_cast<Bits<T>>(value); };
    const auto is_nan = [](T value) { return value != value; };
    const auto least = [&](T a, T b) {
        if (is_nan(a)) return canonical(b);
        if (is_nan(b)) return canonical(a);
        return bits(a < b || (a == b && std::signbit(a)) ? a : b);
    };
    const auto most = [&](T a, T b) {
        if (is_nan(a)) return canonical(b);
        if (is_nan(b)) return canonical(a);
        return bits(a > b || (a == b && !std::signbit(a)) ? a : b);
    };
    this->test("min" + this->t + " $d, $a, $b;", least);
    this->test("max" + this->t + " $d, $a, $b;", most);
    if (this->single) {
        this->test("min.NaN.f32 $d, $a, $b;",
                   [&](T a, T b) { return is_nan(a) || is_nan(b) ? 0x7fffffffu : least(a, b); });
        this->test("max.NaN.f32 $d, $a, $b;",
                   [&](T a, T b) { return is_nan(a) || is_nan(b) ? 0x7fffffffu : most(a, b); });
    }
    this->test("abs" + this->t + " $d, $a;",
               [&](T a, T) { return bits(a) & (~std::uint64_t{0} >> (this->single ? 33 : 1)); });
    this->test("neg" + this->t + " $d, $a;",
               [&](T a, T) { return bits(a) ^ std::uint64_t{1} << (this->single ? 31 : 63); });
    this->test("copysign" + this->t + " $d, $a, $b;", [&](T a, T b) { return bits(std::copysign(b, a)); });
}

float flushed(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}
float saturated(float value) { return value > 0 ? std::fmin(value, 1.0f) : 0.0f; }

TEST(Singles, FlushingAndSaturation) {
    const Pairs pairs{floats<float>(), "f32", "%f"};
    const auto test = [&](const std::string& body, const std::function<float(float, float)>& f) {
        for_pairs<std::uint32_t>(
            pairs, body, "f32", "%f1", [&](std::uint64_t a, std::uint64_t b, std::uint64_t result) {
                return expected(result, canonical(f(std::bit_cast<float>(static_cast<std::uint32_t>(a)),
                                                    std::bit_cast<float>(static_cast<std::uint32_t>(b)))));
            });
    };
    test("add.ftz.f32 $d, $a, $b;", [](float a, float b) { return flushed(flushed(a) + flushed(b)); });
    test("mul.rn.ftz.f32 $d, $a, $b;", [](float a, float b) { return flushed(flushed(a) * flushed(b)); });
    test("add.sat.f32 $d, $a, $b;", [](float a, float b) { return saturated(a + b); });
    test("mul.ftz.sat.f32 $d, $a, $b;", [](float a, float b) { return saturated(flushed(flushed(a) * flushed(b))); });
    test("fma.rn.ftz.f32 $d, $a, $b, $a;",
         [](float a, float b) { return flushed(std::fma(flushed(a), flushed(b), flushed(a))); });
    test("fma.rn.sat.f32 $d, $a, $b, $b;", [](float a, float b) { return saturated(std::fma(a, b, b)); });
    test("div.rn.ftz.f32 $d, $a, $b;", [](float a, float b) { return flushed(flushed(a) / flushed(b)); });
    test("sqrt.rn.ftz.f32 $d, $a;", [](float a, float) { return flushed(std::sqrt(flushed(a))); });
    test("ex2.approx.f32 $d, $a;",
         [](float a, float) { return static_cast<float>(std::exp2(static_cast<double>(a))); });
    test("ex2.approx.ftz.f32 $d, $a;",
         [](float a, float) { return flushed(static_cast<float>(std::exp2(static_cast<double>(flushed(a))))); });
    test("lg2.approx.f32 $d, $a;",
         [](float a, float) { return static_cast<float>(std::log2(static_cast<double>(a))); });
    test("rcp.approx.ftz.f32 $d, $a;", [](float a, float) { return flushed(1.0f / flushed(a)); });
    test("rsqrt.approx.f32 $d, $a;",
         [](float a, float) { return static_cast<float>(1 / std::sqrt(static_cast<double>(a))); });
    test("sqrt.approx.ftz.f32 $d, $a;", [](float a, float) { return std::sqrt(flushed(a)); });
    test("tanh.approx.f32 $d, $a;",
         [](float a, float) { return static_cast<float>(std::tanh(static_cast<double>(a))); });
    test("sin.approx.f32 $d, $a;", [](float a, float) { return static_cast<float>(std::sin(static_cast<double>(a))); });
    test("cos.approx.f32 $d, $a;", [](float a, float) { return static_cast<float>(std::cos(static_cast<double>(a))); });
    test("div.full.f32 $d, $a, $b;", [](float a, float b) { return a / b; });
}

TEST(Doubles, GrossApproximations) {
    const Pairs pairs{floats<double>(), "f64", "%fd"};
    for_pairs<std::uint64_t>(
        pairs, "rcp.approx.ftz.f64 $d, $a;", "f64", "%fd1", [](std::uint64_t a, std::uint64_t, std::uint64_t result) {
            const double x = std::bit_cast<double>(a), y = std::bit_cast<double>(result);
            if ((result & 0xffffffff) != 0) return std::string("low bits");
            if (x != x) return y != y ? std::string() : std::string("no NaN");
            if (std::fabs(x) < std::numeric_limits<double>::min())
                return std::isinf(y) && std::signbit(x) == std::signbit(y) ? std::string() : std::string("no infinity");
            const double right = 1 / x;
            if (std::fabs(right) < std::numeric_limits<double>::min())
                return y == 0 ? std::string() : std::string("not flushed");
            return std::fabs(y / right - 1) < 0x1p-19 ? std::string() : std::string("far away");
        });
}

TEST(Masks, OnlyActiveLanesAreWritten) {
    for (const char* body : {"add.f32 %f1, %f2, %f2;", "fma.rn.f32 %f1, %f2, %f2, %f2;", "add.rz.f32 %f1, %f2, %f2;",
                             "ex2.approx.f32 %f1, %f2;"}) {
        const auto result = run_lanes<float>(
            {{{0x40000000}, "f32", "%f2"}},
            "mov.f32 %f1, 0f42C80000;\nand.b32 %r1, %r0, 5;\nsetp.eq.u32 %p1, %r1, 1;\n@%p1 " + std::string(body),
            "f32", "%f1");
        for (int i = 0; i < 32; ++i) EXPECT_EQ(result[static_cast<std::size_t>(i)] != 100.0f, (i & 5) == 1) << body;
    }
}

TEST(Forms, WhatIsNotDoneIsNamed) {
    for (const char* body :
         {"add.u16x2 %r1, %r2, %r3;", "fma.f32 %f1, %f1, %f1, %f1;", "min.xorsign.abs.f32 %f1, %f1, %f1;",
          "add.rn.f32x2 %rd20, %rd21, %rd22;", "add.f32 %f1, %f2, %f3, %f4;", "add.s32 %rd20, %r1, %r2;",
          "mul.s32 %r1, %r2, %r3;", "min.f32 %f1, %f2, %f3, %f4;", "abs.u32 %r1, %r2;", "div.f32 %f1, %f2, %f3;",
          "rcp.f32 %f1, %f2;", "tanh.f32 %f1, %f2;", "lg2.approx.f64 %fd1, %fd2;"}) {
        Device device;
        const std::string fault = fault_of([&] { device.run(kernel_text(0, body), {}); });
        EXPECT_NE(fault.find("not done"), std::string::npos) << body << ": " << fault;
    }
}

}  // namespace
}  // namespace headrace::ptx
