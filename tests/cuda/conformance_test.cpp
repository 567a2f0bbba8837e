// Conformance on a CUDA device: the problem lines and random problems with their tensors there, by the implementation
// that serves them and, a sixth of the smaller ones, by every other that accepts them.
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

constexpr std::uint64_t random_problems = 600, tensor_problems = 160, tensor_gradient_problems = 60;
constexpr double most_work_of_another = 1e6;  // (device_problems.hpp) where an implementation does not serve the line

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

// Draws sizes, others for each line and each of `kind`.
class Sizes {
  public:
    Sizes(std::uint64_t kind, const ProblemLine& line) : stream_(kind, format(line)) {}
    std::int64_t one_of(std::initializer_list<std::int64_t> sizes) {
        return sizes.begin()[stream_.bits(drawn_++) % sizes.size()];
    }

  private:
    Stream stream_;
    std::int64_t drawn_ = 0;
};

// Random forwards with the sizes and types that tensor cores serve, half of them with tokens enough for states that
// hardly forget and come back.
std::vector<ProblemLine> tensor_lines() {
    std::vector<ProblemLine> lines;
    for (std::uint64_t seed = 0; lines.size() < tensor_problems; ++seed) {
        ProblemLine line = test::on_device(random_problem(8'000'009 + seed));
        Sizes sizes(2, line);
        if (line.direction != Direction::forward || has_channel(line.gate) || line.value_gate || line.elementwise_beta)
            continue;
        line.dtype = DType::bf16;
        line.B = 1;
        line.K = sizes.one_of({64, 64, 80, 100, 127, 128, 128});
        line.V = sizes.one_of({32, 64, 65, 70, 128, 130});
        if (line.varlen.empty()) line.T = sizes.one_of({33, 63, 64, 65, 127, 128, 129, 300, 500, 700});
        if (line.varlen.empty() || line.T >= 32) lines.push_back(line);
    }
    return lines;
}

// Random backwards that tensor cores serve.
std::vector<ProblemLine> tensor_gradient_lines() {
    std::vector<ProblemLine> lines;
    for (std::uint64_t seed = 0; lines.size() < tensor_gradient_problems; ++seed) {
        ProblemLine line = test::on_device(random_problem(8'500'003 + seed));
        Sizes sizes(3, line);
        if (line.direction != Direction::backward || has_delta_rule(line.op) || has_channel(line.gate) ||
            line.value_gate || line.varlen.size() > 3)
            continue;
        line.dtype = DType::bf16;
        line.B = 1, line.H = line.HV = 8, line.l2norm = false;
        line.K = sizes.one_of({32, 64, 80, 127, 128}), line.V = sizes.one_of({32, 64, 70, 128});
        if (line.varlen.empty()) line.T = sizes.one_of({33, 63, 64, 65, 127, 129, 200});
        if (line.state_dtype && *line.state_dtype != DType::f32) line.state_dtype = DType::bf16;
        line.force = "cuda.tensor";
        if (line.gate_raw) line.lower_bound = -5;  // behind a softplus there are too few heads
        const CallTensors made = make_shapes(line);
        if (line.T >= 32 && made.call.d_out.d_o.given()) lines.push_back(line);
    }
    return lines;
}

// Long enough, and of heads few enough, for the segments of the tensor-core form.
const char* const segment_lines[] = {
    "simple_gla:fwd t1100 h2 k128 v128 bf16 state=inout",
    "simple_gla:fwd varlen=0,1000,1000,2100 h1 hv2 gate=step+head bf16 state=inout l2norm",
    "retention:fwd t1600 h1 k32 v32 gamma=-1e-4 bf16 state=out reverse",
    "gla:fwd t2100 h1 k64 v130 gate=channel+head gates=reset bf16 state=inout l2norm",
    "gla:fwd varlen=0,1000,1000,2100,3200 h1 hv2 k100 v40 gates=lasting bf16 state=inout reverse strided",
    "gated_delta_rule:fwd t2100 h1 gates=reset bf16 state=inout l2norm",
    "comba:fwd varlen=0,1100,1300 h1 k100 v70 gates=lasting bf16 state=inout reverse l2norm",
    "delta_rule:fwd b2 t1100 h1 v70 bf16 state=inout beta=two_sigmoid betas=1.9,2 l2norm strided",
};

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
            if (!serves && (hash / 128 % 6 != 0 || test::work(line) > most_work_of_another)) continue;
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
TEST(CudaConformance, GradientsOfTensorCores) {
    for (const ProblemLine& line : tensor_gradient_lines()) {
        if (!in_shard(Stream(1, format(line)).bits(0))) continue;
        const CheckResult result = check(line);
        EXPECT_TRUE(result.ok) << result.message << "\n" << result.repeat;
    }
}
TEST(CudaConformance, SegmentsOfTensorCores) {
    for (const char* text : segment_lines) {
        ProblemLine line;
        const Status status = parse(std::string(text) + " force=cuda.tensor cuda", &line);
        ASSERT_TRUE(status.ok()) << status.message();
        if (!in_shard(Stream(1, text).bits(0))) continue;
        const CheckResult result = check(line);
        EXPECT_TRUE(result.ok) << result.message << "\n" << result.repeat;
    }
}
TEST(CudaConformance, RandomProblemsOfTensorCores) { expect_passes(tensor_lines()); }

}  // namespace
}  // namespace headrace::harness
