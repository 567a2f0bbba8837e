// child_process: a suite of the same test program in a process with other switches, for what is read once per process.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

namespace headrace::test {

struct Outcome {
    bool passed;
    std::string output;
};

// The suite DISABLED_Child<suite>; `environment` as a shell has it.
inline Outcome run_child(const std::string& suite, const std::string& environment) {
    std::array<char, 4096> part{};
    const ssize_t length = ::readlink("/proc/self/exe", part.data(), part.size());
    const std::string program(part.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
    const std::string command = "env " + environment + " '" + program +
                                "' --gtest_also_run_disabled_tests --gtest_filter=DISABLED_Child" + suite + ".* 2>&1";
    Outcome outcome{false, {}};
    FILE* pipe = ::popen(command.c_str(), "r");
    if (pipe == nullptr) return outcome;
    while (const std::size_t bytes = std::fread(part.data(), 1, part.size(), pipe))
        outcome.output.append(part.data(), bytes);
    const bool ran = outcome.output.find("[  PASSED  ] 0 tests") == std::string::npos;
    outcome.passed = ::pclose(pipe) == 0 && ran;
    return outcome;
}

}  // namespace headrace::test
