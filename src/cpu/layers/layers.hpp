// The layer functions on the CPU: validated calls in, results in the caller's tensors.
#pragma once

#include "core/implementation.hpp"
#include "core/layer_problem.hpp"

namespace headrace::cpu {

// On the fastest instruction set that the machine has, or on the one that the options force.
Status run(const ConvolutionProblem& problem, const Machine& machine);
Status run(const RmsNormProblem& problem, const Machine& machine);

}  // namespace headrace::cpu
