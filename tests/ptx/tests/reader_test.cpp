// read_module: what nvcc writes, scopes, labels, variables; what is not understood is a Fault with its line.
#include <gtest/gtest.h>

#include "tests/faults.hpp"
#include "text/module.hpp"

namespace headrace::ptx {
namespace {

constexpr const char* head = ".version 9.0\n.target sm_80, debug\n.address_size 64\n";

Module read(const std::string& text) { return read_module(head + text); }
Function read_body(const std::string& body) { return read(".entry k()\n{\n" + body + "\n}\n").functions.at(0); }

TEST(Reader, EntriesAndParameters) {
    const Module module = read(R"(
        .file 1 "a.cu"
        .visible .entry first(.param .u64 .ptr .global .align 16 a,
            .param .u32 b, .param .align 8 .b8 c[48], .param .u8 d, .param .f64 e)
        .maxntid 128, 2, 1
        .minnctapersm 2
        { .loc 1 3 4
          ret; }
        .weak .entry second() .reqntid 64 { exit; }
    )");
    EXPECT_EQ(module.version, "9.0");
    EXPECT_EQ(module.target, "sm_80");
    ASSERT_EQ(module.functions.size(), 2u);
    const Function& first = module.functions[0];
    EXPECT_EQ(first.max_threads, 256);
    ASSERT_EQ(first.parameters.size(), 5u);
    EXPECT_EQ(first.parameters[0].offset, 0u);
    EXPECT_EQ(first.parameters[1].offset, 8u);
    EXPECT_EQ(first.parameters[2].offset, 16u);
    EXPECT_EQ(first.parameters[2].bytes, 48u);
    EXPECT_EQ(first.parameters[3].offset, 64u);
    EXPECT_EQ(first.parameters[4].offset, 72u);
    EXPECT_EQ(first.parameter_bytes, 80u);
    EXPECT_EQ(module.functions[1].required_threads, 64);
}

TEST(Reader, Variables) {
    const Module module = read(R"(
        .const .align 4 .b8 table[8] = {0, 0, 128, 63, -1, 0, 0, 64};
        .global .align 4 .u32 counter = 3;
        .global .align 8 .f64 open[] = {0d3FF0000000000000, 0d4000000000000000};
        .global .align 8 .b8 big[800];
        .extern .shared .align 16 .b8 dynamic[];
        .shared .align 4 .b8 unused[100];
        .entry k() {
            .shared .align 4 .b8 s[10];
            .shared .align 8 .b8 t[8];
            .local .align 16 .b8 depot[96];
            .reg .b32 %r<2>;
            .reg .b64 %rd<2>;
            mov.u32 %r0, s;
            mov.u32 %r1, dynamic;
            mov.u64 %rd1, counter;
        })");
    ASSERT_EQ(module.variables.size(), 4u);
    EXPECT_EQ(module.variables[0].space, Space::constant);
    EXPECT_EQ(std::to_integer<int>(module.variables[0].contents[4]), 255);
    EXPECT_EQ(module.variables[1].contents.size(), 4u);
    EXPECT_EQ(module.variables[2].bytes, 16u);
    EXPECT_EQ(module.variables[3].bytes, 800u);
    const Function& k = module.functions[0];
    ASSERT_EQ(k.shared.size(), 3u);
    EXPECT_EQ(k.shared[1].offset, 16u);
    EXPECT_TRUE(k.shared[2].external);
    EXPECT_EQ(k.shared[2].offset, 32u);
    EXPECT_EQ(k.shared_bytes, 32u);
    EXPECT_EQ(k.local_bytes, 96u);
}

TEST(Reader, OperandsOfAllKinds) {
    const Function k = read_body(R"(
        .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .f32 %f<9>;
        @!%p1 ld.global.L1::no_allocate.L2::128B.v4.f32 {%f1, %f2, _, %f4}, [%rd1+-16];
        shfl.sync.bfly.b32 %r1|%p2, %r2, 1, 31, -1;
        setp.lt.and.f32 %p1|_, %f1, 0f3F800000, !%p2; // comment
        /* more
           lines */ mov.u32 %r3, %tid.x;
        st.shared.b32 [16], 0d3FF0000000000000;
        ld.global.u32 %r1, [%rd1-8];)");
    ASSERT_EQ(k.statements.size(), 6u);
    const Statement& load = k.statements[0];
    EXPECT_EQ(load.opcode, "ld");
    EXPECT_EQ(load.modifiers, (std::vector<std::string>{"global", "L1::no_allocate", "L2::128B", "v4", "f32"}));
    EXPECT_TRUE(load.guarded && load.guard.negated);
    EXPECT_EQ(load.operands[0].kind, Operand::Kind::vector);
    EXPECT_EQ(load.operands[0].parts[2].kind, Operand::Kind::sink);
    EXPECT_EQ(load.operands[1].kind, Operand::Kind::address);
    EXPECT_EQ(static_cast<std::int64_t>(load.operands[1].bits), -16);
    EXPECT_EQ(load.type(), Type::f32);
    EXPECT_EQ(k.statements[1].operands[0].kind, Operand::Kind::pair);
    EXPECT_EQ(k.statements[1].operands[4].bits, ~std::uint64_t{0});
    EXPECT_TRUE(k.statements[2].operands[3].negated);
    EXPECT_EQ(k.statements[2].operands[2].bits, 0x3f800000u);
    EXPECT_EQ(k.statements[2].operands[2].literal, Type::f32);
    EXPECT_EQ(k.statements[3].operands[1].kind, Operand::Kind::special);
    EXPECT_EQ(k.statements[3].line, 12);
    EXPECT_EQ(k.statements[4].operands[0].parts[0].bits, 16u);
    EXPECT_EQ(static_cast<std::int64_t>(k.statements[5].operands[1].bits), -8);
}

TEST(Reader, ScopesHideRegistersAndLabels) {
    const Function k = read_body(R"(
        .reg .b32 t, %r<3>; .reg .pred p;
        { .reg.b32 t; L: mov.u32 t, 1; bra L; bra OUT; }
        { .reg .b64 t; L: mov.u64 t, 1; { @p bra L; } }
        mov.u32 t, 2;
        OUT: ret;)");
    ASSERT_EQ(k.statements.size(), 7u);
    EXPECT_EQ(k.registers[static_cast<std::size_t>(k.statements[0].operands[0].index)].type, Type::b32);
    EXPECT_NE(k.statements[0].operands[0].index, k.statements[5].operands[0].index);
    EXPECT_EQ(k.statements[1].operands[0].index, 0);
    EXPECT_EQ(k.statements[2].operands[0].index, 6);
    EXPECT_EQ(k.registers[static_cast<std::size_t>(k.statements[3].operands[0].index)].type, Type::b64);
    EXPECT_EQ(k.statements[4].operands[0].index, 3);
}

TEST(Reader, TablesOfLabels) {
    const Function k = read_body(".reg .b32 %r<2>;\nbrx.idx %r1, T;\nT: .branchtargets A, B, A;\nA: ret;\nB: exit;");
    const Operand& table = k.statements[0].operands[1];
    ASSERT_EQ(table.parts.size(), 3u);
    EXPECT_EQ(table.parts[1].kind, Operand::Kind::label);
    EXPECT_EQ(table.parts[1].index, 2);
}

TEST(Reader, FaultsNameTheLine) {
    EXPECT_FAULT(read_body("bra NOWHERE;"), "PTX line 6: no label NOWHERE");
    EXPECT_FAULT(read_body(".reg .b64 %rd1;\nmov.u64 %rd1, unknown;"), "PTX line 7: nothing is called unknown");
    EXPECT_FAULT(read(".global .u64 p = generic(x);"), "an initialiser that is not a number");
    EXPECT_FAULT(read(".func f() { ret; }"), "device functions");
    EXPECT_FAULT(read(".entry k() { .sreg .b32 x; }"), "a directive that is not done");
    EXPECT_FAULT(read(".entry k() { .reg .b33 x; }"), "not a type");
    EXPECT_FAULT(read(".entry k() { ret; "), "before the end");
    EXPECT_FAULT(read_body(".reg .b32 %r1, %r1;"), "a second register");
    EXPECT_FAULT(read_body(".reg .b32 %r1;\nmov.u32 %r1, 0f12;"), "0f wants 8 digits");
    EXPECT_FAULT(read_body("A: ret;\nA: ret;"), "a second label A");
    EXPECT_FAULT(read_body(".reg .b32 %r1;\nmov.u32 %r1, 18446744073709551616;"), "above 64 bits");
    EXPECT_FAULT(read_body("ret"), "expected a name");
    EXPECT_FAULT(read("\x01"), "not understood");
}

}  // namespace
}  // namespace headrace::ptx
