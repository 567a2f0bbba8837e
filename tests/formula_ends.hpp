// formula_ends: raw gates, betas and parameters of heads as far as their formulas take them: softplus and sigmoid
// underflow or are exact, exp(A_log) is 0 or huge.
#pragma once

#include <string>
#include <vector>

#include "harness/problem_line.hpp"
#include "harness/tensors.hpp"

namespace headrace::test {

// Lines of a direction's words: both formulas of gates, and of betas where the operator has some.
inline std::vector<std::string> lines_of_formulas(const std::string& op, const std::string& words) {
    // One token of one key head is computed in double.
    const std::string line = op + words + (words.find(" t1 ") == std::string::npos ? " h1" : " h2") + " hv4 v32";
    if (op == "simple_gla" || op == "gla") return {line + " rawgate", line + " bound=-5"};
    // Comba, which erases from the state before it decays, would make it grow by betas above 1.
    return {line + " rawgate beta=sigmoid", line + " bound=-5 beta=" + (op == "comba" ? "sigmoid" : "two_sigmoid")};
}

// Every third raw gate and beta is such that exponentials of it are subnormal or 0 in f32 or in f64.
inline harness::CallTensors tensors_at_ends(const harness::ProblemLine& line) {
    constexpr double ends[] = {40, -40, 88, -88, 104, -104, 300, -300, 720, -720, 746, -746, 1000, -1000, 1e30, -1e30};
    constexpr double rates[] = {-800, -740, 0, 60};  // A_log of the heads
    harness::CallTensors made = harness::make_tensors(line);
    for (const char* name : {"g", "beta"}) {
        const auto found = made.tensors.find(name);
        if (found == made.tensors.end()) continue;
        std::size_t drawn = 0;
        for (std::int64_t i = 0; i < found->second.numel(); i += 3)
            found->second.set(i, ends[drawn++ % std::size(ends)]);
    }
    for (std::int64_t head = 0; head < line.HV; ++head)
        made.tensors.at("A_log").set(head, rates[static_cast<std::size_t>(head) % std::size(rates)]);
    return made;
}

}  // namespace headrace::test
