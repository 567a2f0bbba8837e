// counted_channel_gradients: what a block of ChannelGradient does at a chunk, counted on the host. What keys that
// overlap add is not known here.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

// Follows ChannelGradient::run: all value heads of a key head.
template <int K, bool delta>
BlockWork channel_gradients_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    return {};
}

}  // namespace headrace::cuda
