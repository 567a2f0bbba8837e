// The check of one problem: run the library through its public interface and judge all that it wrote with the oracle.
#pragma once

#include <string>
#include <vector>

#include "harness/compare.hpp"
#include "harness/problem_line.hpp"

namespace headrace::harness {

struct CheckResult {
    bool ok = false;
    std::string message;              // empty when ok; else one line per miss
    std::string implementation;       // the one that served the call
    std::vector<TensorError> errors;  // one per output or gradient, and one per violation of the caller's memory
    std::string repeat;               // the command line that repeats the check
};

// Makes the tensors of the line, runs it and compares. Beyond the values it demands that guard bytes, padding, inputs
// and pool rows not addressed stay bit-identical, that the workspace is not left, and that a forced implementation is
// the one that served. Lines with an odd seed give a workspace of exactly the size asked for, filled with NaN; the
// others leave it to the library.
CheckResult check(const ProblemLine& line);

// The outputs of the line in which an error of 1 % goes unnoticed; empty is right. Where 1 % is within what the bar
// allows (gradients of gates and beta in bf16; sums whose terms nearly cancel), the question is put to the same line in
// f32, then in f64.
std::vector<std::string> unnoticed_perturbations(const ProblemLine& line);

}  // namespace headrace::harness
