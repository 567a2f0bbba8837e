// Products of summaries on the CPU: validated products in, results in the caller's tensors.
#pragma once

#include "core/implementation.hpp"
#include "core/product_problem.hpp"

namespace headrace::cpu {

// On the fastest instruction set that the machine has.
Status run(const ProductProblem& product, const Machine& machine);

}  // namespace headrace::cpu
