// The oracle over the problems of the tests and larger ones, each by every implementation on the device that accepts
// it.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>

#include "harness/check.hpp"
#include "harness/device_measure.hpp"
#include "harness/random.hpp"
#include "harness/tensors.hpp"
#include "tests/cuda/device_problems.hpp"
#include "tests/cuda/gpu_check/gpu_check.hpp"

namespace headrace::gpu_check {
namespace {

using harness::ProblemLine;

constexpr std::uint64_t random_problems = 3000;

// All problems in an order that is random but the same each time: where time ends, what was checked is a sample.
std::vector<ProblemLine> problems(const Arguments& arguments) {
    std::vector<ProblemLine> lines;
    for (const std::string& text : arguments.problems) {
        ProblemLine line;
        require(harness::parse(text, &line));
        lines.push_back(test::on_device(line));
    }
    if (!arguments.file.empty()) require(test::add_listed(arguments.file, &lines));
    if (!lines.empty()) return lines;
    harness::DeviceFacts facts;
    require(harness::describe_device(&facts));
    for (const char* name : {"conformance", "regressions", "gpu_large"}) {
        require(test::add_listed(arguments.root + "/problems/" + name + ".txt", &lines));
    }
    test::add_random(random_problems, &lines);
    if (harness::is_interpreter(facts.name)) {
        std::erase_if(
            lines, [](const ProblemLine& line) { return test::work(line) > test::most_work_of_an_interpreter / 10; });
    }
    const auto place = [](const ProblemLine& line) { return harness::Stream(2, format(line)).bits(0); };
    std::stable_sort(lines.begin(), lines.end(),
                     [&](const ProblemLine& a, const ProblemLine& b) { return place(a) < place(b); });
    std::vector<ProblemLine> shard;
    for (std::size_t i = 0; i < lines.size(); ++i) {
        if (static_cast<int>(i) % arguments.shards == arguments.shard) shard.push_back(lines[i]);
    }
    return shard;
}

struct Tally {
    std::int64_t lines = 0, runs = 0, missed = 0, not_served = 0;
};

void check_forced(const Arguments& arguments, const ProblemLine& line, Tally* tally) {
    const harness::CheckResult result = harness::check(line);
    double closest = 0;
    for (const harness::TensorError& error : result.errors) {
        if (error.bar > 0) closest = std::max(closest, error.error / error.bar);
    }
    ++tally->runs;
    tally->missed += result.ok ? 0 : 1;
    if (!result.ok) std::printf("MISS %s\n  %s\n", format(line).c_str(), result.message.c_str());
    Line written("conformance");
    written.add("problem", format(line)).add("implementation", result.implementation).add("ok", result.ok);
    written.add("share_of_bar", closest);
    if (!result.ok) written.add("message", result.message).add("repeat", result.repeat);
    write(arguments, written);
}

void check_line(const Arguments& arguments, const ProblemLine& line, Tally* tally) {
    std::vector<Candidate> candidates;
    require(explain(harness::make_shapes(line).call, &candidates));
    const std::int64_t before = tally->runs;
    for (const Candidate& candidate : candidates) {
        if (!candidate.refusal.empty()) continue;
        ProblemLine forced = line;
        forced.force = candidate.name;
        check_forced(arguments, forced, tally);
    }
    ++tally->lines;
    if (tally->runs == before) ++tally->not_served;
}

// After a fault of a kernel a process gets nothing more from the device: a new one goes on behind the problem.
void begin_again_behind(const Arguments& arguments, std::int64_t index, std::int64_t failed, double seconds_left) {
    std::vector<std::string> words = {"gpu_check"};
    words.insert(words.end(), arguments.words.begin(), arguments.words.end());
    for (const std::string& word :
         {std::string("--first"), std::to_string(index + 1), std::string("--count"),
          std::to_string(arguments.count - (index + 1 - arguments.first)), std::string("--failed"),
          std::to_string(failed), std::string("--seconds"), std::to_string(std::max(seconds_left, 0.0))}) {
        words.push_back(word);
    }
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    std::fflush(stdout);
    ::execv("/proc/self/exe", pointers.data());
    throw Failure("could not begin again");
}

}  // namespace

std::int64_t check_conformance(const Arguments& arguments) {
    const Deadline deadline(arguments.seconds);
    const std::vector<ProblemLine> lines = problems(arguments);
    const auto all = static_cast<std::int64_t>(lines.size());
    const std::int64_t end = std::min(all, arguments.first + arguments.count);
    Tally tally;
    tally.missed = arguments.failed;
    std::int64_t index = arguments.first;
    for (; index < end && !deadline.over(); ++index) {
        const ProblemLine& line = lines[static_cast<std::size_t>(index)];
        check_line(arguments, line, &tally);
        if (cudaDeviceSynchronize() == cudaSuccess) continue;
        std::printf("LOST the device in %s\n", format(line).c_str());
        write(arguments,
              Line("conformance").add("problem", format(line)).add("ok", false).add("message", "the device was lost"));
        ++tally.missed;
        if (index + 1 < end) begin_again_behind(arguments, index, tally.missed, arguments.seconds - deadline.passed());
    }
    std::printf("conformance: %lld runs of %lld problems, %lld missed, %lld without an implementation, %.0f s%s\n",
                static_cast<long long>(tally.runs), static_cast<long long>(tally.lines),
                static_cast<long long>(tally.missed), static_cast<long long>(tally.not_served), deadline.passed(),
                index < end ? "; out of time" : "");
    write(arguments, Line("conformance_done")
                         .add("runs", tally.runs)
                         .add("problems", tally.lines)
                         .add("of", end)
                         .add("missed", tally.missed)
                         .add("not_served", tally.not_served)
                         .add("seconds", deadline.passed()));
    if (tally.runs == 0 && arguments.first == 0) throw Failure("conformance: nothing was checked");
    return tally.missed;
}

}  // namespace headrace::gpu_check
