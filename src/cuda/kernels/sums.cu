// Kernels of a few lines around the operators: sums of parameter gradients over sequences, integers into device memory.
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

static_assert(block_threads == launched_threads);

__global__ void __launch_bounds__(block_threads) parameter_sums(SumsArgs args) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * block_threads + threadIdx.x,
                       count = args.heads * args.channels;
    if (i >= count) return;
    double total = 0;
    for (std::int64_t n = 0; n < args.N; ++n) total += args.sums[n * args.step + i];
    const std::int64_t offset = i / args.channels * args.target.stride[0] + i % args.channels * args.target.stride[1];
    store_element<double>(args.target.data, args.target.dtype, offset, total);
}

__global__ void __launch_bounds__(block_threads) numbers(NumbersArgs args) {
    each(args.count, [&](int i) { args.to[i] = args.values[i]; });
}

const void* sums_kernel() { return reinterpret_cast<const void*>(&parameter_sums); }
const void* numbers_kernel() { return reinterpret_cast<const void*>(&numbers); }

}  // namespace headrace::cuda
