// cp.async: sizes, zero fill, groups, and pipelines of two buffers, right and wrong, in every order of execution.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {
namespace {

std::vector<std::uint32_t> counted(std::size_t count) {
    std::vector<std::uint32_t> values(count);
    std::iota(values.begin(), values.end(), 1U);
    return values;
}

// One warp. %r1: the lane's 16 bytes of shared memory; %rd9: of the source (p0), %rd10: of the result (p1).
std::vector<std::uint32_t> run_copies(const std::string& body) {
    Device device;
    const auto from = device.buffer(counted(132)), to = device.buffer(std::vector<std::uint32_t>(128, 0));
    device.run(kernel_text(2,
                           ".shared .align 16 .b8 own[1024]; mov.u32 %r1, own; mad.lo.u32 %r1, %r0, 16, %r1;"
                           "mad.wide.u32 %rd9, %r0, 16, %rd0; mad.wide.u32 %rd10, %r0, 16, %rd1;" +
                               body),
               {from, to});
    return device.read<std::uint32_t>(to, 128);
}

const std::string copy = "cp.async.cg.shared.global [%r1], [%rd9], 16;";
const std::string commit = "cp.async.commit_group;", wait_all = "cp.async.wait_all;",
                  wait_none = "cp.async.wait_group 0;";
const std::string back = "ld.shared.v4.u32 {%r2,%r3,%r4,%r5}, [%r1]; st.global.v4.u32 [%rd10], {%r2,%r3,%r4,%r5};";

TEST(Async, Sizes) {
    EXPECT_EQ(run_copies(copy + commit + wait_none + back), counted(128));
    EXPECT_EQ(run_copies("cp.async.ca.shared::cta.global.L2::128B [%r1], [%rd9], 16;" + wait_all + back), counted(128));
    EXPECT_EQ(run_copies("cp.async.ca.shared.global [%r1], [%rd9], 8; cp.async.ca.shared.global [%r1+8], [%rd9+8], 4;"
                         "cp.async.ca.shared.global [%r1+12], [%rd9+12], 4;" +
                         wait_all + back),
              counted(128));
    EXPECT_EQ(run_copies("createpolicy.fractional.L2::evict_last.b64 %rd11, 1.0;"
                         "cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd9], 16, %rd11;" +
                         wait_all + back),
              counted(128));
}

TEST(Async, ZeroFill) {
    for (const std::string size : {"0", "4", "6", "12", "16"}) {
        for (const bool in_register : {false, true}) {
            auto want = counted(128);
            const auto words = std::stoul(size) / 4;
            for (std::size_t i = 0; i < 128; ++i)
                if (i % 4 >= words) want[i] = i % 4 == words && size == "6" ? want[i] & 0xffff : 0;
            EXPECT_EQ(run_copies("mov.u32 %r9, " + size + "; cp.async.cg.shared.global [%r1], [%rd9], 16, " +
                                 (in_register ? "%r9" : size) + ";" + wait_all + back),
                      want)
                << size;
        }
    }
    auto want = counted(128);
    for (std::size_t i = 0; i < 128; ++i)
        if (i / 4 < 5) want[i] = 0;
    EXPECT_EQ(
        run_copies("setp.lt.u32 %p1, %r0, 5; cp.async.cg.shared.global [%r1], [%rd9], 16, %p1;" + wait_all + back),
        want);
    EXPECT_EQ(
        run_copies("setp.ge.u32 %p1, %r0, 5; cp.async.cg.shared.global [%r1], [%rd9], 16, !%p1;" + wait_all + back),
        want);
}

TEST(Async, OnlyTheBytesOfTheSourceAreRead) {
    // The 132 words end 16 bytes behind the last lane's: lane 31 may read 4 of 16 at [%rd9+16] and none at [%rd9+32].
    EXPECT_FAULT(run_copies("cp.async.cg.shared.global [%r1], [%rd9+32], 16;" + wait_all), "outside any allocation");
    EXPECT_NO_THROW(run_copies("cp.async.cg.shared.global [%r1], [%rd9+32], 16, 0;" + wait_all));
}

TEST(Async, Groups) {
    const std::string two = copy + commit + "cp.async.cg.shared.global [%r1+512], [%rd9], 16;" + commit;
    EXPECT_EQ(run_copies(two + "cp.async.wait_group 1;" + back + wait_none), counted(128));
    EXPECT_FAULT(run_copies(two + "cp.async.wait_group 2;" + back), "is in flight to it");
    EXPECT_FAULT(run_copies(two + "cp.async.wait_group 1; ld.shared.u32 %r2, [%r1+512];"),
                 "lane 0 reads shared offset 512 while");
    EXPECT_FAULT(run_copies(copy + wait_none + back), "is in flight to it");  // never committed
}

TEST(Async, Faults) {
    EXPECT_FAULT(run_copies(copy), "lane 0 ends while the cp.async of line ");
    EXPECT_FAULT(run_copies(copy + commit), "is in flight to shared offset 0");
    EXPECT_FAULT(run_copies(copy + commit + back), "reads shared offset 0 while the cp.async of line");
    EXPECT_FAULT(run_copies(copy + "st.shared.u32 [%r1+4], %r0;"), "writes shared offset 4 while the cp.async of line");
    EXPECT_FAULT(run_copies(copy + copy), "writes shared offset 0 while the cp.async of line");
    EXPECT_FAULT(run_copies("cp.async.cg.shared.global [%r1+520], [%rd9], 16;"), "not aligned to 16 bytes");
    EXPECT_FAULT(run_copies("cp.async.cg.shared.global [%r1+1024], [%rd9], 16;"),
                 "touches 16 bytes at shared offset 1024");
    EXPECT_FAULT(run_copies("cp.async.ca.shared.global [%r1], [%rd9+4], 8;"), "is not aligned to 8 bytes");
    EXPECT_FAULT(run_copies("mov.u32 %r9, 20; cp.async.cg.shared.global [%r1], [%rd9], 16, %r9;"),
                 "copies 20 bytes into 16");
    EXPECT_FAULT(run_copies("cp.async.cg.shared.global [%r1], [%rd9], 8;"), "cp.async.cg");
    EXPECT_FAULT(run_copies("cp.async.mbarrier.arrive.shared.b64 [%r1];"), "cp.async.mbarrier");
    EXPECT_FAULT(run_copies("cp.async.bulk.commit_group;"), "cp.async.bulk");
    EXPECT_FAULT(run_copies(copy + "st.global.u32 [%rd9], 0;" + wait_all),
                 "whose source has changed since it was issued");
    EXPECT_FAULT(run_copies("mov.u32 %r1, own; cp.async.cg.shared.global [%r1], [%rd9], 16;"),
                 "lane 1 writes shared offset 0");
    EXPECT_FAULT(run_copies("st.shared.u32 [%r1], %r0; xor.b32 %r1, %r1, 16;" + copy), "race: writes shared offset 16");
}

TEST(Async, VisibleToOthersOnlyBehindABarrier) {
    const std::string neighbour = "xor.b32 %r1, %r1, 16;" + back;
    EXPECT_FAULT(run_copies(copy + wait_all + neighbour), "race: reads shared offset 16");
    const auto values = run_copies(copy + wait_all + "bar.warp.sync -1;" + neighbour);
    for (std::size_t i = 0; i < 128; ++i) EXPECT_EQ(values[i], counted(128)[i ^ 4]);
}

// Two warps go through six tiles of 16 bytes for each thread, in two buffers: each thread adds up the first word of
// what another one, of the other warp or of its own, copied.
struct Pipeline {
    std::string wait = "cp.async.wait_group 1;", ready = "bar.sync 0;", done = "bar.sync 0;";
    int partner = 33, threads = 64;

    std::string text() const {
        constexpr int tiles = 6;
        const auto issue = [&](int tile) {
            return "cp.async.cg.shared.global [%r1+" + std::to_string(tile % 2 * 1024) + "], [%rd9+" +
                   std::to_string(tile * 1024) + "], 16;\n";
        };
        std::string body =
            ".shared .align 16 .b8 own[2048]; mov.u32 %r2, own; mad.lo.u32 %r1, %r0, 16, %r2;"
            "mad.wide.u32 %rd9, %r0, 16, %rd0; mad.wide.u32 %rd10, %r0, 4, %rd1; mov.u32 %r5, 0;"
            "add.u32 %r3, %r0, " +
            std::to_string(partner) + "; and.b32 %r3, %r3, " + std::to_string(threads - 1) +
            "; mad.lo.u32 %r3, %r3, 16, %r2;\n" + issue(0) + commit;
        for (int tile = 0; tile < tiles; ++tile) {
            if (tile + 1 < tiles) body += issue(tile + 1);
            body += commit + wait + ready + "\nld.shared.u32 %r4, [%r3+" + std::to_string(tile % 2 * 1024) +
                    "]; add.u32 %r5, %r5, %r4;" + done + "\n";
        }
        return kernel_text(2, body + wait_none + "st.global.u32 [%rd10], %r5;");
    }

    void run(const Settings& settings) const {
        Device device;
        device.settings = settings;
        device.block = {static_cast<std::uint32_t>(threads), 1, 1};
        const auto from = device.buffer(counted(6 * 256)), to = device.unwritten(256);
        device.run(text(), {from, to});
        const auto sums = device.read<std::uint32_t>(to, static_cast<std::size_t>(threads));
        for (std::uint32_t thread = 0; thread < static_cast<std::uint32_t>(threads); ++thread) {
            std::uint32_t want = 0;
            for (std::uint32_t tile = 0; tile < 6; ++tile)
                want += tile * 256 +
                        (thread + static_cast<std::uint32_t>(partner)) % static_cast<std::uint32_t>(threads) * 4 + 1;
            ASSERT_EQ(sums[thread], want);
        }
    }
};

std::vector<Settings> orders() {
    std::vector<Settings> all(2);
    all[1].order = Order::descending;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        Settings settings;
        settings.order = Order::random;
        settings.seed = seed;
        all.push_back(settings);
    }
    return all;
}

void expect_fault(const Pipeline& pipeline, const std::string& words) {
    for (const Settings& settings : orders()) EXPECT_FAULT(pipeline.run(settings), words);
}

TEST(Pipelines, OfTheBlock) {
    for (const int partner : {0, 1, 32, 33})
        for (const Settings& settings : orders()) {
            Pipeline pipeline;
            pipeline.partner = partner;
            EXPECT_EQ(fault_of([&] { pipeline.run(settings); }), "no fault");
        }
    Pipeline pipeline;
    pipeline.wait = "cp.async.wait_group 2;";
    expect_fault(pipeline, "in flight");
    pipeline.wait = "";
    expect_fault(pipeline, "in flight");
    pipeline = {};
    pipeline.ready = "";
    expect_fault(pipeline, "shared offset");  // a race, or still in flight, as the other warp stands
    pipeline = {};
    pipeline.done = "";
    expect_fault(pipeline, "shared offset");
    pipeline = {};
    pipeline.ready = pipeline.done = "bar.warp.sync -1;";
    expect_fault(pipeline, "shared offset");
}

TEST(Pipelines, OfOneWarp) {
    Pipeline right;
    right.threads = 32;
    right.partner = 5;
    right.ready = right.done = "bar.warp.sync -1;";
    for (const Settings& settings : orders()) EXPECT_EQ(fault_of([&] { right.run(settings); }), "no fault");
    Pipeline wrong = right;
    wrong.ready = "";
    expect_fault(wrong, "shared offset");
    wrong = right;
    wrong.done = "";
    expect_fault(wrong, "shared offset");
    wrong = right;
    wrong.partner = 0;  // alone, a thread needs no barrier
    wrong.ready = wrong.done = "";
    for (const Settings& settings : orders()) EXPECT_EQ(fault_of([&] { wrong.run(settings); }), "no fault");
}

}  // namespace
}  // namespace headrace::ptx
