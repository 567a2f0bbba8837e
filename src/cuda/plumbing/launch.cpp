// launch: the calls of the CUDA runtime that this backend makes, with errors as Status.
#include "cuda/plumbing/launch.hpp"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/plumbing/blocking.hpp"

namespace headrace::cuda {
namespace {

// The error is taken from the runtime, so that it does not surface in a later call of somebody else.
Status failed(cudaError_t error, const std::string& what) {
    cudaGetLastError();
    const Code code = error == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::unsupported;
    return {code, "CUDA: " + what + ": " + cudaGetErrorString(error)};
}
Status checked(cudaError_t error, const char* what) { return error == cudaSuccess ? Status() : failed(error, what); }

Status device_of(const char* name, const void* memory, int* device) {
    cudaPointerAttributes attributes{};
    if (const cudaError_t error = cudaPointerGetAttributes(&attributes, memory); error != cudaSuccess)
        return failed(error, name);
    *device = attributes.device;
    if (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged) return {};
    return {Code::invalid_argument,
            std::string(name) + ": expected memory of a CUDA device, got an address of the host"};
}

// Where CUDA does not take it back behind the stream, waiting is better than a leak.
void give_back(void* memory, void* stream) {
    if (cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)) == cudaSuccess) return;
    cudaGetLastError();
    if (cudaFree(memory) != cudaSuccess) cudaGetLastError();
}

// All that the GPU gives a block, whatever this launch takes: it is said of the kernel, not of a launch, and another
// thread that launches the same one with less must not take it back in between. Such kernels have none of their own.
Status allow_all_shared_memory(const void* kernel, const char* name) {
    int device = 0, most = 0;
    if (Status status = checked(cudaGetDevice(&device), "cudaGetDevice"); !status.ok()) return status;
    cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return failed(error, "device " + std::to_string(device));
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    return error == cudaSuccess ? Status() : failed(error, std::string("launch of ") + name);
}

constexpr int least_capability = 80, capability_of_groups = 90;

Status check_capability(int device) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return failed(error, "device " + std::to_string(device));
    if (10 * major + minor >= least_capability) return {};
    return {Code::unsupported, "CUDA: device " + std::to_string(device) + " has compute capability " +
                                   std::to_string(major) + "." + std::to_string(minor) + ", the kernels need 8.0"};
}

}  // namespace

bool takes(const void* kernel, int threads, const GpuLimits* planned) {
    if (planned != nullptr) return planned->capability == capability_of_groups;
    cudaFuncAttributes code{};
    if (cudaFuncGetAttributes(&code, kernel) == cudaSuccess) return code.maxThreadsPerBlock >= threads;
    cudaGetLastError();
    return true;
}

Status launch(const void* kernel, const char* name, std::int64_t blocks, BlockSize block, void* parameters,
              void* stream) {
    if (blocks == 0) return {};
    if (blocks > 0x7fffffff) return {Code::unsupported, std::string("CUDA: ") + name + ": more than 2^31 - 1 blocks"};
    constexpr std::size_t without_asking = std::size_t{48} << 10;  // on every GPU
    if (block.shared > without_asking) {
        if (Status status = allow_all_shared_memory(kernel, name); !status.ok()) return status;
    }
    void* all[] = {parameters};
    const cudaError_t error =
        cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(block.threads)), all,
                         block.shared, static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? Status() : failed(error, std::string("launch of ") + name);
}

std::size_t shared_memory_limit(const Problem& problem) {
    if (const GpuLimits* planned = problem.options.planned_gpu; planned != nullptr) return planned->shared_bytes;
    int device = -1, bytes = 0;
    for (const NamedView& named : named_views(problem)) {
        if (named.view->device != Device::cuda || named.view->data == nullptr) continue;
        if (device_of(named.name, named.view->data, &device).ok()) break;
    }
    if (device < 0 && cudaGetDevice(&device) != cudaSuccess) device = -1;
    if (device >= 0 && cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
        bytes > 0)
        return static_cast<std::size_t>(bytes);
    cudaGetLastError();
    return most_shared_bytes;
}

Status clear(void* memory, std::size_t bytes, void* stream) {
    return checked(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

Status allocate(std::size_t bytes, void* stream, Block* block) {
    void* memory = nullptr;
    const cudaError_t error = cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return failed(error, "workspace: could not allocate " + std::to_string(bytes) + " bytes");
    const Release release{give_back, stream};
    *block = Block(memory, release);
    return {};
}

Status read_back(void* to, const void* from, std::size_t bytes, void* stream) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    return checked(error, "cudaMemcpyAsync");
}

OnDevice::OnDevice(const std::vector<NamedView>& views) {
    int current = -1;
    status_ = find(views);
    if (status_.ok()) status_ = checked(cudaGetDevice(&current), "cudaGetDevice");
    if (status_.ok() && device_ < 0) device_ = current, first_ = "the current one";
    if (!status_.ok() || device_ == current) return;
    status_ = checked(cudaSetDevice(device_), "cudaSetDevice");
    if (status_.ok()) previous_ = current;
}

OnDevice::~OnDevice() {
    if (previous_ >= 0 && cudaSetDevice(previous_) != cudaSuccess) cudaGetLastError();
}

Status OnDevice::shared_memory(std::size_t* bytes) const {
    int most = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_);
    *bytes = static_cast<std::size_t>(most);
    return error == cudaSuccess ? Status() : failed(error, "device " + std::to_string(device_));
}

// Memory of the library's own that a capture has allocated is in no device's hands yet: nothing is said about it.
Status OnDevice::check_workspace(const void* memory, void* stream) const {
    int device = -1;
    Status status = device_of("workspace", memory, &device);
    if (status.ok() && device == device_) return {};
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture) != cudaSuccess) cudaGetLastError();
    if (capture != cudaStreamCaptureStatusNone) return {};
    return status.ok() ? of_another("workspace", device) : status;
}

Status OnDevice::of_another(const char* name, int device) const {
    return {Code::invalid_argument, std::string(name) + ": expected memory of CUDA device " + std::to_string(device_) +
                                        " as " + first_ + ", got that of device " + std::to_string(device)};
}

Status OnDevice::find(const std::vector<NamedView>& views) {
    for (const NamedView& named : views) {
        if (named.view->device != Device::cuda || named.view->numel() == 0) continue;
        int device = -1;
        if (Status status = device_of(named.name, named.view->data, &device); !status.ok()) return status;
        if (device_ >= 0 && device != device_) return of_another(named.name, device);
        if (device_ >= 0) continue;
        device_ = device, first_ = named.name;
        if (Status status = check_capability(device); !status.ok()) return status;
    }
    return {};
}

}  // namespace headrace::cuda
