// The chunk form on tensor cores: the delta rule with channel gates, in segments too.
#include "cuda/kernels/channel_entry.hpp"

namespace headrace::cuda {

template ChannelKernels channel_kernels<true>(std::int64_t K);

// Transitions are joined as under a gate per token.
template <>
ChannelSegmentKernels channel_segment_kernels<true>(std::int64_t K) {
    return {K <= 64 ? states_kernel<64, true>() : states_kernel<128, true>(),
            tensor_kernels<true>(K, DType::bf16).join};
}

}  // namespace headrace::cuda
