// The comparison with the oracle: bars, floors, relative L2 errors.
#include "harness/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>

namespace headrace::harness {
namespace {

// Rows of the bars' table. Gradients that sum over many tokens and channels with cancellation have the widest bar.
enum class Kind { forward, gradient, parameter_gradient };

Kind kind_of(const std::string& name) {
    if (name.rfind("d_", 0) != 0) return Kind::forward;
    for (const char* parameter : {"d_g", "d_gv", "d_g_gamma", "d_beta", "d_A_log", "d_dt_bias"}) {
        if (name == parameter) return Kind::parameter_gradient;
    }
    return Kind::gradient;
}

double bar_of(Kind kind, DType dtype) {
    const bool forward = kind == Kind::forward, parameter = kind == Kind::parameter_gradient;
    switch (dtype) {
        case DType::f64: return 1e-11;
        case DType::f32: return forward ? 3e-6 : 1e-5;
        case DType::bf16: return forward ? 4e-3 : parameter ? 1.5e-2 : 6e-3;
        case DType::f16: return bar_of(kind, DType::bf16) / 2;  // three more bits of mantissa, less the range
        case DType::i32:
        case DType::i64: break;
    }
    return 0.0;
}

std::string text(const char* format, double value) {
    char buffer[64];
    std::snprintf(buffer, sizeof buffer, format, value);
    return buffer;
}

// "[1,20,3,7]" of a row-major element
std::string position(const Judged& judged, std::size_t element) {
    auto rest = static_cast<std::int64_t>(element);
    std::string result;
    for (std::size_t i = judged.shape.size(); i-- > 0;) {
        result = std::to_string(rest % judged.shape[i]) + (result.empty() ? "" : ",") + result;
        rest /= judged.shape[i];
    }
    return "[" + result + "]";
}

std::string expected_and_got(const Judged& judged, std::size_t element) {
    return position(judged, element) + ": expected " + text("%.9g", judged.reference[element]) + ", got " +
           text("%.9g", judged.values[element]);
}

TensorError& fail(TensorError& result, const std::string& detail) {
    result.ok = false;
    result.detail = result.name + detail;
    return result;
}

// Fails on the first value that is not finite; counts those of the library.
bool finite(const Judged& judged, TensorError& result) {
    std::size_t first = judged.values.size();
    for (std::size_t i = judged.values.size(); i-- > 0;) {
        if (!judged.terms.empty() && !std::isfinite(judged.terms[i])) {
            fail(result, position(judged, i) + ": the oracle's terms are not finite");
            return false;
        }
        if (!std::isfinite(judged.reference[i])) {
            fail(result, position(judged, i) + ": the oracle is not finite, the problem is ill-posed");
            return false;
        }
        if (std::isfinite(judged.values[i])) continue;
        ++result.nan_count;
        first = i;
    }
    if (result.nan_count == 0) return true;
    fail(result, ": " + std::to_string(result.nan_count) + " of " + std::to_string(judged.values.size()) +
                     " values are NaN or Inf, the first at " + expected_and_got(judged, first));
    return false;
}

std::size_t largest(const std::vector<double>& values) {
    const auto less = [](double a, double b) { return std::fabs(a) < std::fabs(b); };
    return static_cast<std::size_t>(std::max_element(values.begin(), values.end(), less) - values.begin());
}

// L2 norm from a scaled sum: squares of 1e-200 or 1e+200 leave double's range.
double norm(const std::vector<double>& values) {
    if (values.empty()) return 0.0;
    const double scale = std::fabs(values[largest(values)]);
    if (scale == 0.0) return 0.0;
    double sum = 0.0;
    for (double value : values) sum += value / scale * (value / scale);
    return scale * std::sqrt(sum);
}

// Hardware may flush results below it to zero. Every type but f64 computes in f32; bf16 has f32's range.
double smallest_normal(DType problem, DType stored) {
    return std::ldexp(1.0, problem == DType::f64 && stored == DType::f64 ? -1022 : -126);
}

// The L2 norm of what may be missing from the tensor by the range of the types alone.
double floor_of(const Judged& judged) {
    return unavoidable_error(static_cast<std::int64_t>(judged.values.size()), judged.problem, judged.stored) +
           smallest_normal(judged.problem, judged.stored) * norm(judged.underflow);
}

}  // namespace

double bar_of(const std::string& name, DType problem, DType stored) {
    const Kind kind = kind_of(name);
    return std::max(bar_of(kind, problem), bar_of(kind, stored));
}

// Per element, added up in L2:
// - f16 below its normal range, 2^-14, has a fixed spacing of 2^-24: rounding on store loses up to 2^-25.
// - What hardware flushes to zero: an element is a sum of products with factors of order one, of which the few largest
//   flushed ones matter: eight of the smallest normal number, 9.4e-38 for f32. Factors far above one follow in the
//   gradients of raw gates only; the oracle says how large they are (Judged::underflow).
double unavoidable_error(std::int64_t count, DType problem, DType stored) {
    const double flushed = 8 * smallest_normal(problem, stored);
    const double rounded = stored == DType::f16 ? std::ldexp(1.0, -25) : 0.0;
    return std::sqrt(static_cast<double>(count)) * (flushed + rounded);
}

// Why sums are measured by their terms: let y be the sum of n terms x_i, each of which a right implementation has
// within a relative error d, independent of the others. Then y is off by about sqrt(sum (d x_i)^2) = d |x|, whatever y
// itself is: where terms of both signs cancel, the error relative to y grows without bound, that relative to |x| stays
// d. 1 % in all terms makes y wrong by 1 %, which is noticed unless |y| is below |x| times the bar / 1 %.
TensorError compare(const Judged& judged) {
    TensorError result;
    result.name = judged.name;
    result.bar = result.noticeable = bar_of(judged.name, judged.problem, judged.stored);
    result.error = std::numeric_limits<double>::infinity();
    if (judged.values.size() != judged.reference.size()) {
        return fail(result, ": expected " + std::to_string(judged.reference.size()) + " values, got " +
                                std::to_string(judged.values.size()));
    }
    if (!finite(judged, result)) return result;

    std::vector<double> differences(judged.values.size());
    for (std::size_t i = 0; i < differences.size(); ++i) differences[i] = judged.values[i] - judged.reference[i];
    const double size = norm(judged.reference), scale = std::max(size, norm(judged.terms));
    const double floor = floor_of(judged);
    if (!judged.values.empty()) result.noticeable = (result.bar * scale + floor) / size;
    const double excess = std::max(0.0, norm(differences) - floor);
    result.error = excess > 0.0 ? excess / scale : 0.0;
    if (!(result.error <= result.bar)) {
        fail(result, ": rel-L2 " + text("%.3g", result.error) + " is above the bar " + text("%.3g", result.bar) +
                         ", worst at " + expected_and_got(judged, largest(differences)));
    }
    return result;
}

Judged perturbed(Judged judged) {
    constexpr double perturbation = 0.01;
    const bool counts_as_zero = perturbation * norm(judged.reference) <= floor_of(judged);
    for (double& value : judged.values) value *= 1 + perturbation;
    if (counts_as_zero && !judged.values.empty()) judged.values[0] += perturbation;
    return judged;
}

}  // namespace headrace::harness
