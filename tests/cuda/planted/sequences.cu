// Planted bugs of kernels that walk sequences: order, borders, rows of a pool, groups of heads, types, in-place
// products.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/tiles/tile_products.hpp"
#include "planted.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int width = 32, chunk = 16;

// Walks tokens [begin, end) of a sequence in chunks, from its end where it is `reverse`: out = the running sums.
enum class Bug { none, tail_from_padding, over_border, saved_too_late };

template <Bug bug>
__global__ void running_sums(float* out, float* saved, const float* in, const int* borders, int tokens, bool reverse) {
    const int n = static_cast<int>(blockIdx.x), begin = borders[n], j = static_cast<int>(threadIdx.x);
    const int end = bug == Bug::over_border ? (begin + chunk < tokens ? begin + chunk : tokens) : borders[n + 1];
    float state = 0;
    HEADRACE_ROLLED
    for (int first = 0; first < end - begin; first += chunk) {
        const int left = end - begin - first, rows = left < chunk ? left : chunk;
        const int from_end = bug == Bug::tail_from_padding ? chunk - 1 : rows - 1;
        if (bug != Bug::saved_too_late) saved[(begin / chunk + n + first / chunk) * width + j] = state;
        HEADRACE_ROLLED
        for (int i = 0; i < rows; ++i) {
            const int t = reverse ? end - first - rows + from_end - i : begin + first + i;
            state += in[t * width + j];
            out[t * width + j] = state;
        }
        if (bug == Bug::saved_too_late) saved[(begin / chunk + n + first / chunk) * width + j] = state;
    }
}

template <Bug bug>
void run_sums(const std::vector<int>& borders, bool reverse) {
    const std::size_t sequences = borders.size() - 1, tokens = static_cast<std::size_t>(borders.back());
    const std::vector<float> in = numbers(tokens * width);
    std::vector<float> sums(in.size()), states((tokens / chunk + sequences) * width, -1);
    for (std::size_t n = 0; n < sequences; ++n) {
        const auto begin = static_cast<std::size_t>(borders[n]), end = static_cast<std::size_t>(borders[n + 1]);
        for (std::size_t j = 0; j < width; ++j) {
            float state = 0;
            for (std::size_t i = 0; i < end - begin; ++i) {
                if (i % chunk == 0) states[(begin / chunk + n + i / chunk) * width + j] = state;
                const std::size_t t = reverse ? end - 1 - i : begin + i;
                sums[t * width + j] = state += in[t * width + j];
            }
        }
    }
    float *out = empty_on_device<float>(in.size()), *saved = on_device(std::vector<float>(states.size(), -1));
    running_sums<bug><<<static_cast<unsigned>(sequences), width>>>(out, saved, on_device(in), on_device(borders),
                                                                   static_cast<int>(tokens), reverse);
    require_on_device(out, sums);
    require_on_device(saved, states);
}
template <bool bug>
void reversed_tail() {
    run_sums<bug ? Bug::tail_from_padding : Bug::none>({0, 37}, true);
}
template <bool bug>
void chunk_over_border() {
    run_sums<bug ? Bug::over_border : Bug::none>({0, 11, 21}, false);
}
template <bool bug>
void state_saved_too_late() {
    run_sums<bug ? Bug::saved_too_late : Bug::none>({0, 37}, false);
}

// out[t] = the last sequence that begins at or before token t, which passes over empty ones
template <bool bug>
__global__ void sequence_of_token(int* out, const int* borders, int sequences) {
    const int t = static_cast<int>(threadIdx.x);
    int low = 0, high = sequences;
    HEADRACE_ROLLED
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        ((bug ? borders[middle] < t : borders[middle] <= t) ? low : high) = middle;
    }
    out[t] = low;
}
template <bool bug>
void empty_sequence_found() {
    int* out = empty_on_device<int>(6);
    sequence_of_token<bug><<<1, 6>>>(out, on_device<int>({0, 2, 2, 2, 6}), 4);
    require_on_device<int>(out, {0, 0, 3, 3, 3, 3});
}

// pool[row] += x for the row of each slot, of which -1 is none
template <bool bug>
__global__ void add_to_rows(float* pool, const float* x, const int* rows) {
    const int row = rows[blockIdx.x];
    if (!bug && row < 0) return;
    pool[row * width + static_cast<int>(threadIdx.x)] += x[blockIdx.x * width + threadIdx.x];
}
template <bool bug>
void padding_has_a_row() {
    float* pool = on_device(std::vector<float>(2 * width));
    const std::vector<float> x = numbers(3 * width);
    add_to_rows<bug><<<3, width>>>(pool, on_device(x), on_device<int>({1, -1, 0}));
    std::vector<float> expected(x.begin() + 2 * width, x.end());
    expected.insert(expected.end(), x.begin(), x.begin() + width);
    require_on_device(pool, expected);
}

// A group's sum in shared memory: its first head has to store where the others add.
template <bool bug>
__global__ void sum_of_group(float* out, const float* x, int heads) {
    __shared__ float sum[width];
    const unsigned j = threadIdx.x;
    if (!bug) sum[j] = x[j];
    HEADRACE_ROLLED
    for (int head = bug ? 0 : 1; head < heads; ++head) sum[j] += x[static_cast<unsigned>(head) * width + j];
    out[j] = sum[j];
}
template <bool bug>
void first_of_group_adds() {
    float* out = empty_on_device<float>(width);
    const std::vector<float> x = numbers(2 * width);
    sum_of_group<bug><<<1, width>>>(out, on_device(x), 2);
    std::vector<float> sums(width);
    for (std::size_t i = 0; i < x.size(); ++i) sums[i % width] += x[i];
    require_on_device(out, sums);
}

// x <- a x, an operand that other threads still read
template <bool bug>
__global__ void multiply_into(float* out, const float* a, const float* x) {
    __shared__ float tile[chunk * width], result[chunk * width];
    each_element(chunk, width, [&](int i, int j) { tile[i * width + j] = x[i * width + j]; });
    ptx::sync_block();
    multiply<float, few_columns>([&](int i, int d) { return a[i * chunk + d]; },
                                 [&](int d, int j) { return tile[d * width + j]; }, chunk, width, chunk, Part::full,
                                 [&](int i, int j, float sum) { (bug ? tile : result)[i * width + j] = sum; });
    each_element(chunk, width, [&](int i, int j) { out[i * width + j] = (bug ? tile : result)[i * width + j]; });
}
template <bool bug>
void product_into_operand() {
    const std::vector<float> a = numbers(chunk * chunk), x = numbers(chunk * width);
    std::vector<float> product(x.size());
    for (std::size_t i = 0; i < chunk; ++i)
        for (std::size_t d = 0; d < chunk; ++d)
            for (std::size_t j = 0; j < width; ++j) product[i * width + j] += a[i * chunk + d] * x[d * width + j];
    float* out = empty_on_device<float>(x.size());
    multiply_into<bug><<<1, block_threads>>>(out, on_device(a), on_device(x));
    require_on_device(out, product);
}

template <bool bug>
__global__ void widen(float* out, const std::uint16_t* in) {
    const std::uint16_t bits = in[threadIdx.x];
    out[threadIdx.x] = bug ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}
template <bool bug>
void types_exchanged() {
    float* out = empty_on_device<float>(3);
    widen<bug><<<1, 3>>>(out, on_device<std::uint16_t>({0x3f80, 0xc000, 0x0000}));
    require_on_device<float>(out, {1, -2, 0});
}

}  // namespace

std::vector<Pair> pairs_of_sequences() {
    return {
        HEADRACE_PAIR(reversed_tail, "a tail in reverse that counts from its padding"),
        HEADRACE_PAIR(chunk_over_border, "a chunk that goes on into the next sequence"),
        HEADRACE_PAIR(state_saved_too_late, "saves the state that leaves a chunk for the one that enters"),
        HEADRACE_PAIR(empty_sequence_found, "a search that stops at an empty sequence"),
        HEADRACE_PAIR(padding_has_a_row, "index -1 taken for a row of the pool"),
        HEADRACE_PAIR(first_of_group_adds, "the first head of a group adds where it has to store"),
        HEADRACE_PAIR(product_into_operand, "a product into its own operand"),
        HEADRACE_PAIR(types_exchanged, "bf16 taken for f16"),
    };
}

}  // namespace headrace::planted
