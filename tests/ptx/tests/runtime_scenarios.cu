// A program that knows nothing of the stand-in for the CUDA runtime; runtime_test.cpp runs its scenarios under it.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "runtime_scenarios.hpp"

namespace {

__constant__ int addend = 5;
__device__ int total;

__global__ void add_constant(int* out) { out[threadIdx.x] += addend; }

__global__ void count_threads() { atomicAdd(&total, 1); }

__global__ void __launch_bounds__(64) reverse(int* values) {
    extern __shared__ int buffer[];
    buffer[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void static_shared(int* values) {
    __shared__ int buffer[1024];
    buffer[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

// Memory and kernels.

int basics() {
    int *a = device_array(), *b = device_array();
    const std::vector<int> host(count, 3);
    GOOD(cudaMemcpy(a, host.data(), bytes, cudaMemcpyHostToDevice));
    GOOD(cudaMemset(b, 0, bytes));
    launch_add(b, a, 4, nullptr);
    GOOD(cudaGetLastError());
    EXPECT(all_are(b, 7));
    GOOD(cudaMemcpy(a, b, bytes, cudaMemcpyDeviceToDevice));
    launch_add(a, a, 1, nullptr);
    EXPECT(all_are(a, 8));
    launch_add(a, a, 1, nullptr);
    GOOD(cudaFree(a));  // waits for the kernel
    GOOD(cudaFree(b));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaFree(nullptr));
    EXPECT_ERROR(cudaFree(b), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaPeekAtLastError(), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
    GOOD(cudaGetLastError());
    return 0;
}

int copies() {
    int* a = device_array();
    std::vector<int> host(count), back(count, -1);
    for (int i = 0; i < count; ++i) host[i] = i;
    EXPECT_ERROR(cudaMemcpy(a, host.data(), bytes + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaMemcpy(a, host.data(), bytes, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaMemset(host.data(), 0, bytes), cudaErrorInvalidValue);
    // 8 rows of 4 integers, 16 apart in the host's array, side by side on the device.
    GOOD(cudaMemcpy2D(a, 16, host.data(), 64, 16, 8, cudaMemcpyHostToDevice));
    GOOD(cudaMemcpy2D(back.data(), 32, a, 16, 16, 8, cudaMemcpyDefault));
    for (int row = 0; row < 8; ++row) {
        EXPECT(back[8 * row + 3] == 16 * row + 3);
        EXPECT(back[8 * row + 4] == -1);
    }
    EXPECT_ERROR(cudaMemcpy2D(a, 8, host.data(), 64, 16, 8, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
    int* pinned = nullptr;
    GOOD(cudaMallocHost(&pinned, bytes));
    GOOD(cudaMemset(a, 1, bytes));
    GOOD(cudaMemcpyAsync(pinned, a, bytes, cudaMemcpyDeviceToHost, nullptr));
    GOOD(cudaStreamSynchronize(nullptr));
    EXPECT(pinned[count - 1] == 0x01010101);
    GOOD(cudaFreeHost(pinned));
    EXPECT_ERROR(cudaFreeHost(pinned), cudaErrorInvalidValue);
    return 0;
}

int symbols() {
    int* a = device_array();
    GOOD(cudaMemset(a, 0, bytes));
    add_constant<<<1, count>>>(a);
    EXPECT(all_are(a, 5));
    const int other = 7, zero = 0;
    GOOD(cudaMemcpyToSymbol(addend, &other, sizeof other));
    add_constant<<<1, count>>>(a);
    EXPECT(all_are(a, 12));
    GOOD(cudaMemcpyToSymbol(total, &zero, sizeof zero));
    count_threads<<<3, 50>>>();
    int counted = 0;
    GOOD(cudaMemcpyFromSymbol(&counted, total, sizeof counted));
    EXPECT(counted == 150);
    return 0;
}

int unwritten() {
    int* a = device_array();
    GOOD(cudaMemset(a, 0, bytes - 4));
    std::vector<int> host(count);
    GOOD(cudaMemcpy(host.data(), a, bytes, cudaMemcpyDeviceToHost));
    return 0;
}

int out_of_bounds() {
    int* a = device_array();
    fill<<<5, count / 4>>>(a, 1);
    GOOD(cudaGetLastError());
    cudaStream_t stream = make_stream();
    const cudaError_t first = cudaDeviceSynchronize();
    EXPECT_ERROR(first, cudaErrorIllegalAddress);
    EXPECT_ERROR(cudaFree(a), cudaErrorIllegalAddress);
    launch_fill(a, 1, stream);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorIllegalAddress);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorIllegalAddress);
    return 0;
}

int memory_limit() {
    void *a = nullptr, *b = nullptr;
    GOOD(cudaMalloc(&a, 600000));
    EXPECT_ERROR(cudaMalloc(&b, 600000), cudaErrorMemoryAllocation);
    std::size_t free = 0, all = 0;
    GOOD(cudaMemGetInfo(&free, &all));
    EXPECT(all == 1000000 && free == 400000);
    GOOD(cudaFree(a));
    GOOD(cudaMallocAsync(&b, 600000, nullptr));
    GOOD(cudaFreeAsync(b, nullptr));
    GOOD(cudaMallocAsync(&a, 600000, nullptr));
    EXPECT_ERROR(cudaMallocAsync(&b, 600000, nullptr), cudaErrorMemoryAllocation);
    return 0;
}

int use_after_free() {
    int* a = nullptr;
    cudaStream_t stream = make_stream();
    GOOD(cudaMallocAsync(reinterpret_cast<void**>(&a), bytes, stream));
    launch_fill(a, 1, stream);
    GOOD(cudaFreeAsync(a, stream));
    EXPECT_ERROR(cudaFreeAsync(a, stream), cudaErrorInvalidValue);
    launch_fill(a, 2, stream);
    GOOD(cudaStreamSynchronize(stream));
    return 0;
}

// Memory of one stream's allocation in another stream, with nothing between them.
int use_before_allocation() {
    int* a = nullptr;
    cudaStream_t one = make_stream(), other = make_stream();
    GOOD(cudaMallocAsync(reinterpret_cast<void**>(&a), bytes, one));
    launch_fill(a, 1, other);
    GOOD(cudaDeviceSynchronize());
    return 0;
}

// Launches.

int configurations() {
    int* a = device_array();
    GOOD(cudaMemset(a, 0, bytes));
    const auto result = [&](dim3 grid, dim3 block, std::size_t shared) {
        fill<<<grid, block, shared>>>(a, 0);
        return cudaGetLastError();
    };
    EXPECT_ERROR(result(1, 1025, 0), cudaErrorInvalidConfiguration);
    EXPECT_ERROR(result(0, 32, 0), cudaErrorInvalidConfiguration);
    EXPECT_ERROR(result(1, 0, 0), cudaErrorInvalidConfiguration);
    EXPECT_ERROR(result(dim3(1, 65536), 32, 0), cudaErrorInvalidConfiguration);
    EXPECT_ERROR(result(1, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
    EXPECT_ERROR(result(1, 32, 48 * 1024 + 1), cudaErrorInvalidValue);
    EXPECT_ERROR(result(1, 32, 48 * 1024), cudaSuccess);
    reverse<<<1, 65, 65 * 4>>>(a);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
    static_shared<<<1, 32, 45 * 1024>>>(a);  // with its 4 KiB above 48
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1),
                 cudaErrorInvalidValue);
    GOOD(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
    int blocks = 0;
    GOOD(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reverse, 64, 100 * 1024));
    EXPECT(blocks == 2);
    launch_fill(a, 1, nullptr);
    reverse<<<1, 64, 227 * 1024>>>(a);
    GOOD(cudaGetLastError());
    cudaFuncAttributes attributes;
    GOOD(cudaFuncGetAttributes(&attributes, static_shared));
    EXPECT(attributes.sharedSizeBytes == 4096 && attributes.maxThreadsPerBlock == 1024);
    GOOD(cudaFuncGetAttributes(&attributes, reverse));
    EXPECT(attributes.maxThreadsPerBlock == 64 && attributes.maxDynamicSharedSizeBytes == 227 * 1024);
    GOOD(cudaFuncSetCacheConfig(reverse, cudaFuncCachePreferShared));
    GOOD(cudaDeviceSynchronize());
    EXPECT_ERROR(cudaFuncGetAttributes(&attributes, &a), cudaErrorInvalidDeviceFunction);
    return 0;
}

int little_shared_memory() {
    constexpr auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    EXPECT_ERROR(cudaFuncSetAttribute(reverse, attribute, 99 * 1024 + 1), cudaErrorInvalidValue);
    return cudaFuncSetAttribute(reverse, attribute, 99 * 1024) != cudaSuccess;
}

int launch_attributes() {
    int* a = device_array();
    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t configuration{};
    configuration.gridDim = 4;
    configuration.blockDim = count / 4;
    configuration.attrs = &attribute;
    configuration.numAttrs = 1;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    GOOD(cudaLaunchKernelEx(&configuration, fill, a, 9));
    EXPECT(all_are(a, 9));
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    EXPECT_ERROR(cudaLaunchKernelEx(&configuration, fill, a, 9), cudaErrorNotSupported);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    EXPECT_ERROR(cudaLaunchKernelEx(&configuration, fill, a, 9), cudaErrorNotSupported);
    return 0;
}

int injected() {
    int* a = nullptr;
    EXPECT_ERROR(cudaMalloc(&a, bytes), cudaErrorMemoryAllocation);
    GOOD(cudaMalloc(&a, bytes));
    (void)cudaGetLastError();
    launch_fill(a, 1, nullptr);
    GOOD(cudaGetLastError());
    launch_fill(a, 2, nullptr);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorLaunchOutOfResources);
    EXPECT(all_are(a, 1));
    EXPECT_ERROR(cudaDeviceSynchronize(), cudaErrorUnknown);
    GOOD(cudaDeviceSynchronize());
    return 0;
}

int threads() {
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([number] {
            cudaStream_t stream = make_stream();
            int* a = device_array();
            std::vector<int> host(count);
            for (int i = 0; i < 20; ++i) {
                launch_fill(a, number, stream);
                launch_add(a, a, i, stream);
                GOOD(cudaMemcpyAsync(host.data(), a, bytes, cudaMemcpyDeviceToHost, stream));
                GOOD(cudaStreamSynchronize(stream));
                EXPECT(host[0] == number + i);
            }
            EXPECT_ERROR(cudaFree(host.data()), cudaErrorInvalidValue);
            EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
        });
    }
    for (std::thread& thread : threads) thread.join();
    GOOD(cudaGetLastError());  // errors of other threads are not ours
    return 0;
}

int forked_child() {
    GOOD(cudaFree(nullptr));
    const pid_t child = fork();
    if (child == 0) _exit(cudaFree(nullptr) == cudaErrorInitializationError ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}

// Devices.

int attributes() {
    cudaDeviceProp properties;
    GOOD(cudaGetDeviceProperties(&properties, 0));
    EXPECT(properties.major == 8 && properties.minor == 0 && properties.multiProcessorCount == 132);
    EXPECT(properties.sharedMemPerBlockOptin == 227 * 1024);
    int value = 0;
    GOOD(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
    EXPECT(value == 228 * 1024);
    EXPECT_ERROR(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 1), cudaErrorInvalidDevice);
    int* a = device_array();
    int on_stack = 0;
    cudaPointerAttributes of;
    GOOD(cudaPointerGetAttributes(&of, a + count - 1));
    EXPECT(of.type == cudaMemoryTypeDevice && of.device == 0);
    GOOD(cudaPointerGetAttributes(&of, a + count));
    EXPECT(of.type == cudaMemoryTypeUnregistered);
    GOOD(cudaPointerGetAttributes(&of, &on_stack));
    EXPECT(of.type == cudaMemoryTypeUnregistered);
    int* pinned = nullptr;
    GOOD(cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault));
    GOOD(cudaPointerGetAttributes(&of, pinned + 1));
    EXPECT(of.type == cudaMemoryTypeHost);
    cudaMemPool_t pool = nullptr;
    unsigned long long threshold = 1 << 20, back = 0;
    GOOD(cudaDeviceGetDefaultMemPool(&pool, 0));
    GOOD(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    GOOD(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &back));
    EXPECT(back == threshold);
    EXPECT(std::string(cudaGetErrorName(cudaErrorNotReady)) == "cudaErrorNotReady");
    return 0;
}

int no_device() {
    int devices = -1, version = 0;
    void* memory = nullptr;
    EXPECT_ERROR(cudaGetDeviceCount(&devices), cudaErrorNoDevice);
    EXPECT(devices == 0);
    EXPECT_ERROR(cudaMalloc(&memory, 4), cudaErrorNoDevice);
    fill<<<1, 32>>>(nullptr, 0);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorNoDevice);
    GOOD(cudaRuntimeGetVersion(&version));
    EXPECT(version == CUDART_VERSION);
    return 0;
}

int old_driver() {
    int version = 0;
    GOOD(cudaDriverGetVersion(&version));
    EXPECT(version == 12040);
    EXPECT_ERROR(cudaGetDeviceCount(&version), cudaErrorInsufficientDriver);
    return 0;
}

int old_device() {
    int* a = device_array();
    launch_fill(a, 1, nullptr);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
    return 0;
}

int second_device(bool mixes) {
    int devices = 0;
    GOOD(cudaGetDeviceCount(&devices));
    EXPECT(devices == 2);
    int* first = device_array();
    cudaStream_t stream = make_stream();
    EXPECT_ERROR(cudaSetDevice(2), cudaErrorInvalidDevice);
    GOOD(cudaSetDevice(1));
    int* second = device_array();
    cudaPointerAttributes of;
    GOOD(cudaPointerGetAttributes(&of, second));
    EXPECT(of.device == 1);
    (void)cudaGetLastError();
    launch_fill(second, 1, stream);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    launch_fill(mixes ? first : second, 1, nullptr);
    GOOD(cudaGetLastError());
    GOOD(cudaDeviceSynchronize());
    // What a kernel may ask for is set for each device.
    GOOD(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024));
    reverse<<<1, 64, 100 * 1024>>>(second);
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaSetDevice(0));
    reverse<<<1, 64, 100 * 1024>>>(first);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidValue);
    return 0;
}
int two_devices() { return second_device(/*mixes=*/false); }
int memory_of_other_device() { return second_device(/*mixes=*/true); }

int device_reset() {
    GOOD(cudaDeviceReset());
    return 0;
}

int per_thread_stream() {
    GOOD(cudaStreamSynchronize(cudaStreamPerThread));
    return 0;
}

Scenarios scenarios() {
#define SCENARIO(name) {#name, name}
    Scenarios all = scenarios_of_streams();
    all.insert({
        SCENARIO(basics), SCENARIO(copies), SCENARIO(symbols), SCENARIO(unwritten), SCENARIO(out_of_bounds),
        SCENARIO(memory_limit), SCENARIO(use_after_free), SCENARIO(use_before_allocation), SCENARIO(configurations),
        SCENARIO(launch_attributes), SCENARIO(injected), SCENARIO(threads), SCENARIO(little_shared_memory),
        SCENARIO(forked_child), SCENARIO(attributes), SCENARIO(no_device), SCENARIO(old_driver), SCENARIO(old_device),
        SCENARIO(two_devices), SCENARIO(memory_of_other_device), SCENARIO(device_reset),
        SCENARIO(per_thread_stream),
    });
#undef SCENARIO
    return all;
}

}  // namespace

int main(int arguments, char** values) {
    const Scenarios all = scenarios();
    const auto found = arguments == 2 ? all.find(values[1]) : all.end();
    if (found != all.end()) return found->second();
    for (const auto& [name, scenario] : all) std::printf("%s\n", name.c_str());
    return 1;
}
