// Conformance: every problem line, each implementation forced over every line that it accepts, and random problems.
//
// HEADRACE_CONFORMANCE_SHARE, a number in (0, 1], runs that share of everything: for sanitizers, which are slow. What
// is left out is decided by a hash of the line, so that a run can be repeated.
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

namespace headrace::harness {
namespace {

// Runs of forced implementations at share 1: about a minute on two cores. An implementation that few lines reach keeps
// them all.
constexpr std::size_t most_forced_runs = 8000, few = 100;

double share() {
    const char* text = std::getenv("HEADRACE_CONFORMANCE_SHARE");
    const double value = text == nullptr ? 1.0 : std::atof(text);
    return value > 0.0 && value <= 1.0 ? value : 1.0;
}

// Keeps `count` of the items, rounded up: those whose texts have the least hashes.
template <typename Item, typename Text>
std::vector<Item> sample(std::vector<Item> items, double count, Text text) {
    const auto hash = [&](const Item& item) { return Stream(1, text(item)).bits(0); };
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return hash(a) < hash(b); });
    items.resize(std::min(items.size(), static_cast<std::size_t>(std::ceil(count))));
    return items;
}

const std::vector<ProblemLine>& all_lines() {
    static const std::vector<ProblemLine> lines = [] {
        std::vector<ProblemLine> listed;
        for (const char* name : {"conformance", "regressions"}) {
            std::vector<ProblemLine> some;
            const Status status =
                read_problem_file(std::string(HEADRACE_SOURCE_DIR "/problems/") + name + ".txt", &some);
            EXPECT_TRUE(status.ok()) << status.message();
            listed.insert(listed.end(), some.begin(), some.end());
        }
        return listed;
    }();
    return lines;
}

double line_count() { return static_cast<double>(all_lines().size()); }

void expect_passes(const ProblemLine& line) {
    const CheckResult result = check(line);
    EXPECT_TRUE(result.ok) << result.message << "\n" << result.repeat;
}

std::vector<Candidate> candidates_of(const ProblemLine& line) {
    const CallTensors shapes = make_shapes(line);
    std::vector<Candidate> candidates;
    const Status status = explain(shapes.call, &candidates);
    EXPECT_TRUE(status.ok()) << status.message() << "\n" << format(line);
    return candidates;
}

TEST(conformance, every_line_passes) {
    ASSERT_GT(all_lines().size(), 1000u);
    const std::vector<ProblemLine> lines = sample(all_lines(), share() * line_count(), format);
    for (const ProblemLine& line : lines) expect_passes(line);
    std::printf("%zu of %zu lines\n", lines.size(), all_lines().size());
}

// A line and an implementation that accepts it.
struct Forced {
    std::size_t line;
    std::string name;
};

// An implementation serves one direction or several: "avx2.recurrent fwd".
using Served = std::map<std::string, std::vector<Forced>>;

Served accepted_lines() {
    static const char* const directions[] = {" fwd", " bwd", " step", " summary", " summary_bwd"};
    Served served;
    for (std::size_t i = 0; i < all_lines().size(); ++i) {
        ProblemLine line = all_lines()[i];
        if (!line.force.empty()) continue;
        for (const Candidate& candidate : candidates_of(line)) {
            if (!candidate.refusal.empty()) continue;
            served[candidate.name + directions[static_cast<int>(line.direction)]].push_back({i, candidate.name});
        }
    }
    return served;
}

TEST(conformance, every_implementation_passes_every_line_it_accepts) {
    const Served served = accepted_lines();
    std::size_t total = 0;
    for (const auto& [name, forced] : served) {
        EXPECT_GT(forced.size(), 50u) << name << ": too few lines of the conformance set reach it";
        total += forced.size();
    }
    const double part = std::min(1.0, static_cast<double>(most_forced_runs) / static_cast<double>(total));
    std::vector<Forced> runs;
    for (const auto& [name, forced] : served) {
        const double count = share() * std::max(part * static_cast<double>(forced.size()), static_cast<double>(few));
        const std::vector<Forced> some =
            sample(forced, count, [](const Forced& f) { return f.name + format(all_lines()[f.line]); });
        std::printf("%-32s %4zu of %4zu lines\n", name.c_str(), some.size(), forced.size());
        runs.insert(runs.end(), some.begin(), some.end());
    }
    // Line by line: the oracle answers a question that is put again at once without computing it anew.
    std::stable_sort(runs.begin(), runs.end(), [](const Forced& a, const Forced& b) { return a.line < b.line; });
    for (const Forced& run : runs) {
        ProblemLine line = all_lines()[run.line];
        line.force = run.name;
        expect_passes(line);
    }
    std::printf("%zu of %zu forced runs\n", runs.size(), total);
}

// None is left out for want of lines: what this machine can run appears in some line's candidates.
TEST(conformance, every_implementation_of_this_machine_is_reached) {
    std::map<std::string, std::string> refusals;  // of those that accepted nothing: what the machine lacks, or the last
    for (const std::string& name : implementations()) {
        if (name.rfind("cuda.", 0) != 0) refusals[name] = "never asked";  // those: tests/cuda/coverage_test.py
    }
    const auto lacks = [](const std::string& refusal) { return refusal.find("which this machine lacks") != std::string::npos; };
    for (const ProblemLine& line : all_lines()) {
        if (refusals.empty()) break;
        for (const Candidate& candidate : candidates_of(line)) {
            if (candidate.refusal.empty()) {
                refusals.erase(candidate.name);
            } else if (const auto found = refusals.find(candidate.name); found != refusals.end() && !lacks(found->second)) {
                found->second = candidate.refusal;
            }
        }
    }
    for (const auto& [name, refusal] : refusals) {
        EXPECT_TRUE(lacks(refusal)) << name << ": " << refusal;
        std::printf("not run here: %s: %s\n", name.c_str(), refusal.c_str());
    }
}

TEST(conformance, random_problems_pass) {
    const auto count = static_cast<std::uint64_t>(std::ceil(200 * share()));
    for (std::uint64_t seed = 1; seed <= count; ++seed) expect_passes(random_problem(seed));
}

TEST(conformance, one_percent_of_any_output_is_noticed) {
    std::map<std::string, int> noticed;  // lines of each operator and direction
    for (const ProblemLine& line : sample(all_lines(), 0.1 * share() * line_count(), format)) {
        EXPECT_EQ(unnoticed_perturbations(line), std::vector<std::string>{}) << format(line);
        ++noticed[std::string(name_of(line.op)) + std::to_string(static_cast<int>(line.direction))];
    }
    if (share() == 1.0) {
        EXPECT_GE(noticed.size(), 20u) << "the sample misses most operators or directions";
    }
}

}  // namespace
}  // namespace headrace::harness
