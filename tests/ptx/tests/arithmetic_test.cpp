// Arithmetic of integers against 128-bit arithmetic of the host.
#include "tests/faults.hpp"
#include "tests/pairs.hpp"

namespace headrace::ptx {
namespace {

__extension__ typedef __int128 Int128;

template <class T>
std::vector<std::uint64_t> integers() {
    std::vector<std::uint64_t> values;
    using U = std::make_unsigned_t<T>;
    const U top = static_cast<U>(U{1} << (8 * sizeof(T) - 1));
    for (const U value :
         {U{0}, U{1}, U{2}, U{3}, U{7}, U{31}, U{32}, U{33}, U{255}, static_cast<U>(~U{0}), static_cast<U>(~U{0} - 1),
          top, static_cast<U>(top - 1), static_cast<U>(top + 1), static_cast<U>(0x1234567890abcdefu),
          static_cast<U>(0xfedcba0987654321u), static_cast<U>(0x00800080u)}) {
        values.push_back(value);
    }
    return values;
}

template <class T>
struct Integer {
    static constexpr int bits = 8 * sizeof(T);
    using U = std::make_unsigned_t<T>;
    static std::string name() { return (std::is_signed_v<T> ? ".s" : ".u") + std::to_string(bits); }
    static Pairs pairs() {
        return {integers<T>(), "u" + std::to_string(bits), bits == 16 ? "%h" : bits == 32 ? "%r" : "%rd"};
    }
    // f(a, b) as exact 128-bit integers; the result is cut.
    static void test(const std::string& body, const std::function<Int128(Int128, Int128)>& f) {
        for_pairs<U>(pairs(), body, "u" + std::to_string(bits), pairs().registers + "20",
                     [&](std::uint64_t a, std::uint64_t b, std::uint64_t result) {
                         return expected(result, static_cast<U>(f(static_cast<T>(a), static_cast<T>(b))));
                     });
    }
};

template <class T>
class Integers : public ::testing::Test {};
using IntegerTypes =
    ::testing::Types<std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t>;
TYPED_TEST_SUITE(Integers, IntegerTypes);

TYPED_TEST(Integers, PlainForms) {
    using I = Integer<TypeParam>;
    const std::string t = I::name();
    constexpr int bits = I::bits;
    I::test("add" + t + " $d, $a, $b;", [](Int128 a, Int128 b) { return a + b; });
    I::test("sub" + t + " $d, $a, $b;", [](Int128 a, Int128 b) { return a - b; });
    I::test("mul.lo" + t + " $d, $a, $b;", [](Int128 a, Int128 b) {
        return static_cast<Int128>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    });
    const auto high = [](Int128 a, Int128 b) -> Int128 {
        if constexpr (std::is_same_v<TypeParam, std::uint64_t>) {
            __extension__ typedef unsigned __int128 UInt128;
            return static_cast<Int128>((static_cast<UInt128>(a) * static_cast<UInt128>(b)) >> 64);
        }
        return (a * b) >> bits;
    };
    I::test("mul.hi" + t + " $d, $a, $b;", high);
    I::test("mad.lo" + t + " $d, $a, $b, $a;", [](Int128 a, Int128 b) {
        return static_cast<Int128>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b)) + a;
    });
    I::test("mad.hi" + t + " $d, $a, $b, $b;", [&](Int128 a, Int128 b) { return high(a, b) + b; });
    I::test("min" + t + " $d, $a, $b;", [](Int128 a, Int128 b) { return a < b ? a : b; });
    I::test("max" + t + " $d, $a, $b;", [](Int128 a, Int128 b) { return a > b ? a : b; });
    I::test("sad" + t + " $d, $a, $b, $a;", [](Int128 a, Int128 b) { return a + (a < b ? b - a : a - b); });
    // The divisor is made odd, so that it is never zero.
    const std::string r = I::pairs().registers;
    const std::string odd = "or.b" + std::to_string(bits) + " " + r + "22, $b, 1;\n";
    I::test(odd + "div" + t + " $d, $a, " + r + "22;", [](Int128 a, Int128 b) { return a / (b | 1); });
    I::test(odd + "rem" + t + " $d, $a, " + r + "22;", [](Int128 a, Int128 b) { return a % (b | 1); });
    if constexpr (std::is_signed_v<TypeParam>) {
        I::test("neg" + t + " $d, $a;", [](Int128 a, Int128) { return -a; });
        I::test("abs" + t + " $d, $b;", [](Int128, Int128 b) { return b < 0 ? -b : b; });
    }
}

TEST(Integers32, WideSaturatedAndNarrow) {
    const Pairs s{integers<std::int32_t>(), "u32", "%r"};
    const auto wide = [](bool is_signed) {
        return [is_signed](std::uint64_t a, std::uint64_t b, std::uint64_t result) {
            const auto x = static_cast<std::int32_t>(a), y = static_cast<std::int32_t>(b);
            return expected(result, is_signed ? static_cast<std::uint64_t>(std::int64_t{x} * y) : a * b);
        };
    };
    for_pairs<std::uint64_t>(s, "mul.wide.s32 $d, $a, $b;", "u64", "%rd20", wide(true));
    for_pairs<std::uint64_t>(s, "mul.wide.u32 $d, $a, $b;", "u64", "%rd20", wide(false));
    for_pairs<std::uint64_t>(
        s, "mov.u64 %rd21, 5;\nmad.wide.u32 $d, $a, $b, %rd21;", "u64", "%rd20",
        [](std::uint64_t a, std::uint64_t b, std::uint64_t result) { return expected(result, a * b + 5); });
    const auto clamp = [](std::int64_t value) {
        return static_cast<std::uint32_t>(std::min<std::int64_t>(std::max<std::int64_t>(value, INT32_MIN), INT32_MAX));
    };
    Integer<std::int32_t>::test("add.sat.s32 $d, $a, $b;",
                                [&](Int128 a, Int128 b) { return clamp(static_cast<std::int64_t>(a + b)); });
    Integer<std::int32_t>::test("sub.sat.s32 $d, $a, $b;",
                                [&](Int128 a, Int128 b) { return clamp(static_cast<std::int64_t>(a - b)); });
    Integer<std::int32_t>::test("mul24.lo.s32 $d, $a, $b;", [](Int128 a, Int128 b) {
        const auto cut = [](Int128 x) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) << 8) >> 8; };
        return static_cast<Int128>(cut(a)) * cut(b);
    });
    Integer<std::uint32_t>::test("mul24.hi.u32 $d, $a, $b;",
                                 [](Int128 a, Int128 b) { return ((a & 0xffffff) * (b & 0xffffff)) >> 16; });
    Integer<std::uint32_t>::test("dp4a.s32.u32 $d, $a, $b, $a;", [](Int128 a, Int128 b) {
        Int128 sum = a;
        for (int i = 0; i < 4; ++i)
            sum +=
                static_cast<Int128>(static_cast<std::int8_t>(a >> (8 * i))) * static_cast<std::uint8_t>(b >> (8 * i));
        return sum;
    });
}

TEST(Integers64, Carries) {
    // 128-bit sums and differences, (a, b) and (b, a).
    const Pairs pairs{integers<std::uint64_t>(), "u64", "%rd"};
    __extension__ typedef unsigned __int128 UInt128;
    const auto whole = [](std::uint64_t high, std::uint64_t low) { return static_cast<UInt128>(high) << 64 | low; };
    for_pairs<std::uint64_t>(pairs, "add.cc.u64 %rd20, $a, $b;\naddc.u64 $d, $b, $a;", "u64", "%rd21",
                             [&](auto a, auto b, auto result) {
                                 return expected(result, static_cast<std::uint64_t>((whole(b, a) + whole(a, b)) >> 64));
                             });
    for_pairs<std::uint64_t>(pairs, "sub.cc.u64 %rd20, $a, $b;\nsubc.u64 $d, $b, $a;", "u64", "%rd21",
                             [&](auto a, auto b, auto result) {
                                 return expected(result, static_cast<std::uint64_t>((whole(b, a) - whole(a, b)) >> 64));
                             });
    const Pairs narrow{integers<std::uint32_t>(), "u32", "%r"};
    for_pairs<std::uint32_t>(
        narrow, "mad.lo.cc.u32 %r1, $a, $b, $b;\nmadc.hi.cc.u32 $d, $a, $b, $a;\naddc.u32 %r3, $a, $b;", "u32", "%r2",
        [&](std::uint64_t a, std::uint64_t b, auto result) {
            return expected(result, static_cast<std::uint32_t>((static_cast<UInt128>(a) * b + (a << 32) + b) >> 32));
        });
}

TEST(IntegerFaults, DivisionByZero) {
    EXPECT_FAULT(
        run_lanes<std::uint32_t>({{{3}, "u32", "%r1"}, {{0}, "u32", "%r2"}}, "div.u32 %r3, %r1, %r2;", "u32", "%r3"),
        "division by zero");
    EXPECT_FAULT(run_lanes<std::uint64_t>({{{3}, "u64", "%rd21"}, {{0}, "u64", "%rd22"}},
                                          "rem.s64 %rd23, %rd21, %rd22;", "u64", "%rd23"),
                 "division by zero");
}

}  // namespace
}  // namespace headrace::ptx
