// warp_values: what a warp that owns 16 values moves between the caller's tensors and its registers: states, outputs;
// and lower triangular matrices that were prepared.
#pragma once

#include <type_traits>

#include "cuda/chunk/walker_ops.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// f(element, c, j) of a transposed state in registers, channel c, value j of the warp's 16; neighbouring lanes have 8
// values each of 4 channels.
template <int tiles, class State, class F>
HEADRACE_DEVICE void each_state_element(State& state, F f) {
    const LanePlace at;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; ++place)
            f(state[tile][place], 8 * tile + at.column + place % 2, at.row + place / 2 * 8);
    }
}
// Columns of the unit matrix from `first` on, of so many channels.
template <int tiles>
HEADRACE_DEVICE void load_unit_columns(float (&state)[tiles][4], int channels, int first) {
    each_state_element<tiles>(
        state, [&](float& S, int c, int j) { S = c == first + j && c < channels ? 1.0f : 0.0f; });
}
// f(element, place in memory) for those of them that columns from `first` on of state (n, head) of [N,HV,K,V] in fp32
// has: channels below `channels`, values below `columns`.
template <int tiles, class State, class F>
HEADRACE_DEVICE void each_stored_element(State& state, const Strided& tensor, std::int64_t n, std::int64_t head,
                                         int channels, int first, int columns, F f) {
    const LanePlace at;
    const int value = first + at.row;
    const std::int64_t to_channel = tensor.stride[2], to_value = 8 * tensor.stride[3];
    float* of_tile = reinterpret_cast<float*>(tensor.data) + offset_of(tensor, n, head, at.column, value);
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const int odd = place % 2, half = place / 2;
            if (8 * tile + at.column + odd < channels && value + 8 * half < columns)
                f(state[tile][place], of_tile + odd * to_channel + half * to_value);
        }
        of_tile += 8 * to_channel;
    }
}
// Zero past its ends and where it is absent.
template <int tiles>
HEADRACE_DEVICE void load_values(float (&state)[tiles][4], const Strided& tensor, std::int64_t n, std::int64_t head,
                                 int channels, int first, int columns) {
#pragma unroll
    for (auto& tile : state)
        for (float& S : tile) S = 0;
    if (!tensor.given) return;
    each_stored_element<tiles>(state, tensor, n, head, channels, first, columns,
                               [](float& S, const float* from) { S = *from; });
}
template <int tiles>
HEADRACE_DEVICE void store_values(const Strided& tensor, const float (&state)[tiles][4], std::int64_t n,
                                  std::int64_t head, int channels, int first, int columns) {
    if (!tensor.given) return;
    each_stored_element<tiles>(state, tensor, n, head, channels, first, columns,
                               [](float S, float* to) { *to = S; });
}

// A warp's outputs of a chunk of `length` tokens, behind a barrier of the warp, to rows of the tensor that begin with
// the block's values, `count` of them, of which the warp has 16 from `first` on. Values lie in neighbouring lanes, 32
// bytes of a token together.
HEADRACE_DEVICE void store_outputs(const Strided& tensor, TokenRows o, OutputPatch patch, int length, int count,
                                   int first = 16 * warp()) {
    if constexpr (OutputPatch::turns) {
        const int own = lane_here(), token = own / 2, column = first + own % 2 * 8;
        char* to = tensor.data + (o.first - tensor.data) + 2 * column + token * o.step;
        const uint4* const from =
            reinterpret_cast<const uint4*>(patch.matrix.data) + 2 * token + (own % 2 ^ (token / 4 % 2));
        const int left = column < count ? length - token : 0;  // tokens from the lane's first on
        if (length == tensor_chunk && count - first >= 16) {   // of all lanes
#pragma unroll
            for (int turn = 0; turn < token_steps; ++turn, to += 16 * o.step)
                *reinterpret_cast<uint4*>(to) = from[turn * 32];
            return;
        }
        HEADRACE_ROLLED
        for (int turn = 0; turn < token_steps; ++turn, to += 16 * o.step)
            if (16 * turn < left) *reinterpret_cast<uint4*>(to) = from[turn * 32];
        return;
    }
    const int own = lane_here(), column = first + own % 4 * 4;
    // From the tensor's address as the kernel got it, so that stores are known to be to global memory.
    char* to = tensor.data + (o.first - tensor.data) + 2 * column + own / 4 * o.step;
    const auto store = [&](const std::uint32_t (&values)[4], int half) {
        *reinterpret_cast<uint2*>(to) = {values[2 * half], values[2 * half + 1]};
    };
    if (length == tensor_chunk && count - first >= 16) {  // of all lanes
#pragma unroll
        for (int turn = 0; turn < token_steps; ++turn) {
            std::uint32_t values[4];
            patch.load(values, turn, own);
            store(values, 0), to += 8 * o.step, store(values, 1), to += 8 * o.step;
        }
        return;
    }
    const int left = column < count ? length - own / 4 : 0;  // tokens from the lane's first on
    HEADRACE_ROLLED
    for (int turn = 0; turn < token_steps; ++turn) {
        std::uint32_t values[4];
        patch.load(values, turn, own);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (16 * turn + 8 * half < left) store(values, half);
            to += 8 * o.step;
        }
    }
}

// Of a token's outputs the two values that a lane's quad has, to a row that begins with the block's, `count` of them.
template <class Format>
HEADRACE_DEVICE void store_token(TokenRows o, int count, int own, float2 values) {
    const int half = own % 4, value = 16 * (warp_here() % block_warps) + own / 4 + 8 * half;
    if (half < 2 && value < count)
        *reinterpret_cast<std::uint16_t*>(o.first + 2 * value) =
            static_cast<std::uint16_t>(Format::round(half == 0 ? values.x : values.y, 0));
}

// The four warps that fetch, the last ones: where there are others than those that walk, what they wait for holds up
// none that computes.
HEADRACE_DEVICE Warps fetching_warps() { return {warps() - block_warps, block_warps}; }

// The pieces that a thread of the first four of those warps copies of a lower triangular matrix (LowerImage). Products
// of groups read all of its matrix, so that theirs get zeros above the diagonal's blocks.
struct LowerPieces {
    static constexpr int turns = ptx::multiplies_by_group ? 4 : 3;
    std::uint32_t to[turns], from;  // in bytes, of a turn; in the matrix' image, of the first one
    bool copies;
    int last;  // bytes that there are of the third turn's piece

    HEADRACE_DEVICE explicit LowerPieces(Warps by) {
        // Of the blocks that warps 0 to 3 have in a turn, rows and columns, two bits each: ten with numbers, then those
        // above the diagonal.
        constexpr unsigned rows[] = {0b10010100, 0b11111010, 0b00001111, 0b10010100},
                           columns[] = {0b00010000, 0b01001001, 0b10011110, 0b11111011};
        const auto own = static_cast<unsigned>(lane_here()), row = own % 16, column = own / 16 * 8,
                   first = static_cast<unsigned>(warp_here() - by.first);
        const auto place = Matrix<64>::place(static_cast<int>(row), static_cast<int>(column));
        const unsigned to_first = 2 * static_cast<unsigned>(place);
        from = 2 * (16 * row + column + LowerImage::block_size * first);
        copies = first < block_warps, last = first < 2 ? 16 : 0;
#pragma unroll
        for (int turn = 0; turn < turns; ++turn) {
            const unsigned row_block = rows[turn] >> 2 * first & 3, column_block = columns[turn] >> 2 * first & 3;
            to[turn] = (to_first ^ 32 * column_block) + 16 * 2 * Matrix<64>::row * row_block;
        }
    }
    // From the image at a place.
    HEADRACE_DEVICE void copy(Matrix<64> matrix, const std::uint16_t* images, std::int64_t place = 0) const {
        copy(matrix, reinterpret_cast<const char*>(images + place * LowerImage::size) + from);
    }
    // From `from` in it.
    HEADRACE_DEVICE void copy(Matrix<64> matrix, const char* image) const {
        const std::uint32_t to_matrix = ptx::shared_address(matrix.data);
        if (!copies) return;
        constexpr int of_turn = 2 * LowerImage::block_size * block_warps;
        ptx::copy_16(to_matrix + to[0], image, 16), ptx::copy_16(to_matrix + to[1], image + of_turn, 16);
        if constexpr (ptx::multiplies_by_group) {
            // Zeros are copied from nowhere.
            ptx::copy_16(to_matrix + to[2], image + (last > 0 ? 2 * of_turn : 0), last);
            ptx::copy_16(to_matrix + to[turns - 1], image, 0);
        } else if (last > 0) {
            ptx::copy_16(to_matrix + to[2], image + 2 * of_turn, 16);
        }
    }
};

// Queues copies of lower triangular matrices, by the first four of the warps.
struct LowerCopy {
    Matrix<64> to;
    const std::uint16_t* from;  // LowerImage
};
template <class... Copies>
HEADRACE_DEVICE void copy_lower(Warps by, Copies... copies) {
    const LowerPieces pieces(by);
    (pieces.copy(copies.to, copies.from), ...);
}

// Queues copies of so many bytes, a multiple of 16. A warp copies up to 2 KiB at a time, at distances that are known
// beforehand.
template <std::int64_t bytes>
HEADRACE_DEVICE void copy_bytes(void* to, const void* from, Warps by = all_warps()) {
    constexpr int of_warp = 16 * warp_lanes, together = bytes < 4 * of_warp ? of_warp : 4 * of_warp;
    const std::uint32_t to_shared = ptx::shared_address(to);
    HEADRACE_ROLLED
    for (int first = together * (warp() - by.first) + 16 * lane(); first < bytes;
         first += together * by.count) {
#pragma unroll
        for (int piece = 0; piece < together; piece += of_warp)
            ptx::copy_16(to_shared + static_cast<std::uint32_t>(first + piece),
                         static_cast<const char*>(from) + first + piece, 16);
    }
}

// Rows by others in global memory, when all warps have read them: of the block's first `threads`, which have values.
template <int barrier = replacing_barrier, int K>
HEADRACE_DEVICE void replace_rows(Matrix<K> rows, const std::uint16_t* by, int threads) {
    ptx::sync_threads(barrier, threads);
    HEADRACE_ROLLED
    for (int place = 8 * thread_here(); place < tensor_chunk * K; place += 8 * threads)
        *reinterpret_cast<uint4*>(rows.data + place) = *reinterpret_cast<const uint4*>(by + place);
    ptx::sync_threads(barrier, threads);
}

}  // namespace headrace::cuda
