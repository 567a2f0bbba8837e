// Planted bugs of tiles in shared memory: sizes, places, buffers, what was never written.
#include "planted.hpp"
#include "cuda/tiles/tile_ops.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int size = 32, count = size * size;
extern __shared__ __align__(16) char block_memory[];

std::vector<float> transposed() {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % size * size + i / size + 1);
    return values;
}

__global__ void transpose(float* out, const float* in) {
    Arena arena{block_memory, nullptr, 48 << 10};
    const Tile<float> tile = arena.tile<float>(size, size);
    for_each(tile, size, size, [&](int i, int j) { return in[i * size + j]; });
    each_element(size, size, [&](int i, int j) { out[i * size + j] = tile.at(j, i); });
}
template <bool bug>
void one_row_too_few() {
    Arena arena{nullptr, nullptr, 48 << 10};
    arena.tile<float>(bug ? size - 1 : size, size);
    float* out = empty_on_device<float>(count);
    transpose<<<1, block_threads, arena.shared_used>>>(out, on_device(numbers(count)));
    require_on_device(out, transposed());
}

// The pitch of a tile that the padding was forgotten in: the second tile begins in the last row of the first.
template <bool bug>
__global__ void transpose_two(float* out, const float* in) {
    auto* memory = reinterpret_cast<float*>(block_memory);
    const Tile<float> first{memory, size + 1}, second{memory + size * (bug ? size : size + 1), size + 1};
    each_element(size, size, [&](int i, int j) {
        first.at(i, j) = in[i * size + j];
        second.at(i, j) = 2 * in[i * size + j];
    });
    ptx::sync_block();
    each_element(size, size, [&](int i, int j) { out[i * size + j] = second.at(j, i) - first.at(j, i); });
}
template <bool bug>
void tiles_overlap() {
    float* out = empty_on_device<float>(count);
    transpose_two<bug><<<1, block_threads, 2 * size * (size + 1) * sizeof(float)>>>(out, on_device(numbers(count)));
    require_on_device(out, transposed());
}

template <bool bug>
__global__ void transpose_swizzled(float* out, const float* in) {
    __shared__ float tile[count];
    each_element(size, size, [&](int i, int j) { tile[i * size + (j ^ i)] = in[i * size + j]; });
    ptx::sync_block();
    each_element(size, size, [&](int i, int j) { out[i * size + j] = tile[j * size + (i ^ (bug ? j / 2 : j))]; });
}
template <bool bug>
void swizzles_differ() {
    float* out = empty_on_device<float>(count);
    transpose_swizzled<bug><<<1, block_threads>>>(out, on_device(numbers(count)));
    require_on_device(out, transposed());
}

// out[j] = sum_i x(i, j) over a padded tile
template <bool bug>
__global__ void column_sums(float* out, const float* in, int rows) {
    __shared__ float tile[size][size + 1];
    each_element(bug ? rows : size, size, [&](int i, int j) { tile[i][j] = i < rows ? in[i * size + j] : 0; });
    ptx::sync_block();
    each(size, [&](int j) {
        float sum = 0;
        for (int i = 0; i < size; ++i) sum += tile[i][j];
        out[j] = sum;
    });
}
template <bool bug>
void tail_not_cleared() {
    constexpr int rows = 21;
    const std::vector<float> in = numbers(rows * size);
    std::vector<float> expected(size);
    for (std::size_t i = 0; i < in.size(); ++i) expected[i % size] += in[i];
    float* out = empty_on_device<float>(size);
    column_sums<bug><<<1, block_threads>>>(out, on_device(in), rows);
    require_on_device(out, expected);
}

template <bool bug>
__global__ void running_sums(float* out, const float* in, int steps) {
    __shared__ float sums[block_threads];
    const int i = static_cast<int>(threadIdx.x);
    if (!bug) sums[i] = 0;
    for (int step = 0; step < steps; ++step) sums[i] += in[i];
    out[i] = sums[i];
}
template <bool bug>
void sum_not_cleared() {
    std::vector<float> expected(block_threads);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = 4 * static_cast<float>(i + 1);
    float* out = empty_on_device<float>(block_threads);
    running_sums<bug><<<1, block_threads>>>(out, on_device(numbers(block_threads)), 4);
    require_on_device(out, expected);
}

template <bool bug>
__global__ void histogram(float* out) {
    __shared__ float bins[8];
    const int i = static_cast<int>(threadIdx.x);
    if (i < 8) bins[i] = 0;
    ptx::sync_block();
    if (bug) {
        bins[i % 8] += 1;
    } else {
        atomicAdd(&bins[i % 8], 1.0F);
    }
    ptx::sync_block();
    if (i < 8) out[i] = bins[i];
}
template <bool bug>
void updates_lost() {
    float* out = empty_on_device<float>(8);
    histogram<bug><<<1, block_threads>>>(out);
    require_on_device(out, std::vector<float>(8, block_threads / 8));
}

}  // namespace

std::vector<Pair> pairs_of_shared_memory() {
    return {
        HEADRACE_PAIR(one_row_too_few, "dynamic shared memory of a row too few"),
        HEADRACE_PAIR(tiles_overlap, "a tile that begins in the last row of another"),
        HEADRACE_PAIR(swizzles_differ, "written by one swizzle and read by another"),
        HEADRACE_PAIR(tail_not_cleared, "rows past the tail that nothing wrote are summed"),
        HEADRACE_PAIR(sum_not_cleared, "an accumulator that begins with what lay there"),
        HEADRACE_PAIR(updates_lost, "+= of several threads on one number"),
    };
}

}  // namespace headrace::planted
