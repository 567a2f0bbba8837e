// The chunk form on tensor cores: the delta rule with channel gates.
#include "cuda/kernels/channel_entry.hpp"

namespace headrace::cuda {

template ChannelKernels channel_kernels<true>(std::int64_t K);

}  // namespace headrace::cuda
