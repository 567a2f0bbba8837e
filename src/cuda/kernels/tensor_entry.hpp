// tensor_entry: the kernels of the chunk form on tensor cores.
#pragma once

#include "cuda/chunk/added_outputs.hpp"
#include "cuda/chunk/additive_kernel.hpp"
#include "cuda/chunk/gate_terms.hpp"
#include "cuda/chunk/prepare_kernel.hpp"
#include "cuda/chunk/segment_join.hpp"
#include "cuda/chunk/walker_kernel.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

template <class Kernel>
inline constexpr int tensor_threads_of = tensor_threads + (Kernel::has_third_group ? launched_threads : 0);
template <class Kernel>
__device__ void walk_forward(const KernelArgs& args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const std::int64_t blocks = (args.V + tensor_values - 1) / tensor_values;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    kernel.forward(task.place, task.head, task.part * tensor_values);
}
template <class Kernel>
__global__ void __launch_bounds__(tensor_threads_of<Kernel>, 1)
    tensor_forward(const __grid_constant__ KernelArgs args) {
    walk_forward<Kernel>(args);
}
template <class Kernel>
__global__ void __launch_bounds__(tensor_threads_of<Kernel>, 1)
    tensor_forward_gradient(const __grid_constant__ KernelArgs args) {
    walk_forward<Kernel>(args);
}
template <class Kernel>
__global__ void __launch_bounds__(tensor_threads_of<Kernel>, 1)
    tensor_forward_terms(const __grid_constant__ KernelArgs args) {
    walk_forward<Kernel>(args);
}

template <class Kernel>
__global__ void __launch_bounds__(tensor_threads_of<Kernel>, 1) tensor_states(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const std::int64_t blocks = args.segments.blocks;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    kernel.states(task.place, task.head, task.part * tensor_values);
}

// Chunks of the delta rule, and blocks of args.value_columns values that walk them. Of a forward's chunks, or of any
// with more than 128 channels, as many at once as shared memory lets onto a multiprocessor of 9.0; for others ptxas has
// no registers for so many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
inline constexpr int most_prepare_blocks = 3;
#else
inline constexpr int most_prepare_blocks = 4;
#endif
template <class Kernel>
inline constexpr int prepare_blocks = Kernel::channels > 128 ? 2
                                      : Kernel::of_backward  ? 3
                                                             : most_prepare_blocks;
inline constexpr int walker_threads = 128;
template <class Kernel>
__global__ void __launch_bounds__(block_threads, prepare_blocks<Kernel>)
    tensor_prepare(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const std::int64_t parts = (args.group + prepared_heads - 1) / prepared_heads;
    const Task task = task_of(blockIdx.x, args.H, parts);
    kernel.run(task.place, task.head, task.part * prepared_heads);
}
template <int K>
inline constexpr int walk_threads = walker_threads + fetching_threads(K);
template <class Kernel>
__device__ void walk_delta(const KernelArgs& args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    kernel.forward(task.place, task.head, task.part * args.value_columns);
}
template <class Kernel>
__global__ void __launch_bounds__(walk_threads<Kernel::channels> + (Kernel::has_third_group ? launched_threads : 0), 1)
    tensor_walk(const __grid_constant__ KernelArgs args) {
    walk_delta<Kernel>(args);
}
// By two groups of warps, where there is a third.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::has_third_group ? three_groups : walker_threads, 1)
    tensor_walk_two(const __grid_constant__ KernelArgs args) {
    if constexpr (Kernel::has_third_group) walk_delta<Kernel>(args);
}
// Of few channels as many as shared memory lets onto a multiprocessor of 9.0.
template <int K>
inline constexpr int states_blocks = K <= 64 ? 3 : 1;
template <class Kernel>
__global__ void __launch_bounds__(Kernel::has_third_group ? three_groups : walker_threads,
                                  states_blocks<Kernel::channels>)
    tensor_walk_states(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const std::int64_t blocks = args.segments.blocks;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    kernel.states(task.place, task.head, task.part);
}

template <class Join>
__device__ void join_segments(const KernelArgs& args) {
    Arena arena = block_arena();
    Join join(args, arena);
    const std::int64_t blocks = (args.V + Join::columns - 1) / Join::columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    join.join(task.place, task.head, task.part * Join::columns);
}
template <class Join>
__global__ void __launch_bounds__(join_threads(false)) tensor_join(const __grid_constant__ KernelArgs args) {
    join_segments<Join>(args);
}
template <int K>
__global__ void __launch_bounds__(join_threads(true, K), 2)
    tensor_join_transitions(const __grid_constant__ KernelArgs args) {
    join_segments<TransitionJoin<K>>(args);
}

// Left alone, ptxas takes 48 registers and spills.
inline constexpr int gate_blocks = 8;
template <class Kernel>
__global__ void __launch_bounds__(block_threads, gate_blocks) tensor_gate(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    const Task task = task_of(blockIdx.x, args.HV);
    kernel.run(task.place, task.head);
}

inline constexpr int adding_threads_at_once = 512;
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, adding_threads_at_once / Kernel::threads)
    tensor_add_outputs(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Kernel kernel(args, arena);
    constexpr int columns = Kernel::blocks * tensor_values;
    const Task task = task_of(blockIdx.x, args.H, (args.V + columns - 1) / columns);
    kernel.run(task.place, task.head, task.part * columns);
}

}  // namespace headrace::cuda
