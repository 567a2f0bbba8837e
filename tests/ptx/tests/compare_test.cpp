// setp, set, selp, slct: all comparisons of all types, with NaNs and both zeros.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/faults.hpp"
#include "tests/lane_checks.hpp"

namespace headrace::ptx {
namespace {

using Row = std::vector<std::uint64_t>;

struct Case {
    const char* name;
    bool less, equal, greater, unordered;  // what it answers in each relation
};
const std::vector<Case> all_cases{
    {"eq", false, true, false, false}, {"ne", true, false, true, false},  {"lt", true, false, false, false},
    {"le", true, true, false, false},  {"gt", false, false, true, false}, {"ge", false, true, true, false},
    {"equ", false, true, false, true}, {"neu", true, false, true, true},  {"ltu", true, false, false, true},
    {"leu", true, true, false, true},  {"gtu", false, false, true, true}, {"geu", false, true, true, true},
    {"num", true, true, true, false},  {"nan", false, false, false, true}};

template <class T>
bool answer(const Case& compare, T a, T b) {
    if (a < b) return compare.less;
    if (a == b) return compare.equal;
    if (a > b) return compare.greater;
    return compare.unordered;
}

template <class T>
T value_of(std::uint64_t bits) {
    if constexpr (std::is_same_v<T, float>)
        return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    else if constexpr (std::is_same_v<T, double>)
        return std::bit_cast<double>(bits);
    else
        return static_cast<T>(bits);
}

template <class T>
void test_type(const std::string& type, const std::string& load, const std::string& registers, const Row& values,
               std::size_t cases) {
    for (std::size_t i = 0; i < cases; ++i) {
        check_rows<std::uint32_t>(product({values, values}), {load, load}, {registers + "21", registers + "22"},
                                  "setp." + std::string(all_cases[i].name) + "." + type + " %p1, " + registers +
                                      "21, " + registers + "22;\nselp.u32 %r9, 1, 0, %p1;",
                                  "u32", "%r9", [&](const Row& r) {
                                      return answer(all_cases[i], value_of<T>(r[0]), value_of<T>(r[1])) ? 1u : 0u;
                                  });
    }
}

const Row floats{0, 0x80000000, 1, 0x80000001, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fffffff, 0x7fc00000};

TEST(Compare, AllTypes) {
    const Row words{0, 1, 2, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff},
        shorts{0, 1, 0x7fff, 0x8000, 0xffff};
    const Row longs{0, 1, 0xffffffff, 0x7fffffffffffffff, 0x8000000000000000, ~std::uint64_t{0}};
    test_type<std::uint32_t>("u32", "u32", "%r", words, 6);
    test_type<std::int32_t>("s32", "u32", "%r", words, 6);
    test_type<std::uint32_t>("b32", "u32", "%r", words, 2);
    test_type<std::uint16_t>("u16", "u16", "%h", shorts, 6);
    test_type<std::int16_t>("s16", "u16", "%h", shorts, 6);
    test_type<std::uint64_t>("u64", "u64", "%rd", longs, 6);
    test_type<std::int64_t>("s64", "u64", "%rd", longs, 6);
    test_type<float>("f32", "f32", "%f", floats, 14);
    test_type<double>(
        "f64", "f64", "%fd",
        {0, 1ull << 63, 1, 0x3ff0000000000000, 0xbff0000000000000, 0x7ff0000000000000, 0x7ff8000000000000}, 14);
}

TEST(Compare, FlushesAndOtherNames) {
    check_rows<std::uint32_t>(product({floats, floats}), {"f32", "f32"}, {"%f1", "%f2"},
                              "setp.eq.ftz.f32 %p1, %f1, %f2;\nselp.u32 %r9, 1, 0, %p1;", "u32", "%r9",
                              [](const Row& r) {
                                  const auto flushed = [](std::uint64_t bits) {
                                      const float x = value_of<float>(bits);
                                      return std::fabs(x) < 0x1p-126f ? 0.0f : x;
                                  };
                                  return flushed(r[0]) == flushed(r[1]) ? 1u : 0u;
                              });
    check_rows<std::uint32_t>(product({{1, 2, 3}, {2}}), {"u32", "u32"}, {"%r1", "%r2"},
                              "setp.ls.u32 %p1, %r1, %r2;\nselp.u32 %r9, 1, 0, %p1;", "u32", "%r9",
                              [](const Row& r) { return r[0] <= r[1] ? 1u : 0u; });
}

TEST(Compare, HalvesAndPairs) {
    const Row halves{0, 0x8000, 1, 0x3c00, 0xbc00, 0x7c00, 0x7e00};
    const auto code = [](std::uint64_t bits) {  // an order of f16 that suffices for these values
        const int magnitude = static_cast<int>(bits & 0x7fff);
        return (bits & 0x7fff) > 0x7c00 ? std::nan("") : (bits & 0x8000) != 0 ? -magnitude : magnitude;
    };
    for (const Case& compare : all_cases) {
        check_rows<std::uint32_t>(product({halves, halves}), {"u16", "u16"}, {"%h1", "%h2"},
                                  "setp." + std::string(compare.name) + ".f16 %p1, %h1, %h2;\nselp.u32 %r9, 1, 0, %p1;",
                                  "u32", "%r9",
                                  [&](const Row& r) { return answer(compare, code(r[0]), code(r[1])) ? 1u : 0u; });
    }
    check_rows<std::uint32_t>(
        product({{0x3c000000, 0x00003c00, 0x7e003c00}, {0, 0x3c003c00}}), {"u32", "u32"}, {"%r1", "%r2"},
        "setp.eq.f16x2 %p1|%p2, %r1, %r2;\nselp.u32 %r9, 1, 0, %p1;\nselp.u32 %r8, 2, 0, %p2;\nadd.u32 %r9, %r9, %r8;",
        "u32", "%r9", [&](const Row& r) {
            return (code(r[0] & 0xffff) == code(r[1] & 0xffff) ? 1u : 0u) +
                   (code(r[0] >> 16) == code(r[1] >> 16) ? 2u : 0u);
        });
    check_rows<std::uint32_t>(product({{0x3c000000, 0x00003c00}, {0, 0x3c003c00}}), {"u32", "u32"}, {"%r1", "%r2"},
                              "set.eq.f16x2.f16x2 %r9, %r1, %r2;", "u32", "%r9", [&](const Row& r) {
                                  return (code(r[0] & 0xffff) == code(r[1] & 0xffff) ? 0x3c00u : 0u) |
                                         (code(r[0] >> 16) == code(r[1] >> 16) ? 0x3c000000u : 0u);
                              });
}

TEST(Compare, CombinationsAndPairsOfPredicates) {
    for (const std::string how : {"and", "or", "xor"}) {
        for (const bool negated : {false, true}) {
            const auto combine = [&](bool t, bool c) {
                c = c != negated;
                return how == "and" ? t && c : how == "or" ? t || c : t != c;
            };
            check_rows<std::uint32_t>(
                product({{1, 2, 3}, {2}, {0, 1}}), {"u32", "u32", "u32"}, {"%r1", "%r2", "%r3"},
                "setp.ne.u32 %p3, %r3, 0;\nsetp.lt." + how + ".s32 %p1|%p2, %r1, %r2, " + (negated ? "!" : "") +
                    "%p3;\nselp.u32 %r9, 1, 0, %p1;\nselp.u32 %r8, 2, 0, %p2;\nadd.u32 %r9, %r9, %r8;",
                "u32", "%r9", [&](const Row& r) {
                    return (combine(r[0] < r[1], r[2] != 0) ? 1u : 0u) + (combine(!(r[0] < r[1]), r[2] != 0) ? 2u : 0u);
                });
        }
    }
    check_rows<std::uint32_t>(product({{1, 3}}), {"u32"}, {"%r1"},
                              "setp.lt.u32 _|%p2, %r1, 2;\nselp.u32 %r9, 7, 8, %p2;", "u32", "%r9",
                              [](const Row& r) { return r[0] < 2 ? 8u : 7u; });
}

TEST(Compare, Set) {
    check_rows<std::uint32_t>(
        product({floats, floats}), {"f32", "f32"}, {"%f1", "%f2"}, "set.gtu.u32.f32 %r9, %f1, %f2;", "u32", "%r9",
        [](const Row& r) { return answer(all_cases[10], value_of<float>(r[0]), value_of<float>(r[1])) ? ~0u : 0u; });
    check_rows<std::uint32_t>(product({{1, 2}, {2}}), {"u32", "u32"}, {"%r1", "%r2"}, "set.eq.f32.s32 %f9, %r1, %r2;",
                              "f32", "%f9", [](const Row& r) { return r[0] == r[1] ? 0x3f800000u : 0u; });
}

TEST(Compare, Selections) {
    check_rows<std::uint64_t>(product({{5, 6}, {7}, {0, 1}}), {"u64", "u64", "u32"}, {"%rd21", "%rd22", "%r1"},
                              "setp.eq.u32 %p1, %r1, 0;\nselp.b64 %rd29, %rd21, %rd22, %p1;", "u64", "%rd29",
                              [](const Row& r) { return r[2] == 0 ? r[0] : r[1]; });
    check_rows<std::uint32_t>(product({{5}, {7}, {0, 1, 0x7fffffff, 0x80000000, 0xffffffff}}), {"u32", "u32", "u32"},
                              {"%r1", "%r2", "%r3"}, "slct.u32.s32 %r9, %r1, %r2, %r3;", "u32", "%r9",
                              [](const Row& r) { return r[2] >> 31 == 0 ? r[0] : r[1]; });
    check_rows<std::uint32_t>(product({{5}, {7}, floats}), {"u32", "u32", "f32"}, {"%r1", "%r2", "%f3"},
                              "slct.u32.f32 %r9, %r1, %r2, %f3;", "u32", "%r9",
                              [](const Row& r) { return value_of<float>(r[2]) >= 0 ? r[0] : r[1]; });
}

TEST(Compare, OnlyActiveLanes) {
    const auto result = run_lanes<std::uint32_t>(
        {{{1}, "u32", "%r1"}},
        "setp.eq.u32 %p1, %r1, 7;\nsetp.lt.u32 %p2, %r0, 9;\n@%p2 setp.eq.u32 %p1, %r1, 1;\nselp.u32 %r9, 1, 0, %p1;",
        "u32", "%r9");
    for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(result[i], i < 9 ? 1u : 0u);
}

TEST(Compare, WhatIsNotDoneIsNamed) {
    for (const char* body :
         {"setp.lt.b32 %p1, %r1, %r2;", "setp.equ.s32 %p1, %r1, %r2;", "setp.lo.s32 %p1, %r1, %r2;",
          "setp.eq.ftz.f64 %p1, %fd1, %fd2;", "setp.eq.f16x2 %p1, %r1, %r2;", "selp.b32 %rd21, %r1, %r2, %p1;"}) {
        Device device;
        EXPECT_FAULT(device.run(kernel_text(0, body), {}), "not done");
    }
}

}  // namespace
}  // namespace headrace::ptx
