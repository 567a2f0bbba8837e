// args: turns a Problem into KernelArgs, with the sums that the kernels leave.
#pragma once

#include "core/problem.hpp"
#include "core/workspace.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/kernel_args.hpp"
#include "cuda/plumbing/sequences.hpp"

namespace headrace::cuda {

Strided strided(const TensorView& view);

// sums: of a parameter's gradient, per head; -1: one for each sequence.
KernelArgs make_args(const Problem& problem, Carver& carver, std::int64_t sums = -1);

// Queues what the kernels find: zeros, the sequences.
Status prepare(const Problem& problem, const KernelArgs& args);

// The sums of sums that give d_g_gamma, d_A_log and d_dt_bias, of those that are wanted; and what queues them.
std::vector<SumsArgs> parameter_sums(const Problem& problem, const KernelArgs& args);
std::int64_t blocks_of(const SumsArgs& sums);
Status store_parameter_gradients(const Problem& problem, const KernelArgs& args);

// With HEADRACE_DEBUG_NAN=1 waits and says whether a gate or beta was refused; else nothing.
Status check_refused(const Problem& problem, const KernelArgs& args);

}  // namespace headrace::cuda
