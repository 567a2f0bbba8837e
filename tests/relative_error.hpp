// relative_error: how far computed values lie from reference values.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace headrace::test {

// ||values - reference|| / ||reference||; infinity when the sizes differ, a value is not finite, or the reference is
// zero and the values are not.
inline double relative_error(const std::vector<double>& values, const std::vector<double>& reference) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (values.size() != reference.size()) return infinity;
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) return infinity;
        difference += (values[i] - reference[i]) * (values[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    if (difference == 0) return 0;
    return norm == 0 ? infinity : std::sqrt(difference / norm);
}

}  // namespace headrace::test
