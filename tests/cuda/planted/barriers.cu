// Planted bugs of barriers and of what passes between the lanes of a warp.
#include "cuda/tiles/hand_over.hpp"
#include "cuda/tiles/tile_ops.hpp"
#include "planted.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int threads = block_threads;

std::vector<float> reversed(std::size_t tiles, std::size_t width) {
    std::vector<float> values(tiles * width);
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i / width * width + width - i % width);
    }
    return values;
}

template <bool bug>
__global__ void reverse_tile(float* out, const float* in) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x);
    tile[i] = in[i];
    if (!bug) ptx::sync_block();
    out[i] = tile[threads - 1 - i];
}
template <bool bug>
void barrier_after_write() {
    float* out = empty_on_device<float>(threads);
    reverse_tile<bug><<<1, threads>>>(out, on_device(numbers(threads)));
    require_on_device(out, reversed(1, threads));
}

template <bool bug>
__global__ void reverse_tiles(float* out, const float* in) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x);
    HEADRACE_ROLLED
    for (int step = 0; step < 3; ++step) {
        tile[i] = in[step * threads + i];
        ptx::sync_block();
        out[step * threads + i] = tile[threads - 1 - i];
        if (!bug) ptx::sync_block();
    }
}
template <bool bug>
void barrier_before_next_write() {
    float* out = empty_on_device<float>(3 * threads);
    reverse_tiles<bug><<<1, threads>>>(out, on_device(numbers(3 * threads)));
    require_on_device(out, reversed(3, threads));
}

template <bool bug>
__global__ void reverse_in_warp(float* out, const float* in) {
    __shared__ float tile[warp_lanes];
    tile[lane()] = in[lane()];
    if (!bug) ptx::sync_warp();
    out[lane()] = tile[warp_lanes - 1 - lane()];
}
template <bool bug>
void warp_barrier() {
    float* out = empty_on_device<float>(warp_lanes);
    reverse_in_warp<bug><<<1, warp_lanes>>>(out, on_device(numbers(warp_lanes)));
    require_on_device(out, reversed(1, warp_lanes));
}

template <bool bug>
__global__ void reverse_rows(float* out, const float* in, int length) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x);
    if (i < length) {
        tile[i] = in[i];
        if (bug) ptx::sync_block();
    }
    if (!bug) ptx::sync_block();
    out[i] = i < length ? tile[length - 1 - i] : 0;
}
template <bool bug>
void barrier_in_branch() {
    constexpr int length = 80;  // parts the third warp
    float* out = empty_on_device<float>(threads);
    reverse_rows<bug><<<1, threads>>>(out, on_device(numbers(length)), length);
    std::vector<float> expected = reversed(1, length);
    expected.resize(threads);
    require_on_device(out, expected);
}

// A warp at its barrier does not wait for one that has left; what that one was to write is missing.
template <bool bug>
__global__ void reverse_padded(float* out, const float* in, int length) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x);
    if (bug && i >= length) return;
    tile[i] = i < length ? in[i] : 0;
    ptx::sync_block();
    out[i] = tile[threads - 1 - i];
}
template <bool bug>
void return_before_barrier() {
    constexpr int length = 64;
    float* out = empty_on_device<float>(threads);
    reverse_padded<bug><<<1, threads>>>(out, on_device(numbers(length)), length);
    std::vector<float> expected(threads);
    for (int i = 0; i < length; ++i) expected[static_cast<std::size_t>(threads - 1 - i)] = static_cast<float>(i + 1);
    require_on_device(out, expected);
}

// Two warps load for two that compute: barrier 1 is for all four, barrier 2 for the two.
template <bool bug>
__global__ void pairs_of_warps(float* out, const float* in) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x), pair = warp() / 2, half = threads / 2;
    tile[i] = in[i];
    ptx::sync_threads(1 + pair, bug ? half + warp_lanes : half);
    out[i] = tile[i ^ (half - 1)];
}
template <bool bug>
void count_of_named_barrier() {
    float* out = empty_on_device<float>(threads);
    pairs_of_warps<bug><<<1, threads>>>(out, on_device(numbers(threads)));
    require_on_device(out, reversed(2, threads / 2));
}

template <bool bug>
__global__ void name_of_barrier(float* out, const float* in) {
    __shared__ float tile[threads];
    const int i = static_cast<int>(threadIdx.x), pair = warp() / 2, half = threads / 2;
    tile[i] = in[i];
    ptx::sync_threads(bug ? 1 : 1 + pair, half);
    out[i] = tile[i ^ (half - 1)];
}
template <bool bug>
void shared_name_of_barrier() {
    float* out = empty_on_device<float>(threads);
    name_of_barrier<bug><<<1, threads>>>(out, on_device(numbers(threads)));
    require_on_device(out, reversed(2, threads / 2));
}

template <bool bug>
__global__ void sums_of_pairs(float* out, const float* in, int length) {
    float value = lane() < length ? in[lane()] : 0;
    if (!bug || lane() < length) value += ptx::shuffle_xor(value, 1);
    out[lane()] = value;
}
template <bool bug>
void lane_missing_in_shuffle() {
    constexpr int length = 31;
    float* out = empty_on_device<float>(warp_lanes);
    sums_of_pairs<bug><<<1, warp_lanes>>>(out, on_device(numbers(length)), length);
    std::vector<float> expected(warp_lanes);
    for (std::size_t i = 0; i < warp_lanes; ++i) expected[i] = static_cast<float>(i < 30 ? 4 * (i / 2) + 3 : 31);
    require_on_device(out, expected);
}

template <bool bug>
__global__ void sum_of_lanes(float* out, const float* in) {
    float value = in[lane()];
    HEADRACE_ROLLED
    for (int distance = bug ? 8 : 16; distance > 0; distance /= 2) value += ptx::shuffle_xor(value, distance);
    if (lane() == 0) *out = value;
}
template <bool bug>
void step_missing_in_sum() {
    float* out = empty_on_device<float>(1);
    sum_of_lanes<bug><<<1, warp_lanes>>>(out, on_device(numbers(warp_lanes)));
    require_on_device(out, {528.0F});
}

// One group of threads fills stages, another reads them and gives them back.
enum class Handed { well, read_unfilled, filled_unread, given_unread, given_for_nothing };
template <Handed handed>
__global__ void pass_stages(float* out, const float* in, int chunks) {
    constexpr int stages = 2;
    using Filled = HandOver<0, 2 * threads>;
    using Emptied = HandOver<1, 2 * threads>;
    __shared__ float stage[stages][threads];
    const int own = static_cast<int>(threadIdx.x) % threads;
    HEADRACE_ROLLED
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int turn = chunk % stages;
        if (static_cast<int>(threadIdx.x) < threads) {
            if (chunk >= stages && handed != Handed::filled_unread) Emptied::take(turn);
            stage[turn][own] = in[chunk * threads + own];
            Filled::give(turn);
            continue;
        }
        const bool returned = chunk + stages < chunks && handed != Handed::filled_unread;
        if (handed != Handed::read_unfilled) Filled::take(turn);
        if (returned && handed == Handed::given_unread) Emptied::give(turn);
        out[chunk * threads + own] = stage[turn][threads - 1 - own];
        if ((returned && handed != Handed::given_unread) || handed == Handed::given_for_nothing) Emptied::give(turn);
    }
}
template <Handed handed>
void stages_of(int chunks) {
    const auto count = static_cast<std::size_t>(chunks);
    float* out = empty_on_device<float>(count * threads);
    pass_stages<handed><<<1, 2 * threads>>>(out, on_device(numbers(count * threads)), chunks);
    require_on_device(out, reversed(count, threads));
}
template <bool bug>
void stage_before_it_is_filled() {
    stages_of<bug ? Handed::read_unfilled : Handed::well>(2);
}
template <bool bug>
void stage_filled_before_it_is_read() {
    stages_of<bug ? Handed::filled_unread : Handed::well>(5);
}
template <bool bug>
void stage_given_before_it_is_read() {
    stages_of<bug ? Handed::given_unread : Handed::well>(5);
}
template <bool bug>
void stage_given_to_nobody() {
    stages_of<bug ? Handed::given_for_nothing : Handed::well>(5);
}

}  // namespace

std::vector<Pair> pairs_of_barriers() {
    return {
        HEADRACE_PAIR(barrier_after_write, "no __syncthreads between a write and the reads of it"),
        HEADRACE_PAIR(barrier_before_next_write, "no __syncthreads between reads and the next write"),
        HEADRACE_PAIR(warp_barrier, "no __syncwarp between a write and the reads of it"),
        HEADRACE_PAIR(barrier_in_branch, "__syncthreads in a branch that parts a warp"),
        HEADRACE_PAIR(return_before_barrier, "threads of the tail return before the barrier"),
        HEADRACE_PAIR(count_of_named_barrier, "a named barrier with a warp too many"),
        HEADRACE_PAIR_THAT_SHOWS(shared_name_of_barrier, sometimes, "two groups of warps with one named barrier"),
        HEADRACE_PAIR(stage_before_it_is_filled, "a stage is read without waiting for those that fill it"),
        HEADRACE_PAIR(stage_filled_before_it_is_read, "a stage is filled again without waiting for those that read it"),
        HEADRACE_PAIR(stage_given_before_it_is_read, "a stage is given back before it is read"),
        HEADRACE_PAIR(stage_given_to_nobody, "a stage is given back that nobody fills again"),
        HEADRACE_PAIR(lane_missing_in_shuffle, "a shuffle without the lane of the tail"),
        HEADRACE_PAIR(step_missing_in_sum, "a warp's sum without its first step"),
    };
}

}  // namespace headrace::planted
