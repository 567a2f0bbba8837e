// cudaMemcpy*, cudaMemset*: copies as late as CUDA allows them to be, and host memory that shows when nobody waited.
#include <cstring>
#include <vector>

#include "machine/fault.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// What an asynchronous copy to the host leaves there until it has run.
constexpr int poison = 0xA5;

// Rows of `width` bytes; a plain copy is one row.
struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t pitch_to = 0, pitch_from = 0, width = 0, height = 1;
    bool to_device = false, from_device = false;

    bool empty() const { return width == 0 || height == 0; }
    std::size_t extent(std::size_t pitch) const { return (height - 1) * pitch + width; }
};

cudaError_t find_direction(Runtime& runtime, Copy& copy, cudaMemcpyKind kind) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (copy.empty()) return cudaSuccess;
    if (copy.height > 1 && (copy.width > copy.pitch_to || copy.width > copy.pitch_from)) {
        return cudaErrorInvalidPitchValue;
    }
    copy.to_device = runtime.memory.owns(address_of(copy.to));
    copy.from_device = runtime.memory.owns(address_of(copy.from));
    const bool to_named = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_named = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (copy.to_device != to_named || copy.from_device != from_named)) {
        return cudaErrorInvalidValue;
    }
    if (copy.to == nullptr || copy.from == nullptr) return cudaErrorInvalidValue;
    const auto fits = [&](const std::byte* start, std::size_t pitch) {
        return runtime.memory.bytes_from(address_of(start)) >= copy.extent(pitch);
    };
    if (copy.to_device && !fits(copy.to, copy.pitch_to)) return cudaErrorInvalidValue;
    if (copy.from_device && !fits(copy.from, copy.pitch_from)) return cudaErrorInvalidValue;
    return cudaSuccess;
}

bool is_pinned(const Runtime& runtime, const void* pointer) {
    auto next = runtime.host_memory.upper_bound(pointer);
    if (next == runtime.host_memory.begin()) return false;
    --next;
    return address_of(pointer) - address_of(next->first) < next->second;
}

// "written" is monotone in the length: the first byte that nothing wrote, by halving.
[[noreturn]] void throw_unwritten(const Runtime& runtime, std::uint64_t from, std::size_t bytes) {
    std::vector<std::byte> unused(bytes);
    std::size_t good = 0, bad = bytes;
    while (bad - good > 1) {
        const std::size_t middle = good + (bad - good) / 2;
        (runtime.memory.read(unused.data(), from, middle) ? good : bad) = middle;
    }
    throw_fault("a copy of ", bytes, " bytes to the host reads what nothing wrote, first at byte ", good);
}

void read_row(const Runtime& runtime, std::byte* to, const std::byte* from, std::size_t bytes) {
    const bool written = runtime.memory.read(to, address_of(from), bytes);
    if (!written && !runtime.environment.unwritten_allowed) throw_unwritten(runtime, address_of(from), bytes);
}

void run_copy(Runtime& runtime, const Copy& copy, int device) {
    if (copy.to_device) runtime.require_usable(address_of(copy.to), device, "a copy");
    if (copy.from_device) runtime.require_usable(address_of(copy.from), device, "a copy");
    for (std::size_t row = 0; row < copy.height; ++row) {
        std::byte* to = copy.to + row * copy.pitch_to;
        const std::byte* from = copy.from + row * copy.pitch_from;
        if (copy.to_device && copy.from_device) {
            runtime.memory.copy(address_of(to), address_of(from), copy.width);
        } else if (copy.to_device) {
            runtime.memory.write(address_of(to), from, copy.width);
        } else if (copy.from_device) {
            read_row(runtime, to, from, copy.width);
        } else {
            std::memcpy(to, from, copy.width);
        }
    }
}

// A source in host memory, read now: rows side by side.
std::vector<std::byte> snapshot(const Copy& copy) {
    std::vector<std::byte> rows(copy.width * copy.height);
    for (std::size_t row = 0; row < copy.height; ++row) {
        std::memcpy(rows.data() + row * copy.width, copy.from + row * copy.pitch_from, copy.width);
    }
    return rows;
}

Work work_of(Runtime& runtime, const Copy& copy, int device) {
    Work work;
    work.type = cudaGraphNodeTypeMemcpy;
    work.run = [&runtime, copy, device] { run_copy(runtime, copy, device); };
    return work;
}

Work work_with_snapshot(Runtime& runtime, Copy copy, int device) {
    Work work;
    work.type = cudaGraphNodeTypeMemcpy;
    work.run = [&runtime, copy, device, rows = snapshot(copy)]() mutable {
        copy.from = rows.data();
        copy.pitch_from = copy.width;
        run_copy(runtime, copy, device);
    };
    return work;
}

// Pageable memory may be read while the call lasts or later: a coin says which.
cudaError_t copy_in_stream(Runtime& runtime, const Copy& copy, cudaStream_t handle) {
    const Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (copy.empty()) return cudaSuccess;
    const bool pageable = !copy.from_device && !is_pinned(runtime, copy.from);
    const bool at_once = pageable && stream->capture == nullptr && runtime.scheduler.coin();
    Work work = at_once ? work_with_snapshot(runtime, copy, stream->device) : work_of(runtime, copy, stream->device);
    if (!copy.to_device && copy.from_device) {
        work.at_launch = [copy] {
            for (std::size_t row = 0; row < copy.height; ++row) {
                std::memset(copy.to + row * copy.pitch_to, poison, copy.width);
            }
        };
    }
    return runtime.issue(handle, std::move(work));
}

// Copies to the host are done when the call returns; from pinned memory too; from pageable memory the source has been
// read, which is all that is promised; inside the device nothing is.
cudaError_t copy_and_wait(Runtime& runtime, const Copy& copy) {
    if (const cudaError_t error = runtime.may_be_unsafe(); error != cudaSuccess) return error;
    if (copy.empty()) return cudaSuccess;
    const int device = this_thread().device;
    const bool pageable_source = copy.to_device && !copy.from_device && !is_pinned(runtime, copy.from);
    const bool inside_device = copy.to_device && copy.from_device;
    const bool waits = !inside_device && !(pageable_source && runtime.scheduler.coin());
    TaskPtr task;
    Work work = pageable_source ? work_with_snapshot(runtime, copy, device) : work_of(runtime, copy, device);
    if (const cudaError_t error = runtime.issue(nullptr, std::move(work), &task); error != cudaSuccess) return error;
    if (waits) runtime.scheduler.run_until(task);
    return cudaSuccess;
}

Copy make_copy(void* to, const void* from, std::size_t bytes) {
    return {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, bytes, bytes, 1, false, false};
}

Copy make_copy(void* to, std::size_t pitch_to, const void* from, std::size_t pitch_from, std::size_t width,
               std::size_t height) {
    return {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), pitch_to, pitch_from, width, height,
            false, false};
}

cudaError_t copy_blocking(Runtime& runtime, Copy copy, cudaMemcpyKind kind) {
    const cudaError_t error = find_direction(runtime, copy, kind);
    return error != cudaSuccess ? error : copy_and_wait(runtime, copy);
}

cudaError_t copy_async(Runtime& runtime, Copy copy, cudaMemcpyKind kind, cudaStream_t stream) {
    const cudaError_t error = find_direction(runtime, copy, kind);
    return error != cudaSuccess ? error : copy_in_stream(runtime, copy, stream);
}

cudaError_t fill(Runtime& runtime, void* to, int value, std::size_t bytes, cudaStream_t handle) {
    const Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (bytes == 0) return cudaSuccess;
    if (runtime.memory.bytes_from(address_of(to)) < bytes) return cudaErrorInvalidValue;
    Work work;
    work.type = cudaGraphNodeTypeMemset;
    work.run = [&runtime, to, value, bytes, device = stream->device] {
        runtime.require_usable(address_of(to), device, "a memset");
        runtime.memory.fill(address_of(to), value, bytes);
    };
    return runtime.issue(handle, std::move(work));
}

// The address of a variable of the program's device code, or 0 and why.
std::uint64_t address_of_symbol(Runtime& runtime, const void* symbol, cudaError_t& error) {
    const HostVariable* variable = runtime.modules.variable(symbol);
    error = variable == nullptr ? cudaErrorInvalidSymbol : cudaSuccess;
    if (variable == nullptr) return 0;
    return runtime.modules.program_of(*variable->module, runtime.environment, runtime.memory)
        ->address_of(variable->name);
}

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return Runtime::call(__func__, [&](Runtime& r) { return copy_blocking(r, make_copy(to, from, bytes), kind); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return copy_async(r, make_copy(to, from, bytes), kind, stream); });
}

cudaError_t cudaMemcpy2D(void* to, std::size_t pitch_to, const void* from, std::size_t pitch_from, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return copy_blocking(r, make_copy(to, pitch_to, from, pitch_from, width, height), kind);
    });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t pitch_to, const void* from, std::size_t pitch_from,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return copy_async(r, make_copy(to, pitch_to, from, pitch_from, width, height), kind, stream);
    });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    return Runtime::call(__func__, [&](Runtime& r) {
        const cudaError_t error = r.may_be_unsafe();
        return error != cudaSuccess ? error : fill(r, to, value, bytes, nullptr);
    });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return fill(r, to, value, bytes, stream); });
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    return Runtime::call(__func__, [&](Runtime& r) {
        cudaError_t error = cudaSuccess;
        const std::uint64_t found = address_of_symbol(r, symbol, error);
        if (error == cudaSuccess) *address = reinterpret_cast<void*>(found);
        return error;
    });
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t bytes, std::size_t offset,
                               cudaMemcpyKind kind) {
    return Runtime::call(__func__, [&](Runtime& r) {
        cudaError_t error = cudaSuccess;
        const std::uint64_t to = address_of_symbol(r, symbol, error);
        if (error != cudaSuccess) return error;
        return copy_blocking(r, make_copy(reinterpret_cast<void*>(to + offset), from, bytes), kind);
    });
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, std::size_t bytes, std::size_t offset,
                                 cudaMemcpyKind kind) {
    return Runtime::call(__func__, [&](Runtime& r) {
        cudaError_t error = cudaSuccess;
        const std::uint64_t from = address_of_symbol(r, symbol, error);
        if (error != cudaSuccess) return error;
        return copy_blocking(r, make_copy(to, reinterpret_cast<const void*>(from + offset), bytes), kind);
    });
}

}  // extern "C"
