// The kernels of the delta rule's backward on tensor cores: sweeps that save what lies between chunks, and gradients.
#include "cuda/chunk/gradient_kernel.hpp"
#include "cuda/kernels/sweep_entry.hpp"
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {

template <int K>
__global__ void __launch_bounds__(sweep_threads<K> + (has_third_group<K> ? fetching_threads(K) : 0), 1)
    tensor_sweeps(const __grid_constant__ KernelArgs args) {
    sweep_block<SweepKernel<K, ByGroup<Bf16>, false>>(args);
}

template <int K>
__global__ void __launch_bounds__(sweep_threads<K> + (has_third_group<K> ? fetching_threads(K) : 0), 1)
    tensor_sweep_segments(const __grid_constant__ KernelArgs args) {
    sweep_block<SweepKernel<K, ByGroup<Bf16>, true>>(args);
}

template <int K, bool comba>
using GradientBlock = GradientKernel<K <= 128 ? K : 128, comba, K <= 128 ? 1 : K / 128>;
template <int K, bool comba>
__global__ void __launch_bounds__(tensor_threads, 1) tensor_gradients(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    GradientBlock<K, comba> kernel(args, arena);
    const Task task = task_of(blockIdx.x, args.H);
    kernel.run(task.place, task.head);
}

template <int K, bool comba>
TensorBackwardKernels kernels_of() {
    using Chunk = PrepareKernel<K, Bf16, true>;
    constexpr int of_sweeps = registers_allowed(sweep_threads<K> + fetching_threads(K), 1),
                  of_gradients = registers_allowed(tensor_threads, 1);
    return {
        {"tensor_prepare", reinterpret_cast<const void*>(&tensor_prepare<Chunk>),
         registers_allowed(block_threads, prepare_blocks<Chunk>), &shared_memory_of<Chunk>, &tensor_prepare_work<K>},
        {"tensor_sweeps", reinterpret_cast<const void*>(&tensor_sweeps<K>), of_sweeps,
         &shared_memory_of<SweepKernel<K, ByGroup<Bf16>, false>>, &tensor_sweeps_work<K>, fetching_threads(K),
         left_to_third_group(K)},
        {"tensor_gradients", reinterpret_cast<const void*>(&tensor_gradients<K, comba>), of_gradients,
         &shared_memory_of<GradientBlock<K, comba>>, &tensor_gradients_work<K, comba>}};
}

template <int K>
Kernel sweep_segments_kernel_of() {
    return {"tensor_sweep_segments",
            reinterpret_cast<const void*>(&tensor_sweep_segments<K>),
            registers_allowed(sweep_threads<K> + fetching_threads(K), 1),
            &shared_memory_of<SweepKernel<K, ByGroup<Bf16>, true>>,
            &tensor_sweeps_work<K>,
            fetching_threads(K)};
}
Kernel tensor_sweep_segments_kernel(std::int64_t K) {
    return K <= 64 ? sweep_segments_kernel_of<64>() : sweep_segments_kernel_of<128>();
}

TensorBackwardKernels tensor_backward_kernels(std::int64_t K, bool comba) {
    if (K <= 64) return comba ? kernels_of<64, true>() : kernels_of<64, false>();
    if (K > 128) return comba ? kernels_of<256, true>() : kernels_of<256, false>();
    return comba ? kernels_of<128, true>() : kernels_of<128, false>();
}

}  // namespace headrace::cuda
