// The split backward in f64 with a gate per channel, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<double, false, true>();
template SplitKernels split_kernels<double, true, true>();

}  // namespace headrace::cuda
