// Planted bugs of tensors in device memory: tails, strides, offsets, blocks that meet in one place.
#include "planted.hpp"
#include "cuda/tiles/tile_ops.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int length = 37, width = 24, tile_rows = 16, count = length * width;
constexpr unsigned tiles = (length + tile_rows - 1) / tile_rows;

std::vector<float> doubled() {
    std::vector<float> values = numbers(count);
    for (float& value : values) value *= 2;
    return values;
}

enum class Bug { none, reads_past, writes_past, row_short };

template <Bug bug>
__global__ void twice(float* out, const float* in) {
    __shared__ float tile[tile_rows][width];
    const int first = static_cast<int>(blockIdx.x) * tile_rows, left = length - first;
    const int rows = left < tile_rows ? left : tile_rows;
    const bool tail = rows < tile_rows;
    const int loaded = bug == Bug::reads_past && tail ? rows + 1 : rows;
    each_element(loaded, width, [&](int i, int j) { tile[i][j] = 2 * in[(first + i) * width + j]; });
    ptx::sync_block();
    const int stored = bug == Bug::writes_past ? tile_rows : bug == Bug::row_short && tail ? rows - 1 : rows;
    each_element(stored, width, [&](int i, int j) { out[(first + i) * width + j] = i < rows ? tile[i][j] : 0; });
}
template <Bug bug>
void run_twice(unsigned blocks = tiles) {
    float* out = empty_on_device<float>(count);
    twice<bug><<<blocks, block_threads>>>(out, on_device(numbers(count)));
    require_on_device(out, doubled());
}
template <bool bug>
void reads_past_tensor() { run_twice<bug ? Bug::reads_past : Bug::none>(); }
template <bool bug>
void writes_past_tensor() { run_twice<bug ? Bug::writes_past : Bug::none>(); }
template <bool bug>
void row_too_few() { run_twice<bug ? Bug::row_short : Bug::none>(); }
template <bool bug>
void block_too_few() { run_twice<Bug::none>(bug ? length / tile_rows : tiles); }

template <bool bug>
__global__ void twice_strided(float* out, const float* in, std::int64_t stride) {
    const std::int64_t i = blockIdx.x, j = threadIdx.x;
    out[i * width + j] = 2 * in[i * (bug ? width : stride) + j];
}
template <bool bug>
void stride_ignored() {
    constexpr std::size_t stride = width + 8;
    const std::vector<float> dense = numbers(count);
    std::vector<float> in(length * stride);
    for (std::size_t i = 0; i < dense.size(); ++i) in[i / width * stride + i % width] = dense[i];
    float* out = empty_on_device<float>(count);
    twice_strided<bug><<<length, width>>>(out, on_device(in), stride);
    require_on_device(out, doubled());
}

// Rows 1 GiB apart: the third row's offset is no 32-bit integer.
template <bool bug>
__global__ void far_rows(char* data, int stride) {
    const int i = static_cast<int>(blockIdx.x);
    const std::int64_t offset = bug ? i * stride : static_cast<std::int64_t>(i) * stride;
    data[offset] = static_cast<char>(i + 1);
}
template <bool bug>
void offset_overflows() {
    constexpr std::size_t stride = std::size_t{1} << 30;
    char* data = empty_on_device<char>(2 * stride + 1);
    far_rows<bug><<<3, 1>>>(data, static_cast<int>(stride));
    for (std::size_t i = 0; i < 3; ++i) require_on_device(data + i * stride, {static_cast<char>(i + 1)});
}

// out = the sum of the blocks' parts
template <bool bug>
__global__ void sum_of_blocks(float* out, const float* in) {
    const unsigned j = threadIdx.x;
    if (bug) {
        out[j] += in[blockIdx.x * blockDim.x + j];
    } else {
        atomicAdd(out + j, in[blockIdx.x * blockDim.x + j]);
    }
}
std::vector<float> sums_of(std::size_t blocks) {
    std::vector<float> sums(width);
    const std::vector<float> parts = numbers(blocks * width);
    for (std::size_t i = 0; i < parts.size(); ++i) sums[i % width] += parts[i];
    return sums;
}
template <bool bug>
void blocks_on_one_row() {
    float* out = on_device(std::vector<float>(width));
    sum_of_blocks<bug><<<2, width>>>(out, on_device(numbers(2 * width)));
    require_on_device(out, sums_of(2));
}
template <bool bug>
void output_not_cleared() {
    float* out = bug ? empty_on_device<float>(width) : on_device(std::vector<float>(width));
    sum_of_blocks<false><<<2, width>>>(out, on_device(numbers(2 * width)));
    require_on_device(out, sums_of(2));
}

// state[i + 1] = state[i] + x[i]; a launch's blocks have no order
__global__ void next_state(float* state, const float* x, int first) {
    const unsigned i = static_cast<unsigned>(first) + blockIdx.x, j = threadIdx.x;
    state[(i + 1) * width + j] = state[i * width + j] + x[i * width + j];
}
template <bool bug>
void blocks_in_order() {
    constexpr std::size_t steps = 3;
    float* state = empty_on_device<float>((steps + 1) * width);
    good(cudaMemset(state, 0, width * sizeof(float)));
    const float* x = on_device(numbers(steps * width));
    if (bug) next_state<<<steps, width>>>(state, x, 0);
    for (std::size_t i = 0; i < steps && !bug; ++i) next_state<<<1, width>>>(state, x, static_cast<int>(i));
    require_on_device(state + steps * width, sums_of(steps));
}

__global__ void twice_of(float* out, const float* in) { out[threadIdx.x] = 2 * in[threadIdx.x]; }
std::vector<float> doubled_row() {
    std::vector<float> values = doubled();
    values.resize(width);
    return values;
}
template <bool bug>
void pointer_of_host() {
    const std::vector<float> in = numbers(width);
    float* out = empty_on_device<float>(width);
    twice_of<<<1, width>>>(out, bug ? in.data() : on_device(in));
    require_on_device(out, doubled_row());
}
template <bool bug>
void memory_freed() {
    float *in = on_device(numbers(width)), *out = empty_on_device<float>(width);
    if (bug) good(cudaFree(in));
    twice_of<<<1, width>>>(out, in);
    if (!bug) good(cudaFree(in));
    require_on_device(out, doubled_row());
}

// 16 bytes at once, which rows of 24 numbers allow and a row that begins at an odd number does not.
__global__ void twice_by_four(float4* out, const float4* in) {
    const float4 x = in[threadIdx.x];
    out[threadIdx.x] = {2 * x.x, 2 * x.y, 2 * x.z, 2 * x.w};
}
template <bool bug>
void misaligned_load() {
    const int shift = bug ? 1 : 0;
    const float* in = on_device(numbers(width + 1, static_cast<float>(1 - shift))) + shift;
    float* out = empty_on_device<float>(width);
    twice_by_four<<<1, width / 4>>>(reinterpret_cast<float4*>(out), reinterpret_cast<const float4*>(in));
    require_on_device(out, doubled_row());
}

__global__ void through_shared(float* out, const float* in) {
    extern __shared__ float row[];
    row[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = 2 * row[threadIdx.x];
}
template <bool bug>
void limit_not_raised() {
    constexpr int bytes = 64 << 10;
    if (!bug) good(cudaFuncSetAttribute(through_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    float* out = empty_on_device<float>(width);
    const float* in = on_device(numbers(width));
    through_shared<<<1, width, bytes>>>(out, in);
    if (bug) cudaGetLastError();  // as where nobody asks
    require_on_device(out, doubled_row());
}

}  // namespace

std::vector<Pair> pairs_of_tensors() {
    return {
        HEADRACE_PAIR(reads_past_tensor, "reads a row past the tensor, and drops it"),
        HEADRACE_PAIR(writes_past_tensor, "writes whole tiles past the tensor"),
        HEADRACE_PAIR(row_too_few, "the last row is not stored"),
        HEADRACE_PAIR(block_too_few, "a grid that is rounded down"),
        HEADRACE_PAIR(stride_ignored, "takes a strided tensor for a dense one"),
        HEADRACE_PAIR(offset_overflows, "an offset multiplied in 32 bits"),
        HEADRACE_PAIR(blocks_on_one_row, "two blocks add to one row without atomics"),
        HEADRACE_PAIR(output_not_cleared, "atomics on a sum that was not cleared"),
        HEADRACE_PAIR(blocks_in_order, "a block reads what one before it wrote"),
        HEADRACE_PAIR(pointer_of_host, "a pointer of the host in a kernel"),
        HEADRACE_PAIR(memory_freed, "reads memory that was freed"),
        HEADRACE_PAIR(misaligned_load, "16 bytes from an address that is no multiple"),
        HEADRACE_PAIR(limit_not_raised, "shared memory over the limit, nobody asks for the error"),
    };
}

}  // namespace headrace::planted
