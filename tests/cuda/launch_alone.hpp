// launch_alone: one kernel of the library by itself, on arrays that a test has filled, and how these lie.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/kernels.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {

// Of an element in a LowerImage, which has the blocks of 16 x 16 on and below the diagonal.
inline std::size_t lower_place(int i, int j) {
    return static_cast<std::size_t>(256 * (i / 16 * (i / 16 + 1) / 2 + j / 16) + i % 16 * 16 + j % 16);
}
// Of the kernel for K channels.
constexpr int kernel_columns(std::int64_t K) { return K <= 64 ? 64 : K <= 128 ? 128 : 256; }

// With all threads that its bounds let in, and the shared memory that it asks for.
inline void launch_alone(const cuda::Kernel& kernel, cuda::KernelArgs args, std::size_t blocks) {
    cudaFuncAttributes attributes{};
    expect_cuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");
    const auto threads = static_cast<unsigned>(attributes.maxThreadsPerBlock);
    const std::size_t more = threads == cuda::three_groups ? kernel.more_shared : 0,
                      shared = (kernel.memory == nullptr ? 0 : kernel.memory(args, 0).shared) + more;
    expect_cuda(
        cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "cudaFuncSetAttribute");
    void* parameters[] = {&args};
    expect_cuda(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(blocks)), dim3(threads), parameters,
                                 shared, nullptr),
                "cudaLaunchKernel");
}

}  // namespace headrace::test
