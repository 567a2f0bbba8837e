// launch_alone: one kernel of the library by itself, on arrays that a test has filled.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/kernels.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {

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
