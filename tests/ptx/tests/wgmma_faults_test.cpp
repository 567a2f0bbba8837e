// wgmma: each rule about registers, shared memory, the proxy and the warpgroup, broken once.
#include <gtest/gtest.h>

#include "tests/orders.hpp"
#include "tests/wgmma_kernel.hpp"

namespace headrace::ptx {
namespace {

void expect_fault(const Warpgroup& kernel, const std::string& words) {
    SCOPED_TRACE(kernel.text());
    for (const Settings& settings : orders())
        if (!::testing::Test::HasFailure()) EXPECT_FAULT(kernel.run(settings), words);
}

std::string zeros(const std::string& name, int first, int count) {
    std::string text;
    for (int i = first; i < first + count; ++i) text += "mov.b32 %" + name + std::to_string(i) + ", 0;";
    return text;
}

TEST(WgmmaFaults, RegistersInFlight) {
    Warpgroup kernel;
    for (std::string* const place : {&kernel.before_commit, &kernel.before_wait}) {
        kernel = {};
        *place = "mov.f32 %f1, %d3;";
        expect_fault(kernel, "reads %d3 while the wgmma of line ");
        *place = "mov.f32 %d3, 0f00000000;";
        expect_fault(kernel, "writes %d3 while the wgmma of line ");
        *place = "add.u32 %r12, %r12, 1;";
        expect_fault(kernel, "writes %r12 while the wgmma of line ");
        *place = "add.u32 %r21, %r12, 1;";  // a read of A
        for (const Settings& settings : orders()) kernel.run(settings);
        *place = "setp.eq.u32 %p2, %r0, 128; @%p2 mov.f32 %d3, 0f00000000;";  // in no lane
        kernel.run();
        *place = "setp.eq.u32 %p2, %r0, 5; @%p2 mov.f32 %d3, 0f00000000;";
        expect_fault(kernel, "writes %d3 while");
    }
    kernel = {};
    kernel.wait = "wgmma.wait_group.sync.aligned 1;";
    expect_fault(kernel, "reads %d0 while the wgmma of line ");
    kernel = {};
    kernel.commit = "";
    expect_fault(kernel, "reads %d0 while the wgmma of line ");
    kernel = {};
    kernel.before_wait = kernel.product(4);
    kernel.before_fence = zeros("d", 8, 4);
    expect_fault(kernel, "accumulates to %d4 while the wgmma of line ");
    kernel = {};
    kernel.before_fence = zeros("r", 31, 4) + zeros("d", 8, 8);
    kernel.before_product = "mov.b32 %r31, 0;" + kernel.product(8, 31);
    expect_fault(kernel, "has %r31 in A, which line ");
}

// A group of its own for each of two products.
TEST(WgmmaFaults, Groups) {
    Warpgroup kernel;
    kernel.before_fence = zeros("r", 31, 4) + zeros("d", 100, 8);
    kernel.before_product = kernel.product(100, 31) + kernel.commit;
    kernel.before_wait = "wgmma.wait_group.sync.aligned 1; mov.f32 %f1, %d100; mov.u32 %r31, 1;";
    for (const Settings& settings : orders()) kernel.run(settings);
    kernel.before_wait = "wgmma.wait_group.sync.aligned 1; mov.f32 %f1, %d0;";
    expect_fault(kernel, "reads %d0 while the wgmma of line ");
    kernel.before_wait = "wgmma.wait_group.sync.aligned 2; mov.f32 %f1, %d100;";
    expect_fault(kernel, "reads %d100 while the wgmma of line ");
}

TEST(WgmmaFaults, RegistersWithoutAFence) {
    Warpgroup kernel;
    kernel.fence = "";
    expect_fault(kernel, "the warp's first wgmma.mma_async, and no wgmma.fence before it");
    kernel.at_start = "wgmma.fence.sync.aligned;";
    expect_fault(kernel, "which line ");
    kernel = {};
    kernel.before_product = "mov.f32 %d5, 0f00000000;";
    expect_fault(kernel, "accumulates to %d5, which line ");
    kernel.before_product = "mov.f32 %f1, %d5;";
    expect_fault(kernel, "accumulates to %d5, which line ");
    kernel.before_product = "mov.u32 %r11, 0;";
    expect_fault(kernel, "has %r11 in A, which line ");
    kernel.before_product = "mov.u32 %r21, %r11;";
    kernel.run();
    // Again with the same D: no fence; behind an access: one.
    const std::string more = kernel.product() + kernel.commit + kernel.wait;
    kernel = {};
    kernel.adds = false;
    kernel.after_wait = more;
    kernel.run();
    kernel.after_wait = "mov.f32 %f1, %d7;" + more;
    expect_fault(kernel, "accumulates to %d7, which line ");
    kernel.after_wait = "mov.f32 %f1, %d7;" + kernel.fence + more;
    kernel.run();
    Warpgroup narrow;
    narrow.columns = 8;
    kernel.after_wait = narrow.product() + kernel.commit + kernel.wait;
    expect_fault(kernel, "of another shape did; no wgmma.fence lies between");
    kernel.after_wait = kernel.fence + narrow.product() + kernel.commit + kernel.wait;
    kernel.run();
}

TEST(WgmmaFaults, SharedMemory) {
    Warpgroup kernel;
    kernel.stride = 8192;
    expect_fault(
        kernel,
        "touches 16 bytes at shared offset 8192, outside the block's 8192 bytes of shared memory (B at k 0, n 8)");
    kernel = {};
    kernel.barrier = "";
    expect_fault(kernel, " reads shared offset ");  // a race, or nothing wrote it yet
    kernel.barrier = "bar.warp.sync -1;";
    expect_fault(kernel, " reads shared offset ");
    // Overwritten behind a barrier, or without one, while it is read.
    kernel = {};
    kernel.before_wait = "bar.sync 0; st.shared.u32 [%r30], %r2; bar.sync 0;";
    expect_fault(kernel, " since it was issued");
    kernel.before_wait = "bar.sync 0; st.shared.u32 [%r30], %r2;";
    expect_fault(kernel, " shared offset ");  // written since, or a race
    kernel.before_wait = "";
    kernel.after_wait = "st.shared.u32 [%r30], %r2;";
    expect_fault(kernel, "race: ");
    kernel.after_wait = "bar.sync 0; st.shared.u32 [%r30], %r2;";
    for (const Settings& settings : orders()) kernel.run(settings);
    // Never written; in flight.
    const std::string larger = replaced(Warpgroup{}.text(), "own[8192]", "own[9216]");
    const std::string fault =
        element_of(replaced(larger, "mov.u64 %rd20, ", "mov.u64 %rd20, 512; add.u64 %rd20, %rd20, "));
    expect_words(fault, {"reads shared offset 8192, which nothing wrote (B at k 0, n 0)"});
    kernel = {};
    kernel.before_fence = "bar.sync 0; cp.async.cg.shared.global [%r30], [%rd12], 16; bar.sync 0;";
    expect_fault(kernel, " is in flight to it");
}

TEST(WgmmaFaults, AsyncProxy) {
    const char* const words = "; no fence.proxy.async of that thread lies between the write and what orders it";
    Warpgroup kernel;
    kernel.proxy = "";
    expect_fault(kernel, words);
    kernel.before_proxy = "bar.sync 0;";
    kernel.proxy = "@%p4 fence.proxy.async;";
    kernel.at_start = "setp.lt.u32 %p4, %r0, 32;";
    expect_fault(kernel, words);
    // By all lanes but one; by all; before the write; behind the barrier, by the reader.
    kernel = {};
    kernel.at_start = "setp.ne.u32 %p4, %r0, 0;";
    kernel.proxy = "@%p4 fence.proxy.async.shared::cta;";
    expect_fault(kernel, "which warp 0 lane 0 wrote at line ");
    kernel.proxy = "fence.proxy.async.shared::cta;";
    kernel.run();
    kernel.proxy = "";
    kernel.at_start = "fence.proxy.async;";
    expect_fault(kernel, words);
    kernel.before_fence = "fence.proxy.async;";
    for (const Settings& settings : orders()) kernel.run(settings);
    // A fence behind the barrier by others than the reader's warp.
    kernel.before_fence = "setp.ge.u32 %p4, %r0, 32; @%p4 fence.proxy.async;";
    expect_fault(kernel, words);
    // cp.async: behind its landing.
    kernel = {};
    kernel.before_proxy = "bar.sync 0; cp.async.cg.shared.global [%r30], [%rd12], 16; cp.async.wait_all;";
    for (const Settings& settings : orders()) kernel.run(settings);
    kernel.before_proxy = "bar.sync 0; cp.async.cg.shared.global [%r30], [%rd12], 16;";
    kernel.barrier = "cp.async.wait_all; bar.sync 0;";
    expect_fault(kernel, words);
    Settings settings;
    settings.races = false;
    kernel.run(settings);
}

TEST(WgmmaFaults, Warpgroup) {
    Warpgroup kernel;
    kernel.before_product = "setp.lt.u32 %p2, %r0, 32; @%p2 bra SKIP;";
    kernel.before_commit = "SKIP:";
    expect_fault(kernel, "of its warpgroup");
    kernel = {};
    kernel.before_product = "setp.ge.u32 %p2, %r0, 96; @%p2 bra OTHER;";
    kernel.before_commit = "bra.uni BOTH;\nOTHER:\n" + kernel.product() + "\nBOTH:";
    expect_fault(kernel, "wgmma number 1 of the warp is another than that of warp ");
    kernel = {};
    kernel.before_product = "setp.eq.u32 %p2, %r0, 96; @%p2 bra SKIP;";
    kernel.before_commit = "SKIP:";
    for (const Settings& settings : orders()) EXPECT_FAULT(kernel.run(settings), "for all lanes of the warp");
    kernel = {};
    kernel.before_product = "setp.lt.u32 %p2, %r0, 32; @%p2 add.u64 %rd20, %rd20, 2;";
    kernel.stride = 1024;
    expect_fault(kernel, "has another descriptor than that of warp ");
    kernel.before_product = "setp.eq.u32 %p2, %r0, 5; @%p2 add.u64 %rd20, %rd20, 2;";
    expect_fault(kernel, "have different descriptors of B");
    kernel.before_product = "setp.lt.u32 %p1, %r0, 32;";
    expect_fault(kernel, "has another scale-d than that of warp ");
    kernel.before_product = "setp.eq.u32 %p1, %r0, 5;";
    expect_fault(kernel, "the predicate scale-d is true in a part of the lanes only");
    kernel = {};
    kernel.block = 160;
    kernel.at_start = "setp.lt.u32 %p2, %r0, 128; @%p2 bra GO; ret;\nGO:";
    kernel.run();
    kernel.at_start =
        "setp.ge.u32 %p2, %r0, 32; @%p2 bra GO; ret;\nGO: sub.u32 %r0, %r0, 32;\n"
        "mad.lo.u32 %r30, %r0, 16, %r1; mad.wide.u32 %rd12, %r0, 16, %rd1;";
    for (const Settings& settings : orders()) EXPECT_FAULT(kernel.run(settings), "warpgroup");
    kernel.block = 96;
    kernel.at_start = "";
    EXPECT_FAULT(kernel.run(), "a warpgroup of 3 warps: the block ends within it");
}

TEST(WgmmaFaults, KernelEnd) {
    Warpgroup kernel;
    kernel.after_wait = kernel.product(100, 31) + "ret;";
    kernel.before_fence = zeros("r", 31, 4) + zeros("d", 100, 8);
    expect_fault(kernel, "is in flight, not committed");
    kernel.after_wait = kernel.product(100, 31) + kernel.commit + "ret;";
    expect_fault(kernel, "ends while the wgmma of line ");
}

TEST(WgmmaFaults, NotDone) {
    const auto expect = [](const std::string& from, const std::string& to, const char* words) {
        expect_words(element_of(replaced(Warpgroup{}.text(), from, to)), {words});
    };
    const std::string a = "{%r10, %r11, %r12, %r13}, %rd20, %p1, 1, 1, 0";
    expect(a, "%rd20, %rd20, %p1, 1, 1, 0, 0", "not done by this interpreter: wgmma with A in shared memory");
    expect(a, "{%r10, %r11, %r12, %r13}, %rd20, %p1, -1, 1, 0", "wgmma with a scale of A or B other than 1");
    expect(a, "{%r10, %r11, %r12}, %rd20, %p1, 1, 1, 0", "not done by this interpreter");
    expect(a, "{%r10, %r11, %r12, %r13}, %r20, %p1, 1, 1, 0", "not done by this interpreter");
    expect("m64n16k16", "m64n24k16", "not done by this interpreter");
    expect("m64n16k16", "m64n12k16", "wgmma of a shape other than m64nNk16");
    expect("f32.bf16.bf16", "f32.tf32.tf32", "wgmma of types other than bf16 and f16");
    expect("f32.bf16.bf16", "f16.f16.f16", "not done by this interpreter: wgmma.mma_async");
    expect("wgmma.mma_async", "wgmma.mma_async.sp", "not done by this interpreter: wgmma.mma_async.sp");
    expect("fence.proxy.async", "fence.proxy.alias", "not done by this interpreter: fence.proxy.alias");
    expect("wgmma.fence.sync.aligned", "wgmma.fence", "not done by this interpreter: wgmma.fence");
    Warpgroup kernel;
    kernel.more_bits = std::uint64_t{2} << 62;
    EXPECT_FAULT(kernel.run(), "a descriptor of swizzle mode 2");
    kernel.more_bits = 0;
    EXPECT_FAULT(kernel.run(), "a descriptor of swizzle mode 0");
    kernel.more_bits = std::uint64_t{1} << 62 | std::uint64_t{3} << 49;
    EXPECT_FAULT(kernel.run(), "a descriptor with base offset 3");
    kernel.more_bits = std::uint64_t{1} << 62 | std::uint64_t{1} << 14;
    EXPECT_FAULT(kernel.run(), "a descriptor with bits outside its fields: 0x4000");
}

}  // namespace
}  // namespace headrace::ptx
