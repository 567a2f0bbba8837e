// mov with packing and immediates, address spaces.
#include <gtest/gtest.h>

#include "tests/faults.hpp"
#include "tests/lane_checks.hpp"

namespace headrace::ptx {
namespace {

using Row = std::vector<std::uint64_t>;

TEST(Move, PackingAndUnpacking) {
    check_rows<std::uint64_t>(product({{0x11111111, 0xffffffff}, {0x22222222}}), {"u32", "u32"}, {"%r1", "%r2"},
                              "mov.b64 %rd29, {%r1, %r2};", "u64", "%rd29",
                              [](const Row& r) { return r[1] << 32 | r[0]; });
    check_rows<std::uint32_t>(product({{0x123456789abcdef0}}), {"u64"}, {"%rd21"},
                              "mov.b64 {%r1, %r2}, %rd21;\nsub.u32 %r9, %r1, %r2;", "u32", "%r9",
                              [](const Row& r) { return (r[0] & 0xffffffff) - (r[0] >> 32); });
    check_rows<std::uint32_t>(product({{0x123456789abcdef0}}), {"u64"}, {"%rd21"}, "mov.b64 {_, %r9}, %rd21;", "u32",
                              "%r9", [](const Row& r) { return r[0] >> 32; });
    check_rows<std::uint32_t>(product({{0x1234, 0xffff}}), {"u16"}, {"%h1"}, "mov.b32 %r9, {0, %h1};", "u32", "%r9",
                              [](const Row& r) { return r[0] << 16; });
    check_rows<std::uint16_t>(product({{0x12345678}}), {"f32"}, {"%f1"},
                              "mov.b32 {%h1, %h2}, %f1;\nsub.u16 %h9, %h2, %h1;", "u16", "%h9",
                              [](const Row& r) { return (r[0] >> 16) - (r[0] & 0xffff); });
    check_rows<std::uint64_t>(product({{0x1234567890abcdef}}), {"u64"}, {"%rd21"},
                              "mov.b64 {%h1, %h2, %h3, %h4}, %rd21;\nmov.b64 %rd29, {%h4, %h3, %h2, %h1};", "u64",
                              "%rd29", [](const Row&) { return 0xcdef90ab56781234u; });
    check_rows<std::uint64_t>(product({{0x1234567890abcdef}, {7}}), {"u64", "u64"}, {"%rd21", "%rd22"},
                              ".reg .b128 %w;\n.reg .b128 %v;\nmov.b128 %w, {%rd21, %rd22};\nmov.b128 %v, "
                              "%w;\nmov.b128 {%rd23, %rd24}, %v;\nadd.u64 %rd29, %rd23, %rd24;",
                              "u64", "%rd29", [](const Row& r) { return r[0] + r[1]; });
}

TEST(Move, ImmediatesAndPredicates) {
    const auto one = [](const std::string& body) { return run_lanes<std::uint32_t>({}, body, "u32", "%r9")[5]; };
    EXPECT_EQ(one("mov.u32 %r9, -1;"), ~0u);
    EXPECT_EQ(one("mov.u32 %r9, 0x1F;"), 31u);
    EXPECT_EQ(one("mov.u32 %r9, 017;"), 15u);
    EXPECT_EQ(one("mov.u32 %r9, 0b101;"), 5u);
    EXPECT_EQ(one("mov.u32 %r9, WARP_SZ;"), 32u);
    EXPECT_EQ(one("mov.f32 %f1, 0fBF800000;\nmov.b32 %r9, %f1;"), 0xbf800000u);
    EXPECT_EQ(one("mov.f32 %f1, 1.5;\nmov.b32 %r9, %f1;"), 0x3fc00000u);
    EXPECT_EQ(one("mov.pred %p1, 1;\nmov.pred %p2, %p1;\nselp.u32 %r9, 3, 4, %p2;"), 3u);
    EXPECT_EQ(one("mov.u32 %r9, %lanemask_ge;"), 0xffffffe0u);
    EXPECT_EQ(one("mov.u32 %r9, %nwarpid;"), 64u);
    EXPECT_EQ(one("{\n.reg .b32 %r1;\nmov.u32 %r1, 4;\n{\n.reg .b32 %r1;\nmov.u32 %r1, 5;\nmov.u32 %r9, "
                  "%r1;\n}\nadd.u32 %r9, %r9, %r1;\n}"),
              9u);
}

TEST(Move, AddressSpaces) {
    Device device;
    const std::uint64_t out = device.buffer(std::vector<std::uint32_t>(4));
    device.block = {1, 1, 1};
    device.run(
        kernel_text(
            1, R"(
        mov.u32 %r1, s;
        cvt.u64.u32 %rd10, %r1;
        cvta.shared.u64 %rd11, %rd10;
        mov.u32 %r2, 1234;
        st.u32 [%rd11+4], %r2;
        ld.shared.u32 %r3, [s+4];
        isspacep.shared %p1, %rd11;
        isspacep.global %p2, %rd0;
        isspacep.shared %p3, %rd0;
        isspacep.local %p4, %rd11;
        cvta.to.shared.u64 %rd12, %rd11;
        sub.u64 %rd13, %rd12, %rd10;
        cvt.u32.u64 %r4, %rd13;
        selp.u32 %r5, 1, 0, %p1;
        selp.u32 %r6, 2, 0, %p2;
        selp.u32 %r7, 4, 0, %p3;
        selp.u32 %r8, 8, 0, %p4;
        add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r7; add.u32 %r5, %r5, %r8;
        mov.u64 %rd14, table;
        ld.global.u32 %r9, [table+4];
        st.global.v4.u32 [%rd0], {%r3, %r4, %r5, %r9};)",
            ".shared .align 8 .b8 pad[24];\n.shared .align 8 .b8 s[8];\n.global .align 4 .u32 table[2] = {7, 9};"),
        {out});
    EXPECT_EQ(device.read<std::uint32_t>(out, 4), (std::vector<std::uint32_t>{1234, 0, 3, 9}));
    EXPECT_FAULT(device.run(kernel_text(1, "cvta.to.shared.u64 %rd10, %rd0;"), {out}), "not of that space");
}

TEST(Move, WhatIsNotDoneIsNamed) {
    for (const char* body : {"cvt.f32.f64 %f1, %fd1;", "cvt.rn.s32.f32 %r1, %f1;", "cvt.s32.f32 %r1, %f1;",
                             "cvt.rn.f64.f32 %fd1, %f1;", "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;",
                             "cvt.rni.f16.f32 %h1, %f1;", "mov.u32 %r1, %clock;", "mov.u64 %rd10, %tid.x;",
                             "mov.u32 %rd10, %r1;", "cvta.param.u64 %rd10, %rd11;", "isspacep.const %p1, %rd10;"}) {
        Device device;
        const std::string fault = fault_of([&] { device.run(kernel_text(0, body), {}); });
        EXPECT_NE(fault, "no fault") << body;
        EXPECT_NE(fault.find("PTX line"), std::string::npos) << fault;
    }
}

}  // namespace
}  // namespace headrace::ptx
