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
    for (int place = ptx::not_before(static_cast<int>(threadIdx.x)) - by.first * warp_lanes; place < rows * pieces;
         place += by.count * warp_lanes)
        f(place / pieces, place % pieces * 8);
}

// f(i, n) for the rows i of 64 of which a thread has a piece, `pieces` to a row, by so many threads; n counts them.
// They lie multiples of eight apart, so that a Matrix has the pieces at places a constant apart.
template <int threads, int pieces, class F>
HEADRACE_DEVICE void each_own_row(F f) {
    constexpr int step = threads / pieces;
    static_assert(step % 8 == 0);
    const int first = ptx::not_before(static_cast<int>(threadIdx.x)) / pieces;
#pragma unroll 4
    for (int n = 0; n < 64 / step; ++n) f(first + n * step, n);
}

// A lower triangular [64,64] in global memory: its ten blocks of 16 x 16 on and below the diagonal, row after row of
// blocks, each row-major.
struct LowerImage {
    static constexpr std::int64_t size = lower_size;
    std::uint16_t* first;

    // Of a block, and of an element of the matrix.
    static __host__ __device__ int first_of(int row, int column) { return 256 * (row * (row + 1) / 2 + column); }
    static __host__ __device__ int place(int i, int j) { return first_of(i / 16, j / 16) + i % 16 * 16 + j % 16; }
    // The piece of 16 bytes that begins with (i, j).
    HEADRACE_DEVICE uint4& piece(int i, int j) const { return *reinterpret_cast<uint4*>(first + place(i, j)); }
    HEADRACE_DEVICE explicit operator bool() const { return first != nullptr; }
    // That of a chunk, of all chunks'.
    HEADRACE_DEVICE LowerImage of(std::int64_t place) const { return {first + place * size}; }
};

// f(i, j) for the pieces of [64,64] in blocks of 16 x 16 on and below the diagonal: ten turns of a warp.
template <class F>
HEADRACE_DEVICE void each_lower_piece(F f, Warps by = all_warps()) {
    const int own = ptx::not_before(lane());
    HEADRACE_ROLLED
    for (int turn = ptx::not_before(warp()) - by.first; turn < 10; turn += by.count) {
        // Of rows from 48 on 8 pieces, of those from 16 on the first 4, of the first 16 and of those from 32 on 2 more.
        const int bits = turn < 4   ? 3
                         : turn < 8 ? 2
                                    : 1,
                  first_row = turn < 4   ? 48 + 4 * turn
                              : turn < 8 ? 8 * turn - 16
                                         : 32 * (turn - 8),
                  first_piece = turn < 9 ? 0 : 4;
        f(first_row + (own >> bits), 8 * (first_piece + (own & ((1 << bits) - 1))));
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
    ptx::sync_threads(replacing_barrier, by.count * warp_lanes);
}

// Rows of tokens in running order: the first one's address, and bytes to the next one.
struct TokenRows {
    char* first;
    std::int64_t step;
    HEADRACE_DEVICE TokenRows from(std::int64_t token) const { return {first + token * step, step}; }
};
HEADRACE_DEVICE TokenRows rows_of(const Strided& tensor, const ChunkRange& range, std::int64_t head, int first_column) {
    return {tensor.data + 2 * offset_of(tensor, range.row, range.token(0), head, first_column),
            2 * (range.reverse ? -tensor.stride[1] : tensor.stride[1])};
}

// Queues copies of `count` columns of `length` rows in pieces of 16 bytes; the rest of [padded, width] becomes zero.
// `whole`: there is none. A warp has eight rows at a time, as every eighth has its pieces in the same order.
template <int columns, bool whole>
HEADRACE_DEVICE void copy_pieces(Matrix<columns> to, const char* from, std::int64_t step, int length, int padded,
                                 int count, int width, Warps by) {
    constexpr int pieces = columns / 8, rows = warp_lanes / pieces;  // of a row; at once
    const int thread = ptx::not_before(static_cast<int>(threadIdx.x)), own = thread % warp_lanes,
              of_warp = 8 * (thread / warp_lanes - by.first), of_all = 8 * by.count, row = own / pieces,
              column = own % pieces * 8;
    if (column >= width) return;
    const int bytes = whole || column < count ? 16 : 0;
    std::uint32_t first_piece = to.piece(of_warp + row, column);
    const char* of_eight = from + (of_warp + row) * step + 2 * column;
    HEADRACE_ROLLED
    for (int first = of_warp; first < padded; first += of_all) {
        const char* of_row = of_eight;
#pragma unroll
        for (int i = 0; i < 8; i += rows) {
            const bool given = whole || (first + row + i < length && bytes > 0);
            ptx::copy_16((first_piece ^ static_cast<std::uint32_t>(16 * i)) + 2 * columns * i, given ? of_row : from,
                         given ? bytes : 0);
            of_row += rows * step;
        }
        of_eight += of_all * step;
        first_piece += static_cast<std::uint32_t>(of_all * 2 * columns);
    }
}

// The same of `count` lines of a matrix that lies one line behind the other, up to 64.
template <int columns>
HEADRACE_DEVICE void copy_lines(Matrix<columns> to, const std::uint16_t* from, int count) {
    copy_pieces<columns, false>(to, reinterpret_cast<const char*>(from), 2 * columns, count, 64, columns, columns,
                                all_warps());
}

// The same of rows of tokens. They are there behind ptx::wait_for_copies and a barrier. `apart`: code of its own for
// whole chunks, which is shorter to run.
template <int columns, bool apart = true>
HEADRACE_DEVICE void copy_rows(Matrix<columns> to, TokenRows rows, int length, int padded, int count,
                               int width = columns, Warps by = all_warps()) {
    apart&& length == padded&& count >= width
        ? copy_pieces<columns, true>(to, rows.first, rows.step, length, padded, count, width, by)
        : copy_pieces<columns, false>(to, rows.first, rows.step, length, padded, count, width, by);
}
// Of the range's tokens, from first_column on.
template <int columns, bool apart = true>
HEADRACE_DEVICE void copy_tokens(Matrix<columns> to, const Strided& tensor, const ChunkRange& range, std::int64_t head,
                                 int first_column, int count) {
    copy_rows<columns, apart>(to, rows_of(tensor, range, head, first_column), range.length, range.rows, count);
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
