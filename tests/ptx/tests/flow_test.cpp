// The flow of control: branches and meeting again, barriers, exits, deadlocks; the three orders agree on right
// programs.
#include <gtest/gtest.h>

#include "tests/orders.hpp"

namespace headrace::ptx {
namespace {

TEST(Flow, NestedBranches) {
    const auto result = run_threads(R"(
        mov.u32 %r1, 0;
        and.b32 %r2, %r0, 1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra EVEN;
        and.b32 %r3, %r0, 2;
        setp.eq.u32 %p2, %r3, 0;
        @!%p2 bra INNER;
        add.u32 %r1, %r1, 10;
        bra MET;
    INNER:
        add.u32 %r1, %r1, 20;
    MET:
        add.u32 %r1, %r1, 1;
        bra DONE;
    EVEN:
        add.u32 %r1, %r1, 100;
    DONE:
        shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;
        mad.lo.u32 %r1, %r4, 1000, %r1;)");
    for (std::uint32_t i = 0; i < 32; ++i) {
        const auto value = [](std::uint32_t lane) { return lane % 2 == 0 ? 100u : (lane & 2) == 0 ? 11u : 21u; };
        EXPECT_EQ(result[i], value(i ^ 1) * 1000 + value(i));
    }
}

TEST(Flow, LoopsWithTheirOwnTripCounts) {
    const auto result = run_threads(R"(
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
        setp.ne.u32 %p2, %r2, 0;
    LOOP:
        setp.ge.u32 %p1, %r2, %r0;
        @%p1 bra OUT;
        add.u32 %r1, %r1, %r2;
        setp.gt.u32 %p2, %r1, 100;
        @%p2 bra BROKEN;
        add.u32 %r2, %r2, 1;
        bra.uni LOOP;
    BROKEN:
        add.u32 %r1, %r1, 1000;
    OUT:
        vote.sync.ballot.b32 %r3, %p2, -1;
        add.u32 %r1, %r1, 0;)");
    for (std::uint32_t i = 0; i < 32; ++i) {
        std::uint32_t sum = 0;
        for (std::uint32_t k = 0; k < i; ++k) {
            sum += k;
            if (sum > 100) {
                sum += 1000;
                break;
            }
        }
        EXPECT_EQ(result[i], sum);
    }
}

TEST(Flow, ManyRoundsOfPartingDoNotNest) {
    const auto result = run_threads(R"(
        mov.u32 %r1, %r0;
        mov.u32 %r2, 0;
    LOOP:
        mul.lo.u32 %r1, %r1, 1664525;
        add.u32 %r1, %r1, 1013904223;
        and.b32 %r3, %r1, 0x10000;
        setp.ne.u32 %p1, %r3, 0;
        @%p1 bra ODD;
        xor.b32 %r1, %r1, 0x5555;
        and.b32 %r3, %r1, 0x20000;
        setp.ne.u32 %p1, %r3, 0;
        @%p1 bra LATCH;
        add.u32 %r1, %r1, 7;
        bra LATCH;
    ODD:
        add.u32 %r1, %r1, 3;
    LATCH:
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p2, %r2, 300;
        @%p2 bra LOOP;)");
    for (std::uint32_t i = 0; i < 32; ++i) {
        std::uint32_t x = i;
        for (int k = 0; k < 300; ++k) {
            x = x * 1664525 + 1013904223;
            if ((x & 0x10000) != 0)
                x += 3;
            else if (x ^= 0x5555; (x & 0x20000) == 0)
                x += 7;
        }
        EXPECT_EQ(result[i], x);
    }
}

TEST(Flow, LanesThatLeaveEarlyAreNotWaitedFor) {
    const auto result = run_threads(R"(
        mov.u32 %r1, 5;
        mul.wide.u32 %rd21, %r22, 4;
        add.u64 %rd21, %rd21, %rd0;
        setp.lt.u32 %p1, %r0, 40;
        @%p1 bra STAYS;
        st.global.u32 [%rd21], 77;
        ret;
    STAYS:
        setp.lt.u32 %p2, %r0, 3;
        @%p2 exit;
        bar.sync 0;
        add.u32 %r1, %r1, %r0;)",
                                    96, 2);
    for (std::uint32_t i = 0; i < 192; ++i) {
        const std::uint32_t thread = i % 96;
        EXPECT_EQ(result[i], thread < 3 ? 0xdddddddd : thread < 40 ? 5 + thread : 77) << i;
    }
}

TEST(Flow, AnEarlyReturnInABranchDoesNotPartTheOthers) {
    run_threads(R"(
        mov.u32 %r1, 1;
        setp.lt.u32 %p1, %r0, 16;
        @!%p1 bra REST;
        setp.lt.u32 %p2, %r0, 4;
        @%p2 bra END;
        add.u32 %r1, %r1, 1;
    REST:
        bar.sync 0;
        mul.wide.u32 %rd20, %r22, 4;
        add.u64 %rd20, %rd20, %rd0;
        st.global.u32 [%rd20], %r1;
        bra END2;
    END: ret;
    END2:)");
}

TEST(Flow, IndexedBranches) {
    const auto result = run_threads(R"(
        rem.u32 %r2, %r0, 5;
        brx.idx %r2, TABLE;
    TABLE: .branchtargets L0, L1, L2, L1, L3;
    L0: mov.u32 %r1, 10; bra ALL;
    L1: mov.u32 %r1, 11; bra ALL;
    L2: mov.u32 %r1, 12; bra ALL;
    L3: mov.u32 %r1, 13;
    ALL: add.u32 %r1, %r1, 100;)");
    const std::uint32_t expected[] = {110, 111, 112, 111, 113};
    for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(result[i], expected[i % 5]);
    expect_words(fault_of_body("brx.idx %r0, T;\nT: .branchtargets A, B;\nA: mov.u32 %r1, 1;\nB: mov.u32 %r1, 2;"),
                 {"branches to target", "brx.idx"});
}

TEST(Flow, ShufflesInDisjointHalves) {
    const auto result = run_threads(R"(
        setp.lt.u32 %p1, %r0, 16;
        @%p1 bra LOW;
        shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff0000;
        bra MET;
    LOW:
        shfl.sync.bfly.b32 %r1, %r0, 2, 31, 0x0000ffff;
    MET:
        selp.b32 %r3, 0x0000ffff, 0xffff0000, %p1;
        shfl.sync.bfly.b32 %r2, %r0, 4, 31, %r3;
        mad.lo.u32 %r1, %r2, 100, %r1;)");
    for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(result[i], (i ^ 4) * 100 + (i < 16 ? i ^ 2 : i ^ 1));
}

TEST(Flow, LanesComeToAShuffleFromDifferentPaths) {
    // The branch's lanes meet behind the shuffle's statement only by waiting at it: the join lies before it.
    const auto result = run_threads(R"(
        mov.u32 %r2, %r0;
        setp.lt.u32 %p1, %r0, 16;
        @%p1 bra SHUFFLE;
        add.u32 %r2, %r2, 100;
    SHUFFLE:
        shfl.sync.idx.b32 %r1, %r2, 31, 31, -1;)");
    for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(result[i], 131u);
}

TEST(Flow, WarpBarriersAtDifferentStatementsMeet) {
    run_threads(R"(
        mov.u32 %r1, 0;
        setp.lt.u32 %p1, %r0, 16;
        @%p1 bra LOW;
        bar.warp.sync 0xffffffff;
        bra MET;
    LOW:
        bar.warp.sync 0xffffffff;
    MET:
        add.u32 %r1, %r1, 1;)");
}

TEST(Flow, BarriersWithCounts) {
    const auto result = run_threads(R"(
        shr.u32 %r2, %r0, 5;
        mov.u32 %r4, shared;
        shl.b32 %r5, %r0, 2;
        add.u32 %r5, %r5, %r4;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra PRODUCER;
        setp.gt.u32 %p2, %r2, 1;
        @%p2 bra OTHERS;
        bar.sync 1, 64;
        ld.shared.u32 %r1, [%r5+-128];
        bra END;
    PRODUCER:
        mov.u32 %r1, 1;
        mul.lo.u32 %r6, %r0, 3;
        st.shared.u32 [%r5], %r6;
        bar.arrive 1, 64;
        bra END;
    OTHERS:
        mov.u32 %r1, 9;
        bar.sync 2, 64;
    END:
        bar.sync 0;)",
                                    128, 2, ".shared .align 4 .b8 shared[128];");
    for (std::uint32_t i = 0; i < 256; ++i) {
        const std::uint32_t thread = i % 128;
        EXPECT_EQ(result[i], thread < 32 ? 1 : thread < 64 ? 3 * (thread - 32) : 9);
    }
}

TEST(Flow, BarriersReduce) {
    const auto result = run_threads(R"(
        setp.lt.u32 %p1, %r0, 50;
        bar.red.popc.u32 %r1, 0, %p1;
        setp.lt.u32 %p2, %r0, 96;
        bar.red.and.pred %p3, 0, %p2;
        bar.red.or.pred %p4, 0, !%p2;
        selp.u32 %r2, 1000, 0, %p3;
        selp.u32 %r3, 10000, 0, %p4;
        add.u32 %r1, %r1, %r2;
        add.u32 %r1, %r1, %r3;)",
                                    96);
    for (std::uint32_t i = 0; i < 96; ++i) EXPECT_EQ(result[i], 1050u);
}

TEST(Flow, UnalignedBarriersTakeLanesOneByOne) {
    run_threads(R"(
        mov.u32 %r1, 3;
        setp.lt.u32 %p1, %r0, 7;
        @%p1 bra A;
        barrier.sync 0;
        bra B;
    A:
        barrier.sync 0;
    B:
        add.u32 %r1, %r1, 1;)",
                64);
}

TEST(Flow, SpecialRegisters) {
    Device device;
    device.grid = {2, 3, 2};
    device.block = {4, 3, 5};
    const std::uint64_t out = device.buffer(std::vector<std::uint32_t>(12 * 60 * 4));
    device.run(kernel_text(1, R"(
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
        mad.lo.u32 %r4, %r3, 3, %r2;
        mad.lo.u32 %r4, %r4, 2, %r1;
        mov.u32 %r5, %tid.x; mov.u32 %r6, %tid.y; mov.u32 %r7, %tid.z;
        mad.lo.u32 %r8, %r7, 3, %r6;
        mad.lo.u32 %r8, %r8, 4, %r5;
        mad.lo.u32 %r9, %r4, 60, %r8;
        mul.wide.u32 %rd2, %r9, 16;
        add.u64 %rd2, %rd2, %rd0;
        mov.u32 %r10, %laneid; mov.u32 %r11, %warpid; mov.u32 %r12, %lanemask_lt; mov.u32 %r13, %nctaid.y;
        st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};)"),
               {out});
    const auto result = device.read<std::uint32_t>(out, 12 * 60 * 4);
    for (std::uint32_t i = 0; i < 720; ++i) {
        const std::uint32_t thread = i % 60, lane = thread % 32;
        EXPECT_EQ(result[4 * i], lane);
        EXPECT_EQ(result[4 * i + 1], thread / 32);
        EXPECT_EQ(result[4 * i + 2], (1u << lane) - 1);
        EXPECT_EQ(result[4 * i + 3], 3u);
    }
}

TEST(Flow, AShareOfManyBlocks) {
    for (const std::uint32_t blocks : {1000u, 2000u}) {
        for (Settings settings : orders()) {
            settings.share = 0.0014;
            Device device;
            device.settings = settings;
            device.grid = {blocks, 1, 1};
            device.block = {1, 1, 1};
            const std::uint64_t out = device.buffer(std::vector<std::uint32_t>(blocks));
            device.run(kernel_text(1, R"(
                mov.u32 %r1, %ctaid.x;
                mul.wide.u32 %rd2, %r1, 4;
                add.u64 %rd2, %rd2, %rd0;
                st.global.u32 [%rd2], 1;)"),
                       {out});
            const auto result = device.read<std::uint32_t>(out, blocks);
            for (std::uint32_t i = 0; i < blocks; ++i) EXPECT_EQ(result[i], blocks == 1000 || i % 500 >= 497) << i;
        }
    }
}

TEST(Flow, ShufflesIntoTheirOwnOperand) {
    const auto result = run_threads("mov.u32 %r1, %r0;\nshfl.sync.bfly.b32 %r1, %r1, 5, 31, -1;");
    for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(result[i], i ^ 5);
}

TEST(Flow, CountsStatements) {
    Device device;
    device.block = {64, 1, 1};
    Program program(kernel_text(0, "setp.lt.u32 %p1, %r0, 3;\n@%p1 mov.u32 %r1, 3;\nbar.sync 0;"), device.memory);
    device.run(program, {});
    device.run(program, {});
    std::vector<std::uint64_t> times, of_lanes;
    for (const Executions& each : program.executed(program.module().functions[0])) {
        times.push_back(each.times);
        of_lanes.push_back(each.lanes);
    }
    EXPECT_EQ(times, (std::vector<std::uint64_t>{4, 4, 2, 4, 4}));
    EXPECT_EQ(of_lanes, (std::vector<std::uint64_t>{128, 128, 6, 128, 128}));
}

}  // namespace
}  // namespace headrace::ptx
