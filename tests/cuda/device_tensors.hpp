// DeviceTensors: the tensors of a problem line in device memory, the call that names them, its stream, and what it
// wrote.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "harness/device_call.hpp"
#include "tests/behaviours.hpp"

namespace headrace::test {

using harness::each_device_view;
using harness::extent_bytes;

inline void expect_cuda(cudaError_t error, const char* what) {
    EXPECT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}

// Between any two memories; done when it returns, for streams that do not wait for the default stream too.
inline void transfer(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    expect_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
    expect_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// Device memory that is the current device's of when it was made.
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) { expect_cuda(cudaMalloc(&data_, bytes), "cudaMalloc"); }
    ~DeviceMemory() { cudaFree(data_); }
    DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
    void* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

  private:
    void* data_ = nullptr;
    std::size_t bytes_;
};

// An array on the host and its copy on the device.
template <class T>
class Managed {
  public:
    explicit Managed(std::size_t count) : memory_(count * sizeof(T)), values(count) {}
    T* data() const { return static_cast<T*>(memory_.data()); }
    char* bytes() const { return static_cast<char*>(memory_.data()); }
    void upload() const { transfer(memory_.data(), values.data(), memory_.bytes()); }
    void download() { transfer(values.data(), memory_.data(), memory_.bytes()); }

  private:
    DeviceMemory memory_;

  public:
    std::vector<T> values;
};

class DeviceTensors {
  public:
    CallTensors host;               // what uploads copy from and written() copies to
    Call call;                      // the same on the device, on `stream`
    cudaStream_t stream = nullptr;  // does not wait for the default stream, nor that for it

    explicit DeviceTensors(const std::string& text) : DeviceTensors(harness::make_tensors(line_of(text + " cuda"))) {}
    explicit DeviceTensors(CallTensors tensors) : host(std::move(tensors)), call(harness::seen_from_device(host.call)) {
        expect_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        call.options.stream = stream;
        each_device_view(call, [&](TensorView& view) {
            copies_.push_back({view.data, DeviceMemory(extent_bytes(view) + 1)});  // + 1: an address for empty ones too
            view.data = copies_.back().memory.data();
        });
        upload();
    }
    ~DeviceTensors() { cudaStreamDestroy(stream); }
    DeviceTensors(const DeviceTensors&) = delete;
    DeviceTensors& operator=(const DeviceTensors&) = delete;

    // Everything as the host has it, outputs too; waits.
    void upload() {
        for (const Copy& copy : copies_) transfer(copy.memory.data(), copy.host, copy.memory.bytes() - 1);
    }
    // Queues the same.
    void upload_in_stream(cudaStream_t into) {
        for (const Copy& copy : copies_) {
            if (copy.memory.bytes() == 1) continue;
            expect_cuda(
                cudaMemcpyAsync(copy.memory.data(), copy.host, copy.memory.bytes() - 1, cudaMemcpyHostToDevice, into),
                "cudaMemcpyAsync");
        }
    }
    // Other bytes than the host's everywhere: NaN in every floating type, -1 in integers.
    void spoil() {
        for (const Copy& copy : copies_)
            expect_cuda(cudaMemset(copy.memory.data(), 0xff, copy.memory.bytes()), "cudaMemset");
        expect_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    void synchronize() const { expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
    // What the call wrote, after what the stream holds.
    std::map<std::string, Bytes> written() {
        synchronize();
        for (const Copy& copy : copies_) transfer(copy.host, copy.memory.data(), copy.memory.bytes() - 1);
        return test::written(host.call);
    }
    std::map<std::string, Bytes> run_and_read(Workspace workspace = {}) {
        const Status status = run(call, workspace);
        EXPECT_TRUE(status.ok()) << status.message();
        return written();
    }
    std::size_t workspace_bytes() const { return test::workspace_bytes(call); }

  private:
    struct Copy {
        void* host;
        DeviceMemory memory;
    };
    std::vector<Copy> copies_;
};

// Holds a stream from where it is made until it is opened; `early` says that the stream went on without that.
class Gate {
  public:
    explicit Gate(cudaStream_t stream) {
        expect_cuda(cudaLaunchHostFunc(stream, &Gate::hold, this), "cudaLaunchHostFunc");
    }
    void open() { open_ = true; }
    bool early() const { return early_; }

  private:
    static void hold(void* gate) {
        auto& self = *static_cast<Gate*>(gate);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (!self.open_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        self.early_ = !self.open_;
    }
    std::atomic<bool> open_ = false, early_ = false;
};

inline std::size_t free_memory() {
    std::size_t free = 0, total = 0;
    expect_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
}

// The status is an error of this code, and its message holds each of the texts.
inline void expect_error(const Status& status, Code code, const std::vector<std::string>& texts) {
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code)) << status.message();
    for (const std::string& text : texts) EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

}  // namespace headrace::test
