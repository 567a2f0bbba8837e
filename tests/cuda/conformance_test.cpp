// Conformance on a CUDA device: the problem lines and random problems with their tensors there, by the implementation
// that serves them and, a third of them, by every other that accepts them.
//
// HEADRACE_CONFORMANCE_SHARE, a number in (0, 1], runs that share of everything, and HEADRACE_CONFORMANCE_SHARD=2/4 the
// third of four parts of it, both chosen by a hash of the line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "harness/check.hpp"
#include "harness/random.hpp"
#include "harness/tensors.hpp"
#include "tests/cuda/device_problems.hpp"

namespace headrace::harness {
namespace {

constexpr std::uint64_t random_problems = 1200;

// Of everything at share 1: some minutes on two cores in an interpreter.
double share() {
    const char* text = std::getenv("HEADRACE_CONFORMANCE_SHARE");
    const double value = text == nullptr ? 1.0 : std::atof(text);
    return value > 0.0 && value <= 1.0 ? value : 1.0;
}

// Which of how many parts; 0 of 1 without the variable.
bool in_shard(std::uint64_t hash) {
    const char* text = std::getenv("HEADRACE_CONFORMANCE_SHARD");
    unsigned shard = 0, shards = 1;
    if (text != nullptr && (std::sscanf(text, "%u/%u", &shard, &shards) != 2 || shard >= shards)) ADD_FAILURE() << text;
    return hash % shards == shard;
}

std::vector<ProblemLine> listed_lines() {
    std::vector<ProblemLine> lines;
    for (const char* name : {"conformance", "regressions"}) {
        const Status status = test::add_listed(std::string(HEADRACE_SOURCE_DIR "/problems/") + name + ".txt", &lines);
        EXPECT_TRUE(status.ok()) << status.message();
    }
    return lines;
}

std::vector<ProblemLine> random_lines() {
    std::vector<ProblemLine> lines;
    test::add_random(random_problems, &lines);
    return lines;
}

struct Runs {
    std::vector<ProblemLine> lines;
    std::size_t taken = 0;
    std::map<std::string, std::size_t> refused, left_out;
};

// Each line with the implementations that run it.
Runs forced_runs(const std::vector<ProblemLine>& lines) {
    Runs runs;
    for (const ProblemLine& line : lines) {
        const std::uint64_t hash = Stream(1, format(line)).bits(0) >> 8;
        if (hash / 64 % 1000 >= static_cast<std::uint64_t>(1000 * share()) || !in_shard(hash)) continue;
        ++runs.taken;
        if (test::work(line) > test::most_work_of_an_interpreter) {
            ++runs.left_out["too large for an interpreter"];
            continue;
        }
        const CallTensors shapes = make_shapes(line);
        std::vector<Candidate> candidates;
        const Status status = explain(shapes.call, &candidates);
        EXPECT_TRUE(status.ok()) << status.message() << "\n" << format(line);
        bool served = false;
        for (const Candidate& candidate : candidates) {
            if (!candidate.refusal.empty()) {
                ++runs.refused[candidate.name + ": " + candidate.refusal];
                continue;
            }
            const bool serves = candidate.yields.empty() && !served;
            served = served || serves;
            if (!serves && hash / 128 % 3 != 0) continue;
            runs.lines.push_back(line);
            runs.lines.back().force = candidate.name;
        }
        if (candidates.empty()) ++runs.refused["no implementation of the direction"];
    }
    return runs;
}

void expect_passes(const std::vector<ProblemLine>& lines) {
    const Runs runs = forced_runs(lines);
    for (const ProblemLine& line : runs.lines) {
        const CheckResult result = check(line);
        EXPECT_TRUE(result.ok) << result.message << "\n" << result.repeat;
    }
    std::printf("%zu runs of %zu lines, of %zu in all\n", runs.lines.size(), runs.taken, lines.size());
    for (const auto& [reason, count] : runs.left_out) std::printf("  left out %5zu: %s\n", count, reason.c_str());
    for (const auto& [reason, count] : runs.refused) std::printf("  refused  %5zu: %s\n", count, reason.c_str());
    EXPECT_GT(2 * runs.lines.size(), runs.taken);
}

TEST(CudaConformance, ListedLines) { expect_passes(listed_lines()); }
TEST(CudaConformance, RandomProblems) { expect_passes(random_lines()); }

}  // namespace
}  // namespace headrace::harness
