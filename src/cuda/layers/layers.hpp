// The layer functions on a CUDA device: validated calls in, kernels on the stream of their options.
#pragma once

#include "core/layer_problem.hpp"

namespace headrace::cuda {

Status run(const ConvolutionProblem& problem);
Status run(const RmsNormProblem& problem);

}  // namespace headrace::cuda
