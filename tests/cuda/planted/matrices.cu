// Planted bugs of matrix instructions, masks and numbers.
#include <cmath>
#include <limits>

#include "core/types.hpp"
#include "cuda/tiles/tile_products.hpp"
#include "planted.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int size = 16, columns = 8;

enum class Bug { none, not_transposed, wrong_row, swapped_registers };

// out [16,8] = a b, a [16,16] and b [16,8] row-major in bf16
template <Bug bug>
__global__ void product(float* out, const std::uint16_t* a, const std::uint16_t* b) {
    __shared__ __align__(16) std::uint16_t left[size][size], right[size][columns];
    for (int i = lane(); i < size * size; i += warp_lanes) left[i / size][i % size] = a[i];
    for (int i = lane(); i < size * columns; i += warp_lanes) right[i / columns][i % columns] = b[i];
    ptx::sync_warp();
    std::uint32_t x[4], y[2];
    float sums[4] = {};
    ptx::load_matrix(x, ptx::shared_address(&left[lane() % 16][lane() / 16 * 8]));
    if (bug == Bug::not_transposed) {
        ptx::load_matrix(y, ptx::shared_address(right[lane() % 16]));
    } else {
        ptx::load_matrix_transposed(y, ptx::shared_address(right[lane() % 16]));
    }
    if (bug == Bug::swapped_registers) {
        const std::uint32_t second = x[1];
        x[1] = x[2], x[2] = second;
    }
    ptx::multiply_bf16(sums, x, y);
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * (bug == Bug::wrong_row ? 4 : 8)) * columns + 2 * t + i % 2] = sums[i];
}
template <Bug bug>
void run_product() {
    std::vector<float> a, b, expected(size * columns);
    for (int i = 0; i < size * size; ++i) a.push_back(static_cast<float>(i * 37 % 23 - 11) / 2);
    for (int i = 0; i < size * columns; ++i) b.push_back(static_cast<float>(i * 29 % 19 - 9) / 2);
    for (std::size_t i = 0; i < size; ++i)
        for (std::size_t k = 0; k < size; ++k)
            for (std::size_t j = 0; j < columns; ++j) expected[i * columns + j] += a[i * size + k] * b[k * columns + j];
    std::vector<std::uint16_t> a_halves, b_halves;
    for (const float value : a) a_halves.push_back(float_to_bf16(value));
    for (const float value : b) b_halves.push_back(float_to_bf16(value));
    float* out = empty_on_device<float>(size * columns);
    product<bug><<<1, warp_lanes>>>(out, on_device(a_halves), on_device(b_halves));
    require_on_device(out, expected);
}
template <bool bug>
void matrix_not_transposed() { run_product<bug ? Bug::not_transposed : Bug::none>(); }
template <bool bug>
void row_of_fragment() { run_product<bug ? Bug::wrong_row : Bug::none>(); }
template <bool bug>
void registers_of_fragment() { run_product<bug ? Bug::swapped_registers : Bug::none>(); }

// out(i, j) = sum_{m <= i} a(i, m) x(m, j)
template <bool bug>
__global__ void causal_product(float* out, const float* a, const float* x) {
    const auto score = [&](int i, int m) { return bug || m <= i ? a[i * size + m] : 0.0F; };
    multiply<float, few_columns>(
        score, [&](int m, int j) { return x[m * columns + j]; }, size, columns, size, Part::full,
        [&](int i, int j, float sum) { out[i * columns + j] = sum; });
}
template <bool bug>
void causal_mask() {
    std::vector<float> a, x = numbers(size * columns), expected(size * columns);
    for (int i = 0; i < size * size; ++i) a.push_back(static_cast<float>(i * 37 % 23 - 11));
    for (std::size_t i = 0; i < size; ++i)
        for (std::size_t m = 0; m <= i; ++m)
            for (std::size_t j = 0; j < columns; ++j) expected[i * columns + j] += a[i * size + m] * x[m * columns + j];
    float* out = empty_on_device<float>(size * columns);
    causal_product<bug><<<1, block_threads>>>(out, on_device(a), on_device(x));
    require_on_device(out, expected);
}

// The strictly lower part of what causal_mask takes, one diagonal too few.
template <bool bug>
__global__ void inclusive_sums(float* out, const float* x) {
    const int i = lane();
    float sum = 0;
    for (int m = 0; bug ? m < i : m <= i; ++m) sum += x[m];
    out[i] = sum;
}
template <bool bug>
void diagonal_left_out() {
    std::vector<float> expected;
    for (int i = 1; i <= warp_lanes; ++i) expected.push_back(static_cast<float>(i * (i + 1) / 2));
    float* out = empty_on_device<float>(warp_lanes);
    inclusive_sums<bug><<<1, warp_lanes>>>(out, on_device(numbers(warp_lanes)));
    require_on_device(out, expected);
}

// fmaxf takes the number of a number and a NaN: the row looks sound.
template <bool bug>
__global__ void largest(float* out, const float* in) {
    const float a = in[0], b = in[1];
    *out = bug ? fmaxf(a, b) : a > b || a != a ? a : b;
}
template <bool bug>
void nan_hidden_by_max() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    float* out = empty_on_device<float>(1);
    largest<bug><<<1, 1>>>(out, on_device<float>({nan, 3.0F}));
    require_on_device(out, {nan});
}

// A decay from token m to token i, both given as sums from the start.
template <bool bug>
__global__ void decays(float* out, const float* sums) {
    const int i = lane();
    const auto power = [](float x) { return ptx::exp2_approximate(x); };
    out[i] = bug ? power(sums[i]) * power(-sums[0]) : power(sums[i] - sums[0]);
}
template <bool bug>
void positive_exponent() {
    std::vector<float> sums, expected;
    for (int i = 0; i < warp_lanes; ++i) {
        sums.push_back(static_cast<float>(-140 - i));
        expected.push_back(std::exp2(static_cast<float>(-i)));
    }
    float* out = empty_on_device<float>(warp_lanes);
    decays<bug><<<1, warp_lanes>>>(out, on_device(sums));
    require_on_device(out, expected);
}

// 1000 times 1 / 256: exact in fp32, while a bf16 sum no longer moves above 2.
template <bool bug>
__global__ void long_sum(float* out, const float* in, int count) {
    float sum = 0;
    for (int i = 0; i < count; ++i) {
        sum += *in;
        if (bug) sum = __uint_as_float(ptx::round_to_bf16(sum, 0) << 16);
    }
    *out = sum;
}
template <bool bug>
void sum_in_bf16() {
    float* out = empty_on_device<float>(1);
    long_sum<bug><<<1, 1>>>(out, on_device<float>({1.0F / 256}), 1000);
    require_on_device(out, {1000.0F / 256});
}

}  // namespace

std::vector<Pair> pairs_of_matrices() {
    return {
        HEADRACE_PAIR(matrix_not_transposed, "ldmatrix without .trans for a row-major b"),
        HEADRACE_PAIR(row_of_fragment, "accumulators stored as rows g and g + 4"),
        HEADRACE_PAIR(registers_of_fragment, "registers 1 and 2 of a swapped"),
        HEADRACE_PAIR(causal_mask, "no causal mask"),
        HEADRACE_PAIR(diagonal_left_out, "a causal mask without its diagonal"),
        HEADRACE_PAIR(nan_hidden_by_max, "fmaxf, which drops a NaN"),
        HEADRACE_PAIR(positive_exponent, "the exponential of a positive number"),
        HEADRACE_PAIR(sum_in_bf16, "a sum rounded to bf16 at each step"),
    };
}

}  // namespace headrace::planted
