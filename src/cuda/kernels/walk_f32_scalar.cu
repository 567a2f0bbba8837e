// The chunk form in f32 with one gate per token, both rules.
#include "cuda/kernels/walk_entry.hpp"

namespace headrace::cuda {

template WalkKernels walk_kernels<float, false, false>();
template WalkKernels walk_kernels<float, true, false>();

}  // namespace headrace::cuda
