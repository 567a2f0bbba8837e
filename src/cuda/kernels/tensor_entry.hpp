// tensor_entry: the kernels of the chunk form on tensor cores for one rule.
#pragma once

#include "cuda/chunk/gate_terms.hpp"
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
__global__ void __launch_bounds__(tensor_threads, 1) tensor_states(const __grid_constant__ KernelArgs args) {
    Arena arena{block_memory, nullptr, ~std::size_t{0}};
    Kernel kernel(args, arena);
    const std::int64_t blocks = args.segments.blocks, task = blockIdx.x;
    kernel.states(task / blocks / args.HV, task / blocks % args.HV, static_cast<int>(task % blocks) * tensor_values);
}

template <bool delta>
__global__ void __launch_bounds__(block_threads) tensor_join(const __grid_constant__ KernelArgs args) {
    Arena arena{block_memory, nullptr, ~std::size_t{0}};
    SegmentJoin<delta> join(args, arena);
    const std::int64_t blocks = (args.V + join_columns - 1) / join_columns, task = blockIdx.x;
    join.join(task / blocks / args.HV, task / blocks % args.HV, static_cast<int>(task % blocks) * join_columns);
}

template <class Kernel>
__global__ void __launch_bounds__(block_threads) tensor_gate(const __grid_constant__ KernelArgs args) {
    Arena arena{block_memory, nullptr, ~std::size_t{0}};
    Kernel kernel(args, arena);
    kernel.run(blockIdx.x / args.HV, blockIdx.x % args.HV);
}

template <class Kernel>
std::size_t shared_bytes(const KernelArgs& args) {
    Arena arena{nullptr, nullptr, ~std::size_t{0}};
    Kernel(args, arena);
    return arena.shared_used;
}

template <int K, bool delta>
TensorKernels tensor_kernels_of() {
    static_assert(tensor_threads == tensor_warps * warp_lanes);
    using Kernel = TensorKernel<K, delta>;
    const void* gate = nullptr;
    if constexpr (!delta) gate = reinterpret_cast<const void*>(&tensor_gate<GateTermsKernel>);
    return {reinterpret_cast<const void*>(&tensor_forward<Kernel>),
            reinterpret_cast<const void*>(&tensor_states<Kernel>),
            gate,
            reinterpret_cast<const void*>(&tensor_join<delta>),
            &shared_bytes<Kernel>,
            &shared_bytes<SegmentJoin<delta>>,
            &shared_bytes<GateTermsKernel>};
}

template <bool delta>
TensorKernels tensor_kernels(std::int64_t K) {
    return K <= 64 ? tensor_kernels_of<64, delta>() : tensor_kernels_of<128, delta>();
}

}  // namespace headrace::cuda
