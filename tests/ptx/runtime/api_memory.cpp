// cudaMalloc, cudaFree and their stream-ordered and pinned relatives; memory pools as far as one needs them.
#include <cstdlib>
#include <cstring>

#include "machine/fault.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// Stream-ordered frees that wait count against the limit; a pool of CUDA waits for them before it gives up.
std::uint64_t allocate_after_frees(Runtime& runtime, std::size_t bytes) {
    const std::uint64_t address = runtime.allocate(bytes, "cudaMallocAsync");
    if (address != 0) return address;
    runtime.scheduler.run_all();
    return runtime.allocate(bytes, "cudaMallocAsync");
}

// From here on nothing has written the bytes.
void forget_contents(Runtime& runtime, std::uint64_t address, std::size_t bytes) {
    const std::uint64_t unwritten = runtime.memory.allocate(bytes);
    if (unwritten == 0) throw_fault("no address space left");
    runtime.memory.copy(address, unwritten, bytes);
    runtime.memory.release(unwritten);
}

// In a capture: memory that lives as long as the graph, and is unwritten from this node and from the freeing node on.
cudaError_t capture_allocation(Runtime& runtime, void** pointer, std::size_t bytes, Stream& stream,
                               cudaStream_t handle) {
    const std::uint64_t address = runtime.allocate(bytes, "cudaMallocAsync in a capture");
    if (address == 0) return cudaErrorMemoryAllocation;
    runtime.allocations.at(address).of_graph = true;
    stream.capture->graph->memory.emplace_back(
        reinterpret_cast<void*>(address), [&runtime](void* memory) { runtime.release(address_of(memory)); });
    Work work;
    work.type = cudaGraphNodeTypeMemAlloc;
    work.run = [&runtime, address, bytes] { forget_contents(runtime, address, bytes); };
    *pointer = reinterpret_cast<void*>(address);
    return runtime.issue(handle, std::move(work));
}

cudaError_t allocate_in_stream(Runtime& runtime, void** pointer, std::size_t bytes, cudaStream_t handle) {
    Stream* stream = runtime.stream(handle);
    if (pointer == nullptr || bytes == 0) return cudaErrorInvalidValue;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
        if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
        return capture_allocation(runtime, pointer, bytes, *stream, handle);
    }
    if (const cudaError_t error = runtime.may_use_legacy(*stream); error != cudaSuccess) return error;
    const std::uint64_t address = allocate_after_frees(runtime, bytes);
    if (address == 0) return cudaErrorMemoryAllocation;
    Allocation& allocation = runtime.allocations.at(address);
    allocation.device = stream->device;
    allocation.ready = runtime.add_task(*stream, {});
    *pointer = reinterpret_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t free_in_stream(Runtime& runtime, void* pointer, cudaStream_t handle) {
    const Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (pointer == nullptr) return cudaErrorInvalidValue;
    const std::uint64_t address = address_of(pointer);
    const auto found = runtime.allocations.find(address);
    if (found == runtime.allocations.end() || found->second.freed) return cudaErrorInvalidValue;
    const bool captured = stream->capture != nullptr;
    if (captured != found->second.of_graph) {
        runtime.print("cudaFreeAsync: memory of a graph is freed in the same capture, and no other memory there");
        return cudaErrorNotSupported;
    }
    Work work;
    work.type = cudaGraphNodeTypeMemFree;
    if (captured) {
        work.run = [&runtime, address, bytes = found->second.bytes] { forget_contents(runtime, address, bytes); };
    } else {
        work.run = [&runtime, address, device = stream->device] {
            runtime.require_usable(address, device, "cudaFreeAsync");
            runtime.release(address);
        };
    }
    const cudaError_t error = runtime.issue(handle, std::move(work));
    const auto still = runtime.allocations.find(address);  // a full queue may have run it already
    if (error == cudaSuccess && still != runtime.allocations.end()) still->second.freed = !captured;
    return error;
}

cudaError_t free_at_once(Runtime& runtime, void* pointer) {
    if (pointer == nullptr) return cudaSuccess;
    const auto known = [&] {
        const auto found = runtime.allocations.find(address_of(pointer));
        return found != runtime.allocations.end() && !found->second.freed && !found->second.of_graph;
    };
    if (!known()) return cudaErrorInvalidValue;
    runtime.scheduler.run_all();
    runtime.release(address_of(pointer));
    return cudaSuccess;
}

cudaError_t allocate_pinned(Runtime& runtime, void** pointer, std::size_t bytes) {
    if (const cudaError_t error = runtime.may_be_unsafe(); error != cudaSuccess) return error;
    if (pointer == nullptr) return cudaErrorInvalidValue;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory = std::malloc(bytes);
    if (memory == nullptr) return cudaErrorMemoryAllocation;
    std::memset(memory, 0xA5, bytes);
    runtime.host_memory[memory] = bytes;
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t free_pinned(Runtime& runtime, void* pointer) {
    if (const cudaError_t error = runtime.may_be_unsafe(); error != cudaSuccess) return error;
    if (pointer == nullptr) return cudaSuccess;
    if (runtime.host_memory.count(pointer) == 0) return cudaErrorInvalidValue;
    runtime.scheduler.run_all();
    runtime.host_memory.erase(pointer);
    std::free(pointer);
    return cudaSuccess;
}

void describe(const Runtime& runtime, const void* pointer, cudaPointerAttributes& attributes) {
    attributes = {};
    attributes.type = cudaMemoryTypeUnregistered;
    attributes.device = cudaInvalidDeviceId;
    attributes.hostPointer = const_cast<void*>(pointer);
    if (runtime.memory.bytes_from(address_of(pointer)) != 0) {
        const auto* allocation = runtime.allocation_around(address_of(pointer));  // null: a variable of a module
        attributes.type = cudaMemoryTypeDevice;
        attributes.device = allocation == nullptr ? 0 : allocation->second.device;
        attributes.devicePointer = const_cast<void*>(pointer);
        attributes.hostPointer = nullptr;
        return;
    }
    for (const auto& [start, bytes] : runtime.host_memory) {
        if (address_of(pointer) - address_of(start) >= bytes) continue;
        attributes.type = cudaMemoryTypeHost;
        attributes.device = this_thread().device;
        attributes.devicePointer = const_cast<void*>(pointer);
    }
}

// One pool per device, which keeps nothing: the handle says the device.
char pools[64];

int device_of_pool(cudaMemPool_t pool) {
    const auto index = reinterpret_cast<const char*>(pool) - pools;
    return index >= 0 && index < 64 ? static_cast<int>(index) : -1;
}

cudaError_t find_pool(const Runtime& runtime, cudaMemPool_t* pool, int device) {
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (device < 0 || device >= runtime.environment.devices || device >= 64) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(pools + device);
    return cudaSuccess;
}

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (const cudaError_t error = r.may_be_unsafe(); error != cudaSuccess) return error;
        if (pointer == nullptr) return cudaErrorInvalidValue;
        const std::uint64_t address = bytes == 0 ? 0 : r.allocate(bytes, "cudaMalloc");
        *pointer = reinterpret_cast<void*>(address);
        return address == 0 && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess;
    });
}

cudaError_t cudaFree(void* pointer) {
    return Runtime::call(__func__, [&](Runtime& r) {
        const cudaError_t error = r.may_be_unsafe();
        return error != cudaSuccess ? error : free_at_once(r, pointer);
    });
}

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return allocate_in_stream(r, pointer, bytes, stream); });
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (device_of_pool(pool) < 0) return cudaErrorInvalidValue;
        return allocate_in_stream(r, pointer, bytes, stream);
    });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return free_in_stream(r, pointer, stream); });
}

cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
    return Runtime::call(__func__, [&](Runtime& r) { return allocate_pinned(r, pointer, bytes); });
}

// The flags say who may see the memory; kernels of the stand-in never do.
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned int) {
    return Runtime::call(__func__, [&](Runtime& r) { return allocate_pinned(r, pointer, bytes); });
}

cudaError_t cudaFreeHost(void* pointer) {
    return Runtime::call(__func__, [&](Runtime& r) { return free_pinned(r, pointer); });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    return Runtime::call(__func__, [&](Runtime& r) {
        *total = r.environment.memory;
        *free = r.environment.memory - r.allocated;
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (attributes == nullptr) return cudaErrorInvalidValue;
        describe(r, pointer, *attributes);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    return Runtime::call(__func__, [&](Runtime& r) { return find_pool(r, pool, device); });
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
    return Runtime::call(__func__, [&](Runtime& r) { return find_pool(r, pool, device); });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (device_of_pool(pool) < 0 || value == nullptr) return cudaErrorInvalidValue;
        if (attribute != cudaMemPoolAttrReleaseThreshold) return cudaErrorNotSupported;
        std::memcpy(&r.pool_threshold, value, sizeof r.pool_threshold);
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (device_of_pool(pool) < 0 || value == nullptr) return cudaErrorInvalidValue;
        if (attribute != cudaMemPoolAttrReleaseThreshold) return cudaErrorNotSupported;
        std::memcpy(value, &r.pool_threshold, sizeof r.pool_threshold);
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
    return Runtime::call(__func__, [&](Runtime&) {
        return device_of_pool(pool) < 0 ? cudaErrorInvalidValue : cudaSuccess;
    });
}

}  // extern "C"
