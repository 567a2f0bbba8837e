// The kernel of the backward under channel gates on tensor cores that makes gradients of what its sweeps left.
#include "cuda/chunk/channel_gradient.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

template <int K, bool delta>
__global__ void __launch_bounds__(channel_gradient_threads(K), tensor_threads / channel_gradient_threads(K))
    channel_gradients(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    ChannelGradient<K, delta> kernel(args, arena);
    kernel.run(blockIdx.x / args.H, blockIdx.x % args.H);
}

template <int K, bool delta>
Kernel gradients_kernel_of() {
    return {"channel_gradients", reinterpret_cast<const void*>(&channel_gradients<K, delta>),
            registers_allowed(tensor_threads, 1), &shared_memory_of<ChannelGradient<K, delta>>,
            &channel_gradients_work<K, delta>};
}

Kernel channel_gradients_kernel(std::int64_t K, bool delta) {
    if (K <= 64) return delta ? gradients_kernel_of<64, true>() : gradients_kernel_of<64, false>();
    return delta ? gradients_kernel_of<128, true>() : gradients_kernel_of<128, false>();
}

}  // namespace headrace::cuda
