// Planted bugs on the host: what waits for what.
#include "planted.hpp"

namespace headrace::planted {
namespace {

constexpr std::size_t count = 256, bytes = count * sizeof(float);

__global__ void twice(float* out, const float* in) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2 * in[i];
}
std::vector<float> times(float factor) {
    std::vector<float> values = numbers(count);
    for (float& value : values) value *= factor;
    return values;
}
cudaStream_t new_stream() {
    cudaStream_t stream = nullptr;
    good(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
float* pinned(const std::vector<float>& values) {
    void* memory = nullptr;
    good(cudaMallocHost(&memory, bytes));
    for (std::size_t i = 0; i < count; ++i) static_cast<float*>(memory)[i] = values[i];
    return static_cast<float*>(memory);
}

template <bool bug>
void stream_not_synchronised() {
    cudaStream_t stream = new_stream();
    const float* in = on_device(numbers(count));
    float *out = empty_on_device<float>(count), *host = pinned(std::vector<float>(count));
    twice<<<4, 64, 0, stream>>>(out, in);
    good(cudaMemcpyAsync(host, out, bytes, cudaMemcpyDeviceToHost, stream));
    if (!bug) good(cudaStreamSynchronize(stream));
    require_equal({host, host + count}, times(2));
}

template <bool bug>
void event_missing() {
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t written = nullptr;
    good(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
    const float* in = on_device(numbers(count));
    float *between = on_device(std::vector<float>(count)), *out = empty_on_device<float>(count);
    twice<<<4, 64, 0, first>>>(between, in);
    good(cudaEventRecord(written, first));
    if (!bug) good(cudaStreamWaitEvent(second, written, 0));
    twice<<<4, 64, 0, second>>>(out, between);
    good(cudaDeviceSynchronize());
    require_on_device(out, times(4));
}

template <bool bug>
void legacy_stream_not_waited_for() {
    cudaStream_t stream = new_stream();
    const float* in = on_device(numbers(count));
    float *between = empty_on_device<float>(count), *out = empty_on_device<float>(count);
    twice<<<4, 64>>>(between, in);
    if (!bug) good(cudaStreamSynchronize(nullptr));
    twice<<<4, 64, 0, stream>>>(out, between);
    good(cudaDeviceSynchronize());
    require_on_device(out, times(4));
}

// cudaMemcpy returns when it has read its pageable source: the bytes may still be on their way.
template <bool bug>
void upload_on_its_way() {
    cudaStream_t stream = new_stream();
    const std::vector<float> host = numbers(count);
    float *in = empty_on_device<float>(count), *out = empty_on_device<float>(count);
    good(cudaMemcpy(in, host.data(), bytes, cudaMemcpyHostToDevice));
    if (!bug) good(cudaStreamSynchronize(nullptr));
    twice<<<4, 64, 0, stream>>>(out, in);
    good(cudaDeviceSynchronize());
    require_on_device(out, times(2));
}

template <bool bug>
void source_changed_too_early() {
    cudaStream_t stream = new_stream();
    float *in = empty_on_device<float>(count), *out = empty_on_device<float>(count), *host = pinned(numbers(count));
    good(cudaMemcpyAsync(in, host, bytes, cudaMemcpyHostToDevice, stream));
    if (!bug) good(cudaStreamSynchronize(stream));
    for (std::size_t i = 0; i < count; ++i) host[i] = 0;
    twice<<<4, 64, 0, stream>>>(out, in);
    good(cudaStreamSynchronize(stream));
    require_on_device(out, times(2));
}

// The memory is given back in one stream while the other still works on it.
template <bool bug>
void freed_in_other_stream() {
    cudaStream_t first = new_stream(), second = new_stream();
    void* memory = nullptr;
    good(cudaMallocAsync(&memory, bytes, first));
    auto* between = static_cast<float*>(memory);
    const float* in = on_device(numbers(count));
    float* out = empty_on_device<float>(count);
    twice<<<4, 64, 0, first>>>(between, in);
    good(cudaStreamSynchronize(first));
    twice<<<4, 64, 0, second>>>(out, between);
    if (!bug) good(cudaStreamSynchronize(second));
    good(cudaFreeAsync(between, first));
    good(cudaDeviceSynchronize());
    require_on_device(out, times(4));
}

}  // namespace

std::vector<Pair> pairs_of_streams() {
    return {
        HEADRACE_PAIR(stream_not_synchronised, "the host reads before the stream is done"),
        HEADRACE_PAIR_THAT_SHOWS(event_missing, sometimes, "no event between two streams"),
        HEADRACE_PAIR_THAT_SHOWS(legacy_stream_not_waited_for, sometimes, "a non-blocking stream after the legacy one"),
        HEADRACE_PAIR_THAT_SHOWS(upload_on_its_way, sometimes, "a non-blocking stream after cudaMemcpy"),
        HEADRACE_PAIR(source_changed_too_early, "a pinned source changed before it was copied"),
        HEADRACE_PAIR_THAT_SHOWS(freed_in_other_stream, sometimes, "freed in one stream while another reads it"),
    };
}

}  // namespace headrace::planted
