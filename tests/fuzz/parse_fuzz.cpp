// Fuzzes the parser of problem lines: no bytes may break it, and what it accepts must survive format and parse.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "harness/problem_line.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace headrace::harness;
    ProblemLine line;
    const std::string text(reinterpret_cast<const char*>(data), size);
    const headrace::Status status = parse(text, &line);
    if (!status.ok()) {
        if (status.message().empty()) std::abort();
        return 0;
    }
    ProblemLine again;
    const std::string canonical = format(line);
    if (!parse(canonical, &again).ok() || !(again == line) || format(again) != canonical) std::abort();
    return 0;
}
