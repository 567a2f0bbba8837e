// Planted bugs: kernels as one writes them and with a bug in them, in pairs; planted_test.cpp runs them.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace headrace::planted {

// always: in every order of threads. sometimes: only where a seed leads to it, by the order of streams or of warps.
enum class Shows { always, sometimes };

// Each is a template over whether the bug is in; it returns where the result is what it has to be.
struct Pair {
    const char *name, *bug;
    void (*right)();
    void (*wrong)();
    Shows shows;
};
#define HEADRACE_PAIR_THAT_SHOWS(function, shows, bug) \
    Pair { #function, bug, &function < false>, &function < true>, Shows::shows }
#define HEADRACE_PAIR(function, bug) HEADRACE_PAIR_THAT_SHOWS(function, always, bug)

std::vector<Pair> pairs_of_barriers();
std::vector<Pair> pairs_of_shared_memory();
std::vector<Pair> pairs_of_copies();
std::vector<Pair> pairs_of_matrices();
std::vector<Pair> pairs_of_tensors();
std::vector<Pair> pairs_of_sequences();
std::vector<Pair> pairs_of_streams();
std::vector<Pair> pairs_of_tensor_cores();

constexpr int exit_code_of_wrong_result = 1, exit_code_of_error = 2;

inline void good(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
    std::exit(exit_code_of_error);
}

// Device memory that nothing wrote, or with what `values` holds; lives until the process ends.
template <class T>
T* empty_on_device(std::size_t count) {
    void* data = nullptr;
    good(cudaMalloc(&data, count * sizeof(T)));
    return static_cast<T*>(data);
}
template <class T>
T* on_device(const std::vector<T>& values) {
    T* data = empty_on_device<T>(values.size());
    good(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    good(cudaStreamSynchronize(nullptr));  // cudaMemcpy may return before the last bytes are there
    return data;
}

// first, first + 1, ...: exact in fp32, each different.
inline std::vector<float> numbers(std::size_t count, float first = 1) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
    return values;
}

// Not over a difference, which a NaN would pass.
template <class T>
void require_equal(const std::vector<T>& got, const std::vector<T>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const bool both_nan = got[i] != got[i] && expected[i] != expected[i];
        if (got[i] == expected[i] || both_nan) continue;
        const auto wanted = static_cast<double>(expected[i]), found = static_cast<double>(got[i]);
        std::fprintf(stderr, "element %zu: expected %g, got %g\n", i, wanted, found);
        std::exit(exit_code_of_wrong_result);
    }
}
template <class T>
void require_on_device(const T* device, const std::vector<T>& expected) {
    std::vector<T> got(expected.size());
    good(cudaGetLastError());
    good(cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost));
    require_equal(got, expected);
}

}  // namespace headrace::planted
