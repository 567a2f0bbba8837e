// The split backward in f32 with one gate per token, both rules.
#include "cuda/kernels/split_entry.hpp"

namespace headrace::cuda {

template SplitKernels split_kernels<float, false, false>();
template SplitKernels split_kernels<float, true, false>();

}  // namespace headrace::cuda
