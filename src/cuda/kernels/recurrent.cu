// The recurrent form in f32 and f64, both rules.
#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/adjoint_kernel.hpp"
#include "cuda/recurrent/recurrent_kernel.hpp"
#include "cuda/recurrent/step_kernel.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

// Of backwards shared memory lets in two blocks; for more ptxas would save registers, and spill
// (docs/cuda-kernels.md).
inline constexpr int backward_blocks = 2;
// Of a token alone: as many as registers let in without spills, so that states of some arrive while others compute.
constexpr int step_blocks(int key_channels) { return key_channels <= 128 ? 5 : 4; }

// Of this block the sequence and value head, and this warp's first value.
struct WarpTask {
    int sequence, head, first;
};
template <int warp_columns>
__device__ WarpTask warp_task(const KernelArgs& args) {
    constexpr int columns = block_warps * warp_columns;
    const Task task = task_of(blockIdx.x, args.HV, (args.V + columns - 1) / columns);
    return {static_cast<int>(task.place), static_cast<int>(task.head), task.part * columns + warp() * warp_columns};
}
template <class T, bool delta, int key_channels>
__global__ void __launch_bounds__(block_threads) recurrent_forward(const __grid_constant__ KernelArgs args) {
    const auto [n, head, first] = warp_task<StateColumns<T, key_channels>::warp_columns>(args);
    if (first < args.V) RecurrentKernel<T, delta, key_channels>(args, head, first).forward(n, first);
}
template <class T, bool delta, int key_channels>
__global__ void __launch_bounds__(block_threads, step_blocks(key_channels))
    recurrent_step(const __grid_constant__ KernelArgs args) {
    using Step = StepKernel<T, delta, key_channels>;
    __shared__ __align__(16) typename Step::Shared shared;
    const auto [n, head, first] = warp_task<StateColumns<T, key_channels>::warp_columns>(args);
    Step(args, shared, head, first).step(n, first);
}

template <class T, bool delta>
__global__ void __launch_bounds__(block_threads, backward_blocks) recurrent_backward(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    AdjointKernel<T, delta> kernel(args, arena);
    const Task task = task_of(args.first_item + blockIdx.x, args.H);
    kernel.backward(task.place, task.head);
}

template <class Kernel>
BlockMemory memory_of(const KernelArgs& args, std::size_t shared_limit) {
    Arena arena{nullptr, nullptr, shared_limit};
    Kernel(args, arena);
    return {arena.shared_used, arena.spill_used};
}

BlockMemory no_memory(const KernelArgs& /*args*/, std::size_t /*shared_limit*/) { return {0, 0}; }

template <class T, bool delta, int key_channels>
RecurrentKernels recurrent_kernels_of() {
    RecurrentKernels kernels{
        {"recurrent_forward", reinterpret_cast<const void*>(&recurrent_forward<T, delta, key_channels>),
         registers_allowed(block_threads, 1), &no_memory, &recurrent_forward_work<T, delta>},
        {},
        {"recurrent_backward", reinterpret_cast<const void*>(&recurrent_backward<T, delta>),
         registers_allowed(block_threads, backward_blocks), &memory_of<AdjointKernel<T, delta>>,
         &recurrent_backward_work<T, delta>},
        block_warps * StateColumns<T, key_channels>::warp_columns};
    kernels.step = kernels.forward;
    if constexpr (sizeof(T) == 4) {
        kernels.step = {"recurrent_step", reinterpret_cast<const void*>(&recurrent_step<T, delta, key_channels>),
                        registers_allowed(block_threads, step_blocks(key_channels)), &no_memory,
                        &recurrent_step_work<T, delta>};
    }
    return kernels;
}

template <class T, bool delta>
RecurrentKernels recurrent_kernels(std::int64_t K) {
    if (K <= 64) return recurrent_kernels_of<T, delta, 64>();
    return K <= 128 ? recurrent_kernels_of<T, delta, 128>() : recurrent_kernels_of<T, delta, 256>();
}

template RecurrentKernels recurrent_kernels<float, false>(std::int64_t);
template RecurrentKernels recurrent_kernels<float, true>(std::int64_t);
template RecurrentKernels recurrent_kernels<double, false>(std::int64_t);
template RecurrentKernels recurrent_kernels<double, true>(std::int64_t);

}  // namespace headrace::cuda
