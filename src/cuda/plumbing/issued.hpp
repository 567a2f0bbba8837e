// issued: the instructions that warps of the kernels on tensor cores execute, as the interpreter of tests/ptx counted
// them.
#pragma once

#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

// Sets KernelWork::issued of a block of so many threads and of its step; 0 where the table has no such kernel.
void set_issued(BlockWork& work, const Kernel& kernel, const KernelArgs& args, bool in_double, int threads);

}  // namespace headrace::cuda
