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

// Left alone, ptxas takes 48 registers and spills.
inline constexpr int gate_blocks = 8;
template <class Kernel>
__global__ void __launch_bounds__(block_threads, gate_blocks) tensor_gate(const __grid_constant__ KernelArgs args) {
    Arena arena{block_memory, nullptr, ~std::size_t{0}};
    Kernel kernel(args, arena);
    kernel.run(blockIdx.x / args.HV, blockIdx.x % args.HV);
}

template <class Block>
BlockMemory shared_memory_of(const KernelArgs& args, std::size_t /*shared_limit*/) {
    Arena arena{nullptr, nullptr, ~std::size_t{0}};
    Block(args, arena);
    return {arena.shared_used, 0};
}

template <int K, bool delta>
TensorKernels tensor_kernels_of() {
    static_assert(tensor_threads == tensor_warps * warp_lanes);
    using Block = TensorKernel<K, delta>;
    constexpr int registers = registers_allowed(tensor_threads, 1), few_threads = registers_allowed(block_threads, 1);
    Kernel gate{};
    if constexpr (!delta) {
        gate = {"tensor_gate", reinterpret_cast<const void*>(&tensor_gate<GateTermsKernel>),
                registers_allowed(block_threads, gate_blocks), &shared_memory_of<GateTermsKernel>, &tensor_gate_work};
    }
    return {{"tensor_forward", reinterpret_cast<const void*>(&tensor_forward<Block>), registers,
             &shared_memory_of<Block>, &tensor_forward_work<K, delta>},
            {"tensor_states", reinterpret_cast<const void*>(&tensor_states<Block>), registers, &shared_memory_of<Block>,
             &tensor_states_work<K, delta>},
            gate,
            {"tensor_join", reinterpret_cast<const void*>(&tensor_join<delta>), few_threads,
             &shared_memory_of<SegmentJoin<delta>>, &tensor_join_work<delta>}};
}

template <bool delta>
TensorKernels tensor_kernels(std::int64_t K) {
    return K <= 64 ? tensor_kernels_of<64, delta>() : tensor_kernels_of<128, delta>();
}

}  // namespace headrace::cuda
