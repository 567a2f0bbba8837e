// The chunk form on tensor cores: the delta rule with a scalar gate.
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {

template TensorKernels tensor_kernels<true>(std::int64_t K);

}  // namespace headrace::cuda
