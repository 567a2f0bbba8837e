// wgmma: products of a warpgroup from registers and swizzled shared memory.
#include <gtest/gtest.h>

#include "tests/orders.hpp"
#include "tests/wgmma_kernel.hpp"

namespace headrace::ptx {
namespace {

TEST(Wgmma, Products) {
    for (const int columns : {8, 16, 48, 64, 128, 256})
        for (const bool by_rows : {false, true})
            for (const char* type : {"bf16", "f16"})
                for (const bool adds : {true, false}) {
                    Warpgroup kernel;
                    kernel.columns = columns;
                    kernel.by_rows = by_rows;
                    kernel.type = type;
                    kernel.adds = adds;
                    kernel.leading = by_rows ? 2048 : 0;
                    kernel.image_bytes = 32768;
                    Settings settings;
                    for (const auto arithmetic : {MmaArithmetic::exact, MmaArithmetic::truncated}) {
                        settings.mma = arithmetic;
                        SCOPED_TRACE(kernel.product());
                        kernel.run(settings);
                    }
                }
}

TEST(Wgmma, InAllOrders) {
    for (const Settings& settings : orders()) Warpgroup{}.run(settings);
}

// Steps along k within the rows of 128 bytes, and starts that are not the swizzle's.
TEST(Wgmma, StartAddresses) {
    for (const std::uint64_t start : {32, 64, 96, 1024, 1056, 128, 384, 2048 + 512 + 64}) {
        Warpgroup kernel;
        kernel.start = start;
        kernel.columns = 8;
        kernel.run();
        kernel.columns = 64;
        kernel.stride = 512 + 1024;
        kernel.image_bytes = 16384;
        kernel.run();
    }
    for (const std::uint64_t start : {1024, 2048, 256, 32}) {
        Warpgroup kernel;
        kernel.by_rows = true;
        kernel.start = start;
        kernel.columns = start == 32 ? 48 : 64;
        kernel.run();
        kernel.columns = 128;
        if (start == 32) continue;
        kernel.leading = 4096;
        kernel.image_bytes = 16384;
        kernel.run();
    }
}

// Products of one D in two groups; the last one starts from zero.
TEST(Wgmma, Sequences) {
    Warpgroup kernel;
    kernel.adds = false;
    kernel.before_product = kernel.product() + kernel.commit + kernel.product();
    kernel.before_wait = "wgmma.wait_group.sync.aligned 1;";
    for (const Settings& settings : orders()) kernel.run(settings);
}

TEST(Wgmma, ScaleD) {
    const std::string text = Warpgroup{}.text();
    EXPECT_EQ(element_of(text), "37.000000");
    EXPECT_EQ(element_of(replaced(text, "%rd20, %p1", "%rd20, !%p1")), "32.000000");
    // A register of D that nobody wrote matters where it is read.
    std::string unwritten = text;
    for (int i = 0; i < 8; ++i)
        unwritten = replaced(unwritten, "ld.global.f32 %d" + std::to_string(i), "ld.global.f32 %d99");
    EXPECT_EQ(element_of(replaced(unwritten, "%rd20, %p1", "%rd20, !%p1")), "32.000000");
    EXPECT_NE(element_of(unwritten).find("reads %d0, which it has not written"), std::string::npos);
}

}  // namespace
}  // namespace headrace::ptx
