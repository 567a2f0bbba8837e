// The split backward in f64 with one gate per token, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<double, false, false>();
template SplitKernels split_kernels<double, true, false>();

}  // namespace headrace::cuda
