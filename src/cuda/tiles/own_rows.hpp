// own_rows: copies of 64 rows into matrices in shared memory by a block whose threads each have a piece of the same
// column in every so many rows.
#pragma once

#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// f(i, n) for the rows i of 64 of which the thread has a piece, `pieces` to a row; n counts them. Rows lie multiples of
// eight apart, so that a Matrix has the pieces at places a constant apart.
template <int threads, int pieces, class F>
HEADRACE_DEVICE void each_own_row(F f) {
    constexpr int step = threads / pieces;
    static_assert(step % 8 == 0);
#pragma unroll 4
    for (int n = 0; n < 64 / step; ++n) f(static_cast<int>(threadIdx.x) / pieces + n * step, n);
}

// Queues copies of `count` lines of `columns` elements; zeros behind them.
template <int threads, int columns>
HEADRACE_DEVICE void copy_lines(Matrix<columns> to, const std::uint16_t* from, int count) {
    constexpr int pieces = columns / 8, step = threads / pieces;
    const int i = static_cast<int>(threadIdx.x) / pieces, j = static_cast<int>(threadIdx.x) % pieces * 8;
    const std::uint32_t first = to.piece(i, j);
    const std::uint16_t* const own = from + i * columns + j;
    each_own_row<threads, pieces>([&](int row, int n) {
        const bool inside = row < count;
        ptx::copy_16(first + 2 * columns * step * n, inside ? own + columns * step * n : from, inside ? 16 : 0);
    });
}

// copy_tokens, with few instructions where rows have whole pieces.
template <int threads, int columns>
HEADRACE_DEVICE void copy_token_rows(Matrix<columns> to, const Strided& tensor, const ChunkRange& range,
                                     std::int64_t head, int first_column, int count) {
    const TokenRows rows = rows_of(tensor, range, head, first_column);
    if (!rows.in_pieces(16) || count % 8 != 0) return copy_tokens(to, tensor, range, head, first_column, count);
    constexpr int pieces = columns / 8, step = threads / pieces;
    const int i = static_cast<int>(threadIdx.x) / pieces, j = static_cast<int>(threadIdx.x) % pieces * 8;
    const std::uint32_t first = to.piece(i, j);
    const char* const own = rows.first + i * rows.step + 2 * j;
    each_own_row<threads, pieces>([&](int row, int n) {
        const bool inside = row < range.length && j < count;
        ptx::copy_16(first + 2 * columns * step * n, inside ? own + n * step * rows.step : rows.first, inside ? 16 : 0);
    });
}

}  // namespace headrace::cuda
