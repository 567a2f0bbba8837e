// Judges kernels that hold many mutations, one switched on at a time: prints each mutation with the line that noticed
// it.
//
// usage: mutation_runner COUNT PROBLEM_FILE   exits with 0 if all are noticed and none is active when all lines pass
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "harness/check.hpp"
#include "harness/tensors.hpp"

// Read by the kernels: the number of the mutation that is switched on, 0 for none.
extern "C" {
extern int headrace_active_mutation;
int headrace_active_mutation = 0;
}

namespace {

using headrace::harness::ProblemLine;

// A forced implementation that the machine cannot run is the only reason to leave a line out.
bool runs_here(const ProblemLine& line) {
    const headrace::harness::CallTensors shapes = headrace::harness::make_shapes(line);
    std::vector<headrace::Candidate> candidates;
    if (!headrace::explain(shapes.call, &candidates).ok()) return true;
    for (const headrace::Candidate& candidate : candidates) {
        if (candidate.name == line.force) {
            return candidate.refusal.find("which this machine lacks") == std::string::npos;
        }
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    std::vector<ProblemLine> lines;
    const headrace::Status status = headrace::harness::read_problem_file(arguments[2], &lines);
    if (!status.ok()) return std::printf("%s\n", status.message().c_str()), 2;
    std::vector<std::string> noticed(static_cast<std::size_t>(std::atoi(arguments[1])) + 1);
    for (const ProblemLine& line : lines) {
        if (!runs_here(line)) {
            std::printf("not run here: %s\n", format(line).c_str());
            continue;
        }
        headrace_active_mutation = 0;
        const headrace::harness::CheckResult right = headrace::harness::check(line);
        if (!right.ok)
            return std::printf("without a mutation: %s\n%s\n", right.message.c_str(), right.repeat.c_str()), 2;
        for (std::size_t i = 1; i < noticed.size(); ++i) {
            if (!noticed[i].empty()) continue;
            headrace_active_mutation = static_cast<int>(i);
            if (!headrace::harness::check(line).ok) noticed[i] = format(line);
        }
    }
    bool all = true;
    for (std::size_t i = 1; i < noticed.size(); ++i) {
        std::printf("%zu %s\n", i, noticed[i].empty() ? "UNNOTICED" : noticed[i].c_str());
        all = all && !noticed[i].empty();
    }
    return all ? 0 : 1;
}
