// The recurrent form in f32 and f64, both rules.
#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/adjoint_kernel.hpp"
#include "cuda/recurrent/recurrent_kernel.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

// Of backwards shared memory lets in two blocks; for more ptxas would save registers, and spill
// (docs/cuda-kernels.md).
inline constexpr int backward_blocks = 2;
// Of a token alone: as many as registers let in without spills, so that states of some arrive while others compute.
inline constexpr int step_blocks = 4;

// walk(sequence, value head, first value) of this warp, if it has values.
template <int warp_columns, class Walk>
__device__ void each_walk(const KernelArgs& args, Walk walk) {
    constexpr int columns = block_warps * warp_columns;
    const std::int64_t blocks = (args.V + columns - 1) / columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    const int first = task.part * columns + warp() * warp_columns;
    if (first < args.V) walk(task.place, task.head, first);
}
template <class T, bool delta, int key_channels>
__global__ void __launch_bounds__(block_threads) recurrent_forward(const __grid_constant__ KernelArgs args) {
    each_walk<StateColumns<T, key_channels>::warp_columns>(args, [&](std::int64_t n, std::int64_t head, int first) {
        RecurrentKernel<T, delta, key_channels>(args).forward(n, head, first);
    });
}
template <class T, bool delta, int key_channels>
__global__ void __launch_bounds__(block_threads, step_blocks) recurrent_step(const __grid_constant__ KernelArgs args) {
    each_walk<StateColumns<T, key_channels>::warp_columns>(args, [&](std::int64_t n, std::int64_t head, int first) {
        RecurrentKernel<T, delta, key_channels>(args).step(n, head, first);
    });
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
                        registers_allowed(block_threads, step_blocks), &no_memory, &recurrent_forward_work<T, delta>};
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
