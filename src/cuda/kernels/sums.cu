// Sums of parameter gradients over sequences or chunks.
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

static_assert(block_threads == launched_threads && block_warps == totals_per_block);

__global__ void __launch_bounds__(block_threads) parameter_sums(SumsArgs args) {
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * totals_per_block,
                       left = args.heads * args.channels - first;
    each_row_sum(
        left < totals_per_block ? static_cast<int>(left) : totals_per_block, static_cast<int>(args.count),
        [&](int i, int n) { return args.sums[n * args.step + first + i]; },
        [&](int i, double total) {
            const std::int64_t head = (first + i) / args.channels, channel = (first + i) % args.channels;
            store_element<double>(args.target.data, args.target.dtype,
                                  head * args.target.stride[0] + channel * args.target.stride[1], total);
        });
}

const void* sums_kernel() { return reinterpret_cast<const void*>(&parameter_sums); }

}  // namespace headrace::cuda
