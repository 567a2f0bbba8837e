// The chunk form in f32 with a gate per channel, both rules.
#include "cuda/kernels/walk_entry.hpp"

namespace headrace::cuda {

template WalkKernels walk_kernels<float, false, true>();
template WalkKernels walk_kernels<float, true, true>();

}  // namespace headrace::cuda
