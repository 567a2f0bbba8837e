// launch: the calls of the CUDA runtime that this backend makes, with errors as Status.
#include "cuda/plumbing/launch.hpp"

#include <cuda_runtime_api.h>

#include <string>

#include "core/validation.hpp"

namespace headrace::cuda {
namespace {

// The error is taken from the runtime, so that it does not surface in a later call of somebody else.
Status failed(cudaError_t error, const std::string& what) {
    cudaGetLastError();
    const Code code = error == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::unsupported;
    return {code, "CUDA: " + what + ": " + cudaGetErrorString(error)};
}
Status checked(cudaError_t error, const char* what) { return error == cudaSuccess ? Status() : failed(error, what); }

constexpr int least_capability = 80;

Status check_capability(int device) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return failed(error, "device " + std::to_string(device));
    if (10 * major + minor >= least_capability) return {};
    return {Code::unsupported, "CUDA: device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
                                   std::to_string(minor) + ", the kernels need 8.0"};
}

}  // namespace

Status launch(const void* kernel, const char* name, std::int64_t blocks, int threads, std::size_t shared_bytes, void* parameters,
              void* stream) {
    if (blocks == 0) return {};
    if (blocks > 0x7fffffff) return {Code::unsupported, std::string("CUDA: ") + name + ": more than 2^31 - 1 blocks"};
    const int bytes = static_cast<int>(shared_bytes);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    void* all[] = {parameters};
    if (error == cudaSuccess) {
        error = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), all, shared_bytes,
                                 static_cast<cudaStream_t>(stream));
    }
    return error == cudaSuccess ? Status() : failed(error, std::string("launch of ") + name);
}

Status clear(void* memory, std::size_t bytes, void* stream) {
    return checked(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

Status allocate(std::size_t bytes, void* stream, Block* block) {
    void* memory = nullptr;
    const cudaError_t error = cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return failed(error, "workspace: could not allocate " + std::to_string(bytes) + " bytes");
    const Release release{[](void* held, void* behind) { cudaFreeAsync(held, static_cast<cudaStream_t>(behind)); }, stream};
    *block = Block(memory, release);
    return {};
}

Status read_back(void* to, const void* from, std::size_t bytes, void* stream) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    return checked(error, "cudaMemcpyAsync");
}

OnDevice::OnDevice(const Problem& problem) {
    int device = -1, current = -1;
    status_ = find(problem, &device);
    if (status_.ok() && device >= 0) status_ = checked(cudaGetDevice(&current), "cudaGetDevice");
    if (!status_.ok() || device < 0 || device == current) return;
    status_ = checked(cudaSetDevice(device), "cudaSetDevice");
    if (status_.ok()) previous_ = current;
}

OnDevice::~OnDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

// -1 where no tensor has elements.
Status OnDevice::find(const Problem& problem, int* device) const {
    const char* first = nullptr;
    for (const NamedView& named : named_views(problem)) {
        if (named.view->device != Device::cuda || named.view->numel() == 0) continue;
        cudaPointerAttributes attributes{};
        if (const cudaError_t error = cudaPointerGetAttributes(&attributes, named.view->data); error != cudaSuccess) {
            return failed(error, named.name);
        }
        if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
            return {Code::invalid_argument, std::string(named.name) + ": expected memory of a CUDA device, got an address of the host"};
        }
        if (first == nullptr) {
            first = named.name;
            *device = attributes.device;
            if (Status status = check_capability(*device); !status.ok()) return status;
        } else if (attributes.device != *device) {
            return {Code::invalid_argument, std::string(named.name) + ": expected memory of CUDA device " + std::to_string(*device) + " as " +
                                                first + ", got that of device " + std::to_string(attributes.device)};
        }
    }
    return {};
}

}  // namespace headrace::cuda
