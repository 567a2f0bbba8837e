// Runtime: the frame of every call: one at a time, errors that any call may return, faults, injected failures, the end.
#include "runtime/runtime.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

std::mutex& only_one() {
    static auto* mutex = new std::mutex;  // used until the very end of the process
    return *mutex;
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// CUDA tells these apart; a Fault only in its text, of which these are the phrases of checks/device_memory.cpp and
// machine/code.cpp.
cudaError_t error_of_fault(const std::string& message) {
    if (contains(message, "is not aligned to")) return cudaErrorMisalignedAddress;
    if (contains(message, "not done by this interpreter")) return cudaErrorIllegalInstruction;
    for (const char* phrase : {"outside any allocation", "released memory", "the null pointer", "reach behind the end",
                               "uses an allocation"}) {
        if (contains(message, phrase)) return cudaErrorIllegalAddress;
    }
    return cudaErrorLaunchFailure;
}

Environment environment_or_exit() {
    try {
        return read_environment();
    } catch (const Fault& fault) {
        std::fprintf(stderr, "headrace_ptx: %s\n", fault.what());
        ::_exit(exit_code_of_fault);
    }
}

}  // namespace

ThreadState& this_thread() {
    thread_local ThreadState state;
    return state;
}

Runtime::Runtime() : environment(environment_or_exit()), scheduler(environment.settings.seed) {
    for (int device = 0; device < environment.devices; ++device) {
        auto stream = std::make_unique<Stream>();
        stream->device = device;
        stream->legacy = true;
        legacy_streams.push_back(std::move(stream));
    }
    std::atexit(at_exit);
}

Runtime& Runtime::get() {
    static auto* runtime = new Runtime;
    return *runtime;
}

cudaError_t Runtime::call(const char* name, const Body& body) {
    ThreadState& thread = this_thread();
    if (thread.in_host_function) return cudaErrorNotPermitted;  // also keeps the lock below from waiting for itself
    const std::lock_guard lock(only_one());
    const cudaError_t result = get().guarded(name, body);
    if (result != cudaSuccess) thread.last_error = result;
    return result;
}

cudaError_t Runtime::plain_call(const Body& body) {
    if (this_thread().in_host_function) return body(get());  // this thread has the lock
    const std::lock_guard lock(only_one());
    return body(get());
}

cudaError_t Runtime::guarded(const char* name, const Body& body) {
    if (process_ != 0 && process_ != ::getpid()) return cudaErrorInitializationError;  // a child of fork()
    if (environment.driver / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
    if (environment.devices == 0) return cudaErrorNoDevice;
    process_ = ::getpid();
    if (const cudaError_t injected = injected_failure(name); injected != cudaSuccess) return injected;
    if (sticky_ != cudaSuccess) return sticky_;
    try {
        return body(*this);
    } catch (const Fault& failure) {
        return fault(failure.what());
    } catch (const std::bad_alloc&) {
        die("the stand-in itself has no memory left");
    } catch (const std::exception& failure) {
        return fault(std::string("unexpected exception: ") + failure.what());
    }
}

cudaError_t Runtime::injected_failure(const char* name) {
    for (InjectedFailure& failure : environment.failures) {
        if (failure.calls == 0 || (failure.function != name && failure.function != "any")) continue;
        if (--failure.calls != 0) continue;
        const std::string function = name;
        if (function == "cudaLaunchKernel") return cudaErrorLaunchOutOfResources;
        if (contains(function, "lloc")) return cudaErrorMemoryAllocation;
        return cudaErrorUnknown;
    }
    return cudaSuccess;
}

cudaError_t Runtime::last_error(Forget forget) {
    ThreadState& thread = this_thread();
    const cudaError_t last = sticky_ != cudaSuccess ? sticky_ : thread.last_error;
    if (forget == Forget::yes) thread.last_error = cudaSuccess;
    return last;
}

void Runtime::print(const std::string& text) const {
    std::string line = "headrace_ptx: " + text;
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fprintf(stderr, "%s\n", line.c_str());
}

cudaError_t Runtime::fault(const std::string& message) {
    if (environment.abort) die(message);
    print(message);
    print("repeat with " + command_that_repeats(environment));
    scheduler.abandon();
    sticky_ = error_of_fault(message);
    return sticky_;
}

void Runtime::die(const std::string& message) {
    std::fflush(nullptr);
    print(message);
    print("repeat with " + command_that_repeats(environment));
    try {
        modules.finish(environment);
    } catch (const Fault& failure) {
        print(failure.what());
    }
    ::_exit(exit_code_of_fault);
}

void Runtime::at_exit() {
    Runtime& runtime = get();
    if (runtime.process_ != ::getpid()) return;
    if (const std::size_t left = runtime.scheduler.waiting(); left != 0) {
        runtime.print(std::to_string(left) + " pieces of work were never waited for and did not run");
    }
    for (const InjectedFailure& failure : runtime.environment.failures) {
        if (failure.calls != 0) runtime.print("the failure of " + failure.function + " did not come to pass");
    }
    try {
        const std::string problem = runtime.modules.finish(runtime.environment);
        if (!problem.empty()) runtime.die(problem);
    } catch (const Fault& failure) {
        runtime.die(failure.what());
    }
}

const std::map<std::uint64_t, Allocation>::value_type* Runtime::allocation_around(std::uint64_t address) const {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    --next;
    return address - next->first < next->second.bytes ? &*next : nullptr;
}

// Stream-ordered memory may be used where its allocation is known to have come before. A pointer that a kernel gets is
// looked at when the kernel starts, in all words of its parameters that point into an allocation.
void Runtime::require_usable(std::uint64_t address, int device, const char* what) const {
    const auto* found = allocation_around(address);
    if (found == nullptr) return;
    const Allocation& allocation = found->second;
    if (allocation.device != device) {
        throw_fault(what, " of device ", device, " uses an allocation of device ", allocation.device);
    }
    if (allocation.ready != nullptr && !allocation.ready->done) {
        throw_fault(what, " uses an allocation that cudaMallocAsync's stream has not come to: nothing orders them");
    }
}

std::uint64_t Runtime::allocate(std::size_t bytes, const char* function) {
    if (bytes > environment.memory || allocated > environment.memory - bytes) return 0;
    const std::string name = std::string(function) + " number " + std::to_string(++allocations_made_);
    const std::uint64_t address = memory.allocate(bytes, name);
    if (address == 0) return 0;
    allocations[address] = {bytes, this_thread().device, nullptr, false, false};
    allocated += bytes;
    return address;
}

void Runtime::release(std::uint64_t address) {
    const auto found = allocations.find(address);
    if (found == allocations.end()) throw_fault("an allocation is freed twice");
    allocated -= found->second.bytes;
    allocations.erase(found);
    memory.release(address);
}

}  // namespace headrace::ptx
