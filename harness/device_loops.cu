// device_loops: kernels that do nothing but multiply and add.
#include "harness/device_loops.hpp"

#include <cuda_runtime_api.h>

#include "cuda/ptx.hpp"

namespace headrace::harness {
namespace {

constexpr int chains = 8;  // independent, so that no multiply-add waits for another

// Sums are written once: the compiler can drop no round.
template <typename Scalar>
__global__ void __launch_bounds__(loop_threads) fma_loop(std::int64_t rounds, Scalar factor, double* sums) {
    Scalar chain[chains];
#pragma unroll
    for (int i = 0; i < chains; ++i) chain[i] = static_cast<Scalar>(threadIdx.x + i);
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma unroll
        for (int repeat = 0; repeat < 8; ++repeat) {
#pragma unroll
            for (int i = 0; i < chains; ++i) chain[i] = fma(chain[i], factor, factor);
        }
    }
    Scalar sum = 0;
#pragma unroll
    for (int i = 0; i < chains; ++i) sum += chain[i];
    sums[blockIdx.x * loop_threads + threadIdx.x] = sum;
}

// Operands of ones and zeros would let the hardware idle: bits of the lane.
__global__ void __launch_bounds__(loop_threads) mma_loop(std::int64_t rounds, std::uint32_t bits, double* sums) {
    float chain[chains][4] = {};
    std::uint32_t a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = 0x3c003c00u + ((threadIdx.x * 2654435761u + bits * (i + 1)) & 0x007f007fu);
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = 0x3c003c00u + ((threadIdx.x * 2246822519u + bits * (i + 1)) & 0x807f807fu);
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < chains; ++i) cuda::ptx::multiply_bf16(chain[i], a, b);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < chains; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += chain[i][j];
    }
    sums[blockIdx.x * loop_threads + threadIdx.x] = sum;
}

}  // namespace

double launch_loop(LoopKind kind, int blocks, std::int64_t rounds, double* sums) {
    const unsigned grid = static_cast<unsigned>(blocks);
    double flop_of_round = 2.0 * 8 * chains * loop_threads;
    switch (kind) {
        case LoopKind::f32_fma: fma_loop<float><<<grid, loop_threads>>>(rounds, 0.5f, sums); break;
        case LoopKind::f64_fma: fma_loop<double><<<grid, loop_threads>>>(rounds, 0.5, sums); break;
        case LoopKind::bf16_mma:
            mma_loop<<<grid, loop_threads>>>(rounds, 0x9e3779b9u, sums);
            flop_of_round = 2.0 * 16 * 8 * 16 * chains * (loop_threads / 32);
            break;
    }
    if (cudaPeekAtLastError() != cudaSuccess) return 0;
    return flop_of_round * static_cast<double>(rounds) * blocks;
}

}  // namespace headrace::harness
