// Registration of a program's device code, launches, and what may be asked about kernels.
#include <algorithm>
#include <vector>

#include "machine/fault.hpp"
#include "runtime/launch.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// What <<<...>>> pushes and the kernel's stub pops.
struct Configuration {
    dim3 grid, block;
    std::size_t shared_bytes = 0;
    cudaStream_t stream = nullptr;
};
std::vector<Configuration>& configurations() {
    thread_local std::vector<Configuration> stack;
    return stack;
}

// All ways to launch fail under one name.
constexpr const char* launch_name = "cudaLaunchKernel";

cudaError_t launch(Runtime& runtime, const void* kernel, const dim3& grid, const dim3& block, void** arguments,
                   std::size_t shared_bytes, cudaStream_t stream) {
    const Kernel* found = runtime.modules.kernel(kernel);
    if (found == nullptr) return cudaErrorInvalidDeviceFunction;
    return runtime.launch(*found, grid, block, arguments, shared_bytes, stream);
}

// Hints are ignored; what would change the meaning of the launch is refused.
cudaError_t check_attribute(const cudaLaunchAttribute& attribute) {
    const auto& value = attribute.val;
    switch (attribute.id) {
        case cudaLaunchAttributeIgnore:
        case cudaLaunchAttributeProgrammaticStreamSerialization:
        case cudaLaunchAttributePriority:
        case cudaLaunchAttributePreferredSharedMemoryCarveout: return cudaSuccess;
        case cudaLaunchAttributeCooperative: return value.cooperative == 0 ? cudaSuccess : cudaErrorNotSupported;
        case cudaLaunchAttributeClusterDimension:
            return value.clusterDim.x * value.clusterDim.y * value.clusterDim.z <= 1 ? cudaSuccess
                                                                                     : cudaErrorNotSupported;
        default: return cudaErrorNotSupported;
    }
}

cudaError_t check_attributes(const cudaLaunchConfig_t& configuration) {
    for (unsigned i = 0; i < configuration.numAttrs; ++i) {
        const cudaError_t error = check_attribute(configuration.attrs[i]);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// f(kernel, function) for a kernel that is there.
template <class F>
cudaError_t with_kernel(Runtime& runtime, const void* handle, F f) {
    Kernel* kernel = runtime.modules.kernel(handle);
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    cudaError_t error = cudaSuccess;
    const Function* function = runtime.function_of(*kernel, error);
    return function == nullptr ? error : f(*kernel, *function);
}

int threads_allowed(const Function& function) {
    return function.max_threads == 0 ? threads_per_block : std::min(threads_per_block, function.max_threads);
}

// Registers are unknown, since PTX has any number of them: numRegs is 0.
void describe(const Runtime& runtime, const Kernel& kernel, const Function& function, cudaFuncAttributes& attributes) {
    attributes = {};
    attributes.sharedSizeBytes = function.shared_bytes;
    attributes.localSizeBytes = function.local_bytes;
    attributes.maxThreadsPerBlock = threads_allowed(function);
    attributes.ptxVersion = kernel.module->target;
    attributes.binaryVersion = 10 * runtime.environment.major + runtime.environment.minor;
    attributes.maxDynamicSharedSizeBytes = static_cast<int>(dynamic_shared_limit(kernel, function));
    attributes.preferredShmemCarveout = kernel.carveout;
}

cudaError_t set_attribute(const Runtime& runtime, Kernel& kernel, const Function& function, cudaFuncAttribute attribute,
                          int value) {
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
        if (value < -1 || value > 100) return cudaErrorInvalidValue;
        kernel.carveout = value;
        return cudaSuccess;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorNotSupported;
    const std::size_t shared = static_cast<std::size_t>(runtime.environment.shared) * kib;
    if (value < 0 || static_cast<std::size_t>(value) + function.shared_bytes > shared) {
        return cudaErrorInvalidValue;
    }
    kernel.dynamic_shared_limits[this_thread().device] = value;
    return cudaSuccess;
}

// From threads, blocks and shared memory alone: registers are unknown.
int occupancy(const Kernel& kernel, const Function& function, int block, std::size_t dynamic_bytes) {
    if (block > threads_allowed(function) || dynamic_bytes > dynamic_shared_limit(kernel, function)) return 0;
    const int warps = (block + 31) / 32;
    const std::size_t bytes = function.shared_bytes + dynamic_bytes + shared_reserved_per_block;
    const auto by_shared = static_cast<int>(shared_per_multiprocessor / bytes);
    return std::min({blocks_per_multiprocessor, threads_per_multiprocessor / 32 / warps, by_shared});
}

cudaError_t give_occupancy(Runtime& runtime, int* blocks, const void* kernel, int block, std::size_t dynamic_bytes) {
    return with_kernel(runtime, kernel, [&](const Kernel& k, const Function& f) {
        if (blocks == nullptr || block < 1) return cudaErrorInvalidValue;
        *blocks = occupancy(k, f, block, dynamic_bytes);
        return cudaSuccess;
    });
}

LoadedModule* module_of(void** handle) { return reinterpret_cast<LoadedModule*>(handle); }

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

// What compiled code calls without a declaration in a public header; the program's copies are in nvcc's
// crt/host_runtime.h.
extern "C" {

void** __cudaRegisterFatBinary(void* fat_binary) {
    LoadedModule* module = nullptr;
    Runtime::plain_call([&](Runtime& r) {
        module = r.modules.add(fat_binary, r.environment);
        return cudaSuccess;
    });
    return reinterpret_cast<void**>(module);
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
    Runtime::plain_call([&](Runtime& r) {
        r.modules.remove(module_of(handle));
        return cudaSuccess;
    });
}

void __cudaRegisterFunction(void** handle, const char* host_function, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
    Runtime::plain_call([&](Runtime& r) {
        r.modules.add_kernel(module_of(handle), host_function, name);
        return cudaSuccess;
    });
}

void __cudaRegisterVar(void** handle, char* host_variable, char*, const char* name, int, std::size_t bytes, int, int) {
    Runtime::plain_call([&](Runtime& r) {
        r.modules.add_variable(module_of(handle), host_variable, name, bytes);
        return cudaSuccess;
    });
}

char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream) {
    configurations().push_back({grid, block, shared_bytes, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes, void* stream) {
    if (configurations().empty()) return cudaErrorMissingConfiguration;
    const Configuration top = configurations().back();
    configurations().pop_back();
    *grid = top.grid;
    *block = top.block;
    *shared_bytes = top.shared_bytes;
    *static_cast<cudaStream_t*>(stream) = top.stream;
    return cudaSuccess;
}

// The stub keeps the answer for ever, so this never fails for reasons that pass.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
    return Runtime::plain_call([&](Runtime& r) {
        Kernel* found = r.modules.kernel(host_function);
        *kernel = handle_of<cudaKernel_t>(found);
        return found == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
    });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                               cudaStream_t stream) {
    return Runtime::call(launch_name, [&](Runtime& r) {
        return launch(r, kernel, grid, block, arguments, shared_bytes, stream);
    });
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                             cudaStream_t stream) {
    return Runtime::call(launch_name, [&](Runtime& r) {
        return launch(r, function, grid, block, arguments, shared_bytes, stream);
    });
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
    return Runtime::call(launch_name, [&](Runtime& r) {
        if (configuration == nullptr) return cudaErrorInvalidValue;
        if (const cudaError_t error = check_attributes(*configuration); error != cudaSuccess) return error;
        return launch(r, function, configuration->gridDim, configuration->blockDim, arguments,
                      configuration->dynamicSmemBytes, configuration->stream);
    });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_kernel(r, kernel, [&](const Kernel& k, const Function& f) {
            describe(r, k, f, *attributes);
            return cudaSuccess;
        });
    });
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_kernel(r, kernel,
                           [&](Kernel& k, const Function& f) { return set_attribute(r, k, f, attribute, value); });
    });
}

cudaError_t cudaFuncSetCacheConfig(const void* kernel, cudaFuncCache) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return r.modules.kernel(kernel) == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int block,
                                                          std::size_t dynamic_bytes) {
    return Runtime::call(__func__, [&](Runtime& r) { return give_occupancy(r, blocks, kernel, block, dynamic_bytes); });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int block,
                                                                   std::size_t dynamic_bytes, unsigned int) {
    return Runtime::call(__func__, [&](Runtime& r) { return give_occupancy(r, blocks, kernel, block, dynamic_bytes); });
}

}  // extern "C"
