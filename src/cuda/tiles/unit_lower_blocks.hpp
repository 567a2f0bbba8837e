// unit_lower_blocks: the inverse of I - n in 16 bits, where four warps have n in accumulators (LowerBlock).
#pragma once

#include "cuda/tiles/lower_blocks.hpp"

namespace headrace::cuda {

// sums += a b^T of blocks of 16 x 16. What split_a makes of a block's accumulators is the block as a left operand, and
// its transpose as a right one.
HEADRACE_DEVICE void multiply_transposed(float (&sums)[2][4], const SplitA& a, const SplitA& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        multiply(sums[half], a, {{b.high[half], b.high[2 + half]}, {b.low[half], b.low[2 + half]}});
}

// inverse = (I - n)^-1, n [64,64] strictly lower, as high + low in two images, by the method of UnitLowerInverse: blocks
// on the diagonal, row by row; then D^-1 B A^-1 of two of 16 and of two of 32 rows. What a warp multiplies from the
// right it has in registers, as it is or as the transpose of a product: (B A^-1)^T = A^-T B^T.
struct UnitLowerBlocks {
    struct Images {
        LowerImage high, low;
    };

    float* diagonal;  // [4,16,diagonal_row] n's blocks on its diagonal, zeros from the diagonal on
    float* squares;   // [4,64] sums of squares of the inverse, of each row in a column of blocks, where they are wanted

    __host__ __device__ void carve(Arena& arena) {
        diagonal = arena.take<float>(blocks * size * diagonal_row);
        squares = arena.take<float>(blocks * blocks * size);
        operands_ = arena.take<std::uint16_t>(operands * 2 * size * operand_row);
        passed_ = arena.take<uint4>(2 * 2 * warp_lanes);
    }
    // Of a lane's pair in a block on the diagonal.
    HEADRACE_DEVICE float2& diagonal_pair(int block, int i, int j) const {
        return *reinterpret_cast<float2*>(diagonal + (block * size + i) * diagonal_row + j);
    }
    // `own`: this warp's blocks of n; those on the diagonal are in `diagonal`, behind a barrier. Called by four warps. The
    // last two may come back while the first two go on.
    HEADRACE_DEVICE void compute(const float (&own)[LowerBlock::turns][2][4], Images to, bool with_squares) const {
        if (warp() >= 2) invert_diagonal(2 * (warp() - 2) + lane() / size, to, with_squares);
        ptx::sync_block();
        if (warp() % 2 == 0) join_16(warp() == 0 ? 3 : 1, own[0], to, with_squares);
        ptx::sync_block();
        if (warp() < 2) join_32(3 - warp(), own[1], own[2], to, with_squares);
    }

  private:
    static constexpr int blocks = 4, size = 16;
    // Of rows in shared memory: eight of them, of 16 bytes each, lie in all banks.
    static constexpr int diagonal_row = 20, operand_row = 24;
    // Of operands: the inverse's blocks on the diagonal, then those of rows 16 and 48 next to it.
    static constexpr int operands = 6;
    HEADRACE_DEVICE static int beside_diagonal(int row) { return blocks + row / 2; }
    static constexpr int joining_barrier = 1;

    std::uint16_t* operands_;  // [operands,2,16,operand_row] high and low
    uint4* passed_;            // [2,2,lanes] products of rows 32, from one warp to another

    // A lane has a row x of the inverse: x (I - n) is that row of I.
    HEADRACE_DEVICE void invert_diagonal(int block, Images to, bool with_squares) const {
        const int row = lane() % size;
        const float* const n = diagonal + block * size * diagonal_row;
        float x[size];
#pragma unroll
        for (int j = 0; j < size; ++j) x[j] = j == row ? 1.0f : 0.0f;
#pragma unroll
        for (int m = size - 1; m > 0; --m) {
#pragma unroll
            for (int j = 0; j < m; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(n + m * diagonal_row + j);
                const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (j + c < m) x[j + c] = fmaf(of[c], x[m], x[j + c]);
            }
        }
        SplitPair pairs[size / 2];
#pragma unroll
        for (int p = 0; p < size / 2; ++p) pairs[p] = split_pair(x[2 * p], x[2 * p + 1]);
        const int place = LowerImage::first_of(block, block) + row * size;
        std::uint16_t *const high = operand(block, 0) + row * operand_row, *const low = operand(block, 1) + row * operand_row;
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            const SplitPair(&of)[4] = *reinterpret_cast<const SplitPair(*)[4]>(pairs + 4 * piece);
            const uint4 of_high{of[0].high, of[1].high, of[2].high, of[3].high},
                of_low{of[0].low, of[1].low, of[2].low, of[3].low};
            reinterpret_cast<uint4*>(high)[piece] = of_high, reinterpret_cast<uint4*>(low)[piece] = of_low;
            reinterpret_cast<uint4*>(to.high.first + place)[piece] = of_high;
            reinterpret_cast<uint4*>(to.low.first + place)[piece] = of_low;
        }
        if (!with_squares) return;
        float sum = 0;
#pragma unroll
        for (const float element : x) sum = fmaf(element, element, sum);
        squares[block * blocks * size + block * size + row] = sum;
    }
    // The block left of the diagonal in a row of blocks, 1 or 3.
    HEADRACE_DEVICE void join_16(int row, const float (&n)[2][4], Images to, bool with_squares) const {
        float y[2][4] = {}, z[2][4] = {};
        multiply_transposed(y, load_transposed(row - 1), split_a(n[0], n[1]));
        multiply_transposed(z, load(row), split_a(y[0], y[1]));
        const SplitA of = leave(z, row, row - 1, to, with_squares);
        const LanePlace at;
        const int place = at.row * operand_row + at.column;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int pair = place + n % 2 * 8 * operand_row + n / 2 * 8;
            *reinterpret_cast<std::uint32_t*>(operand(beside_diagonal(row), 0) + pair) = of.high[n];
            *reinterpret_cast<std::uint32_t*>(operand(beside_diagonal(row), 1) + pair) = of.low[n];
        }
    }
    // The first two blocks of a row, 2 or 3; n's second and first block there.
    HEADRACE_DEVICE void join_32(int row, const float (&second)[2][4], const float (&first)[2][4], Images to,
                                 bool with_squares) const {
        SplitA y[2];
        {
            float sums[2][2][4] = {};
            const SplitA of_second = split_a(second[0], second[1]);
            multiply_transposed(sums[0], load_transposed(0), split_a(first[0], first[1]));
            multiply_transposed(sums[1], load_transposed(1), of_second);
            multiply_transposed(sums[0], load_transposed(beside_diagonal(1)), of_second);
#pragma unroll
            for (int column = 0; column < 2; ++column) y[column] = split_a(sums[column][0], sums[column][1]);
        }
        if (row == 2) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                passed(column, 0) = {y[column].high[0], y[column].high[1], y[column].high[2], y[column].high[3]};
                passed(column, 1) = {y[column].low[0], y[column].low[1], y[column].low[2], y[column].low[3]};
            }
        }
        ptx::sync_threads(joining_barrier, 2 * warp_lanes);
        float z[2][2][4] = {};
        if (row == 3) {
            const SplitA beside = load(beside_diagonal(3));
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const uint4 high = passed(column, 0), low = passed(column, 1);
                multiply_transposed(z[column], beside,
                                    {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}});
            }
        }
        const SplitA on_diagonal = load(row);
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            multiply_transposed(z[column], on_diagonal, y[column]);
            leave(z[column], row, column, to, with_squares);
        }
    }

    HEADRACE_DEVICE std::uint16_t* operand(int which, int part) const {
        return operands_ + (2 * which + part) * size * operand_row;
    }
    HEADRACE_DEVICE uint4& passed(int column, int part) const {
        return passed_[(2 * column + part) * warp_lanes + lane()];
    }
    HEADRACE_DEVICE SplitA load(int which) const {
        const int own = ptx::not_before(lane()), place = own % 16 * operand_row + own / 16 * 8;
        SplitA of;
        ptx::load_matrix(of.high, ptx::shared_address(operand(which, 0) + place));
        ptx::load_matrix(of.low, ptx::shared_address(operand(which, 1) + place));
        return of;
    }
    HEADRACE_DEVICE SplitA load_transposed(int which) const {
        const int own = ptx::not_before(lane()), place = (own % 8 + own / 16 * 8) * operand_row + own / 8 % 2 * 8;
        SplitA of;
        ptx::load_matrix_transposed(of.high, ptx::shared_address(operand(which, 0) + place));
        ptx::load_matrix_transposed(of.low, ptx::shared_address(operand(which, 1) + place));
        return of;
    }
    // Stores a block of the inverse.
    HEADRACE_DEVICE SplitA leave(const float (&z)[2][4], int row, int column, Images to, bool with_squares) const {
        const LanePlace at;
        const SplitA of = split_a(z[0], z[1]);
        const int place = LowerImage::first_of(row, column) + at.row * size + at.column;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int pair = place + n % 2 * 8 * size + n / 2 * 8;
            *reinterpret_cast<std::uint32_t*>(to.high.first + pair) = of.high[n];
            *reinterpret_cast<std::uint32_t*>(to.low.first + pair) = of.low[n];
        }
        if (with_squares) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0;
#pragma unroll
                for (int n = 0; n < 4; ++n) sum = fmaf(z[n / 2][2 * half + n % 2], z[n / 2][2 * half + n % 2], sum);
                sum = sum_of_quad(sum);
                if (lane() % 4 == 0) squares[column * blocks * size + row * size + at.row + 8 * half] = sum;
            }
        }
        return of;
    }
};

}  // namespace headrace::cuda
