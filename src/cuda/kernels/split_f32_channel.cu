// The split backward in f32 with a gate per channel, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<float, false, true>();
template SplitKernels split_kernels<float, true, true>();

}  // namespace headrace::cuda
