// The recurrent form in f32 and f64, both rules.
#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/adjoint_kernel.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

// A thread for each key channel; of backwards shared memory lets in two blocks; for more ptxas would save registers,
// and spill (docs/cuda-kernels.md).
inline constexpr int most_threads = 256, backward_blocks = 2;

template <class T, bool delta>
__global__ void __launch_bounds__(most_threads) recurrent_forward(KernelArgs args) {
    Arena arena{block_memory, nullptr, args.shared_limit};
    RecurrentKernel<T, delta> kernel(args, arena);
    const std::int64_t blocks = (args.V + recurrent_columns - 1) / recurrent_columns, task = blockIdx.x;
    kernel.forward(task / blocks / args.HV, task / blocks % args.HV,
                   static_cast<int>(task % blocks) * recurrent_columns);
}

template <class T, bool delta>
__global__ void __launch_bounds__(block_threads, backward_blocks) recurrent_backward(KernelArgs args) {
    Arena arena{block_memory, args.spill + blockIdx.x * args.spill_bytes, args.shared_limit};
    AdjointKernel<T, delta> kernel(args, arena);
    kernel.backward(blockIdx.x / args.H, blockIdx.x % args.H);
}

template <class Kernel>
BlockMemory memory_of(const KernelArgs& args, std::size_t shared_limit) {
    Arena arena{nullptr, nullptr, shared_limit};
    Kernel(args, arena);
    return {arena.shared_used, arena.spill_used};
}

template <class T, bool delta>
RecurrentKernels recurrent_kernels() {
    static_assert(recurrent_columns == state_columns);
    return {
        {"recurrent_forward", reinterpret_cast<const void*>(&recurrent_forward<T, delta>),
         registers_allowed(most_threads, 1), &memory_of<RecurrentKernel<T, delta>>, &recurrent_forward_work<T, delta>},
        {"recurrent_backward", reinterpret_cast<const void*>(&recurrent_backward<T, delta>),
         registers_allowed(block_threads, backward_blocks), &memory_of<AdjointKernel<T, delta>>,
         &recurrent_backward_work<T, delta>}};
}

template RecurrentKernels recurrent_kernels<float, false>();
template RecurrentKernels recurrent_kernels<float, true>();
template RecurrentKernels recurrent_kernels<double, false>();
template RecurrentKernels recurrent_kernels<double, true>();

}  // namespace headrace::cuda
