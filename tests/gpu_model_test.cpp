// The model of a GPU: useful work by shapes, blocks on a multiprocessor, floors of a launch, published times.
#include "harness/gpu_model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "harness/gpu_bound.hpp"
#include "harness/measure.hpp"
#include "harness/tensors.hpp"

namespace headrace::harness {
namespace {

ProblemLine parsed(const std::string& text) {
    ProblemLine line;
    const Status status = parse(text, &line);
    EXPECT_TRUE(status.ok()) << status.message();
    return line;
}

// Of one token and value head, K = V = 128, as many query heads as value heads.
struct Useful {
    const char* problem;
    double kiloflop, bytes;
};
constexpr Useful useful[] = {
    {"simple_gla:fwd gate=none", 98, 1024},
    {"simple_gla:bwd gate=none", 246, 1792},
    {"gated_delta_rule:fwd", 167, 1032},
    {"gated_delta_rule:bwd", 492, 1808},
    {"kda:fwd", 167, 1540},
    {"kda:bwd", 524, 2312 + 2 * 256},  // gates in f32, not in bf16
};

TEST(GpuBound, UsefulWorkOfATokenAndHead) {
    constexpr double tokens = 1024, heads = 4;
    for (const Useful& expected : useful) {
        const ProblemLine line = parsed(std::string(expected.problem) + " t1024 h4 k128 bf16");
        EXPECT_EQ(std::round(chunk_flop(line) / tokens / heads / 1e3), expected.kiloflop) << expected.problem;
        EXPECT_EQ(least_bytes(make_shapes(line).call) / tokens / heads, expected.bytes) << expected.problem;
    }
}

TEST(GpuBound, GroupedHeadsReadKeysOnce) {
    const ProblemLine line = parsed("gated_delta_rule:fwd t1024 h1 hv4 k128 bf16");
    EXPECT_EQ(least_bytes(make_shapes(line).call) / 1024, 2 * 256 + 4 * (2 * 256 + 8));
}

// Of a token and head in bf16, K 64, V 128; gates and betas are f32. What leaves is a state, of bytes.
TEST(GpuBound, SummariesReadWhatTheyRestOn) {
    constexpr int q = 128, k = 128, v = 256, d_o = 256, tokens = 1024;
    constexpr double state = 4.0 * 64 * 128;
    const auto bytes = [&](const char* problem, double out) {
        const ProblemLine line = parsed(std::string(problem) + " t1024 h1 k64 v128 bf16");
        return (least_bytes(make_shapes(line).call) - out) / tokens;
    };
    EXPECT_EQ(bytes("simple_gla:summary part=transition state=in", 4), 4);
    EXPECT_EQ(bytes("gla:summary part=transition", 4 * 64), 4 * 64);
    EXPECT_EQ(bytes("simple_gla:summary part=state state=in", 2 * state), k + v + 4);
    EXPECT_EQ(bytes("simple_gla:summary state=none", state + 4), k + v + 4);
    EXPECT_EQ(bytes("gated_delta_rule:summary part=transition", 4.0 * 64 * 64), k + 8);
    EXPECT_EQ(bytes("comba:summary part=transition", 4.0 * 64 * 64), 2 * k + 8);
    EXPECT_EQ(bytes("simple_gla:summary_bwd state=none", state), q + d_o + 4);
    EXPECT_EQ(bytes("gated_delta_rule:summary_bwd state=none", state), q + k + d_o + 8);
}

TEST(GpuBound, OfPublishedShapes) {
    const Gpu& h200 = *find_gpu("h200");
    const auto milliseconds = [&](const char* problem) {
        const ProblemLine line = parsed(problem);
        return 1e3 * bound_of(line, least_bytes(make_shapes(line).call), h200).seconds;
    };
    EXPECT_NEAR(milliseconds("gated_delta_rule:fwd t8192 h16 hv64 k128 bf16"), 0.111, 5e-4);
    EXPECT_NEAR(milliseconds("gated_delta_rule:fwd t8192 h2 hv8 k128 bf16"), 0.014, 5e-4);
    EXPECT_NEAR(milliseconds("gated_delta_rule:bwd t8192 h16 hv32 k128 bf16"), 0.163, 5e-4);
    EXPECT_NEAR(milliseconds("simple_gla:fwd t8192 h64 k128 bf16 gate=none"), 0.125, 5e-4);
    EXPECT_EQ(chunk_flop(parsed("gla:step b2 t1 h1 k64 v32")), 2 * 4 * 64 * 32);
}

TEST(GpuBound, PublishedTimesBelongToTheirShape) {
    const Gpu &h200 = *find_gpu("h200"), &h100 = *find_gpu("h100");
    const ProblemLine line = parsed("gated_delta_rule:fwd t8192 h16 hv64 k128 bf16 cuda threads=2 force=cuda.walk");
    const std::vector<PeerTime> peers = peers_of(line, h200);
    ASSERT_EQ(peers.size(), 3u);
    EXPECT_STREQ(peers[0].peer, "FlashInfer");
    EXPECT_EQ(peers[0].seconds, 0.392e-3);
    EXPECT_TRUE(peers_of(line, h100).empty());
    EXPECT_TRUE(peers_of(parsed("gated_delta_rule:fwd t8192 h16 hv32 k128 bf16"), h200).empty());
    EXPECT_TRUE(peers_of(parsed("gated_delta_rule:fwd t8192 h16 hv64 k128 f32"), h200).empty());
    for (const PeerTime& time : peer_times()) {
        EXPECT_FALSE(peers_of(parsed(time.problem), *find_gpu(time.gpu)).empty()) << time.problem;
        EXPECT_GT(std::string(time.source).size(), 0u);
    }
    const std::set<std::string> distinct(peer_problems().begin(), peer_problems().end());
    EXPECT_EQ(distinct.size(), peer_problems().size());
}

LaunchPlan launch_of(int threads, int registers, std::size_t shared) {
    LaunchPlan launch;
    launch.kernel = "kernel";
    launch.blocks = 264, launch.threads = threads, launch.registers = registers, launch.shared_bytes = shared;
    return launch;
}

TEST(GpuModel, BlocksOfAMultiprocessor) {
    const Gpu &h200 = *find_gpu("h200"), &a100 = *find_gpu("a100");
    EXPECT_EQ(blocks_at_once(launch_of(128, 32, 96 << 10), h200), 2);  // shared memory
    EXPECT_EQ(blocks_at_once(launch_of(128, 32, 96 << 10), a100), 1);
    EXPECT_EQ(blocks_at_once(launch_of(128, 168, 0), h200), 3);  // registers
    EXPECT_EQ(blocks_at_once(launch_of(1024, 32, 0), h200), 2);  // threads
    EXPECT_EQ(blocks_at_once(launch_of(32, 32, 0), h200), 32);
    EXPECT_EQ(blocks_at_once(launch_of(128, 32, 228 << 10), h200), 0);
}

TEST(GpuModel, StepsThatEndEarlyLackNoMoreInstructionsThanTheyHave) {
    LaunchPlan launch = launch_of(128, 168, 0);
    launch.block.issued = -300, launch.step.issued = 1000;
    const auto issued = [&](double all_steps) {
        launch.all_steps = all_steps;
        return launch.total().issued;
    };
    EXPECT_EQ(issued(2.0 * 264), (2 * 1000 - 300) * 264);
    EXPECT_EQ(issued(264), 700 * 264);
    EXPECT_EQ(issued(10), 700 * 10);  // of few tokens each, or most blocks without any
    EXPECT_EQ(issued(0), 0);
}

double floor_of(const LaunchTime& time, const std::string& name) {
    for (const Floor& floor : time.floors)
        if (name == floor.name) return floor.seconds;
    return 0;
}

TEST(GpuModel, TheLargestFloorIsTheTime) {
    const Gpu& gpu = *find_gpu("");
    EXPECT_STREQ(gpu.name, "h200");
    LaunchPlan launch = launch_of(128, 168, 96 << 10);
    launch.steps = 10, launch.all_steps = 10 * 264;
    const auto limit = [&](double KernelWork::*field, double each, CallBytes bytes = {}) {
        launch.step = {};
        launch.step.*field = each;
        const LaunchTime time = model(launch, gpu, bytes);
        EXPECT_NEAR(time.seconds, time.limit.seconds + gpu.launch, 1e-12);
        for (const Floor& floor : time.floors) EXPECT_LE(floor.seconds, time.limit.seconds) << floor.name;
        return time;
    };
    constexpr double gib = 1 << 30;
    LaunchTime time = limit(&KernelWork::input_bytes, gib, {2640 * gib, 0});
    EXPECT_STREQ(time.limit.name, "memory");
    EXPECT_NEAR(time.limit.seconds, 2640 * gib / 4.3e12, 1e-6);
    EXPECT_EQ(time.at_once, 2);
    EXPECT_EQ(time.waves, 1);
    time = limit(&KernelWork::input_bytes, gib, {gib, 0});  // read 2640 times, from L2
    EXPECT_STREQ(time.limit.name, "L2");
    EXPECT_EQ(time.device_bytes, gib);
    // Of multiply-adds alone the peak at its higher clock is never the largest: so many instructions are issued.
    EXPECT_NEAR(floor_of(limit(&KernelWork::fma_flop, 1e9), "multiply-adds"), 2640e9 / 66.9e12, 1e-6);
    launch.arithmetic = DType::f64;
    EXPECT_NEAR(limit(&KernelWork::fma_flop, 1e9).limit.seconds, 2640e9 / 33.5e12, 1e-6);
    EXPECT_NEAR(limit(&KernelWork::tensor_flop, 1e9).limit.seconds, 2640e9 / 66.9e12, 1e-6);
    launch.arithmetic = DType::bf16;
    EXPECT_NEAR(limit(&KernelWork::tensor_flop, 1e9).limit.seconds, 2640e9 / (0.62 * 989e12), 1e-6);
    time = limit(&KernelWork::memory_waits, 1000);
    EXPECT_STREQ(time.limit.name, "chain");
    EXPECT_NEAR(time.limit.seconds, 10 * 1000 * 480 / 1.83e9, 1e-6);
    launch.blocks = 265;
    EXPECT_NEAR(limit(&KernelWork::memory_waits, 1000).limit.seconds, 2 * 10 * 1000 * 480 / 1.83e9, 1e-6);
}

// Those that were measured as often as an H200 issued them; those that are counted one in each cycle.
TEST(GpuModel, InstructionsAreIssuedByFourSchedulers) {
    const Gpu& gpu = *find_gpu("");
    constexpr double issued = 0.41 * 1.83e9;
    LaunchPlan launch = launch_of(128, 168, 96 << 10);
    launch.steps = 1, launch.all_steps = 264;
    const auto seconds_of = [&](const char* name) { return floor_of(model(launch, gpu, {}), name); };
    launch.step.issued = 4e6;
    EXPECT_NEAR(seconds_of("issue"), 264 / 132 * 1e6 / issued, 1e-9);
    EXPECT_NEAR(seconds_of("chain"), 264 / 132 * 1e6 / issued, 1e-9);
    launch.threads = 96;  // six warps: two of the four schedulers have two
    EXPECT_NEAR(seconds_of("chain"), 2 * 4e6 / 3 / issued, 1e-9);
    launch.threads = 128, launch.blocks = 265;  // the last block has a multiprocessor for itself
    EXPECT_NEAR(seconds_of("chain"), 3 * 1e6 / issued, 1e-9);
    launch.step.issued = 0, launch.step.tensor_flop = 4096 * 4e6;  // not measured: what is counted of them
    EXPECT_NEAR(seconds_of("issue"), 264 / 132 * 1e6 / 1.83e9, 1e-9);
}

TEST(GpuModel, ALoneBlockHasAMultiprocessorForItself) {
    const Gpu& gpu = *find_gpu("h200");
    LaunchPlan launch = launch_of(128, 168, 96 << 10);
    launch.steps = 1, launch.step.fma_flop = 1e9;
    launch.blocks = 1, launch.all_steps = 1;
    const double alone = model(launch, gpu, {}).seconds;
    launch.blocks = 132, launch.all_steps = 132;
    EXPECT_NEAR(model(launch, gpu, {}).seconds, alone, 1e-9);
    launch.blocks = 264, launch.all_steps = 264;
    EXPECT_NEAR(model(launch, gpu, {}).seconds - gpu.launch, 2 * (alone - gpu.launch), 1e-9);
}

TEST(GpuModel, BlocksWithoutAChunkTakeNoTurn) {
    const Gpu& gpu = *find_gpu("h200");
    LaunchPlan launch = launch_of(128, 168, 96 << 10);
    launch.steps = 1, launch.step.fma_flop = 1e9;
    launch.blocks = 264, launch.all_steps = 264;
    const LaunchTime busy = model(launch, gpu, {});
    launch.blocks = 265;  // a wave more
    EXPECT_EQ(model(launch, gpu, {}).waves, busy.waves + 1);
    launch.idle_blocks = 1;
    EXPECT_EQ(model(launch, gpu, {}).waves, busy.waves);
    EXPECT_NEAR(model(launch, gpu, {}).seconds - busy.seconds, 480 / 1.83e9, 1e-9);
}

TEST(GpuModel, ACpuCallHasNoLaunches) {
    std::vector<LaunchPlan> launches(1);
    ASSERT_TRUE(plan_launches(make_shapes(parsed("gla:fwd t64 h2")).call, &launches).ok());
    EXPECT_TRUE(launches.empty());
}

}  // namespace
}  // namespace headrace::harness
