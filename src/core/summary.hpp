// Short texts about a problem for messages and reports.
#pragma once

#include <string>

#include "core/problem.hpp"

namespace headrace {

// "simple_gla forward b1 t256 h4 hv4 k64 v64 f32".
std::string summary(const Problem& problem);

}  // namespace headrace
