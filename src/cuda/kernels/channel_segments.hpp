// channel_segments: the kernels of segments under channel gates, as the portable code sees them.
#pragma once

#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

// The additive rule, behind ChannelKernels::prepare and before its walk, which then takes segments; as the same of
// TensorKernels: states of segments that no state enters, with two threads for each of value_columns; what enters them.
struct ChannelSegmentKernels {
    Kernel states, join;
};
ChannelSegmentKernels channel_segment_kernels(std::int64_t K);
template <int K>
BlockWork channel_states_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork channel_join_work(const KernelArgs& args, std::size_t shared_limit);

}  // namespace headrace::cuda
