// Planted bugs of copies that go on by themselves (cp.async): waits, sizes, buffers.
#include "planted.hpp"
#include "cuda/tiles/tile_ops.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int row = 64;  // floats, copied by 16 threads with 16 bytes each
constexpr int rows = 4;  // copied one after the other
constexpr int threads = warp_lanes;

HEADRACE_DEVICE void begin_row(float* to, const float* from, int given = row) {
    const int first = 4 * static_cast<int>(threadIdx.x);
    if (first >= row) return;
    const int left = given - first < 0 ? 0 : given - first;
    ptx::copy_16(ptx::shared_address(to + first), from + (left == 0 ? 0 : first), left < 4 ? 4 * left : 16);
}

std::vector<float> reversed_rows(int count) {
    std::vector<float> values;
    for (int i = 0; i < count * row; ++i) values.push_back(static_cast<float>(i / row * row + row - i % row));
    return values;
}

HEADRACE_DEVICE void reverse(float* out, const float* buffer) {
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    for (int j = first; j < row; j += step) out[j] = buffer[row - 1 - j];
}

enum class Bug { none, weak_wait, no_barrier, one_buffer, no_second_barrier, left_behind };

// Two buffers: row i + 1 is on its way while row i is used.
template <Bug bug>
__global__ void pipeline(float* out, const float* in) {
    __shared__ __align__(16) float buffers[2][row];
    begin_row(buffers[0], in);
    ptx::end_copies();
    HEADRACE_ROLLED
    for (int i = 0; i < rows; ++i) {
        if (i + 1 < rows) begin_row(buffers[bug == Bug::one_buffer ? 0 : (i + 1) % 2], in + (i + 1) * row);
        ptx::end_copies();
        ptx::wait_for_copies<bug == Bug::weak_wait ? 2 : 1>();
        if (bug != Bug::no_barrier) ptx::sync_block();
        reverse(out + i * row, buffers[bug == Bug::one_buffer ? 0 : i % 2]);
        if (bug != Bug::no_second_barrier) ptx::sync_block();
    }
    if (bug == Bug::left_behind) begin_row(buffers[0], in);
}
template <Bug bug>
void run_pipeline(unsigned block) {
    float* out = empty_on_device<float>(rows * row);
    pipeline<bug><<<1, block>>>(out, on_device(numbers(rows * row)));
    require_on_device(out, reversed_rows(rows));
}
template <bool bug>
void weak_wait() { run_pipeline<bug ? Bug::weak_wait : Bug::none>(threads); }
template <bool bug>
void wait_without_barrier() { run_pipeline<bug ? Bug::no_barrier : Bug::none>(threads); }
template <bool bug>
void buffer_not_flipped() { run_pipeline<bug ? Bug::one_buffer : Bug::none>(threads); }
template <bool bug>
void refilled_too_early() { run_pipeline<bug ? Bug::no_second_barrier : Bug::none>(2 * threads); }
template <bool bug>
void in_flight_at_exit() { run_pipeline<bug ? Bug::left_behind : Bug::none>(threads); }

enum class Size { right, whole, half };

template <Size size>
__global__ void copy_tail(float* out, const float* in, int given) {
    __shared__ __align__(16) float buffer[row];
    begin_row(buffer, in, size == Size::whole ? row : size == Size::half ? given / 2 : given);
    ptx::end_copies();
    ptx::wait_for_copies<0>();
    ptx::sync_block();
    reverse(out, buffer);
}
template <Size size>
void run_tail() {
    constexpr int given = 50;
    std::vector<float> expected(row);
    for (int j = 0; j < given; ++j) expected[static_cast<std::size_t>(row - 1 - j)] = static_cast<float>(j + 1);
    float* out = empty_on_device<float>(row);
    copy_tail<size><<<1, threads>>>(out, on_device(numbers(given)), given);
    require_on_device(out, expected);
}
template <bool bug>
void source_too_long() { run_tail<bug ? Size::whole : Size::right>(); }
template <bool bug>
void source_too_short() { run_tail<bug ? Size::half : Size::right>(); }

// Rows of 65 numbers: the second begins 4 bytes behind a multiple of 16.
template <bool bug>
__global__ void copy_padded(float* out, const float* in) {
    constexpr int pitch = bug ? row + 1 : row + 4;
    __shared__ __align__(16) float buffer[2 * pitch];
    begin_row(buffer, in);
    begin_row(buffer + pitch, in + row);
    ptx::end_copies();
    ptx::wait_for_copies<0>();
    ptx::sync_block();
    reverse(out, buffer);
    reverse(out + row, buffer + pitch);
}
template <bool bug>
void misaligned_copy() {
    float* out = empty_on_device<float>(2 * row);
    copy_padded<bug><<<1, threads>>>(out, on_device(numbers(2 * row)));
    require_on_device(out, reversed_rows(2));
}

}  // namespace

std::vector<Pair> pairs_of_copies() {
    return {
        HEADRACE_PAIR(weak_wait, "wait_group leaves the group that is read next"),
        HEADRACE_PAIR(wait_without_barrier, "wait_group, but no barrier before others read"),
        HEADRACE_PAIR(buffer_not_flipped, "the next row goes into the buffer in use"),
        HEADRACE_PAIR(refilled_too_early, "no barrier before a buffer is filled again"),
        HEADRACE_PAIR(in_flight_at_exit, "copies on their way when the block ends"),
        HEADRACE_PAIR(source_too_long, "16 bytes of a tail that has fewer"),
        HEADRACE_PAIR(source_too_short, "zeros in place of half of a row"),
        HEADRACE_PAIR(misaligned_copy, "16 bytes to rows of an odd pitch"),
    };
}

}  // namespace headrace::planted
