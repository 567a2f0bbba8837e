// The kernels of the backward under channel gates on tensor cores that make gradients of what its sweeps left.
#include "cuda/chunk/channel_gradient.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

template <int K, bool delta>
__global__ void __launch_bounds__(channel_gradient_threads(K), tensor_threads / channel_gradient_threads(K))
    channel_gradients(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    ChannelGradient<K, delta, false> kernel(args, arena);
    const Task task = task_of(blockIdx.x, args.HV);
    kernel.run(task.place, task.head);
}
template <int K>
__global__ void __launch_bounds__(channel_gradient_threads(K), tensor_threads / channel_gradient_threads(K))
    channel_gradients_low(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    ChannelGradient<K, true, true> kernel(args, arena);
    const Task task = task_of(blockIdx.x, args.HV);
    kernel.run(task.place, task.head);
}
template <int K>
__global__ void __launch_bounds__(channel_gradient_threads(K))
    channel_key_sums(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    const Task task = task_of(blockIdx.x, args.H);
    ChannelKeySums<K>(args, arena).run(task.place, task.head);
}

template <int K, bool delta>
Kernel gradients_kernel_of() {
    return {"channel_gradients", reinterpret_cast<const void*>(&channel_gradients<K, delta>),
            registers_allowed(tensor_threads, 1), &shared_memory_of<ChannelGradient<K, delta, false>>,
            &channel_gradients_work<K, delta>};
}

template <int K>
Kernel gradients_low_kernel_of() {
    return {"channel_gradients_low", reinterpret_cast<const void*>(&channel_gradients_low<K>),
            registers_allowed(tensor_threads, 1), &shared_memory_of<ChannelGradient<K, true, true>>,
            &channel_gradients_low_work<K>};
}
template <int K>
Kernel key_sums_kernel_of() {
    return {"channel_key_sums", reinterpret_cast<const void*>(&channel_key_sums<K>),
            registers_allowed(channel_gradient_threads(K), 1), &shared_memory_of<ChannelKeySums<K>>,
            &channel_key_sums_work<K>};
}

Kernel channel_gradients_kernel(std::int64_t K, bool delta) {
    if (K <= 64) return delta ? gradients_kernel_of<64, true>() : gradients_kernel_of<64, false>();
    return delta ? gradients_kernel_of<128, true>() : gradients_kernel_of<128, false>();
}
Kernel channel_gradients_low_kernel(std::int64_t K) {
    return K <= 64 ? gradients_low_kernel_of<64>() : gradients_low_kernel_of<128>();
}
Kernel channel_key_sums_kernel(std::int64_t K) {
    return K <= 64 ? key_sums_kernel_of<64>() : key_sums_kernel_of<128>();
}

}  // namespace headrace::cuda
