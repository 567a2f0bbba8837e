// Judges kernels that hold many mutations, one switched on at a time: prints each mutation with the check that noticed
// it.
//
// usage: mutation_runner OPERATOR_MUTATIONS LAYER_MUTATIONS PROBLEM_FILE
// Exits with 0 if all are noticed and none is active when all checks pass.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "harness/check.hpp"
#include "harness/tensors.hpp"
#include "layer_calls.hpp"

// Read by the kernels: the number of the mutation that is switched on, 0 for none.
extern "C" {
extern int headrace_active_mutation;
int headrace_active_mutation = 0;
}

namespace {

using headrace::harness::ProblemLine;
using namespace headrace::test;

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

// Which check noticed each mutation; mutations count from 1.
using Noticed = std::vector<std::string>;

// Runs a check, which returns what is wrong, without a mutation and then with each of [first, end) that is unnoticed.
// Returns whether it passes without.
template <typename Check>
bool judge(Noticed& noticed, std::size_t first, std::size_t end, const std::string& name, const Check& check) {
    headrace_active_mutation = 0;
    if (const std::string wrong = check(); !wrong.empty()) {
        std::printf("without a mutation: %s\n%s\n", name.c_str(), wrong.c_str());
        return false;
    }
    for (std::size_t i = first; i < end; ++i) {
        headrace_active_mutation = static_cast<int>(i);
        if (noticed[i].empty() && !check().empty()) noticed[i] = name;
    }
    return true;
}

bool judge_operators(Noticed& noticed, std::size_t end, const std::vector<ProblemLine>& lines) {
    for (const ProblemLine& line : lines) {
        if (!runs_here(line)) {
            std::printf("not run here: %s\n", format(line).c_str());
            continue;
        }
        const auto check = [&] {
            const headrace::harness::CheckResult result = headrace::harness::check(line);
            return result.ok ? "" : result.message + "\n" + result.repeat;
        };
        if (!judge(noticed, 1, end, format(line), check)) return false;
    }
    return true;
}

// 21 tokens and 41 channels: whole groups, registers and runs, and parts of them.
bool judge_layers(Noticed& noticed, std::size_t first) {
    using headrace::Activation;
    const auto right = [&](const std::string& name, auto& call, const auto& run, const auto& outputs) {
        call.options.force = "generic";
        return judge(noticed, first, noticed.size(), name, [&] {
            const headrace::Status status = run(call);
            return status.ok() ? misses(call, outputs) : status.message();
        });
    };
    const auto whole = [](auto& call) { return call.run(); };
    for (const ConvolutionCase& c :
         {ConvolutionCase{.T = 21, .D = 41},
          {.T = 21, .D = 41, .W = 5, .activation = Activation::none, .bias = false, .state = false}}) {
        ConvolutionCall call(c);
        if (!right("short_convolution " + c.text(), call, whole, call.outputs)) return false;
    }
    ConvolutionCall step({.B = 3, .T = 1, .D = 41});
    const std::initializer_list<const char*> written = {"y", "final_state"};
    if (!right(
            "short_convolution_step", step, [](auto& call) { return call.step(); }, written))
        return false;
    for (const RmsNormCase& c : {RmsNormCase{.eps = 0.5},
                                 {.activation = Activation::sigmoid},
                                 {.shape = {300, 8}, .gate = false, .weight = false}}) {
        RmsNormCall call(c);
        if (!right("rms_norm_gated", call, whole, call.outputs)) return false;
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) return 2;
    std::vector<ProblemLine> lines;
    const headrace::Status status = headrace::harness::read_problem_file(arguments[3], &lines);
    if (!status.ok()) return std::printf("%s\n", status.message().c_str()), 2;
    const auto number = [&](int i) { return static_cast<std::size_t>(std::atoi(arguments[i])); };
    const std::size_t layers = number(1) + 1;
    Noticed noticed(layers + number(2));
    if (!judge_operators(noticed, layers, lines) || !judge_layers(noticed, layers)) return 2;
    bool all = true;
    for (std::size_t i = 1; i < noticed.size(); ++i) {
        std::printf("%zu %s\n", i, noticed[i].empty() ? "UNNOTICED" : noticed[i].c_str());
        all = all && !noticed[i].empty();
    }
    return all ? 0 : 1;
}
