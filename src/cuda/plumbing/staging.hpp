// staging: tensors that kernels on tensor cores cannot take as they lie, as copies in the workspace that they can.
//
// Those kernels move rows in pieces of 16 bytes, of which the last is theirs to its end, states in fp32, and total log
// decays in fp32. Most tensors lie so; of the others inputs are copied before, outputs behind, and log decays made of
// gates of other types, with a formula or of a head and its tokens together.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "core/workspace.hpp"
#include "cuda/plumbing/kernel_args.hpp"

namespace headrace::cuda {

// Replaces such tensors of args by copies that it takes, and finds the log decays, if there are gates.
void stage(const Problem& problem, Carver& carver, KernelArgs& args);

// The copies of args that were staged: parameters of staged_copy_kernel.
std::vector<KernelArgs> copies_in(const Problem& problem, const KernelArgs& args);
std::vector<KernelArgs> copies_out(const Problem& problem, const KernelArgs& args);

// The same of zeros for the roundings of a piece, of which these kernels know nothing.
std::vector<KernelArgs> zero_roundings(const Problem& problem);

// Whether log_decays_kernel computes args.log_decays, and not g is what they are.
bool makes_log_decays(const Problem& problem);
KernelArgs args_of_log_decays(const Problem& problem, KernelArgs args);

// Elements [., ., ., 0 to columns) of `from`, which lies as `view`, into those of `to`, from the view's own on zeros:
// parameters of staged_copy_kernel.
KernelArgs copy_of(const TensorView& view, const Strided& from, const Strided& to, std::int64_t columns);

// Blocks of these kernels.
std::int64_t blocks_of_copy(const KernelArgs& args);
std::int64_t blocks_of_log_decays(const Problem& problem);

}  // namespace headrace::cuda
