// ld, st, atom, red in every space: widths, vectors, extension, hints, and their faults.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {
namespace {

template <class T>
std::vector<T> counted(std::size_t count, T first = 0) {
    std::vector<T> values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
}

// Copies 32 elements of 16 bytes from p0 to p1 with `body`, which finds its addresses in %rd9 and %rd10.
std::vector<std::uint32_t> copy_lanes(const std::string& body) {
    Device device;
    const auto from = device.buffer(counted<std::uint32_t>(128, 5)),
               to = device.buffer(std::vector<std::uint32_t>(128, 0));
    device.run(kernel_text(2, "mad.wide.u32 %rd9, %r0, 16, %rd0; mad.wide.u32 %rd10, %r0, 16, %rd1;" + body),
               {from, to});
    return device.read<std::uint32_t>(to, 128);
}

TEST(Memory, VectorsAndHints) {
    const auto all = counted<std::uint32_t>(128, 5);
    EXPECT_EQ(copy_lanes("ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9]; st.global.v4.u32 [%rd10], {%r1,%r2,%r3,%r4};"),
              all);
    EXPECT_EQ(copy_lanes("ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {%f1,%f2,%f3,%f4}, [%rd9];"
                         "st.global.cs.v4.f32 [%rd10], {%f1,%f2,%f3,%f4};"),
              all);
    EXPECT_EQ(copy_lanes("ld.global.v2.b64 {%rd11,%rd12}, [%rd9]; st.global.v2.b64 [%rd10], {%rd11,%rd12};"), all);
    EXPECT_EQ(copy_lanes("ld.global.f64 %fd1, [%rd9]; ld.global.f64 %fd2, [%rd9+8];"
                         "st.global.f64 [%rd10], %fd1; st.global.f64 [%rd10+8], %fd2;"),
              all);
    EXPECT_EQ(copy_lanes("ld.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9]; st.v4.u32 [%rd10], {%r1,%r2,%r3,%r4};"), all);
    EXPECT_EQ(copy_lanes("createpolicy.fractional.L2::evict_first.b64 %rd11, 1.0;"
                         "ld.global.L2::cache_hint.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9], %rd11;"
                         "st.global.L2::cache_hint.v4.u32 [%rd10], {%r1,%r2,%r3,%r4}, %rd11;"),
              all);
    EXPECT_EQ(
        copy_lanes("ld.volatile.global.v2.u32 {%r1,%r2}, [%rd9]; ld.relaxed.gpu.global.v2.u32 {%r3,%r4}, [%rd9+8];"
                   "st.volatile.global.v2.u32 [%rd10], {%r1,%r2}; st.release.sys.global.u32 [%rd10+8], %r3;"
                   "st.weak.global.u32 [%rd10+12], %r4; membar.gl; fence.acq_rel.gpu; prefetch.global.L2 [%rd9];"),
        all);
}

// A register of 32 bits that holds -128, and an offset that leads back into the window.
TEST(Memory, AddressesOfThirtyTwoBitsWrapAround) {
    EXPECT_EQ(copy_lanes(".shared .align 16 .b8 window[512];"
                         "shl.b32 %r8, %r0, 4; sub.u32 %r9, %r8, 128; mov.u32 %r7, window; add.u32 %r9, %r9, %r7;"
                         "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9]; st.shared.v4.u32 [%r9+128], {%r1,%r2,%r3,%r4};"
                         "ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [%r9+128]; st.global.v4.u32 [%rd10], {%r1,%r2,%r3,%r4};"),
              counted<std::uint32_t>(128, 5));
}

TEST(Memory, GuardAndSinkAndImmediate) {
    auto want = std::vector<std::uint32_t>(128, 0);
    for (std::size_t lane = 0; lane < 7; ++lane)
        want[4 * lane] = 4 * static_cast<std::uint32_t>(lane) + 6, want[4 * lane + 1] = 77;
    EXPECT_EQ(
        copy_lanes(
            "setp.lt.u32 %p1, %r0, 7; ld.global.v2.u32 {_, %r1}, [%rd9]; @%p1 st.global.v2.u32 [%rd10], {%r1, 77};"),
        want);
}

TEST(Memory, ExtensionOfNarrowTypes) {
    Device device;
    const auto from = device.buffer(std::vector<std::uint8_t>{0x80, 0xff, 0x7f, 0x01, 0x80, 0x90, 0xa0, 0xb0});
    const auto to = device.unwritten(64);
    device.run(kernel_text(2,
                           "setp.ne.u32 %p1, %r0, 0; @%p1 ret;"
                           "ld.global.u8 %r1, [%rd0]; st.global.u32 [%rd1], %r1;"
                           "ld.global.s8 %r1, [%rd0]; st.global.u32 [%rd1+4], %r1;"
                           "ld.global.s16 %r1, [%rd0]; st.global.u32 [%rd1+8], %r1;"
                           "ld.global.s8 %h1, [%rd0+1]; st.global.b16 [%rd1+12], %h1; st.global.u16 [%rd1+14], %h1;"
                           "ld.global.s32 %rd9, [%rd0+4]; st.global.u64 [%rd1+16], %rd9;"
                           "ld.global.u32 %rd9, [%rd0+4]; st.global.u64 [%rd1+24], %rd9;"
                           "ld.global.s8 %rd9, [%rd0]; st.global.u64 [%rd1+32], %rd9;"
                           "ld.global.u16 %r1, [%rd0]; st.global.u8 [%rd1+40], %r1; st.global.u8 [%rd1+41], %r1;"
                           "ld.global.u64 %rd9, [%rd0]; st.global.u16 [%rd1+42], %rd9; st.global.u32 [%rd1+44], %rd9;"),
               {from, to});
    const std::vector<std::uint32_t> want{0x80,       0xffffff80, 0xffffff80, 0xffffffff, 0xb0a09080, 0xffffffff,
                                          0xb0a09080, 0,          0xffffff80, 0xffffffff, 0xff808080, 0x017fff80};
    EXPECT_EQ(device.read<std::uint32_t>(to, 12), want);
}

void run_one(const std::string& body, const std::string& before = {}, const Settings& settings = {}) {
    Device device;
    device.settings = settings;
    const auto from = device.buffer(counted<std::uint32_t>(128)),
               to = device.buffer(std::vector<std::uint32_t>(128, 0));
    device.run(kernel_text(2, "mad.wide.u32 %rd9, %r0, 16, %rd0; mad.wide.u32 %rd10, %r0, 16, %rd1;" + body, before),
               {from, to});
}

TEST(Memory, Faults) {
    EXPECT_FAULT(run_one("ld.global.u32 %r1, [%rd9+496];"), "lane 1 touches 4 bytes at ");
    EXPECT_FAULT(run_one("ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9+8];"), "is not aligned to 16 bytes");
    EXPECT_FAULT(run_one("ld.u32 %r1, [%rd9+2];"), "is not aligned to 4 bytes");
    EXPECT_FAULT(run_one("st.global.u32 [%rd1], %r0;"), "lanes 0 and 1 write the same global bytes");
    EXPECT_FAULT(run_one("st.global.u32 [%rd10], %r0; ld.global.nc.u32 %r1, [%rd10];"),
                 "wants memory that stays as it is");
    EXPECT_FAULT(run_one("ld.global.v8.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%rd9];"), "ld.global.v8");
    EXPECT_FAULT(run_one("discard.global.L2 [%rd9], 128;"), "discard");
    EXPECT_FAULT(run_one("fence.proxy.alias;"), "fence.proxy.alias");
    EXPECT_FAULT(run_one("ld.global.mmio.u32 %r1, [%rd9];"), "ld.global");
    EXPECT_FAULT(run_one("ld.param.u32 %r1, [p1+8];"), "reads 4 bytes at parameter offset 16, outside the launch's 16");
}

TEST(Memory, BlocksDoNotShare) {
    Device device;
    device.grid = {2, 1, 1};
    const auto a = device.buffer(counted<std::uint32_t>(64));
    EXPECT_FAULT(device.run(kernel_text(1, "mad.wide.u32 %rd9, %r0, 4, %rd0; st.global.u32 [%rd9], %r0;"), {a}),
                 "block 0 wrote");
    device.run(kernel_text(1, "red.global.add.u32 [%rd0], 1;"), {a});
    EXPECT_EQ(device.read<std::uint32_t>(a, 1)[0], 64U);
    EXPECT_FAULT(device.run(kernel_text(1, "red.relaxed.cta.global.add.u32 [%rd0], 1;"), {a}), "which block 0 wrote");
}

TEST(Memory, Shared) {
    const std::string before = ".extern .shared .align 16 .b8 pool[];";
    Device device;
    device.dynamic_shared_bytes = 1024;
    const auto to = device.unwritten(1024);
    device.run(
        kernel_text(
            1,
            ".shared .align 8 .b8 own[256]; mov.u32 %r1, own; mov.u32 %r2, pool; sub.u32 %r3, %r2, %r1;"
            "mad.lo.u32 %r4, %r0, 8, %r1; cvt.u64.u32 %rd9, %r0; st.shared.u64 [%r4], %rd9; bar.warp.sync -1;"
            "xor.b32 %r5, %r4, 8; ld.shared.u64 %rd10, [%r5];"
            "mad.lo.u32 %r6, %r0, 16, %r2; st.shared.v4.u32 [%r6], {%r3, %r0, %r0, 3}; bar.warp.sync -1;"
            "xor.b32 %r7, %r6, 16; cvt.u64.u32 %rd11, %r7; cvta.shared.u64 %rd12, %rd11; ld.u32 %r8, [%rd12+4];"
            "mad.wide.u32 %rd13, %r0, 16, %rd0; st.global.u64 [%rd13], %rd10; st.global.v2.u32 [%rd13+8], {%r8, %r3};",
            before),
        {to});
    const auto out = device.read<std::uint32_t>(to, 128);
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
        EXPECT_EQ(out[4 * lane], lane ^ 1);
        EXPECT_EQ(out[4 * lane + 2], lane ^ 1);
        EXPECT_EQ(out[4 * lane + 3] % 16, 0U);
    }
}

TEST(Memory, SharedFaults) {
    const std::string own = ".shared .align 16 .b8 own[256]; mov.u32 %r1, own; mad.lo.u32 %r4, %r0, 8, %r1;";
    EXPECT_FAULT(run_one(own + "ld.shared.u32 %r2, [%r4];"), "lane 0 reads shared offset 0, which nothing wrote");
    EXPECT_FAULT(run_one(own + "st.shared.u32 [%r4+256], %r0;"), "lane 0 touches 4 bytes at shared offset 256");
    EXPECT_FAULT(run_one(own + "st.shared.u32 [%r4+2], %r0;"), "not aligned");
    EXPECT_FAULT(run_one(own + "st.shared.u32 [%r1], %r0;"),
                 "lane 1 race: writes shared offset 0, which warp 0 lane 0 wrote");
    EXPECT_FAULT(run_one(own + "st.shared.u64 [%r4], %rd9; xor.b32 %r5, %r4, 8; ld.shared.u64 %rd10, [%r5];"),
                 "race: reads");
    EXPECT_FAULT(run_one(own + "st.shared.u64 [%r4], %rd9; bar.warp.sync -1; ld.shared.u64 %rd10, [%r1];"
                               "st.shared.u64 [%r4], %rd9;"),
                 "lane 0 race: writes shared offset 0, which warp 0 lane 1 read");
    Settings lenient;
    lenient.races = false;
    EXPECT_NO_THROW(run_one(own + "st.shared.u32 [%r1], %r0;", "", lenient));
    EXPECT_NO_THROW(run_one("st.global.u32 [%rd1], %r0;", "", lenient));
}

TEST(Memory, Local) {
    const std::string own = ".local .align 8 .b8 own[64]; mov.u64 %rd11, own;";
    EXPECT_EQ(
        copy_lanes(
            own + "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd9]; st.local.v4.u32 [%rd11+16], {%r1,%r2,%r3,%r4};"
                  "cvta.local.u64 %rd12, %rd11; ld.v2.u32 {%r5,%r6}, [%rd12+16]; ld.local.v2.u32 {%r7,%r8}, [%rd11+24];"
                  "st.global.v4.u32 [%rd10], {%r5,%r6,%r7,%r8};"),
        counted<std::uint32_t>(128, 5));
    EXPECT_FAULT(run_one(own + "ld.local.u32 %r1, [%rd11];"), "reads local offset 0, which nothing wrote");
    EXPECT_FAULT(run_one(own + "st.local.u32 [%rd11+64], %r0;"), "outside the thread's 64");
    EXPECT_FAULT(run_one(own + "st.local.u32 [%rd11+2], %r0;"), "not aligned");
}

TEST(Memory, Constants) {
    const std::string before = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};";
    EXPECT_EQ(copy_lanes("mov.u32 %r1, 0; st.global.u32 [%rd10], %r1;")[0], 0U);
    Device device;
    const auto to = device.unwritten(128);
    device.run(
        kernel_text(
            1,
            "and.b32 %r1, %r0, 3; mov.u64 %rd9, table; mad.wide.u32 %rd9, %r1, 4, %rd9; ld.const.u32 %r2, [%rd9];"
            "ld.const.u32 %r3, [table+4]; add.u32 %r2, %r2, %r3;"
            "mad.wide.u32 %rd10, %r0, 4, %rd0; st.global.u32 [%rd10], %r2;",
            before),
        {to});
    const auto out = device.read<std::uint32_t>(to, 32);
    for (std::uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], 30 + 10 * (lane % 4));
}

template <class T>
T after_atomics(const std::string& statement, T before, Order order = Order::ascending) {
    Device device;
    device.settings.order = order;
    const auto a = device.buffer(std::vector<T>{before, before});
    device.run(kernel_text(
                   1, "cvt.rn.f32.u32 %f1, %r0; cvt.rn.f64.u32 %fd1, %r0; cvt.u64.u32 %rd9, %r0; sub.s32 %r1, 7, %r0;" +
                          statement),
               {a});
    return device.read<T>(a, 1)[0];
}

TEST(Atomics, Operations) {
    EXPECT_EQ(after_atomics<std::uint32_t>("red.global.add.u32 [%rd0], %r0;", 4), 500U);
    EXPECT_EQ(after_atomics<std::int32_t>("atom.global.min.s32 %r2, [%rd0], %r1;", 4), -24);
    EXPECT_EQ(after_atomics<std::int32_t>("atom.global.max.s32 %r2, [%rd0], %r1;", -9), 7);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.max.u32 %r2, [%rd0], %r0;", 5), 31U);
    EXPECT_EQ(after_atomics<std::uint32_t>("red.and.b32 [%rd0], %r0;", 5), 0U);
    EXPECT_EQ(after_atomics<std::uint32_t>("red.global.gpu.relaxed.or.b32 [%rd0], %r0;", 64), 95U);
    EXPECT_EQ(after_atomics<std::uint32_t>("red.xor.b32 [%rd0], 1;", 5), 5U);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.global.exch.b32 %r2, [%rd0], %r0;", 5), 31U);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.global.exch.b32 %r2, [%rd0], %r0;", 5, Order::descending), 0U);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.global.cas.b32 %r2, [%rd0], 5, %r0;", 5, Order::descending), 31U);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.global.inc.u32 %r2, [%rd0], 9;", 5), 7U);
    EXPECT_EQ(after_atomics<std::uint32_t>("atom.global.dec.u32 %r2, [%rd0], 9;", 5), 3U);
    EXPECT_EQ(after_atomics<std::uint64_t>("red.global.add.u64 [%rd0], %rd9;", 1ULL << 40), (1ULL << 40) + 496);
    EXPECT_EQ(after_atomics<std::uint64_t>("red.global.max.u64 [%rd0], %rd9;", 3), 31U);
    EXPECT_EQ(after_atomics<float>("red.global.add.f32 [%rd0], %f1;", 0.5F), 496.5F);
    EXPECT_EQ(after_atomics<double>("red.global.add.f64 [%rd0], %fd1;", 0.25), 496.25);
    EXPECT_EQ(after_atomics<float>("red.global.add.f32 [%rd0], 0f00000000;", 0x1p-140F), 0.0F);
    EXPECT_FAULT(after_atomics<float>("red.global.add.noftz.f16x2 [%rd0], %r1;", 0), "f16x2");
    EXPECT_FAULT(after_atomics<float>("red.global.exch.b32 [%rd0], %r1;", 0), "red.global.exch");
}

TEST(Atomics, ReturnTheOldValue) {
    Device device;
    const auto counter = device.buffer(std::vector<std::uint32_t>{100}), to = device.unwritten(128);
    device.run(
        kernel_text(2,
                    "atom.global.add.u32 %r1, [%rd0], 1; mad.wide.u32 %rd9, %r0, 4, %rd1; st.global.u32 [%rd9], %r1;"),
        {counter, to});
    auto out = device.read<std::uint32_t>(to, 32);
    std::sort(out.begin(), out.end());
    EXPECT_EQ(out, counted<std::uint32_t>(32, 100));
}

TEST(Atomics, Shared) {
    const std::string own =
        ".shared .align 4 .b8 own[4]; mov.u32 %r1, own; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r1], 3;";
    Device device;
    device.block = {128, 1, 1};
    const auto to = device.unwritten(4);
    device.run(kernel_text(1, own + "bar.sync 0; red.shared.add.u32 [own], 2; bar.sync 0; @%p1 ld.shared.u32 %r2, "
                                    "[%r1]; @%p1 st.global.u32 [%rd0], %r2;"),
               {to});
    EXPECT_EQ(device.read<std::uint32_t>(to, 1)[0], 259U);
    EXPECT_FAULT(device.run(kernel_text(1, own + "red.shared.add.u32 [own], 2;"), {to}),
                 "race: uses atomics on shared offset 0");
    EXPECT_FAULT(
        device.run(
            kernel_text(
                1, own + "bar.sync 0; red.shared.add.u32 [own], 2; bar.warp.sync -1; @%p1 ld.shared.u32 %r2, [%r1];"),
            {to}),
        "used atomics on");
}

TEST(BankConflicts, AreCounted) {
    const auto conflicts = [](const std::string& stride, const std::string& statement) {
        Device device;
        Program program(kernel_text(0, ".shared .align 16 .b8 own[8192]; mov.u32 %r1, own; mad.lo.u32 %r1, %r0, " +
                                           stride + ", %r1;" + statement),
                        device.memory);
        device.run(program, {});
        const auto& counts = program.conflicts(program.module().functions.at(0));
        return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    };
    EXPECT_EQ(conflicts("4", "st.shared.u32 [%r1], %r0;"), 0U);
    EXPECT_EQ(conflicts("8", "st.shared.u32 [%r1], %r0;"), 1U);
    EXPECT_EQ(conflicts("128", "st.shared.u32 [%r1], %r0;"), 31U);
    EXPECT_EQ(conflicts("132", "st.shared.u32 [%r1], %r0;"), 0U);
    EXPECT_EQ(conflicts("16", "st.shared.v4.u32 [%r1], {%r0,%r0,%r0,%r0};"), 0U);
    EXPECT_EQ(conflicts("128", "st.shared.v4.u32 [%r1], {%r0,%r0,%r0,%r0};"), 28U);
    EXPECT_EQ(conflicts("144", "st.shared.v4.u32 [%r1], {%r0,%r0,%r0,%r0};"), 0U);
    EXPECT_EQ(conflicts("8", "st.shared.v2.u32 [%r1], {%r0,%r0};"), 0U);
    EXPECT_EQ(conflicts("2", "cvt.u16.u32 %h1, %r0; st.shared.u16 [%r1], %h1;"), 0U);
}

}  // namespace
}  // namespace headrace::ptx
