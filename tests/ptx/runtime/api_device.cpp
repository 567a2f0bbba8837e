// The device: how many, which, what it is like; and errors with their names.
#include <cstdio>
#include <cstring>

#include "machine/fault.hpp"
#include "runtime/launch.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// The errors that this library gives, with what it says about them.
struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
#define HEADRACE_ERROR(name, text) {name, #name, text}
constexpr ErrorText error_texts[] = {
    HEADRACE_ERROR(cudaSuccess, "no error"),
    HEADRACE_ERROR(cudaErrorInvalidValue, "invalid argument"),
    HEADRACE_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    HEADRACE_ERROR(cudaErrorInitializationError, "initialization error"),
    HEADRACE_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    HEADRACE_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    HEADRACE_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    HEADRACE_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    HEADRACE_ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    HEADRACE_ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    HEADRACE_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    HEADRACE_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    HEADRACE_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    HEADRACE_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    HEADRACE_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    HEADRACE_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    HEADRACE_ERROR(cudaErrorNotReady, "device not ready"),
    HEADRACE_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    HEADRACE_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    HEADRACE_ERROR(cudaErrorIllegalInstruction, "an illegal instruction was encountered"),
    HEADRACE_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    HEADRACE_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    HEADRACE_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    HEADRACE_ERROR(cudaErrorNotSupported, "operation not supported"),
    HEADRACE_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    HEADRACE_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    HEADRACE_ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    HEADRACE_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    HEADRACE_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    HEADRACE_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    HEADRACE_ERROR(cudaErrorStreamCaptureImplicit,
                   "operation would make the legacy stream depend on a capturing stream"),
    HEADRACE_ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    HEADRACE_ERROR(cudaErrorStreamCaptureWrongThread,
                   "attempt to terminate a thread-local capture sequence from another thread"),
    HEADRACE_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef HEADRACE_ERROR

const ErrorText& text_of(cudaError_t error) {
    static constexpr ErrorText unknown{cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};
    for (const ErrorText& known : error_texts) {
        if (known.error == error) return known;
    }
    return unknown;
}

struct Attribute {
    cudaDeviceAttr name;
    int value;
};
// An H100 without what the interpreter cannot do: clusters, cooperative launches, managed memory.
constexpr Attribute attributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, threads_per_block},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 0x7FFFFFFF},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, shared_per_block},
    {cudaDevAttrTotalConstantMemory, constant_bytes},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxRegistersPerBlock, registers_per_multiprocessor},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMultiProcessorCount, multiprocessors},
    {cudaDevAttrKernelExecTimeout, 0},
    {cudaDevAttrIntegrated, 0},
    {cudaDevAttrCanMapHostMemory, 0},
    {cudaDevAttrComputeMode, cudaComputeModeDefault},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrEccEnabled, 1},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrL2CacheSize, l2_bytes},
    {cudaDevAttrMaxThreadsPerMultiProcessor, threads_per_multiprocessor},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrGlobalL1CacheSupported, 1},
    {cudaDevAttrLocalL1CacheSupported, 1},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, shared_per_multiprocessor},
    {cudaDevAttrMaxRegistersPerMultiprocessor, registers_per_multiprocessor},
    {cudaDevAttrManagedMemory, 0},
    {cudaDevAttrIsMultiGpuBoard, 0},
    {cudaDevAttrPageableMemoryAccess, 0},
    {cudaDevAttrConcurrentManagedAccess, 0},
    {cudaDevAttrCooperativeLaunch, 0},
    {cudaDevAttrMaxBlocksPerMultiprocessor, blocks_per_multiprocessor},
    {cudaDevAttrReservedSharedMemoryPerBlock, shared_reserved_per_block},
    {cudaDevAttrMemoryPoolsSupported, 1},
    {cudaDevAttrClusterLaunch, 0},
};

bool exists(const Runtime& runtime, int device) { return device >= 0 && device < runtime.environment.devices; }

cudaError_t attribute_of(const Runtime& runtime, int* value, cudaDeviceAttr attribute, int device) {
    if (value == nullptr) return cudaErrorInvalidValue;
    if (!exists(runtime, device)) return cudaErrorInvalidDevice;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = runtime.environment.major;
    if (attribute == cudaDevAttrComputeCapabilityMinor) *value = runtime.environment.minor;
    if (attribute == cudaDevAttrComputeCapabilityMajor || attribute == cudaDevAttrComputeCapabilityMinor) {
        return cudaSuccess;
    }
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
        *value = runtime.environment.shared * static_cast<int>(kib);
        return cudaSuccess;
    }
    for (const Attribute& known : attributes) {
        if (known.name != attribute) continue;
        *value = known.value;
        return cudaSuccess;
    }
    runtime.print("cudaDeviceGetAttribute: attribute " + std::to_string(attribute) + " is not in the stand-in's table");
    return cudaErrorNotSupported;
}

void describe(const Runtime& runtime, cudaDeviceProp& to) {
    std::memset(&to, 0, sizeof to);
    std::snprintf(to.name, sizeof to.name, "headrace PTX interpreter");
    to.totalGlobalMem = runtime.environment.memory;
    to.sharedMemPerBlock = shared_per_block;
    to.regsPerBlock = to.regsPerMultiprocessor = registers_per_multiprocessor;
    to.warpSize = 32;
    to.memPitch = 0x7FFFFFFF;
    to.maxThreadsPerBlock = threads_per_block;
    to.maxThreadsDim[0] = to.maxThreadsDim[1] = 1024;
    to.maxThreadsDim[2] = 64;
    to.maxGridSize[0] = 0x7FFFFFFF;
    to.maxGridSize[1] = to.maxGridSize[2] = 65535;
    to.totalConstMem = constant_bytes;
    to.major = runtime.environment.major;
    to.minor = runtime.environment.minor;
    to.textureAlignment = 512;
    to.multiProcessorCount = multiprocessors;
    to.concurrentKernels = 1;
    to.asyncEngineCount = 3;
    to.unifiedAddressing = 1;
    to.memoryBusWidth = 5120;
    to.l2CacheSize = l2_bytes;
    to.maxThreadsPerMultiProcessor = threads_per_multiprocessor;
    to.streamPrioritiesSupported = 1;
    to.globalL1CacheSupported = to.localL1CacheSupported = 1;
    to.sharedMemPerMultiprocessor = shared_per_multiprocessor;
    to.sharedMemPerBlockOptin = static_cast<std::size_t>(runtime.environment.shared) * kib;
    to.maxBlocksPerMultiProcessor = blocks_per_multiprocessor;
    to.reservedSharedMemPerBlock = shared_reserved_per_block;
    to.memoryPoolsSupported = 1;
}

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    if (count != nullptr) *count = 0;
    return Runtime::call(__func__, [&](Runtime& r) {
        if (count == nullptr) return cudaErrorInvalidValue;
        *count = r.environment.devices;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int* device) {
    return Runtime::call(__func__, [&](Runtime&) {
        *device = this_thread().device;
        return cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (!exists(r, device)) return cudaErrorInvalidDevice;
        this_thread().device = device;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (properties == nullptr) return cudaErrorInvalidValue;
        if (!exists(r, device)) return cudaErrorInvalidDevice;
        describe(r, *properties);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return Runtime::call(__func__, [&](Runtime& r) { return attribute_of(r, value, attribute, device); });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return Runtime::call(__func__, [&](Runtime&) {
        if (least != nullptr) *least = 0;
        if (greatest != nullptr) *greatest = -5;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceSynchronize() {
    return Runtime::call(__func__, [&](Runtime& r) { return r.synchronize_device(); });
}

cudaError_t cudaDeviceReset() {
    return Runtime::call(__func__, [&](Runtime& r) -> cudaError_t {
        r.die("cudaDeviceReset: it takes the device away from everybody else in the process");
    });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    if (version == nullptr) return cudaErrorInvalidValue;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    if (version == nullptr) return cudaErrorInvalidValue;
    return Runtime::plain_call([&](Runtime& r) {
        *version = r.environment.driver;
        return cudaSuccess;
    });
}

cudaError_t cudaGetLastError() {
    return Runtime::plain_call([&](Runtime& r) { return r.last_error(Runtime::Forget::yes); });
}

cudaError_t cudaPeekAtLastError() {
    return Runtime::plain_call([&](Runtime& r) { return r.last_error(Runtime::Forget::no); });
}

const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }

}  // extern "C"
