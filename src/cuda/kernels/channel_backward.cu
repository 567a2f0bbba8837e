// The kernels that sweep over chunks for the backward under channel gates on tensor cores.
#include "cuda/kernels/sweep_entry.hpp"

namespace headrace::cuda {

template <int K, bool delta>
__global__ void __launch_bounds__(most_channel_sweep_threads, 1)
    channel_sweeps(const __grid_constant__ KernelArgs args) {
    sweep_block<ChannelSweep<K, delta, false>>(args);
}

template <int K, bool delta>
__global__ void __launch_bounds__(most_channel_sweep_threads, 1)
    channel_sweep_segments(const __grid_constant__ KernelArgs args) {
    sweep_block<ChannelSweep<K, delta, true>>(args);
}

template <int K, bool delta>
Kernel sweep_segments_kernel_of() {
    return {"channel_sweep_segments", reinterpret_cast<const void*>(&channel_sweep_segments<K, delta>),
            registers_allowed(most_channel_sweep_threads, 1), &shared_memory_of<ChannelSweep<K, delta, true>>,
            &channel_sweeps_work<K, delta>};
}
template <int K, bool delta>
Kernel sweeps_kernel_of() {
    return {"channel_sweeps", reinterpret_cast<const void*>(&channel_sweeps<K, delta>),
            registers_allowed(most_channel_sweep_threads, 1), &shared_memory_of<ChannelSweep<K, delta, false>>,
            &channel_sweeps_work<K, delta>};
}

Kernel channel_sweep_segments_kernel(std::int64_t K, bool delta) {
    if (K <= 64) return delta ? sweep_segments_kernel_of<64, true>() : sweep_segments_kernel_of<64, false>();
    return delta ? sweep_segments_kernel_of<128, true>() : sweep_segments_kernel_of<128, false>();
}
Kernel channel_sweeps_kernel(std::int64_t K, bool delta) {
    if (K <= 64) return delta ? sweeps_kernel_of<64, true>() : sweeps_kernel_of<64, false>();
    return delta ? sweeps_kernel_of<128, true>() : sweeps_kernel_of<128, false>();
}

}  // namespace headrace::cuda
