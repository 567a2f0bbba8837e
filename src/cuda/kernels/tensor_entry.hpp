// tensor_entry: the kernels of the chunk form on tensor cores for one rule.
#pragma once

#include "cuda/chunk/tensor_kernel.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char block_memory[];

template <class Kernel>
__global__ void __launch_bounds__(tensor_threads, 1) tensor_forward(const __grid_constant__ KernelArgs args) {
    Arena arena{block_memory, nullptr, ~std::size_t{0}};
    Kernel kernel(args, arena);
    const std::int64_t blocks = (args.V + tensor_values - 1) / tensor_values, task = blockIdx.x;
    kernel.forward(task / blocks / args.HV, task / blocks % args.HV, static_cast<int>(task % blocks) * tensor_values);
}

template <class Kernel>
TensorKernels tensor_kernels_of() {
    static_assert(tensor_threads == tensor_warps * warp_lanes);
    return {reinterpret_cast<const void*>(&tensor_forward<Kernel>), [](const KernelArgs& args) {
                Arena arena{nullptr, nullptr, ~std::size_t{0}};
                Kernel(args, arena);
                return arena.shared_used;
            }};
}

template <bool delta>
TensorKernels tensor_kernels(std::int64_t K) {
    return K <= 64 ? tensor_kernels_of<TensorKernel<64, delta>>() : tensor_kernels_of<TensorKernel<128, delta>>();
}

}  // namespace headrace::cuda
