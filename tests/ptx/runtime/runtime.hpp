// Runtime: the state of the stand-in for the CUDA runtime, and what the functions of its interface are made of.
//
// The library libcudart.so.13 that this folder makes takes the place of NVIDIA's where there is no GPU: a program that
// nvcc built with `-arch=compute_80 -code=compute_80 --no-compress -cudart shared` and that finds this library in
// LD_LIBRARY_PATH runs its kernels in the interpreter of PTX of the neighbouring folders, and knows nothing of it. It
// is stricter than a GPU wherever CUDA leaves something open: what is asynchronous happens as late as it may
// (tasks.hpp), streams are interleaved at random (HEADRACE_PTX_SEED), memory is known to be written or not, and what no
// correct program does ends the process with exit code 86. exports.map is the table of the functions that there are;
// environment.hpp that of the switches. Which file has what:
//
//   api_*.cpp      the functions of the interface, by subject: checks of arguments, then a piece of work into a stream
//   issue.cpp      work into streams and captures; what captures forbid
//   tasks.cpp      what waits, and in which order it runs
//   launch.cpp     kernels: configurations, parameters, the run
//   modules.cpp    registered device code, texts in and out of files, coverage
//   fat_binary.cpp the container in which nvcc embeds PTX
//
// Not modelled: registers (occupancy and launch bounds know threads and shared memory alone), clusters, cooperative
// launches, managed and mapped memory, textures, per-thread default streams, memory of one device seen from another.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "checks/device_memory.hpp"
#include "runtime/environment.hpp"
#include "runtime/modules.hpp"
#include "runtime/streams.hpp"
#include "runtime/tasks.hpp"

namespace headrace::ptx {

inline constexpr int exit_code_of_fault = 86;

// An allocation that the program asked for.
struct Allocation {
    std::size_t bytes = 0;
    int device = 0;
    TaskPtr ready;         // of cudaMallocAsync: not to be used before this is done; null: at once
    bool freed = false;    // cudaFreeAsync was called; the memory is there until its stream gets to it
    bool of_graph = false; // belongs to a graph: cudaFree is not for it
};

class Runtime {
  public:
    // The one of this process; never destroyed, since programs call it while they end.
    static Runtime& get();

    // The frame of every function of the interface: one at a time, the errors that any call may return, faults and
    // injected failures. `name` is for HEADRACE_PTX_FAIL. The result becomes the thread's last error.
    using Body = std::function<cudaError_t(Runtime&)>;
    static cudaError_t call(const char* name, const Body& body);
    // The same for functions that work without a device and neither see nor leave errors.
    static cudaError_t plain_call(const Body& body);

    // The calling thread's, or the error that stays.
    enum class Forget { no, yes };
    cudaError_t last_error(Forget forget);

    // Issues work into a stream: a task, or a node of the graph that the stream captures.
    cudaError_t issue(cudaStream_t handle, Work work, TaskPtr* task = nullptr);
    // Null: no such stream. 0 and cudaStreamLegacy are the legacy stream of the current device.
    Stream* stream(cudaStream_t handle);
    Event* event(cudaEvent_t handle);
    TaskPtr add_task(Stream& stream, std::function<void()> run, std::vector<TaskPtr> after = {});
    // For calls that wait for `stream`: the error if it captures (which spoils the capture), or cudaSuccess.
    cudaError_t may_wait_for(Stream& stream);
    // For calls that CUDA does not allow while a capture goes on that the calling thread has to respect.
    cudaError_t may_be_unsafe();
    cudaError_t synchronize_device();
    void spoil_captures_of(int device);
    // The legacy stream may not be used while a blocking stream captures.
    cudaError_t may_use_legacy(Stream& stream);

    cudaError_t launch(const Kernel& kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                       cudaStream_t stream);
    // Fault: the address lies in an allocation of another device, or one that its stream has not come to yet.
    void require_usable(std::uint64_t address, int device, const char* what) const;
    const std::map<std::uint64_t, Allocation>::value_type* allocation_around(std::uint64_t address) const;
    std::uint64_t allocate(std::size_t bytes, const char* function);  // 0: over the limit
    void release(std::uint64_t address);
    const Function* function_of(const Kernel& kernel, cudaError_t& error);
    void print(const std::string& text) const;
    [[noreturn]] void die(const std::string& message);

    Environment environment;
    // Address space is used once where it lasts.
    DeviceMemory memory{2 * std::clamp(environment.memory, std::size_t{1} << 35, std::size_t{1} << 39)};
    Modules modules;
    Scheduler scheduler;
    std::map<std::uint64_t, Allocation> allocations;
    std::size_t allocated = 0;
    std::map<const void*, std::size_t> host_memory;  // pinned
    std::map<const void*, std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Stream>> legacy_streams;  // by device
    std::vector<TaskPtr> destroyed;                  // last tasks of destroyed blocking streams
    std::map<const void*, std::unique_ptr<Event>> events;
    std::map<const void*, std::unique_ptr<Graph>> graphs;
    std::map<const void*, std::shared_ptr<GraphExec>> executables;
    std::vector<std::weak_ptr<Capture>> captures;
    unsigned long long captures_begun = 0, pool_threshold = 0;
    int streams_made = 0;

  private:
    Runtime();
    cudaError_t guarded(const char* name, const Body& body);
    cudaError_t injected_failure(const char* name);
    cudaError_t fault(const std::string& message);
    void run_kernel(const std::shared_ptr<Program>& program, const Launch& launch, int device);
    static void at_exit();

    int process_ = 0;  // the one that made the first call; 0: none was made
    cudaError_t sticky_ = cudaSuccess;
    std::uint64_t launches_ = 0, allocations_made_ = 0;
};

// Of the calling thread.
struct ThreadState {
    cudaError_t last_error = cudaSuccess;
    int device = 0;
    cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
    bool in_host_function = false;
};
ThreadState& this_thread();

template <class To>
To handle_of(const void* object) {
    return static_cast<To>(const_cast<void*>(object));
}
inline std::uint64_t address_of(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

}  // namespace headrace::ptx
