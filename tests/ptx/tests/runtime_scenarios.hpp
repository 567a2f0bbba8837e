// What the scenarios of runtime_scenarios*.cu share: checks, two kernels, arrays and streams.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

// Exit codes: 0 as it should be, 1 a check failed, 2 a hazard of the scenario showed.
constexpr int hazard_shows = 2;

#define EXPECT(condition)                                                                    \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition);    \
            std::exit(1);                                                                    \
        }                                                                                    \
    } while (false)
#define EXPECT_ERROR(call, error)                                                            \
    do {                                                                                     \
        const cudaError_t got = (call);                                                      \
        if (got != (error)) {                                                                \
            std::fprintf(stderr, "%s:%d: %s: expected %s, got %s\n", __FILE__, __LINE__, #call, \
                         cudaGetErrorName(error), cudaGetErrorName(got));                    \
            std::exit(1);                                                                    \
        }                                                                                    \
    } while (false)
#define GOOD(call) EXPECT_ERROR(call, cudaSuccess)

constexpr int count = 256;
constexpr std::size_t bytes = count * sizeof(int);

__global__ void fill(int* out, int value) { out[blockIdx.x * blockDim.x + threadIdx.x] = value; }

__global__ void add(int* out, const int* in, int value) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i] + value;
}

void launch_fill(int* out, int value, cudaStream_t stream) { fill<<<4, count / 4, 0, stream>>>(out, value); }
void launch_add(int* out, const int* in, int value, cudaStream_t stream) {
    add<<<4, count / 4, 0, stream>>>(out, in, value);
}

int* device_array() {
    int* array = nullptr;
    GOOD(cudaMalloc(&array, bytes));
    return array;
}

cudaStream_t make_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    GOOD(cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}

cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    GOOD(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

bool all_are(const int* device, int value) {
    std::vector<int> host(count);
    GOOD(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
    for (const int each : host) {
        if (each != value) return false;
    }
    return true;
}

}  // namespace

// Those of runtime_scenarios_streams.cu: a library of its own inside the program, with its own fat binary.
using Scenarios = std::map<std::string, int (*)()>;
Scenarios scenarios_of_streams();
