// The chunk form on tensor cores: the additive rule with a scalar gate.
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {

template TensorKernels tensor_kernels<false>(std::int64_t K);

}  // namespace headrace::cuda
