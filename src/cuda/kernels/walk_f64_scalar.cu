// The chunk form in f64 with one gate per token, both rules.
#include "cuda/kernels/walk_entry.hpp"

namespace headrace::cuda {

template WalkKernels walk_kernels<double, false, false>();
template WalkKernels walk_kernels<double, true, false>();

}  // namespace headrace::cuda
