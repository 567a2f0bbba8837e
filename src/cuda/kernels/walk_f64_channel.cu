// The chunk form in f64 with a gate per channel, both rules.
#include "cuda/kernels/walk_entry.hpp"

namespace headrace::cuda {

template WalkKernels walk_kernels<double, false, true>();
template WalkKernels walk_kernels<double, true, true>();

}  // namespace headrace::cuda
