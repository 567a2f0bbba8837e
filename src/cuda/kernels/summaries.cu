// What summaries launch beside walks, and their products.
#include "cuda/chunk/decay_product.hpp"
#include "cuda/products/product_kernel.hpp"

namespace headrace::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(decay_product_threads) decay_product(const __grid_constant__ KernelArgs args) {
    __shared__ double shared[decay_product_threads];
    const int parts = args.channel_gate ? (args.K + warp_lanes - 1) / warp_lanes : 1;
    const Task task = task_of(blockIdx.x, args.HV, parts);
    DecayProduct<T>{args, task.place, task.head, warp_lanes * task.part}.multiply(shared);
}

// A row of the unit matrix that walks begin with, in the type of states.
__global__ void __launch_bounds__(block_threads) unit_matrix(const __grid_constant__ KernelArgs args) {
    const int row = static_cast<int>(blockIdx.x);
    each(args.K, [&](int c) {
        const std::int64_t place = static_cast<std::int64_t>(row) * args.K + c;
        const float value = c == row ? 1 : 0;
        if (args.identity.dtype == DType::f64) {
            reinterpret_cast<double*>(args.identity.data)[place] = static_cast<double>(value);
        } else {
            reinterpret_cast<float*>(args.identity.data)[place] = value;
        }
    });
}

__global__ void __launch_bounds__(block_threads) product(const __grid_constant__ ProductArgs args) {
    const int blocks = (args.columns + product_columns - 1) / product_columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    const int first = product_columns * task.part, left = args.columns - first;
    ProductKernel{args, task.place, task.head, first, left < product_columns ? left : product_columns}.product();
}

BlockMemory no_memory(const KernelArgs& /*args*/, std::size_t /*shared_limit*/) { return {0, 0}; }

}  // namespace

Kernel decay_product_kernel(bool in_double) {
    const void* const function = in_double ? reinterpret_cast<const void*>(&decay_product<double>)
                                           : reinterpret_cast<const void*>(&decay_product<float>);
    return {"decay_product", function, registers_allowed(decay_product_threads, 1), &no_memory, &decay_product_work};
}
Kernel unit_matrix_kernel() {
    return {"unit_matrix", reinterpret_cast<const void*>(&unit_matrix), registers_allowed(block_threads, 4), &no_memory,
            &unit_matrix_work};
}
const void* product_kernel() { return reinterpret_cast<const void*>(&product); }

}  // namespace headrace::cuda
