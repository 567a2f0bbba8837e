// Kernels around ragged batches: cu_seqlens into device memory, from the host or checked, and what becomes of results
// where they are no list of sequences.
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {
namespace {

__global__ void __launch_bounds__(block_threads) numbers(NumbersArgs args) {
    each(args.count, [&](int i) { args.to[i] = args.values[i]; });
}

__global__ void __launch_bounds__(checking_threads) check_sequences(const __grid_constant__ SequencesArgs args) {
    __shared__ int wrong_in[checking_threads / warp_lanes];
    const auto boundary = [&](std::int64_t n) { return load_integer(args.from, n * args.from.stride[0]); };
    bool wrong = false;
    HEADRACE_ROLLED
    for (std::int64_t n = threadIdx.x; n <= args.N; n += checking_threads) {
        const std::int64_t here = boundary(n), behind = n < args.N ? boundary(n + 1) : args.T;
        wrong = wrong || (n == 0 && here != 0) || (n < args.N ? here > behind : here != behind);
    }
    wrong = ptx::any_of_warp(wrong);
    if (lane() == 0) wrong_in[threadIdx.x / warp_lanes] = wrong;
    ptx::sync_block();
    wrong = ptx::any_of_warp(wrong_in[lane()] != 0);
    HEADRACE_ROLLED
    for (std::int64_t n = threadIdx.x; n <= args.N; n += checking_threads) args.to[n] = wrong ? 0 : boundary(n);
    if (threadIdx.x != 0) return;
    args.to[args.N + 1] = wrong;
    if (args.refused != nullptr) *args.refused = 0;
}
static_assert(checking_threads == warp_lanes * warp_lanes);  // a lane for each warp

__global__ void __launch_bounds__(block_threads) spoil(const __grid_constant__ SpoilArgs args) {
    if (*args.wrong == 0) return;
    const double nan = not_a_number<double>();
    HEADRACE_ROLLED
    for (int which = 0; which < args.count; ++which) {
        const SpoilArgs::Result& result = args.results[which];
        const int inner = static_cast<int>(result.shape[2] * result.shape[3]), last = static_cast<int>(result.shape[3]);
        HEADRACE_ROLLED
        for (std::int64_t i = 0; i < result.shape[0]; ++i) {
            HEADRACE_ROLLED
            for (std::int64_t j = blockIdx.x; j < result.shape[1]; j += gridDim.x) {
                each(inner, [&](int at) {
                    const std::int64_t place = offset_of(result.tensor, i, j, at / last, at % last);
                    store_element<double>(result.tensor.data, result.tensor.dtype, place, nan);
                });
            }
        }
    }
}

}  // namespace

const void* numbers_kernel() { return reinterpret_cast<const void*>(&numbers); }
const void* sequences_kernel() { return reinterpret_cast<const void*>(&check_sequences); }
const void* spoil_kernel() { return reinterpret_cast<const void*>(&spoil); }

}  // namespace headrace::cuda
