// matrices: matrices of 16 bits in shared memory and their products on tensor cores.
//
// A warp computes 16 rows of a product at a time, in accumulators of 16 x 8 (ptx.hpp): with g = lane / 4, t = lane % 4
// a lane holds elements (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1) of each. What must be finer than bf16 is
// the sum of two of them, high and low: 16 bits.
#pragma once

#include "cuda/tiles/formats.hpp"

namespace headrace::cuda {

// [rows, columns], columns 64, 128 or 256: of more than 64, [64,64] one behind the other. A row's pieces of 16 bytes
// change places with the row's number, so that a column of eight pieces lies in all banks: what wgmma calls a swizzle
// of 128 bytes, if the matrix begins at a multiple of 1024. It begins at a multiple of its rows, so that what is known
// of a place's bits holds for its address.
template <int columns>
struct Matrix {
    static constexpr int row = 64, half = 64 * row;  // in elements

    std::uint16_t* data = nullptr;

    static __host__ __device__ Matrix take(Arena& arena, int rows) {
        constexpr std::size_t bytes = row * sizeof(std::uint16_t);
        arena.shared_used = (arena.shared_used + bytes - 1) / bytes * bytes;
        return {arena.take<std::uint16_t>(static_cast<std::size_t>(rows) * columns)};
    }
    HEADRACE_DEVICE explicit operator bool() const { return data != nullptr; }
    // Elements (i, j) and (i, j + 1), j even, the first in the low half; and the piece that begins with (i, j).
    HEADRACE_DEVICE std::uint32_t& pair(int i, int j) const {
        return *reinterpret_cast<std::uint32_t*>(data + place(i, j));
    }
    HEADRACE_DEVICE std::uint32_t piece(int i, int j) const { return ptx::shared_address(data + place(i, j)); }
    HEADRACE_DEVICE std::uint16_t& at(int i, int j) const { return data[place(i, j)]; }
    // Elements from the first one in memory to (i, j).
    HEADRACE_DEVICE static int place(int i, int j) {
        const int piece = columns == row ? j / 8 : j / 8 % 8, in_half = i * row + (piece ^ (i % 8)) * 8 + j % 8;
        return columns == row ? in_half : in_half + j / row * half;
    }
    // Bytes from a place of column 0 to that so many columns and rows on, the latter a multiple of eight.
    HEADRACE_DEVICE static std::uint32_t moved(std::uint32_t from, int rows, int columns_on) {
        const int on = columns == row ? columns_on : columns_on % row;
        const std::uint32_t in_half = (from ^ static_cast<std::uint32_t>(2 * on)) + 2 * row * rows;
        return columns == row ? in_half : in_half + static_cast<std::uint32_t>(columns_on / row * (2 * half));
    }
};

// Before matrices for products of groups, and between stages that have them: they begin at multiples of this.
inline constexpr std::size_t group_multiple = 1024;
__host__ __device__ inline void take_padding(Arena& arena) {
    arena.shared_used = (arena.shared_used + group_multiple - 1) / group_multiple * group_multiple;
}

// Two numbers as sums of two of 16 bits.
struct SplitPair {
    std::uint32_t high, low;
};
template <class Format = Bf16>
HEADRACE_DEVICE SplitPair split_pair(float x, float y) {
    const std::uint32_t high = Format::round(x, y);
    return {high, Format::round(x - Format::first(high), y - Format::second(high))};
}
// What both leave of the numbers.
HEADRACE_DEVICE std::uint32_t rest_of_pair(float x, float y) {
    const std::uint32_t high = Bf16::round(x, y);
    return split_pair(x - Bf16::first(high), y - Bf16::second(high)).low;
}
// Where the accumulators of a lane lie in their 16 x 8: rows first and first + 8, columns `column` and the next.
struct LanePlace {
    int row, column;
    HEADRACE_DEVICE explicit LanePlace(int of = lane()) : row(of / 4), column(of % 4 * 2) {}
};

// Lane t of each four gets what the four have of tile t, in the order of lanes.
HEADRACE_DEVICE void transpose_of_four_lanes(std::uint32_t (&of_tiles)[4]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = (lane() & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & distance) != 0) continue;
            std::uint32_t &first = of_tiles[i], &second = of_tiles[i + distance];
            const std::uint32_t other = ptx::shuffle_xor(upper ? first : second, distance);
            (upper ? first : second) = other;
        }
    }
}

// Where a matrix has the pairs of a lane's accumulators of [32, 8 tiles] at (row, column), its first a multiple of 16,
// the other of all columns of the tiles: one step away from the first pair.
template <int columns>
struct PairsAt {
    std::uint32_t first;  // bytes from the matrix's begin

    HEADRACE_DEVICE PairsAt(int row, int column, int of_lane = lane()) {
        const LanePlace at(of_lane);
        first = 2 * static_cast<std::uint32_t>(Matrix<columns>::place(row + at.row, column + at.column));
    }
    // Of a tile, rows further down by a multiple of 8.
    HEADRACE_DEVICE std::uint32_t& of(Matrix<columns> m, int tile, int down) const {
        const std::uint32_t bytes = Matrix<columns>::moved(first, down, 8 * tile);
        return *reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(m.data) + bytes);
    }
};

// ---- operands of fp32, each as high and low: products are off by 2^-16 ----

// What is multiplied of a left operand: its upper 8 bits, the next 8, or both.
enum class Left { high, low, both };

struct SplitA {
    std::uint32_t high[4], low[4];
    template <class Format = Bf16>
    HEADRACE_DEVICE void set(int place, float x, float y) {
        const SplitPair both = split_pair<Format>(x, y);
        high[place] = both.high, low[place] = both.low;
    }
};
struct SplitB {
    std::uint32_t high[2], low[2];
};
HEADRACE_DEVICE void multiply(float (&sums)[4], const SplitA& a, const SplitB& b) {
    ptx::multiply_bf16(sums, a.low, b.high);
    ptx::multiply_bf16(sums, a.high, b.low);
    ptx::multiply_bf16(sums, a.high, b.high);
}

// Of two accumulators side by side.
HEADRACE_DEVICE SplitA split_a(const float (&left)[4], const float (&right)[4]) {
    SplitA a;
    a.set(0, left[0], left[1]), a.set(1, left[2], left[3]), a.set(2, right[0], right[1]), a.set(3, right[2], right[3]);
    return a;
}

}  // namespace headrace::cuda
