// Problems for a CUDA device: the listed ones and random ones, with their tensors there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/problem_line.hpp"

namespace headrace::test {

// The line with its tensors on a device, by the implementations there.
inline harness::ProblemLine on_device(harness::ProblemLine line) {
    line.cuda = true;
    line.force.clear();
    return line;
}

// Adds the lines of a problem file.
inline Status add_listed(const std::string& path, std::vector<harness::ProblemLine>* lines) {
    std::vector<harness::ProblemLine> listed;
    Status status = harness::read_problem_file(path, &listed);
    for (const harness::ProblemLine& line : listed) lines->push_back(on_device(line));
    return status;
}

inline void add_random(std::uint64_t count, std::vector<harness::ProblemLine>* lines) {
    for (std::uint64_t seed = 0; seed < count; ++seed)
        lines->push_back(on_device(harness::random_problem(7'000'003 + seed)));
}

// Problems of more work than this take an interpreter seconds.
constexpr double most_work_of_an_interpreter = 3e7;
inline double work(const harness::ProblemLine& line) {
    const double sweeps = line.direction == Direction::backward ? 4 : 1;
    return sweeps * static_cast<double>(line.B * line.T * line.HV * line.K * line.V);
}

}  // namespace headrace::test
