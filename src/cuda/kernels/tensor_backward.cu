// The kernels of the delta rule's backward on tensor cores: sweeps that save what lies between chunks, and gradients.
#include "cuda/chunk/gradient_kernel.hpp"
#include "cuda/chunk/sweep_kernel.hpp"
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {

// Of heads and blocks of values: first those of gradients of states, then, where gradients follow, those of states.
template <int K>
inline constexpr int sweep_threads = most_sweep_threads + fetching_threads(K);
template <int K>
__global__ void __launch_bounds__(sweep_threads<K> + (has_third_group<K> ? fetching_threads(K) : 0), 1)
    tensor_sweeps(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    SweepKernel<K, ByGroup<Bf16>> kernel(args, arena);
    const Task task = task_of(blockIdx.x, args.HV, (args.V + args.value_columns - 1) / args.value_columns);
    const bool back = task.place < args.N;
    const std::int64_t n = back ? task.place : task.place - args.N, head = task.head;
    const int first = task.part * args.value_columns;
    back ? kernel.adjoints(n, head, first) : kernel.states(n, head, first);
}

template <int K, bool comba>
__global__ void __launch_bounds__(tensor_threads, 1) tensor_gradients(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    GradientKernel<K, comba> kernel(args, arena);
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
         &shared_memory_of<SweepKernel<K, ByGroup<Bf16>>>, &tensor_sweeps_work<K>, fetching_threads(K),
         left_to_third_group(K)},
        {"tensor_gradients", reinterpret_cast<const void*>(&tensor_gradients<K, comba>), of_gradients,
         &shared_memory_of<GradientKernel<K, comba>>, &tensor_gradients_work<K, comba>}};
}

TensorBackwardKernels tensor_backward_kernels(std::int64_t K, bool comba) {
    if (K <= 64) return comba ? kernels_of<64, true>() : kernels_of<64, false>();
    return comba ? kernels_of<128, true>() : kernels_of<128, false>();
}

}  // namespace headrace::cuda
