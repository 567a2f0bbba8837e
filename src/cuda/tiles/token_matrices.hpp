// token_matrices: moves rows of 16 bits between tensors and matrices in shared memory, in pieces of 16 bytes: tensors are
// the caller's or copies that lie so (plumbing/staging.hpp), and of a row's last piece what lies behind it is zero, and
// nobody's.
#pragma once

#include "cuda/tiles/matrices.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// f(i, j) for the first column j of each piece of [tensor_chunk rows, columns]. Here and below `by` share the work.
template <int columns, class F>
HEADRACE_DEVICE void each_piece(int rows, F f, Warps by = all_warps()) {
    constexpr int pieces = columns / 8;
    HEADRACE_ROLLED
    for (int place = thread_here() - by.first * warp_lanes; place < rows * pieces; place += by.count * warp_lanes)
        f(place / pieces, place % pieces * 8);
}

// f(i, n) for the rows i of 64 of which a thread has a piece, `pieces` to a row, by so many threads; n counts them.
// They lie multiples of eight apart, so that a Matrix has the pieces at places a constant apart.
template <int threads, int pieces, class F>
HEADRACE_DEVICE void each_own_row(F f) {
    constexpr int step = threads / pieces;
    static_assert(step % 8 == 0);
    const int first = thread_here() / pieces;
#pragma unroll 4
    for (int n = 0; n < 64 / step; ++n) f(first + n * step, n);
}

// A lower triangular [64,64] in global memory: its ten blocks of 16 x 16 on and below the diagonal, row after row of
// blocks, each row-major.
struct LowerImage {
    static constexpr std::int64_t size = lower_size;
    static constexpr int blocks = 10, block_size = 256;
    std::uint16_t* first;

    // Of a block, and of an element of the matrix.
    static __host__ __device__ int first_of(int row, int column) { return block_size * (row * (row + 1) / 2 + column); }
    static __host__ __device__ int place(int i, int j) { return first_of(i / 16, j / 16) + i % 16 * 16 + j % 16; }
    // The piece of 16 bytes that begins with (i, j).
    HEADRACE_DEVICE uint4& piece(int i, int j) const { return *reinterpret_cast<uint4*>(first + place(i, j)); }
    HEADRACE_DEVICE explicit operator bool() const { return first != nullptr; }
    // That of a chunk, of all chunks'.
    HEADRACE_DEVICE LowerImage of(std::int64_t place) const { return {first + place * size}; }
};

// Of the ten blocks of 16 x 16 on and below the diagonal of [64,64], in the order of LowerImage.
struct LowerPlace {
    int row, column;  // of blocks
    HEADRACE_DEVICE explicit LowerPlace(int number) : row((number >= 1) + (number >= 3) + (number >= 6)) {
        column = number - row * (row + 1) / 2;
    }
};

// f(i, j) for their pieces: a warp has a block at a time, eight lanes pieces of as many rows.
template <class F>
HEADRACE_DEVICE void each_lower_piece(F f, Warps by = all_warps()) {
    const int own = lane_here();
    HEADRACE_ROLLED
    for (int number = warp_here() - by.first; number < LowerImage::blocks; number += by.count) {
        const LowerPlace block(number);
        f(16 * block.row + own % 16, 16 * block.column + own / 16 * 8);
    }
}

// A lower triangular matrix by another (LowerImage), when all of the warps, which have read it, are here.
inline constexpr int replacing_barrier = 2;
HEADRACE_DEVICE void replace_lower(Matrix<64> matrix, const std::uint16_t* image, Warps by) {
    ptx::sync_threads(replacing_barrier, by.count * warp_lanes);
    const auto replace = [&](int i, int j) {
        *reinterpret_cast<uint4*>(&matrix.pair(i, j)) = *reinterpret_cast<const uint4*>(image + LowerImage::place(i, j));
    };
    each_lower_piece(replace, by);
    ptx::publish_to_products();
    ptx::sync_threads(replacing_barrier, by.count * warp_lanes);
}

// Rows of tokens in running order: the first one's address, and bytes to the next one.
struct TokenRows {
    char* first;
    std::int64_t step;
    HEADRACE_DEVICE TokenRows from(std::int64_t token) const { return {first + token * step, step}; }
    HEADRACE_DEVICE TokenRows right(int columns) const { return {first + 2 * columns, step}; }
    // Whether 32 rows lie within 2^31 bytes.
    HEADRACE_DEVICE bool near() const {
        const int narrow = static_cast<int>(step);
        return narrow == step && narrow / (1 << 26) == 0;
    }
};
HEADRACE_DEVICE TokenRows rows_of(const Strided& tensor, const ChunkRange& range, std::int64_t head, int first_column) {
    return {tensor.data + 2 * offset_of(tensor, range.row, range.token(0), head, first_column),
            2 * (range.reverse ? -tensor.stride[1] : tensor.stride[1])};
}

// Queues copies of `count` columns of `length` rows in pieces of 16 bytes; the rest of [padded, width] becomes zero. A
// thread has the same piece of rows that lie multiples of eight apart, at distances known beforehand: `by` are as many
// warps as have a piece of each of eight rows, or a multiple.
template <int columns>
HEADRACE_DEVICE void copy_pieces(Matrix<columns> to, const char* from, std::int64_t step, int length, int padded,
                                 int count, int width, Warps by) {
    if constexpr (columns > 128) {
        HEADRACE_ROLLED
        for (int first = 0; first < columns; first += 128)
            copy_pieces(Matrix<128>{to.data + 64 * first}, from + 2 * first, step, length, padded, count - first,
                        width - first, by);
        return;
    }
    constexpr int pieces = columns / 8;
    const int thread = thread_here() - by.first * warp_lanes, together = by.count * warp_lanes / pieces,
              first_row = thread / pieces, column = thread % pieces * 8;
    if (column >= width) return;
    const int bytes = column < count ? 16 : 0;
    std::uint32_t to_piece = to.piece(first_row, column);
    const char* of_row = from + first_row * step + 2 * column;
    const std::int64_t to_next = together * step;
    HEADRACE_ROLLED
    for (int row = first_row; row < padded; row += together) {
        const bool given = row < length && bytes > 0;
        ptx::copy_16(to_piece, given ? of_row : from, given ? bytes : 0);
        to_piece += static_cast<std::uint32_t>(together * 2 * Matrix<columns>::row);
        of_row += to_next;
    }
}
// The pieces that a thread copies of [64, columns], all of it, by so many threads from `first` on, of rows that are
// `near`: two instructions for a copy. Of more than 128 columns the same pieces of each 128.
template <int columns, int threads = block_threads>
struct WholePieces {
    static constexpr int parts = columns > 128 ? columns / 128 : 1;
    static constexpr unsigned pieces = columns / 8 / parts, together = threads / pieces;
    static_assert(together % 8 == 0 && together <= 32);
    static constexpr int count = static_cast<int>(64 / together);

    const char* from;
    int to_next;
    std::uint32_t to;

    HEADRACE_DEVICE WholePieces(Matrix<columns> matrix, TokenRows rows, int first) {
        const unsigned thread = static_cast<unsigned>(thread_here() - first), row = thread / pieces,
                       piece = thread % pieces;
        const int step = static_cast<int>(rows.step);
        to_next = static_cast<int>(together * static_cast<unsigned>(step));  // of far rows nothing that is used
        to = matrix.piece(static_cast<int>(row), static_cast<int>(8 * piece));
        from = rows.first + static_cast<std::int64_t>(row) * step + 16 * piece;
    }
    // To the matrix, or one that lies so many bytes behind it.
    HEADRACE_DEVICE void copy(std::uint32_t behind = 0) const {
#pragma unroll
        for (int n = 0; n < count; ++n) copy_row(to + behind, n, from + static_cast<std::int64_t>(n) * to_next);
    }
    // Of the n-th of its rows, to the first one's place.
    HEADRACE_DEVICE static void copy_row(std::uint32_t to, int n, const char* from) {
#pragma unroll
        for (int part = 0; part < parts; ++part)
            ptx::copy_16(to + (n * together + part * 128) * 2 * Matrix<columns>::row, from + 256 * part, 16);
    }
    // What 64 rows further takes; to the same pieces so many times that.
    HEADRACE_DEVICE std::int64_t rows() const { return static_cast<std::int64_t>(count) * to_next; }
    HEADRACE_DEVICE void advance(int times = 1) { from += static_cast<std::int64_t>(times * count) * to_next; }
};
// The same with every place known beforehand, so that copies follow one another without an instruction in between: for
// warps that have registers, where what they fetch is waited for.
template <int columns, int threads = block_threads>
struct PlacedPieces {
    using Whole = WholePieces<columns, threads>;
    const char* from[Whole::count];
    int to_next;
    std::uint32_t to;

    HEADRACE_DEVICE PlacedPieces(Matrix<columns> matrix, TokenRows rows, int first) {
        const Whole pieces(matrix, rows, first);
        to_next = pieces.to_next, to = pieces.to;
#pragma unroll
        for (int n = 0; n < Whole::count; ++n) from[n] = pieces.from + static_cast<std::int64_t>(n) * to_next;
    }
    HEADRACE_DEVICE void copy(std::uint32_t behind) const {
#pragma unroll
        for (int n = 0; n < Whole::count; ++n) Whole::copy_row(to + behind, n, from[n]);
    }
    // What 64 rows further takes.
    HEADRACE_DEVICE std::int64_t rows() const { return static_cast<std::int64_t>(Whole::count) * to_next; }
    HEADRACE_DEVICE void advance() {
        const std::int64_t further = rows();
#pragma unroll
        for (const char*& row : from) row += further;
    }
};
// The line of 128 bytes of [64, columns] that a thread asks for before it is copied, so that it is in L2 by then; there
// are a thread for each, or more. Of more than 128 columns the first of two.
template <int columns>
HEADRACE_DEVICE const char* line_of(TokenRows rows, int thread) {
    constexpr unsigned together = columns > 128 ? 2 : 1, lines = columns / 64 / together;
    const auto own = static_cast<unsigned>(thread);
    return rows.from(own / lines).first + own % lines * (together * 128);
}
template <int columns, int threads = block_threads>
HEADRACE_DEVICE void copy_whole(Matrix<columns> to, TokenRows rows, int first) {
    WholePieces<columns, threads>(to, rows, first).copy();
}

// The same of `count` lines that lie one behind the other, or so many elements apart, up to 64.
template <int apart = 0, int threads = 0, int columns>
HEADRACE_DEVICE void copy_lines(Matrix<columns> to, const std::uint16_t* from, int count) {
    constexpr int step = apart > 0 ? apart : columns;
    if constexpr (threads > 0) {  // of the block: whole ones have code of their own, which is shorter to run
        const TokenRows rows{reinterpret_cast<char*>(const_cast<std::uint16_t*>(from)), 2 * step};
        if (count >= 64) return copy_whole<columns, threads>(to, rows, 0);
    }
    copy_pieces(to, reinterpret_cast<const char*>(from), 2 * step, count, 64, columns, columns, all_warps());
}

// The same of rows of tokens. They are there behind ptx::wait_for_copies and a barrier. Where `by` have so many
// threads, whole chunks have code of their own, which is shorter to run.
template <int columns, int threads = block_threads>
HEADRACE_DEVICE void copy_rows(Matrix<columns> to, TokenRows rows, int length, int padded, int count,
                               int width = columns, Warps by = all_warps()) {
    if constexpr (threads > 0) {
        const bool all = length == 64 && count >= columns && width == columns && by.count * warp_lanes == threads;
        if (all && rows.near()) return copy_whole<columns, threads>(to, rows, by.first * warp_lanes);
    }
    copy_pieces(to, rows.first, rows.step, length, padded, count, width, by);
}
// Of the range's tokens, from first_column on.
template <int columns, int threads = block_threads>
HEADRACE_DEVICE void copy_tokens(Matrix<columns> to, const Strided& tensor, const ChunkRange& range, std::int64_t head,
                                 int first_column, int count) {
    copy_rows<columns, threads>(to, rows_of(tensor, range, head, first_column), range.length, range.rows, count);
}

// The other way; pieces past `count` are left alone.
template <int columns>
HEADRACE_DEVICE void store_matrix(const Strided& tensor, Matrix<columns> from, const ChunkRange& range,
                                  std::int64_t head, int first_column, int count) {
    const TokenRows to = rows_of(tensor, range, head, first_column);
    each_piece<columns>(range.length, [&](int i, int j) {
        if (j < count)
            *reinterpret_cast<uint4*>(to.first + i * to.step + 2 * j) =
                *reinterpret_cast<const uint4*>(&from.pair(i, j));
    });
}

}  // namespace headrace::cuda
