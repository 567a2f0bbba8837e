// Planted bugs in the patterns of the kernels on tensor cores: rows that arrive in swizzled matrices, scores of a
// triangle, operands of 16 bits.
#include "core/types.hpp"
#include "planted.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::planted {
namespace {

using namespace cuda;  // NOLINT: the kernels read like those of src/cuda

constexpr int tokens = 16, channels = 64, chunks = 3, elements = tokens * channels;

enum class Bug { none, wrong_swizzle, weak_wait, not_transposed, no_mask, no_low_part, one_stage };

// A warp copies [16,64] as pieces of 16 bytes.
template <Bug bug>
HEADRACE_DEVICE void begin_rows(Matrix<channels> to, const std::uint16_t* from) {
    for (int piece = lane(); piece < elements / 8; piece += warp_lanes) {
        const int i = piece / 8, j = piece % 8 * 8, swizzled = bug == Bug::wrong_swizzle ? i / 2 * 2 : i;
        const int place = i * channels + ((j / 8) ^ (swizzled % 8)) * 8;
        ptx::copy_16(ptx::shared_address(to.data + place), from + i * channels + j, 16);
    }
    ptx::end_copies();
}

// Of each chunk of keys k [16,64]: out [16,16] = the first columns of P k, P [16,16] = the lower triangle of k k^T.
template <Bug bug>
__global__ void scored(float* out, const std::uint16_t* keys) {
    __shared__ __align__(128) std::uint16_t memory[2][elements];
    const auto stage = [&](int chunk) { return Matrix<channels>{memory[bug == Bug::one_stage ? 0 : chunk % 2]}; };
    begin_rows<bug>(stage(0), keys);
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk + 1 < chunks) begin_rows<bug>(stage(chunk + 1), keys + (chunk + 1) * elements);
        if (chunk + 1 == chunks) ptx::end_copies();
        ptx::wait_for_copies<bug == Bug::weak_wait ? 2 : 1>();
        ptx::sync_warp();
        const Matrix<channels> k = stage(chunk);
        float scores[2][4] = {}, sums[2][4] = {};
        const auto down = OperandAt<channels>::down(k), across = OperandAt<channels>::across(k);
        std::uint32_t a[4], b[4];
        for (int d = 0; d < channels; d += 16) {
            ptx::load_matrix(a, down.at(0, d));
            bug == Bug::not_transposed ? ptx::load_matrix_transposed(b, down.at(d % tokens, 0))
                                       : ptx::load_matrix(b, across.at(0, d));
            for (int tile = 0; tile < 2; ++tile) ptx::multiply_bf16(scores[tile], a, {b[2 * tile], b[2 * tile + 1]});
        }
        const LanePlace at;
        for (int tile = 0; tile < 2; ++tile)
            for (int place = 0; place < 4; ++place)
                if (bug != Bug::no_mask && 8 * tile + at.column + place % 2 > at.row + place / 2 * 8)
                    scores[tile][place] = 0;
        const SplitA p = split_a(scores[0], scores[1]);
        ptx::load_matrix_transposed(b, down.at(0, 0));
        for (int tile = 0; tile < 2; ++tile) {
            const std::uint32_t right[2] = {b[2 * tile], b[2 * tile + 1]};
            if (bug != Bug::no_low_part) ptx::multiply_bf16(sums[tile], p.low, right);
            ptx::multiply_bf16(sums[tile], p.high, right);
            for (int place = 0; place < 4; ++place)
                out[(chunk * tokens + at.row + place / 2 * 8) * tokens + 8 * tile + at.column + place % 2] =
                    sums[tile][place];
        }
        ptx::sync_warp();
    }
}

// Whole numbers: scores of up to ten bits, more than bf16 has; all sums are exact in fp32.
std::vector<float> keys_of_chunks() {
    std::vector<float> keys;
    for (int i = 0; i < chunks * elements; ++i) keys.push_back(static_cast<float>(i * 37 % 11 - 3 + i / channels % 3));
    return keys;
}
std::vector<float> expected_of(const std::vector<float>& keys) {
    std::vector<float> out(static_cast<std::size_t>(chunks * tokens * 16));
    for (std::size_t row = 0; row < chunks * tokens; ++row) {
        const std::size_t first = row / tokens * tokens;
        for (std::size_t m = first; m <= row; ++m) {
            float score = 0;
            for (std::size_t c = 0; c < channels; ++c) score += keys[row * channels + c] * keys[m * channels + c];
            for (std::size_t j = 0; j < 16; ++j) out[row * 16 + j] += score * keys[m * channels + j];
        }
    }
    return out;
}
template <Bug bug>
void run_scored() {
    const std::vector<float> keys = keys_of_chunks(), expected = expected_of(keys);
    std::vector<std::uint16_t> halves;
    for (const float value : keys) halves.push_back(float_to_bf16(value));
    float* out = empty_on_device<float>(expected.size());
    scored<bug><<<1, warp_lanes>>>(out, on_device(halves));
    require_on_device(out, expected);
}
template <bool bug>
void swizzle_of_other_row() { run_scored<bug ? Bug::wrong_swizzle : Bug::none>(); }
template <bool bug>
void chunk_not_waited_for() { run_scored<bug ? Bug::weak_wait : Bug::none>(); }
template <bool bug>
void keys_not_transposed() { run_scored<bug ? Bug::not_transposed : Bug::none>(); }
template <bool bug>
void scores_not_masked() { run_scored<bug ? Bug::no_mask : Bug::none>(); }
template <bool bug>
void low_part_left_out() { run_scored<bug ? Bug::no_low_part : Bug::none>(); }
template <bool bug>
void chunks_in_one_stage() { run_scored<bug ? Bug::one_stage : Bug::none>(); }

}  // namespace

std::vector<Pair> pairs_of_tensor_cores() {
    return {
        HEADRACE_PAIR(swizzle_of_other_row, "odd rows in places of the rows before them"),
        HEADRACE_PAIR(chunk_not_waited_for, "the wait lets the chunk's own copies go on"),
        HEADRACE_PAIR(keys_not_transposed, "k in place of k^T as the right operand of scores"),
        HEADRACE_PAIR(scores_not_masked, "scores of later tokens"),
        HEADRACE_PAIR(low_part_left_out, "of scores the high part alone"),
        HEADRACE_PAIR(chunks_in_one_stage, "the next chunk arrives where this one lies"),
    };
}

}  // namespace headrace::planted
