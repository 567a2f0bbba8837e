// The split backward with one gate per token, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<false, false>();
template SplitKernels split_kernels<true, false>();

}  // namespace headrace::cuda
