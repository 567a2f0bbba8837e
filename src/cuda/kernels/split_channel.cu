// The split backward with a gate per channel, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<false, true>();
template SplitKernels split_kernels<true, true>();

}  // namespace headrace::cuda
