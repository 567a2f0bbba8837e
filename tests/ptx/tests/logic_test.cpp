// Operations on bits: shifts beyond the width, fields beyond the ends, all tables and permutations.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/faults.hpp"
#include "tests/lane_checks.hpp"

namespace headrace::ptx {
namespace {

using Row = std::vector<std::uint64_t>;
const Row words32{0, 1, 2, 0x7fffffff, 0x80000000, 0xffffffff, 0x12345678, 0xfedcba98, 0x00ff00ff};
const Row words64{
    0, 1, 0x7fffffffffffffff, 0x8000000000000000, ~std::uint64_t{0}, 0x123456789abcdef0, 0x00000000ffffffff};
const Row counts{0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0xffffffff};

void check32(const std::string& body, const std::vector<Row>& lists,
             const std::function<std::uint64_t(const Row&)>& expect) {
    const std::vector<std::string> types{"u32", "u32", "u32", "u32"}, registers{"%r1", "%r2", "%r3", "%r4"};
    const auto count = static_cast<std::ptrdiff_t>(lists.size());
    check_rows<std::uint32_t>(product(lists), {types.begin(), types.begin() + count},
                              {registers.begin(), registers.begin() + count}, body, "u32", "%r9", expect);
}

TEST(Logic, Bitwise) {
    check32("and.b32 %r9, %r1, %r2;", {words32, words32}, [](const Row& r) { return r[0] & r[1]; });
    check32("or.b32 %r9, %r1, %r2;", {words32, words32}, [](const Row& r) { return r[0] | r[1]; });
    check32("xor.b32 %r9, %r1, %r2;", {words32, words32}, [](const Row& r) { return r[0] ^ r[1]; });
    check32("not.b32 %r9, %r1;", {words32}, [](const Row& r) { return ~r[0]; });
    check32("cnot.b32 %r9, %r1;", {words32}, [](const Row& r) { return r[0] == 0 ? 1u : 0u; });
    check32("and.b32 %r9, %r1, -16;", {words32}, [](const Row& r) { return r[0] & 0xfffffff0; });
    check_rows<std::uint16_t>(product({{0, 0xffff, 0x1234}}), {"u16"}, {"%h1"}, "not.b16 %h9, %h1;", "u16", "%h9",
                              [](const Row& r) { return ~r[0]; });
    check_rows<std::uint64_t>(product({words64, words64}), {"u64", "u64"}, {"%rd21", "%rd22"},
                              "xor.b64 %rd29, %rd21, %rd22;", "u64", "%rd29", [](const Row& r) { return r[0] ^ r[1]; });
    check32(
        "setp.gt.u32 %p1, %r1, 5;\nsetp.gt.u32 %p2, %r2, 5;\nxor.pred %p3, %p1, %p2;\nnot.pred %p4, %p3;\nand.pred "
        "%p5, %p4, %p1;\nor.pred %p6, %p5, %p3;\nselp.u32 %r9, 1, 0, %p6;",
        {words32, words32}, [](const Row& r) { return (r[0] > 5) || (r[1] > 5) ? 1u : 0u; });
}

TEST(Logic, Shifts) {
    check32("shl.b32 %r9, %r1, %r2;", {words32, counts}, [](const Row& r) { return r[1] > 31 ? 0 : r[0] << r[1]; });
    check32("shr.u32 %r9, %r1, %r2;", {words32, counts}, [](const Row& r) { return r[1] > 31 ? 0 : r[0] >> r[1]; });
    check32("shr.b32 %r9, %r1, %r2;", {words32, counts}, [](const Row& r) { return r[1] > 31 ? 0 : r[0] >> r[1]; });
    check32("shr.s32 %r9, %r1, %r2;", {words32, counts}, [](const Row& r) {
        return static_cast<std::uint64_t>(static_cast<std::int32_t>(r[0]) >> std::min<std::uint64_t>(r[1], 31));
    });
    const std::vector<std::string> types{"u64", "u32"}, registers{"%rd21", "%r2"};
    check_rows<std::uint64_t>(product({words64, counts}), types, registers, "shl.b64 %rd29, %rd21, %r2;", "u64",
                              "%rd29", [](const Row& r) { return r[1] > 63 ? 0 : r[0] << r[1]; });
    check_rows<std::uint64_t>(
        product({words64, counts}), types, registers, "shr.s64 %rd29, %rd21, %r2;", "u64", "%rd29", [](const Row& r) {
            return static_cast<std::uint64_t>(static_cast<std::int64_t>(r[0]) >> std::min<std::uint64_t>(r[1], 63));
        });
    check_rows<std::uint16_t>(
        product({{1, 0x8000, 0xffff}, counts}), {"u16", "u32"}, {"%h1", "%r2"}, "shr.s16 %h9, %h1, %r2;", "u16", "%h9",
        [](const Row& r) {
            return static_cast<std::uint64_t>(static_cast<std::int16_t>(r[0]) >> std::min<std::uint64_t>(r[1], 15));
        });
    check_rows<std::uint16_t>(product({{1, 0x8000, 0xffff}, counts}), {"u16", "u32"}, {"%h1", "%r2"},
                              "shl.b16 %h9, %h1, %r2;", "u16", "%h9",
                              [](const Row& r) { return r[1] > 15 ? 0 : r[0] << r[1]; });
}

TEST(Logic, FunnelShifts) {
    const auto both = [](const Row& r) { return r[1] << 32 | r[0]; };
    const auto clamp = [](std::uint64_t n) { return std::min<std::uint64_t>(n, 32); };
    check32("shf.l.wrap.b32 %r9, %r1, %r2, %r3;", {words32, words32, counts},
            [&](const Row& r) { return (both(r) << (r[2] & 31)) >> 32; });
    check32("shf.r.wrap.b32 %r9, %r1, %r2, %r3;", {words32, words32, counts},
            [&](const Row& r) { return both(r) >> (r[2] & 31); });
    check32("shf.l.clamp.b32 %r9, %r1, %r2, %r3;", {words32, words32, counts},
            [&](const Row& r) { return (both(r) << clamp(r[2])) >> 32; });
    check32("shf.r.clamp.b32 %r9, %r1, %r2, %r3;", {words32, words32, counts},
            [&](const Row& r) { return both(r) >> clamp(r[2]); });
}

TEST(Logic, AllTablesOfThree) {
    for (int table = 0; table < 256; table += 5) {
        check32("lop3.b32 %r9, %r1, %r2, %r3, " + std::to_string(table) + ";",
                {{0xf0f0f0f0}, {0xcccccccc}, {0xaaaaaaaa}},
                [&](const Row&) { return 0x01010101u * static_cast<unsigned>(table); });
    }
}

TEST(Logic, Permutations) {
    const Row bytes{0x03020100, 0x83828180}, more{0x07060504, 0x87868584};
    const auto byte = [](const Row& r, std::uint64_t index) { return (r[1] << 32 | r[0]) >> (8 * (index & 7)) & 0xff; };
    check32("prmt.b32 %r9, %r1, %r2, %r3;",
            {bytes, more, {0x3210, 0x7654, 0x0123, 0xba98, 0xfedc, 0x8f07, 0x5410, 0xffff3210}}, [&](const Row& r) {
                std::uint64_t result = 0;
                for (int i = 0; i < 4; ++i) {
                    const std::uint64_t selector = r[2] >> (4 * i) & 15, value = byte(r, selector);
                    result |= ((selector & 8) != 0 ? (value >> 7) * 0xff : value) << (8 * i);
                }
                return result;
            });
    const std::vector<std::pair<std::string, std::vector<std::vector<int>>>> modes{
        {"f4e", {{3, 2, 1, 0}, {4, 3, 2, 1}, {5, 4, 3, 2}, {6, 5, 4, 3}}},
        {"b4e", {{5, 6, 7, 0}, {6, 7, 0, 1}, {7, 0, 1, 2}, {0, 1, 2, 3}}},
        {"rc8", {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}}},
        {"ecl", {{3, 2, 1, 0}, {3, 2, 1, 1}, {3, 2, 2, 2}, {3, 3, 3, 3}}},
        {"ecr", {{0, 0, 0, 0}, {1, 1, 1, 0}, {2, 2, 1, 0}, {3, 2, 1, 0}}},
        {"rc16", {{1, 0, 1, 0}, {3, 2, 3, 2}, {1, 0, 1, 0}, {3, 2, 3, 2}}}};
    for (const auto& [name, table] : modes) {
        check32("prmt.b32." + name + " %r9, %r1, %r2, %r3;", {bytes, more, {0, 1, 2, 3, 4, 7}},
                [&, rows = table](const Row& r) {
                    const std::vector<int>& row = rows[r[2] & 3];
                    std::uint64_t result = 0;
                    for (std::size_t i = 0; i < 4; ++i)
                        result = result << 8 | byte(r, static_cast<std::uint64_t>(row[i]));
                    return result;
                });
    }
}

// The definition, bit by bit.
std::uint64_t field_of(std::uint64_t a, std::uint64_t position, std::uint64_t length, unsigned width, bool is_signed) {
    position &= 255;
    length &= 255;
    const std::uint64_t last = std::min<std::uint64_t>(position + length - 1, width - 1);
    const std::uint64_t sign = is_signed && length > 0 ? a >> last & 1 : 0;
    std::uint64_t result = 0;
    for (std::uint64_t i = 0; i < width; ++i) {
        const std::uint64_t bit = i < length && position + i < width ? a >> (position + i) & 1 : sign;
        result |= bit << i;
    }
    return result;
}

TEST(Logic, Fields) {
    const Row at{0, 1, 8, 31, 32, 33, 63, 64, 255, 256}, lengths{0, 1, 7, 8, 31, 32, 33, 64, 255};
    check32("bfe.u32 %r9, %r1, %r2, %r3;", {words32, at, lengths},
            [](const Row& r) { return field_of(r[0], r[1], r[2], 32, false); });
    check32("bfe.s32 %r9, %r1, %r2, %r3;", {words32, at, lengths},
            [](const Row& r) { return field_of(r[0], r[1], r[2], 32, true); });
    for (const bool is_signed : {false, true}) {
        check_rows<std::uint64_t>(product({words64, at, lengths}), {"u64", "u32", "u32"}, {"%rd21", "%r2", "%r3"},
                                  std::string("bfe.") + (is_signed ? "s" : "u") + "64 %rd29, %rd21, %r2, %r3;", "u64",
                                  "%rd29", [&](const Row& r) { return field_of(r[0], r[1], r[2], 64, is_signed); });
    }
    check32("bfi.b32 %r9, %r1, %r2, %r3, %r4;", {{0x12345678, 0xffffffff}, {0, 0xaaaaaaaa}, at, lengths},
            [](const Row& r) {
                std::uint64_t result = r[1];
                for (std::uint64_t i = 0; i < (r[3] & 255) && (r[2] & 255) + i < 32; ++i) {
                    const std::uint64_t bit = (r[2] & 255) + i;
                    result = (result & ~(std::uint64_t{1} << bit)) | (i < 32 ? r[0] >> i & 1 : 0) << bit;
                }
                return result;
            });
}

TEST(Logic, Counts) {
    check32("popc.b32 %r9, %r1;", {words32},
            [](const Row& r) { return static_cast<std::uint64_t>(std::popcount(r[0])); });
    check32("clz.b32 %r9, %r1;", {words32}, [](const Row& r) {
        return static_cast<std::uint64_t>(std::countl_zero(static_cast<std::uint32_t>(r[0])));
    });
    check32("brev.b32 %r9, %r1;", {words32}, [](const Row& r) {
        std::uint64_t result = 0;
        for (int i = 0; i < 32; ++i) result |= (r[0] >> i & 1) << (31 - i);
        return result;
    });
    const auto highest = [](std::uint64_t bits) {
        return bits == 0 ? ~0u : static_cast<std::uint32_t>(63 - std::countl_zero(bits));
    };
    check32("bfind.u32 %r9, %r1;", {words32}, [&](const Row& r) { return highest(r[0]); });
    check32("bfind.s32 %r9, %r1;", {words32},
            [&](const Row& r) { return highest((r[0] >> 31 != 0 ? ~r[0] : r[0]) & 0xffffffff); });
    check32("bfind.shiftamt.u32 %r9, %r1;", {words32},
            [&](const Row& r) { return r[0] == 0 ? ~0u : 31 - highest(r[0]); });
    check_rows<std::uint32_t>(product({words64}), {"u64"}, {"%rd21"}, "popc.b64 %r9, %rd21;", "u32", "%r9",
                              [](const Row& r) { return static_cast<std::uint64_t>(std::popcount(r[0])); });
    check_rows<std::uint32_t>(product({words64}), {"u64"}, {"%rd21"}, "clz.b64 %r9, %rd21;", "u32", "%r9",
                              [](const Row& r) { return static_cast<std::uint64_t>(std::countl_zero(r[0])); });
    check_rows<std::uint32_t>(product({words64}), {"u64"}, {"%rd21"}, "bfind.s64 %r9, %rd21;", "u32", "%r9",
                              [&](const Row& r) { return highest(r[0] >> 63 != 0 ? ~r[0] : r[0]); });
}

TEST(Logic, TestsOfFloats) {
    const Row values{0,          0x80000000, 1,          0x007fffff, 0x00800000, 0x3f800000,
                     0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001};
    const auto value = [](const Row& r) { return std::bit_cast<float>(static_cast<std::uint32_t>(r[0])); };
    const std::vector<std::pair<std::string, std::function<bool(float)>>> tests{
        {"finite", [](float x) { return std::isfinite(x); }},
        {"infinite", [](float x) { return std::isinf(x); }},
        {"number", [](float x) { return !std::isnan(x); }},
        {"notanumber", [](float x) { return std::isnan(x); }},
        {"normal", [](float x) { return std::isnormal(x) || x == 0; }},
        {"subnormal", [](float x) { return x != 0 && std::fabs(x) < 0x1p-126f; }}};
    for (const auto& [name, test] : tests) {
        check_rows<std::uint32_t>(product({values}), {"f32"}, {"%f1"},
                                  "testp." + name + ".f32 %p1, %f1;\nselp.u32 %r9, 1, 0, %p1;", "u32", "%r9",
                                  [&, holds = test](const Row& r) { return holds(value(r)) ? 1u : 0u; });
    }
}

TEST(Logic, WhatIsNotDoneIsNamed) {
    for (const char* body :
         {"fns.b32 %r1, %r2, %r3, %r4;", "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 5, %p2;", "and.u32 %r1, %r2, %r3;",
          "shf.l.b32 %r1, %r2, %r3, %r4;", "bfe.b32 %r1, %r2, %r3, %r4;"}) {
        Device device;
        EXPECT_FAULT(device.run(kernel_text(0, body), {}), "not done");
    }
}

}  // namespace
}  // namespace headrace::ptx
