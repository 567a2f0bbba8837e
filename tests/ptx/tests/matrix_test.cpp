// ldmatrix, stmatrix, movmatrix and mma in a warp: layouts of fragments, transposes, both arithmetics, faults.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "instructions/mma.hpp"
#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {
namespace {

// Four matrices of 8 x 8 in shared memory, element (r, c) of matrix m is 64 m + 8 r + c. %r1: the lane's row.
const std::string fill =
    ".shared .align 16 .b8 own[1024]; mov.u32 %r9, own; mad.lo.u32 %r1, %r0, 16, %r9; mul.lo.u32 %r2, %r0, 0x80008; "
    "add.u32 %r2, %r2, 0x10000;"
    "add.u32 %r3, %r2, 0x20002; add.u32 %r4, %r2, 0x40004; add.u32 %r5, %r2, 0x60006; st.shared.v4.u32 [%r1], "
    "{%r2,%r3,%r4,%r5};"
    "bar.warp.sync -1;";

// `registers` of each lane after the body, from %r10.
std::vector<std::uint32_t> run_matrices(const std::string& body, int registers) {
    Device device;
    const auto to = device.unwritten(static_cast<std::size_t>(registers) * 128);
    std::string text = fill + body + "mad.wide.u32 %rd9, %r0, " + std::to_string(4 * registers) + ", %rd0;";
    for (int i = 0; i < registers; ++i)
        text += "st.global.u32 [%rd9+" + std::to_string(4 * i) + "], %r" + std::to_string(10 + i) + ";";
    device.run(kernel_text(1, text), {to});
    return device.read<std::uint32_t>(to, static_cast<std::size_t>(registers) * 32);
}

std::uint32_t element(int matrix, int row, int column) {
    return static_cast<std::uint32_t>(64 * matrix + 8 * row + column);
}

TEST(Ldmatrix, Layout) {
    for (const int count : {1, 2, 4})
        for (const bool transposed : {false, true}) {
            const std::string list = count == 1 ? "{%r10}" : count == 2 ? "{%r10,%r11}" : "{%r10,%r11,%r12,%r13}";
            const std::string statement = "ldmatrix.sync.aligned.m8n8.x" + std::to_string(count) +
                                          (transposed ? ".trans" : "") + ".shared.b16 " + list + ", [%r1];";
            const auto values = run_matrices(statement, count);
            for (int lane = 0; lane < 32; ++lane)
                for (int m = 0; m < count; ++m) {
                    const int g = lane / 4, t = 2 * (lane % 4);
                    const auto low = transposed ? element(m, t, g) : element(m, g, t);
                    const auto high = transposed ? element(m, t + 1, g) : element(m, g, t + 1);
                    EXPECT_EQ(values[static_cast<std::size_t>(lane * count + m)], low | high << 16)
                        << statement << lane;
                }
        }
}

TEST(Ldmatrix, GenericAddressAndOffset) {
    const auto values = run_matrices(
        "add.u32 %r1, %r1, 128; cvt.u64.u32 %rd9, %r1; setp.ge.u32 %p1, %r0, 8; @%p1 mov.u64 %rd9, 0;"
        "cvta.shared.u64 %rd9, %rd9; ldmatrix.sync.aligned.m8n8.x1.b16 {%r10}, [%rd9+-128];",
        1);
    EXPECT_EQ(values[31], element(0, 7, 6) | element(0, 7, 7) << 16);  // only eight lanes give addresses
}

TEST(Ldmatrix, Faults) {
    const std::string load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10,%r11,%r12,%r13}, ";
    EXPECT_FAULT(run_matrices(load + "[%r1+8];", 1),
                 "lane 0 touches shared offset 8, which is not aligned to 16 bytes");
    EXPECT_FAULT(run_matrices(load + "[%r1+1024];", 1), "lane 0 touches 16 bytes at shared offset 1024");
    EXPECT_FAULT(run_matrices(load + "[%r1+512];", 1), "lane 0 reads shared offset 512, which nothing wrote");
    EXPECT_FAULT(run_matrices("st.shared.u32 [%r1], %r0;" + load + "[%r1];", 1),
                 "lane 0 race: reads shared offset 0, which warp 0 lane 0 wrote");
    EXPECT_FAULT(run_matrices(load + "[%r1]; st.shared.u32 [%r1], %r0;", 1), "race: writes shared offset 0");
    EXPECT_NO_THROW(run_matrices(load + "[%r1]; bar.warp.sync -1; st.shared.u32 [%r1], %r0;", 1));
    EXPECT_FAULT(run_matrices("mov.u64 %rd9, %rd0; ldmatrix.sync.aligned.m8n8.x1.b16 {%r10}, [%rd9];", 1),
                 "which is not in shared memory");
    EXPECT_FAULT(run_matrices("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r10,%r11}, [%r1];", 1),
                 "ldmatrix.sync.aligned.m16n16");
    EXPECT_FAULT(run_matrices("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10}, [%r1];", 1), "ldmatrix");
}

TEST(Stmatrix, InverseOfLdmatrix) {
    for (const std::string trans : {"", ".trans"})
        for (const std::string back : {"", ".trans"}) {
            const std::string list = "{%r10,%r11,%r12,%r13}";
            const std::string body = "ldmatrix.sync.aligned.m8n8.x4" + trans + ".shared.b16 " + list +
                                     ", [%r1];"
                                     "stmatrix.sync.aligned.m8n8.x4" +
                                     back + ".shared.b16 [%r1+512], " + list +
                                     "; bar.warp.sync -1;"
                                     "ld.shared.v4.u32 " +
                                     list + ", [%r1+512];";
            const auto values = run_matrices(body, 4);
            for (int row = 0; row < 32; ++row)
                for (int c = 0; c < 8; ++c) {
                    const auto word = values[static_cast<std::size_t>(4 * row + c / 2)];
                    const auto want = trans == back ? element(row / 8, row % 8, c) : element(row / 8, c, row % 8);
                    EXPECT_EQ(c % 2 == 0 ? word & 0xffff : word >> 16, want);
                }
        }
}

TEST(Movmatrix, Transposes) {
    const auto values = run_matrices(
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r11}, [%r1]; movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r11;", 1);
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = 2 * (lane % 4);
        EXPECT_EQ(values[static_cast<std::size_t>(lane)], element(0, t, g) | element(0, t + 1, g) << 16);
    }
}

// A, B and C of one mma by rows and columns, in doubles that their types hold.
struct Case {
    std::string shape, factors, result;  // "m16n8k16", "bf16", "f32"
    int rows, depth;
    double a[16][16] = {}, b[16][8] = {}, c[16][8] = {}, d[16][8] = {};
};

std::uint32_t bits16(const std::string& type, double value) {
    return type == "f16" ? bits_of_f16(value) : std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16;
}

// Registers by lane, written out from the figures of the PTX ISA; garbage in the bits of tf32 that do not count.
std::vector<std::uint32_t> fragment_a(const Case& x, int lane) {
    const int g = lane / 4, t = lane % 4;
    const auto pair = [&](int row, int k) {
        return bits16(x.factors, x.a[row][k]) | bits16(x.factors, x.a[row][k + 1]) << 16;
    };
    const auto one = [&](int row, int k) {
        return std::bit_cast<std::uint32_t>(static_cast<float>(x.a[row][k])) | 0x1abc;
    };
    if (x.factors == "tf32" && x.depth == 4) return {one(g, t), one(g + 8, t)};
    if (x.factors == "tf32") return {one(g, t), one(g + 8, t), one(g, t + 4), one(g + 8, t + 4)};
    if (x.depth == 8) return {pair(g, 2 * t), pair(g + 8, 2 * t)};
    return {pair(g, 2 * t), pair(g + 8, 2 * t), pair(g, 2 * t + 8), pair(g + 8, 2 * t + 8)};
}

std::vector<std::uint32_t> fragment_b(const Case& x, int lane) {
    const int g = lane / 4, t = lane % 4;
    const auto pair = [&](int k) { return bits16(x.factors, x.b[k][g]) | bits16(x.factors, x.b[k + 1][g]) << 16; };
    const auto one = [&](int k) { return std::bit_cast<std::uint32_t>(static_cast<float>(x.b[k][g])) | 0x0123; };
    if (x.factors == "tf32" && x.depth == 4) return {one(t)};
    if (x.factors == "tf32") return {one(t), one(t + 4)};
    if (x.depth == 8) return {pair(2 * t)};
    return {pair(2 * t), pair(2 * t + 8)};
}

std::vector<std::uint32_t> fragment_c(const Case& x, int lane) {
    const int g = lane / 4, n = 2 * (lane % 4);
    const auto one = [&](int row, int column) {
        return std::bit_cast<std::uint32_t>(static_cast<float>(x.c[row][column]));
    };
    const auto pair = [&](int row) { return bits_of_f16(x.c[row][n]) | bits_of_f16(x.c[row][n + 1]) << 16; };
    if (x.result == "f16") return {pair(g), pair(g + 8)};
    return {one(g, n), one(g, n + 1), one(g + 8, n), one(g + 8, n + 1)};
}

std::string list_of(const std::string& prefix, int first, std::size_t count) {
    std::string list = "{";
    for (std::size_t i = 0; i < count; ++i)
        list += (i == 0 ? "" : ",") + prefix + std::to_string(first + static_cast<int>(i));
    return list + "}";
}

void run_mma(Case& x, const Settings& settings) {
    Device device;
    device.settings = settings;
    std::string text =
        "mul.lo.u32 %r1, %r0, 48; cvt.u64.u32 %rd9, %r1; add.u64 %rd10, %rd9, %rd0; add.u64 %rd11, %rd9, %rd1;";
    std::vector<std::uint32_t> inputs(32 * 12), outputs;
    const std::size_t of_a = fragment_a(x, 0).size(), of_b = fragment_b(x, 0).size(), of_c = fragment_c(x, 0).size();
    for (int lane = 0; lane < 32; ++lane) {
        std::size_t next = static_cast<std::size_t>(lane) * 12;
        for (const auto& fragment : {fragment_a(x, lane), fragment_b(x, lane), fragment_c(x, lane)})
            for (const auto word : fragment) inputs[next++] = word;
    }
    const std::string c = x.result == "f32" ? "%f" : "%r", type = x.result == "f32" ? "f32" : "b32";
    for (std::size_t i = 0; i < of_a + of_b; ++i)
        text += "ld.global.b32 %r" + std::to_string(10 + i) + ", [%rd10+" + std::to_string(4 * i) + "];";
    for (std::size_t i = 0; i < of_c; ++i)
        text += "ld.global." + type + " " + c + std::to_string(20 + i) + ", [%rd10+" +
                std::to_string(4 * (i + of_a + of_b)) + "];";
    text += "mma.sync.aligned." + x.shape + ".row.col." + x.result + "." + x.factors + "." + x.factors + "." +
            x.result + " " + list_of(c, 30, of_c) + "," + list_of("%r", 10, of_a) + "," +
            list_of("%r", 10 + static_cast<int>(of_a), of_b) + "," + list_of(c, 20, of_c) + ";";
    for (std::size_t i = 0; i < of_c; ++i)
        text += "st.global." + type + " [%rd11+" + std::to_string(4 * i) + "], " + c + std::to_string(30 + i) + ";";
    const auto from = device.buffer(inputs), to = device.buffer(inputs);
    device.run(kernel_text(2, text), {from, to});
    outputs = device.read<std::uint32_t>(to, inputs.size());
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, n = 2 * (lane % 4);
        const auto* word = &outputs[static_cast<std::size_t>(lane) * 12];
        for (int i = 0; i < 4; ++i)
            x.d[g + i / 2 * 8][n + i % 2] =
                x.result == "f16" ? value_of_f16(word[i / 2] >> 16 * (i % 2)) : std::bit_cast<float>(word[i]);
    }
}

double rounded(const std::string& type, double value) {
    if (type == "f16") return std::nearbyint(value * 256.0) / 256.0;
    const std::uint32_t keep = type == "bf16" ? 0xffff0000U : 0xffffe000U;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) & keep);
}

class Mma : public testing::TestWithParam<Case> {};

TEST_P(Mma, AgainstDoubles) {
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    for (int repeat = 0; repeat < 10; ++repeat) {
        Case x = GetParam();
        for (auto& row : x.a)
            for (double& v : row) v = rounded(x.factors, normal(random));
        for (auto& row : x.b)
            for (double& v : row) v = rounded(x.factors, normal(random));
        for (auto& row : x.c)
            for (double& v : row) v = rounded(x.result == "f16" ? "f16" : "tf32", normal(random));
        for (const MmaArithmetic arithmetic : {MmaArithmetic::exact, MmaArithmetic::truncated}) {
            Settings settings;
            settings.mma = arithmetic;
            run_mma(x, settings);
            for (int row = 0; row < 16; ++row)
                for (int n = 0; n < 8; ++n) {
                    double sum = x.c[row][n], size = std::fabs(sum);  // exact: few bits of like exponents
                    for (int k = 0; k < x.depth; ++k)
                        sum += x.a[row][k] * x.b[k][n], size += std::fabs(x.a[row][k] * x.b[k][n]);
                    const double ulp = x.result == "f16" ? 0x1p-10 : 0x1p-23;
                    if (arithmetic == MmaArithmetic::exact && x.result == "f32")
                        EXPECT_EQ(x.d[row][n], static_cast<float>(sum));
                    else if (arithmetic == MmaArithmetic::exact)
                        EXPECT_LE(std::fabs(x.d[row][n] - sum), ulp / 2 * std::fabs(sum) + 0x1p-25);
                    // 17 terms are cut by less than 2^-24 of the largest, the result by less than an ulp of its own.
                    else
                        EXPECT_LE(std::fabs(x.d[row][n] - sum), ulp * std::fabs(sum) + 17 * 0x1p-24 * size + 0x1p-24);
                }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Mma,
                         testing::Values(Case{"m16n8k16", "bf16", "f32", 16, 16},
                                         Case{"m16n8k16", "f16", "f32", 16, 16}, Case{"m16n8k16", "f16", "f16", 16, 16},
                                         Case{"m16n8k8", "bf16", "f32", 16, 8}, Case{"m16n8k8", "f16", "f32", 16, 8},
                                         Case{"m16n8k8", "f16", "f16", 16, 8}, Case{"m16n8k8", "tf32", "f32", 16, 8},
                                         Case{"m16n8k4", "tf32", "f32", 16, 4}));

TEST(MmaSpecials, NanInfinityAndSubnormals) {
    Case x{"m16n8k16", "bf16", "f32", 16, 16};
    x.a[0][3] = NAN;
    x.a[1][3] = HUGE_VAL, x.b[3][0] = 1.0, x.b[3][1] = -1.0;
    x.a[2][5] = 0x1p-130, x.b[5][2] = 1.0;  // a subnormal bf16 stays what it is
    x.a[3][6] = 0x1p-70, x.b[6][3] = 0x1p-70;
    x.c[4][4] = 0x1p-149;
    for (const MmaArithmetic arithmetic : {MmaArithmetic::exact, MmaArithmetic::truncated}) {
        Settings settings;
        settings.mma = arithmetic;
        run_mma(x, settings);
        EXPECT_TRUE(std::isnan(x.d[0][0]));
        EXPECT_EQ(x.d[1][0], HUGE_VAL);
        EXPECT_EQ(x.d[1][1], -HUGE_VAL);
        EXPECT_TRUE(std::isnan(x.d[1][2]));
        EXPECT_EQ(x.d[2][2], 0x1p-130);
        EXPECT_EQ(x.d[3][3], 0x1p-140);
        EXPECT_EQ(x.d[4][4], 0x1p-149);
    }
}

TEST(MmaSpecials, Doubles) {
    Device device;
    std::vector<double> inputs(32 * 4);
    std::mt19937_64 random(3);
    std::normal_distribution<double> normal;
    for (double& x : inputs) x = normal(random);
    const auto from = device.buffer(inputs), to = device.unwritten(32 * 16);
    device.run(
        kernel_text(
            2,
            "mad.wide.u32 %rd9, %r0, 32, %rd0; mad.wide.u32 %rd10, %r0, 16, %rd1; ld.global.v2.f64 {%fd1,%fd2}, [%rd9];"
            "ld.global.v2.f64 {%fd3,%fd4}, [%rd9+16];"
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd5,%fd6}, {%fd1}, {%fd2}, {%fd3,%fd4};"
            "st.global.v2.f64 [%rd10], {%fd5,%fd6};"),
        {from, to});
    const auto out = device.read<double>(to, 64);
    const auto a = [&](int row, int k) { return inputs[static_cast<std::size_t>(4 * (4 * row + k))]; };
    const auto b = [&](int k, int n) { return inputs[static_cast<std::size_t>(4 * (4 * n + k)) + 1]; };
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 2; ++i) {
            double want = inputs[static_cast<std::size_t>(4 * lane + 2 + i)];
            for (int k = 0; k < 4; ++k) want = std::fma(a(lane / 4, k), b(k, 2 * (lane % 4) + i), want);
            EXPECT_EQ(out[static_cast<std::size_t>(2 * lane + i)], want);
        }
}

TEST(MmaSpecials, OtherFormsAreFaults) {
    const auto run = [](const std::string& statement) {
        Device device;
        device.run(kernel_text(0, statement), {});
    };
    EXPECT_FAULT(run("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
                     "{%fd0,%fd1,%fd2,%fd3},{%fd4,%fd5,%fd6,%fd7},{%fd8,%fd9},{%fd0,%fd1,%fd2,%fd3};"),
                 "mma.sync.aligned.m16n8k8");
    EXPECT_FAULT(run("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
                     "{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7},{%r0,%r1},{%r2,%r3},{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7};"),
                 "mma.sync.aligned.m8n8k4");
    EXPECT_FAULT(run("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                     "{%r0,%r1,%r2,%r3},{%r4,%r5,%r6,%r7},{%r8,%r9},{%r0,%r1,%r2,%r3};"),
                 "m16n8k32");
    Device device;
    device.block = {16, 1, 1};
    EXPECT_FAULT(device.run(kernel_text(0,
                                        ".shared .align 16 .b8 own[128]; mov.u32 %r1, own; "
                                        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];"),
                            {}),
                 "live: 0x0000ffff");
}

}  // namespace
}  // namespace headrace::ptx
