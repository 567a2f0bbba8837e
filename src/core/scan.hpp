// Searches a tensor for a value that an operator must not be given.
#pragma once

#include <cstdint>

#include "headrace/tensor.hpp"

namespace headrace {

enum class Refused { nan, nan_or_positive, nan_or_infinite };

// The row-major number of the first refused element, or -1. The view has a floating dtype and valid strides.
std::int64_t find_refused(const TensorView& view, Refused refused, int threads);

}  // namespace headrace
