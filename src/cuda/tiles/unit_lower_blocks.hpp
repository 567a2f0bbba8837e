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

// inverse = (I - n)^-1, n [64,64] strictly lower, as high + low in two images. Blocks on the diagonal by substitution
// in fp32; then [[A, 0], [-B, D]]^-1 = [[A^-1, 0], [D^-1 B A^-1, D^-1]] twice, from 16 to 32 and 64 rows, with operands
// of 16 bits. What a warp multiplies from the right it has in registers, as it is or as the transpose of a product:
// (B A^-1)^T = A^-T B^T.
struct UnitLowerBlocks {
    // What is stored: the inverse without its ones; with factors, each column times its factor.
    struct Images {
        LowerImage high, low;
        const float* of_columns;  // [64] or null
    };
    static constexpr int blocks = 4, size = 16, half = size / 2;  // of a diagonal of blocks

    // n's blocks on its diagonal, fp32, zeros from the diagonal on: the first, elements to the next.
    Tile<float> diagonal;
    int to_next_diagonal;

    // With room for the blocks on the diagonal, or where those of n are.
    __host__ __device__ void carve(Arena& arena) {
        to_next_diagonal = size * diagonal_row + 4;  // four blocks' elements lie in different banks
        diagonal = {arena.take<float>(blocks * to_next_diagonal), diagonal_row};
        carve_others(arena);
    }
    __host__ __device__ void carve(Arena& arena, Tile<float> n) {
        diagonal = n;
        to_next_diagonal = size * n.row + size;
        carve_others(arena);
    }
    // Of a lane's pair in a block on the diagonal.
    HEADRACE_DEVICE float2& diagonal_pair(int block, int i, int j) const {
        return *reinterpret_cast<float2*>(&diagonal_block(block).at(i, j));
    }
    // `own`: this warp's blocks of n; those on the diagonal are in `diagonal`, behind a barrier. Squares are of the
    // inverse itself: not with factors. Called by four warps. The last two may come back while the first two go on.
    HEADRACE_DEVICE void compute(const float (&own)[LowerBlock::turns][2][4], Images to, bool with_squares) const {
        if (warp() == 2) invert_diagonal<size>(to, with_squares);
        if (warp() == 3) invert_diagonal<half>(to, with_squares);
        ptx::sync_block();
        if (warp() % 2 == 0) join_16(warp() == 0 ? 3 : 1, own[0], to, with_squares);
        ptx::sync_block();
        if (warp() < 2) join_32(3 - warp(), own[1], own[2], to, with_squares);
    }
    // Behind it and a barrier, where squares are wanted: the sum of those of row i, of every second block.
    HEADRACE_DEVICE float squares_of(int i, int first) const {
        float sum = 0;
        HEADRACE_ROLLED
        for (int block = first; block <= i / size; block += 2) sum += squares_[block * blocks * size + i];
        return sum;
    }

  private:
    // Of rows in shared memory: eight of them, of 16 bytes each, lie in all banks.
    static constexpr int diagonal_row = 20, operand_row = 24;
    // Of operands: the inverse's blocks on the diagonal, then those of rows 16 and 48 next to it.
    static constexpr int operands = 6;
    HEADRACE_DEVICE static int beside_diagonal(int row) { return blocks + row / 2; }
    static constexpr int joining_barrier = 1;

    std::uint16_t* operands_;  // [operands,2,16,operand_row] high and low
    uint4* passed_;            // [2,2,lanes] products of rows 32, from one warp to another
    float* squares_;           // [4,64] sums of squares of the inverse, of each row in a column of blocks

    __host__ __device__ void carve_others(Arena& arena) {
        operands_ = arena.take<std::uint16_t>(operands * 2 * size * operand_row);
        passed_ = arena.take<uint4>(2 * 2 * warp_lanes);
        squares_ = arena.take<float>(blocks * blocks * size);
    }
    HEADRACE_DEVICE Tile<float> diagonal_block(int block) const {
        return {diagonal.data + block * to_next_diagonal, diagonal.row};
    }

    // Of all four blocks the lower eight rows, which have `columns` = 16, or the upper ones, which have 8. A lane has a
    // row x of the inverse: x (I - n) is that row of I.
    template <int columns>
    HEADRACE_DEVICE void invert_diagonal(Images to, bool with_squares) const {
        constexpr int first_row = columns - half;
        const int block = lane() / half, row = first_row + lane() % half;
        const Tile<float> n = diagonal_block(block);
        float x[size] = {};
#pragma unroll
        for (int j = first_row; j < columns; ++j) x[j] = j == row ? 1.0f : 0.0f;
#pragma unroll
        for (int m = columns - 1; m > 0; --m) {
#pragma unroll
            for (int j = 0; j < m; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(&n.at(m, j));
                const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (j + c < m) x[j + c] = fmaf(of[c], x[m], x[j + c]);
            }
        }
        SplitPair pairs[size / 2] = {};
        split<columns>(pairs, x);
        store_row(operand(block, 0) + row * operand_row, operand(block, 1) + row * operand_row, pairs);
        if (to.of_columns != nullptr) {
            float of_columns[columns];  // ahead of the choice, which then needs no branch
#pragma unroll
            for (int j = 0; j < columns; j += 4)
                *reinterpret_cast<float4*>(of_columns + j) =
                    *reinterpret_cast<const float4*>(to.of_columns + block * size + j);
#pragma unroll
            for (int j = 0; j < columns; ++j) x[j] = j == row ? 0.0f : x[j] * of_columns[j];
            split<columns>(pairs, x);
        } else {
            const std::uint32_t without_one = row % 2 == 0 ? 0 : 0xffff;  // of the pair on the diagonal
#pragma unroll
            for (int n = first_row / 2; n < columns / 2; ++n)
                pairs[n].high &= n == row / 2 ? without_one : 0xffffffff;
        }
        const int place = LowerImage::first_of(block, block) + row * size;
        store_row(to.high.first + place, to.low.first + place, pairs);
        if (!with_squares) return;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < columns; ++j) sum = fmaf(x[j], x[j], sum);
        squares_[block * blocks * size + block * size + row] = sum;
    }
    template <int columns>
    HEADRACE_DEVICE static void split(SplitPair (&pairs)[size / 2], const float (&x)[size]) {
#pragma unroll
        for (int n = 0; n < columns / 2; ++n) pairs[n] = split_pair(x[2 * n], x[2 * n + 1]);
    }
    HEADRACE_DEVICE static void store_row(std::uint16_t* high, std::uint16_t* low, const SplitPair (&of)[size / 2]) {
#pragma unroll
        for (int n = 0; n < size / 2; n += 4) {
            *reinterpret_cast<uint4*>(high + 2 * n) = {of[n].high, of[n + 1].high, of[n + 2].high, of[n + 3].high};
            *reinterpret_cast<uint4*>(low + 2 * n) = {of[n].low, of[n + 1].low, of[n + 2].low, of[n + 3].low};
        }
    }
    // The block left of the diagonal in a row of blocks, 1 or 3.
    HEADRACE_DEVICE void join_16(int row, const float (&n)[2][4], Images to, bool with_squares) const {
        float y[2][4] = {}, z[2][4] = {};
        multiply_transposed(y, load_transposed(row - 1), split_a(n[0], n[1]));
        multiply_transposed(z, load(row), split_a(y[0], y[1]));
        const SplitA of = leave(z, row, row - 1, to, with_squares);
        store_block(operand(beside_diagonal(row), 0), operand(beside_diagonal(row), 1), operand_row, of);
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
        return passed_[(2 * column + part) * warp_lanes + lane_here()];
    }
    HEADRACE_DEVICE SplitA load(int which) const {
        const int own = lane_here(), place = own % 16 * operand_row + own / 16 * 8;
        SplitA of;
        ptx::load_matrix(of.high, ptx::shared_address(operand(which, 0) + place));
        ptx::load_matrix(of.low, ptx::shared_address(operand(which, 1) + place));
        return of;
    }
    HEADRACE_DEVICE SplitA load_transposed(int which) const {
        const int own = lane_here(), place = (own % 8 + own / 16 * 8) * operand_row + own / 8 % 2 * 8;
        SplitA of;
        ptx::load_matrix_transposed(of.high, ptx::shared_address(operand(which, 0) + place));
        ptx::load_matrix_transposed(of.low, ptx::shared_address(operand(which, 1) + place));
        return of;
    }
    // This lane's accumulators of a block, its first element at `high` and at `low`.
    HEADRACE_DEVICE static void store_block(std::uint16_t* high, std::uint16_t* low, int to_next, const SplitA& of) {
        const LanePlace at(lane_here());
        high += at.row * to_next + at.column, low += at.row * to_next + at.column;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int pair = n % 2 * 8 * to_next + n / 2 * 8;
            *reinterpret_cast<std::uint32_t*>(high + pair) = of.high[n];
            *reinterpret_cast<std::uint32_t*>(low + pair) = of.low[n];
        }
    }
    // Stores a block of the inverse, which comes back as operand.
    HEADRACE_DEVICE SplitA leave(float (&z)[2][4], int row, int column, Images to, bool with_squares) const {
        const LanePlace at(lane_here());
        if (with_squares) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0;
#pragma unroll
                for (int n = 0; n < 4; ++n) sum = fmaf(z[n / 2][2 * half + n % 2], z[n / 2][2 * half + n % 2], sum);
                sum = sum_of_quad(sum);
                if (lane() % 4 == 0) squares_[column * blocks * size + row * size + at.row + 8 * half] = sum;
            }
        }
        const SplitA of = split_a(z[0], z[1]);
        SplitA stored = of;
        if (to.of_columns != nullptr) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int j = column * size + 8 * tile + at.column;
                const float2 pair = *reinterpret_cast<const float2*>(to.of_columns + j);
                z[tile][0] *= pair.x, z[tile][1] *= pair.y, z[tile][2] *= pair.x, z[tile][3] *= pair.y;
            }
            stored = split_a(z[0], z[1]);
        }
        const int place = LowerImage::first_of(row, column);
        store_block(to.high.first + place, to.low.first + place, size, stored);
        return of;
    }
};

// What the tile of an inverse has of UnitLowerBlocks::Images with factors, as high + low + rest. By all warps.
HEADRACE_DEVICE void store_exact_inverse(Tile<float> inverse, UnitLowerBlocks::Images to, LowerImage rest) {
    const auto eight = [](float(&of)[8], const float* from) {
        const float4 x = reinterpret_cast<const float4*>(from)[0], y = reinterpret_cast<const float4*>(from)[1];
        of[0] = x.x, of[1] = x.y, of[2] = x.z, of[3] = x.w, of[4] = y.x, of[5] = y.y, of[6] = y.z, of[7] = y.w;
    };
    each_lower_piece([&](int i, int j) {
        float elements[8], of_columns[8];  // ahead of the choice, which then needs no branch
        eight(elements, &inverse.at(i, j));
        eight(of_columns, to.of_columns + j);
        SplitPair pairs[4];
        std::uint32_t rests[4];
#pragma unroll
        for (int c = 0; c < 8; ++c) elements[c] = i == j + c ? 0.0f : elements[c] * of_columns[c];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            pairs[pair] = split_pair(elements[2 * pair], elements[2 * pair + 1]);
            rests[pair] = rest_of_pair(elements[2 * pair], elements[2 * pair + 1]);
        }
        to.high.piece(i, j) = {pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high};
        to.low.piece(i, j) = {pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low};
        rest.piece(i, j) = {rests[0], rests[1], rests[2], rests[3]};
    });
}

}  // namespace headrace::cuda
