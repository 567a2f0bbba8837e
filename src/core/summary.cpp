// Short texts about a problem for messages and reports.
#include "core/summary.hpp"

namespace headrace {

std::string summary(const Problem& problem) {
    const auto size = [](const char* letter, std::int64_t value) { return " " + (letter + std::to_string(value)); };
    return std::string(name_of(problem.op)) + " " + name_of(problem.direction) + size("b", problem.B) +
           size("t", problem.T) + size("h", problem.H) + size("hv", problem.HV) + size("k", problem.K) +
           size("v", problem.V) + " " + name_of(problem.dtype) + (problem.device == Device::cuda ? " cuda" : "");
}

}  // namespace headrace
