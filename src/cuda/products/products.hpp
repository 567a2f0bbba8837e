// Products of summaries on a CUDA device: validated products in, kernels on their stream.
#pragma once

#include "core/product_problem.hpp"

namespace headrace::cuda {

Status run(const ProductProblem& product);

}  // namespace headrace::cuda
