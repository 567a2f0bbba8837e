// args: turns a Problem into KernelArgs, with the small arrays that the kernels read and the sums they leave.
#pragma once

#include "core/problem.hpp"
#include "core/workspace.hpp"
#include "cpu/plumbing/kernel_args.hpp"

namespace headrace::cpu {

// Takes the arrays from the carver and, where it has memory, fills them. Without memory only sizes are valid.
KernelArgs make_args(const Problem& problem, Carver& carver);

Strided strided(const TensorView& view);

// Adds up the per-sequence sums, in order, into d_g_gamma, d_A_log and d_dt_bias.
void store_parameter_gradients(const Problem& problem, const KernelArgs& args);

}  // namespace headrace::cpu
