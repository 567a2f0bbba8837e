// The two arithmetics of mma against sums in wide integers: spread exponents, cancellation, NaN, infinity, subnormals.
#include "instructions/mma.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

namespace headrace::ptx {
namespace {

// A fixed-point number wide enough for any sum of products of bf16 and an f32: units of 2^-300, 640 bits, two's
// complement.
struct Fixed {
    static constexpr int words = 20, unit = -300;
    std::uint32_t word[words] = {};

    void add(double value) {
        if (value == 0.0) return;
        int exponent;
        const double fraction = std::frexp(std::fabs(value), &exponent);
        const auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, 53));
        const int shift = exponent - 53 - unit + 64;  // mantissas reach below the unit with zeros only
        Fixed term;
        for (int bit = 0; bit < 53; ++bit)
            if ((mantissa >> bit & 1) != 0) {
                const int at = shift + bit - 64;
                ASSERT_GE(at, 0);
                ASSERT_LT(at, 32 * words - 2);
                term.word[at / 32] |= 1U << at % 32;
            }
        if (value < 0.0) term.negate();
        std::uint64_t carry = 0;
        for (int i = 0; i < words; ++i) {
            carry += std::uint64_t{word[i]} + term.word[i];
            word[i] = static_cast<std::uint32_t>(carry);
            carry >>= 32;
        }
    }
    void negate() {
        std::uint64_t carry = 1;
        for (auto& w : word) {
            carry += static_cast<std::uint32_t>(~w);
            w = static_cast<std::uint32_t>(carry);
            carry >>= 32;
        }
    }
    // To nearest even of `bits` bits, not below the last place of the least exponent.
    double rounded(int bits, int least_exponent) const {
        Fixed magnitude = *this;
        const bool negative = word[words - 1] >> 31 != 0;
        if (negative) magnitude.negate();
        int top = -1;
        for (int i = 0; i < 32 * words; ++i)
            if ((magnitude.word[i / 32] >> i % 32 & 1) != 0) top = i;
        if (top < 0) return 0.0;
        const int last = std::max(top - bits + 1, least_exponent - bits + 1 - unit);
        std::uint64_t kept = 0;
        for (int i = top; i >= last; --i) kept = kept * 2 + magnitude.bit(i);
        bool sticky = false;
        for (int i = 0; i < last - 1; ++i) sticky |= magnitude.bit(i) != 0;
        if (last > 0 && magnitude.bit(last - 1) != 0 && (sticky || kept % 2 == 1)) ++kept;
        const double result = std::ldexp(static_cast<double>(kept), last + unit);
        return negative ? -result : result;
    }
    std::uint32_t bit(int i) const { return i < 0 || i >= 32 * words ? 0 : word[i / 32] >> i % 32 & 1; }
};

double random_bf16(std::mt19937_64& random, int spread) {
    const auto exponent =
        static_cast<std::uint32_t>(127 + static_cast<int>(random() % (2 * static_cast<unsigned>(spread) + 1)) - spread);
    const auto bits = static_cast<std::uint32_t>(random() & 0x807f0000U) | exponent << 23;
    return std::bit_cast<float>(bits & 0xffff0000U);
}

void fill(Product& product, std::mt19937_64& random, int spread) {
    for (auto& row : product.a)
        for (double& x : row) x = random_bf16(random, spread);
    for (auto& row : product.b)
        for (int n = 0; n < 8; ++n) row[n] = random_bf16(random, spread);
    for (auto& row : product.c)
        for (int n = 0; n < 8; ++n) {
            const double more_bits = 1.0 + static_cast<double>(random() % 65536) / 65536.0;
            row[n] = static_cast<float>(random_bf16(random, 2 * spread) * more_bits);
        }
}

double expected(const Product& product, int row, int column, int depth, int bits, int least_exponent) {
    Fixed sum;
    sum.add(product.c[row][column]);
    for (int k = 0; k < depth; ++k) sum.add(product.a[row][k] * product.b[k][column]);
    return sum.rounded(bits, least_exponent);
}

TEST(Mma, ExactSumIsRoundedOnce) {
    std::mt19937_64 random(1);
    Product product;
    for (const int spread : {0, 2, 8, 20, 31, 60})
        for (const int depth : {4, 8, 16})
            for (int repeat = 0; repeat < 20; ++repeat) {
                fill(product, random, spread);
                multiply_exactly(product, depth, SumType::f32);
                for (int row = 0; row < 16; ++row)
                    for (int column = 0; column < 8; ++column)
                        ASSERT_EQ(product.d[row][column], expected(product, row, column, depth, 24, -126))
                            << "spread " << spread;
            }
}

TEST(Mma, CancellationLeavesWhatIsSmall) {
    Product product{};
    product.a[0][0] = 0x1p60, product.b[0][0] = 0x1p60;
    product.a[0][1] = -0x1p60, product.b[1][0] = 0x1p60;
    product.a[0][2] = 1.0, product.b[2][0] = 0x1p-100;
    product.c[0][0] = 0x1p-102;
    multiply_exactly(product, 16, SumType::f32);
    EXPECT_EQ(product.d[0][0], 0x1p-100 + 0x1p-102);
    // A tie that a term far below breaks, upwards and downwards.
    for (const double sign : {1.0, -1.0}) {
        product.a[0][0] = 1.0, product.b[0][0] = 1.0;
        product.a[0][1] = 1.0, product.b[1][0] = 0x1p-24;
        product.a[0][2] = sign, product.b[2][0] = 0x1p-110;
        product.c[0][0] = 0.0;
        multiply_exactly(product, 16, SumType::f32);
        EXPECT_EQ(product.d[0][0], sign > 0 ? 1.0 + 0x1p-23 : 1.0);
    }
}

TEST(Mma, Halves) {
    std::mt19937_64 random(2);
    Product product;
    for (int repeat = 0; repeat < 200; ++repeat) {
        fill(product, random, repeat % 6);
        for (auto& row : product.c)
            for (int n = 0; n < 8; ++n) row[n] = value_of_f16(static_cast<std::uint32_t>(random() & 0xbfff));
        multiply_exactly(product, 16, SumType::f16);
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column) {
                const double want = expected(product, row, column, 16, 11, -14);
                ASSERT_EQ(product.d[row][column], std::fabs(want) > 65504.0 ? std::copysign(HUGE_VAL, want) : want);
                ASSERT_EQ(value_of_f16(bits_of_f16(product.d[row][column])), product.d[row][column]);
            }
    }
}

TEST(Mma, SubnormalResults) {
    Product product{};
    product.a[0][0] = 0x1.8p-70, product.b[0][0] = 0x1p-79;  // 1.5 of the least f32
    product.c[0][1] = 0x1p-149;
    multiply_exactly(product, 16, SumType::f32);
    EXPECT_EQ(product.d[0][0], 0x1p-148);
    EXPECT_EQ(product.d[0][1], 0x1p-149);
    EXPECT_EQ(bits_of_f32(product.d[0][1]), 1U);
    multiply_truncating(product, 16, SumType::f32);
    EXPECT_EQ(product.d[0][0], 0x1p-149);
    EXPECT_EQ(product.d[0][1], 0x1p-149);
}

TEST(Mma, NanAndInfinity) {
    using Multiply = void (*)(Product&, int, SumType);
    for (const Multiply multiply : {Multiply{multiply_exactly}, Multiply{multiply_truncating}})
        for (const SumType type : {SumType::f32, SumType::f16}) {
            Product product{};
            product.c[0][0] = NAN;
            product.c[0][1] = HUGE_VAL;
            product.a[1][0] = HUGE_VAL, product.b[0][2] = 1.0, product.b[0][3] = -2.0;  // 0 in other columns: NaN
            product.a[2][0] = -1.0, product.b[1][2] = -1.0, product.c[1][3] = HUGE_VAL;
            product.a[3][1] = 0x1p127, product.b[1][4] = 4.0;
            multiply(product, 16, type);
            EXPECT_EQ(bits_of_f32(product.d[0][0]), 0x7fffffffU);
            EXPECT_EQ(bits_of_f16(product.d[0][0]), 0x7fffU);
            EXPECT_EQ(product.d[0][1], HUGE_VAL);
            EXPECT_EQ(product.d[0][5], 0.0);
            EXPECT_TRUE(std::isnan(product.d[1][0]));
            EXPECT_EQ(product.d[1][2], HUGE_VAL);
            EXPECT_TRUE(std::isnan(product.d[1][3]));
            EXPECT_EQ(product.d[2][2], -1.0);
            EXPECT_EQ(product.d[3][4], HUGE_VAL);
        }
}

TEST(Mma, TruncatedSum) {
    Product product{};
    for (int k = 0; k < 16; ++k) product.a[0][k] = 1.0;
    for (int n = 0; n < 8; ++n) product.c[0][n] = 1.0;
    for (int k = 0; k < 16; ++k) {
        product.b[k][0] = 0x1p-25;   // each below the 24 bits behind the largest: all cut
        product.b[k][1] = 0x1p-24;   // each kept: 16 of them reach the result
        product.b[k][2] = -0x1p-25;  // cut toward zero too
        product.b[k][3] = k < 1 ? -0x1p-24 : 0.0;
    }
    multiply_truncating(product, 16, SumType::f32);
    EXPECT_EQ(product.d[0][0], 1.0);
    EXPECT_EQ(product.d[0][1], 1.0 + 0x1p-20);
    EXPECT_EQ(product.d[0][2], 1.0);
    EXPECT_EQ(product.d[0][3], 1.0 - 0x1p-24);
    multiply_exactly(product, 16, SumType::f32);
    EXPECT_EQ(product.d[0][0], 1.0 + 0x1p-21);
}

TEST(Mma, TruncatedSumIsNear) {
    std::mt19937_64 random(3);
    Product product;
    for (int repeat = 0; repeat < 200; ++repeat) {
        fill(product, random, repeat % 40);
        multiply_truncating(product, 16, SumType::f32);
        for (int row = 0; row < 16; ++row)
            for (int n = 0; n < 8; ++n) {
                double most = std::fabs(product.c[row][n]), sum = 0.0;
                for (int k = 0; k < 16; ++k) most = std::max(most, std::fabs(product.a[row][k] * product.b[k][n]));
                const double unit = std::ldexp(1.0, std::ilogb(most) - 24);
                sum = std::trunc(product.c[row][n] / unit);
                for (int k = 0; k < 16; ++k) sum += std::trunc(product.a[row][k] * product.b[k][n] / unit);
                double want = sum * unit;
                const double last = want == 0.0 ? 1.0 : std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
                want = std::trunc(want / last) * last;
                ASSERT_EQ(product.d[row][n], want);
            }
    }
}

TEST(Mma, ConversionsOfF16) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const double value = value_of_f16(bits);
        const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 0x3ff);
        if (exponent == 31 && fraction != 0) {
            ASSERT_TRUE(std::isnan(value));
            continue;
        }
        const double magnitude = exponent == 31  ? HUGE_VAL
                                 : exponent == 0 ? std::ldexp(fraction, -24)
                                                 : std::ldexp(1024 + fraction, exponent - 25);
        ASSERT_EQ(value, (bits & 0x8000) != 0 ? -magnitude : magnitude);
        ASSERT_EQ(bits_of_f16(value), bits);
    }
}

}  // namespace
}  // namespace headrace::ptx
