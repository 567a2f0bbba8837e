// Memory: what a problem takes at its peak, and what this process can still get.
#pragma once

#include <string>

#include "harness/tensors.hpp"

namespace headrace::harness {

// `limit` says where the number is from. Infinite where the system does not say.
struct AvailableMemory {
    double bytes = 0;
    std::string limit;
};

// The least of MemAvailable, what the limits of the control group (v1 and v2) and of those above it leave, and what
// ulimit -v leaves. `root` stands before /proc and /sys.
AvailableMemory available_memory(const std::string& root = "");

// A failure where `bytes` are not available, with code out_of_memory: "WHAT: not enough memory: needs 12 GiB, ...".
Status fits(const std::string& what, double bytes, const AvailableMemory& available);

// Bytes of the line's tensors as make_tensors makes them; `shapes` from make_shapes.
double tensor_bytes(const CallTensors& shapes);

// The peak of check() on the line: the tensors, the workspace, the oracle and the comparison, all of which grow with
// the problem. At least what is used, less than twice that. The Status is the library's refusal of the problem, if any.
Status check_bytes(const ProblemLine& line, double* bytes);

}  // namespace headrace::harness
