// shfl, vote, match, redux and activemask: every mode, segments, partial member masks, and their faults.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {
namespace {

std::vector<std::uint64_t> squares() {
    std::vector<std::uint64_t> values(32);
    for (std::size_t i = 0; i < 32; ++i) values[i] = i * i + 7;
    return values;
}

// Lane l's result of one statement, with its square in %r1.
std::vector<std::uint32_t> run_lane_values(const std::string& body) {
    return run_lanes<std::uint32_t>({{squares(), "u32", "%r1"}}, body, "u32", "%r2");
}

std::uint32_t square(int lane) { return static_cast<std::uint32_t>(lane * lane + 7); }

struct ShuffleCase {
    const char* mode;
    int b, c;
    int (*source)(int lane);  // -1: outside, the lane itself
};

class Shuffle : public testing::TestWithParam<ShuffleCase> {};

TEST_P(Shuffle, ValueAndPredicate) {
    const ShuffleCase& test = GetParam();
    const std::string statement = std::string("shfl.sync.") + test.mode + ".b32 %r2|%p1, %r1, " +
                                  std::to_string(test.b) + ", " + std::to_string(test.c) + ", -1;";
    const auto values = run_lane_values(statement);
    const auto inside = run_lane_values(statement + "selp.u32 %r2, 1, 0, %p1;");
    for (int lane = 0; lane < 32; ++lane) {
        const int source = test.source(lane);
        EXPECT_EQ(values[static_cast<std::size_t>(lane)], square(source < 0 ? lane : source)) << statement << lane;
        EXPECT_EQ(inside[static_cast<std::size_t>(lane)], source < 0 ? 0U : 1U) << statement << lane;
    }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, Shuffle,
    testing::Values(ShuffleCase{"idx", 5, 31, [](int) { return 5; }},
                    ShuffleCase{"idx", 37, 31, [](int) { return 5; }},                               // five bits count
                    ShuffleCase{"idx", 3, 31 | 24 << 8, [](int lane) { return lane / 8 * 8 + 3; }},  // width 8
                    ShuffleCase{"up", 1, 0, [](int lane) { return lane - 1; }},
                    ShuffleCase{"up", 3, 24 << 8, [](int lane) { return lane % 8 < 3 ? -1 : lane - 3; }},
                    ShuffleCase{"down", 4, 31, [](int lane) { return lane + 4 > 31 ? -1 : lane + 4; }},
                    ShuffleCase{"down", 2, 7 | 24 << 8, [](int lane) { return lane % 8 + 2 > 7 ? -1 : lane + 2; }},
                    ShuffleCase{"down", 2, 5 | 24 << 8, [](int lane) { return lane % 8 + 2 > 5 ? -1 : lane + 2; }},
                    ShuffleCase{"bfly", 16, 31, [](int lane) { return lane ^ 16; }},
                    ShuffleCase{"bfly", 1, 31, [](int lane) { return lane ^ 1; }},
                    ShuffleCase{"bfly", 12, 7 | 24 << 8,
                                [](int lane) { return (lane ^ 12) > lane / 8 * 8 + 7 ? -1 : lane ^ 12; }}));

TEST(Shuffle, LanePerLane) {
    const auto values = run_lane_values("sub.u32 %r3, 31, %r39; shfl.sync.idx.b32 %r2, %r1, %r3, 31, -1;");
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(values[static_cast<std::size_t>(lane)], square(31 - lane));
}

TEST(Shuffle, InPlace) {
    const auto values = run_lane_values("mov.u32 %r2, %r1; shfl.sync.down.b32 %r2, %r2, 1, 31, -1;");
    for (int lane = 0; lane < 31; ++lane) EXPECT_EQ(values[static_cast<std::size_t>(lane)], square(lane + 1));
}

const std::string low_half = "mov.u32 %r2, 99; setp.lt.u32 %p2, %r39, 16; @!%p2 bra done; ";

TEST(Shuffle, HalfOfTheWarp) {
    const auto values = run_lane_values(low_half + "shfl.sync.bfly.b32 %r2, %r1, 8, 31, 0xffff; done:");
    for (int lane = 0; lane < 32; ++lane)
        EXPECT_EQ(values[static_cast<std::size_t>(lane)], lane < 16 ? square(lane ^ 8) : 99U);
}

TEST(Shuffle, AbsentLaneIsAFault) {
    EXPECT_FAULT(run_lane_values(low_half + "shfl.sync.bfly.b32 %r2, %r1, 16, 31, 0xffff; done:"),
                 "lane 0 reads lane 16, which does not take part");
    EXPECT_FAULT(run_lane_values("shfl.bfly.b32 %r2, %r1, 16, 31;"), "shfl.bfly.b32");
}

TEST(Vote, Modes) {
    const auto count = [](const std::string& condition, const std::string& mode) {
        const auto results = run_lane_values("setp." + condition + "; vote.sync." + mode +
                                             ".pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;");
        return std::count(results.begin(), results.end(), 1U);
    };
    for (const char* mode : {"all", "any", "uni"}) {
        const std::string name = mode;
        EXPECT_EQ(count("lt.u32 %p1, %r39, 32", mode), 32);
        EXPECT_EQ(count("lt.u32 %p1, %r39, 5", mode), name == "any" ? 32 : 0);
        EXPECT_EQ(count("gt.u32 %p1, %r39, 40", mode), name == "uni" ? 32 : 0);
    }
}

TEST(Vote, Ballot) {
    const auto plain = run_lane_values("setp.lt.u32 %p1, %r39, 5; vote.sync.ballot.b32 %r2, %p1, -1;");
    EXPECT_EQ(plain, std::vector<std::uint32_t>(32, 31));
    const auto negated = run_lane_values("setp.lt.u32 %p1, %r39, 5; vote.sync.ballot.b32 %r2, !%p1, -1;");
    EXPECT_EQ(negated, std::vector<std::uint32_t>(32, ~31U));
    const auto half =
        run_lane_values(low_half + "setp.gt.u32 %p1, %r39, 3; vote.sync.ballot.b32 %r2, %p1, 0xffff; done:");
    for (std::size_t lane = 0; lane < 32; ++lane) EXPECT_EQ(half[lane], lane < 16 ? 0xfff0U : 99U);
}

TEST(Match, AnyAndAll) {
    const auto any = run_lane_values("and.b32 %r3, %r39, 3; match.any.sync.b32 %r2, %r3, -1;");
    for (std::size_t lane = 0; lane < 32; ++lane) EXPECT_EQ(any[lane], 0x11111111U << lane % 4);
    const auto wide = run_lane_values("and.b32 %r3, %r39, 1; cvt.u64.u32 %rd9, %r3; match.any.sync.b64 %r2, %rd9, -1;");
    for (std::size_t lane = 0; lane < 32; ++lane) EXPECT_EQ(wide[lane], 0x55555555U << lane % 2);
    const auto all = run_lane_values("mov.u32 %r3, 8; match.all.sync.b32 %r2|%p1, %r3, -1; @!%p1 mov.u32 %r2, 1;");
    EXPECT_EQ(all, std::vector<std::uint32_t>(32, ~0U));
    const auto unlike = run_lane_values("match.all.sync.b32 %r2|%p1, %r1, -1; @%p1 mov.u32 %r2, 1;");
    EXPECT_EQ(unlike, std::vector<std::uint32_t>(32, 0));
}

TEST(Redux, Operations) {
    std::uint32_t sum = 0, conjunction = ~0U, disjunction = 0, difference = 0;
    for (int lane = 0; lane < 32; ++lane) {
        sum += square(lane), conjunction &= square(lane), disjunction |= square(lane), difference ^= square(lane);
    }
    const auto first = [](const std::string& body) { return run_lane_values(body).at(31); };
    EXPECT_EQ(first("redux.sync.add.u32 %r2, %r1, -1;"), sum);
    EXPECT_EQ(first("redux.sync.and.b32 %r2, %r1, -1;"), conjunction);
    EXPECT_EQ(first("redux.sync.or.b32 %r2, %r1, -1;"), disjunction);
    EXPECT_EQ(first("redux.sync.xor.b32 %r2, %r1, -1;"), difference);
    EXPECT_EQ(first("redux.sync.min.u32 %r2, %r1, -1;"), square(0));
    EXPECT_EQ(first("redux.sync.max.u32 %r2, %r1, -1;"), square(31));
    EXPECT_EQ(static_cast<std::int32_t>(first("sub.s32 %r3, 20, %r1; redux.sync.min.s32 %r2, %r3, -1;")), 20 - 968);
    EXPECT_EQ(static_cast<std::int32_t>(first("sub.s32 %r3, 20, %r1; redux.sync.max.s32 %r2, %r3, -1;")), 13);
    EXPECT_EQ(static_cast<std::int32_t>(first("neg.s32 %r3, %r1; redux.sync.add.s32 %r2, %r3, -1;")),
              -static_cast<std::int32_t>(sum));
    EXPECT_FAULT(first("redux.sync.add.f32 %f2, %f1, -1;"), "redux.sync.add.f32");
}

TEST(ActiveMask, OfTheRunningLanes) {
    const auto values = run_lane_values(low_half + "activemask.b32 %r2; done:");
    for (std::size_t lane = 0; lane < 32; ++lane) EXPECT_EQ(values[lane], lane < 16 ? 0xffffU : 99U);
    EXPECT_FAULT(run_lane_values("elect.sync %r2|%p1, -1;"), "elect.sync");
}

}  // namespace
}  // namespace headrace::ptx
