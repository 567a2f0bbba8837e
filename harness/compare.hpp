// The comparison with the oracle: relative L2 error of one tensor against its bar, and what counts as a miss.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "headrace/tensor.hpp"

namespace headrace::harness {

struct TensorError {
    std::string name;
    double error = 0;            // rel-L2 beyond what the type cannot hold (see unavoidable_error); inf if undefined
    double bar = 0;              // the largest error allowed
    double noticeable = 0;       // the error that may pass as a share of |reference|: see Judged::terms, underflow
    std::int64_t nan_count = 0;  // NaN or Inf where the oracle is finite
    bool ok = true;
    std::string detail;  // empty when ok
};

// The largest rel-L2 of tensor `name` ("o", "final_state", "pool", "d_q", ...) of a problem in `problem` dtype that is
// stored in `stored` dtype: the wider bar of the two.
double bar_of(const std::string& name, DType problem, DType stored);

// The L2 error of `count` elements that comes from the range of the types alone, whatever the method: the oracle, in
// double, resolves values that they cannot hold. See the derivation in compare.cpp.
double unavoidable_error(std::int64_t count, DType problem, DType stored);

// One tensor to be judged, in row-major order.
struct Judged {
    std::string name;
    std::vector<std::int64_t> shape;
    DType problem = DType::f32;  // dtype of the problem's q
    DType stored = DType::f32;   // dtype of this tensor
    std::vector<double> values;
    std::vector<double> reference;
    // For sums of terms that may cancel: the root-sum-square of the terms of each element. Empty: judged by its values.
    std::vector<double> terms;
    // How many times the smallest normal number counts in each element where it becomes zero before large factors,
    // beyond unavoidable_error. Empty: not at all.
    std::vector<double> underflow;
};

// The error is |values - reference| / max(|reference|, |terms|). Passes only if every value is finite and rel-L2 is
// within the bar. An oracle, or terms, that are not finite fail too: NaN never equals NaN, and Inf never equals Inf.
TensorError compare(const Judged& judged);

// The same tensor made 1 % wrong: every value, or the first one by 0.01 too where the oracle is zero throughout or all
// that it has is what the types cannot hold.
Judged perturbed(Judged judged);

}  // namespace headrace::harness
