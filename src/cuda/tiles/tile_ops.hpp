// tile_ops: the primitives of the algorithm pages on a thread block: tiles in memory that all of its threads share.
//
// All threads of a block call these functions together, with the same arguments. Each ends with a barrier where it has
// written to memory that others read, so that one may follow the other.
#pragma once

#include "cuda/ptx.hpp"

namespace headrace::cuda {

inline constexpr int warp_lanes = 32, block_warps = 4, block_threads = block_warps * warp_lanes;

constexpr __host__ __device__ int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

HEADRACE_DEVICE int lane() { return static_cast<int>(threadIdx.x % warp_lanes); }
HEADRACE_DEVICE int warp() { return static_cast<int>(threadIdx.x / warp_lanes); }
// Of this kernel's blocks: block_warps, or what the kernel's entry says.
HEADRACE_DEVICE int warps() { return static_cast<int>(blockDim.x / warp_lanes); }
// The same numbers, found where they are asked for, and what follows from them (ptx::not_before).
HEADRACE_DEVICE int thread_here() { return ptx::not_before(static_cast<int>(threadIdx.x)); }
HEADRACE_DEVICE int lane_here() {
    const int own = ptx::not_before(lane());
    __builtin_assume(own < warp_lanes);
    return own;
}
HEADRACE_DEVICE int warp_here() { return ptx::not_before(warp()); }
// Those of a block that share some work.
struct Warps {
    int first, count;
};
HEADRACE_DEVICE Warps all_warps() { return {0, warps()}; }
HEADRACE_DEVICE Warps warps_from(int first) { return {first, warps() - first}; }

// Of numbers below 2^31, as those of blocks are: divisions of 64 bits are a page of code each.
HEADRACE_DEVICE std::int64_t quotient(std::int64_t a, std::int64_t b) {
    return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}
// What a block or warp of that number is for: a head of a place (a sequence, a segment, a chunk), a part of it.
struct Task {
    std::int64_t place, head;
    int part;
};
HEADRACE_DEVICE Task task_of(std::int64_t number, std::int64_t heads, std::int64_t parts = 1) {
    const std::int64_t of_parts = quotient(number, parts), place = quotient(of_parts, heads);
    return {place, of_parts - place * heads, static_cast<int>(number - of_parts * parts)};
}

// Between all threads of a block whose warps come from different places in the code, where ptx::sync_block is for one.
// What they have written before is there for products of groups behind it.
inline constexpr int meeting_barrier = 3;
HEADRACE_DEVICE void meet_block() {
    ptx::publish_to_products();
    ptx::meet_threads(meeting_barrier, static_cast<int>(blockDim.x));
}
// What the block's threads have queued is there for all.
HEADRACE_DEVICE void end_copies_of_block() {
    ptx::wait_for_copies<0>();
    meet_block();
}

// A matrix in shared memory, or where that is full in global memory: element (i, j) at data[i * row + j]. Sizes are
// multiples of 16, padded with zeros.
template <class T>
struct Tile {
    T* data = nullptr;
    int row = 0;
    HEADRACE_DEVICE T& at(int i, int j) const { return data[i * row + j]; }
    HEADRACE_DEVICE Tile from(int i, int j) const { return {data + i * row + j, row}; }
    __host__ __device__ explicit operator bool() const { return data != nullptr; }
};

// Hands out pieces of a block's memory: of shared memory first, of `spill` what it has no room for. Without memory it
// measures, on the host.
struct Arena {
    char *shared = nullptr, *spill = nullptr;
    std::size_t shared_size = 0, shared_used = 0, spill_used = 0;

    template <class T>
    __host__ __device__ T* take(std::size_t count) {
        const std::size_t bytes = (count * sizeof(T) + 15) / 16 * 16;
        const bool fits = shared_used + bytes <= shared_size;
        std::size_t& used = fits ? shared_used : spill_used;
        char* const base = fits ? shared : spill;
        used += bytes;
#ifndef __CUDA_ARCH__
        if (base == nullptr) return nullptr;
#endif
        return reinterpret_cast<T*>(base + used - bytes);
    }
    // Lanes side by side in a row or in a column meet different banks, and so do 8 x 4 of doubles (multiply_f64).
    template <class T>
    __host__ __device__ Tile<T> tile(int rows, int columns) {
        const int row = round_up(columns, 16) + (sizeof(T) == 8 ? 4 : 1);
        return {take<T>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(row)), row};
    }
};

// f(i, j) for all elements of [rows, columns], neighbours in a row by neighbouring lanes.
template <class F>
HEADRACE_DEVICE void each_element(int rows, int columns, F f) {
    HEADRACE_ROLLED
    for (int i = warp(); i < rows; i += warps()) {
        HEADRACE_ROLLED
        for (int j = lane(); j < columns; j += warp_lanes) f(i, j);
    }
}
// f(i) for i < count
template <class F>
HEADRACE_DEVICE void each(int count, F f) {
    HEADRACE_ROLLED
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) f(i);
}

// dst[i,j] = value(i,j)
template <class T, class F>
HEADRACE_DEVICE void for_each(Tile<T> dst, int rows, int columns, F value) {
    each_element(rows, columns, [&](int i, int j) { dst.at(i, j) = value(i, j); });
    ptx::sync_block();
}

template <class T>
HEADRACE_DEVICE T sum_of_warp(T value) {
    HEADRACE_ROLLED
    for (int distance = warp_lanes / 2; distance > 0; distance /= 2) value += ptx::shuffle_xor(value, distance);
    return value;
}

// Of the four lanes that share a row of accumulators.
HEADRACE_DEVICE float sum_of_quad(float value) {
    value += ptx::shuffle_xor(value, 1);
    return value + ptx::shuffle_xor(value, 2);
}

// store(i, sum_j value(i, j)) for each row, by one lane; the sum of 32 interleaved parts, in an order that is always
// the same.
template <class Value, class Store>
HEADRACE_DEVICE void each_row_sum(int rows, int columns, Value value, Store store) {
    HEADRACE_ROLLED
    for (int i = warp(); i < rows; i += warps()) {
        decltype(value(0, 0)) sum = 0;
        HEADRACE_ROLLED
        for (int j = lane(); j < columns; j += warp_lanes) sum += value(i, j);
        sum = sum_of_warp(sum);
        if (lane() == 0) store(i, sum);
    }
    ptx::sync_block();
}

// Which terms d of sum_d a(i,d) b(d,j) are not zero: all, d <= i, or d >= i. Or all, of sums with j <= i: the others
// are left as they come, or as zero.
enum class Part { full, a_lower, a_upper, lower_sums };

// leave(i, j, sum_d a(i, d) b(d, j)); what leave writes must be no operand. Sizes are multiples of 16. A warp has 4
// rows of 32 `parts` columns at once, a lane 4 x `parts` sums: few_columns for scores, wide for rows of keys and
// values. Doubles are multiplied on tensor cores: a warp has 8 rows, of `wide` ones 16, and 16 columns at once.
inline constexpr int few_columns = 1, wide = 4;

template <int row_tiles, class A, class B, class Leave>
HEADRACE_DEVICE void multiply_doubles(A a, B b, int rows, int columns, int depth, Part part, Leave leave) {
    const int own = lane_here(), g = own / 4, t = own % 4, across = columns / 16, height = 8 * row_tiles;
    HEADRACE_ROLLED
    for (int tile = warp_here(); tile < rows / height * across; tile += warps()) {
        const int i = tile / across * height, j = tile % across * 16;
        double sums[row_tiles][2][2] = {};
        const bool nothing = part == Part::lower_sums && j >= i + height;
        const int begin = part == Part::a_upper ? i / 16 * 16 : 0, end = part == Part::a_lower ? i / 16 * 16 + 16
                                                                         : nothing             ? 0
                                                                                               : depth;
        HEADRACE_ROLLED
        for (int first = begin; first < end; first += 16) {
#pragma unroll
            for (int d = first; d < first + 16; d += 4) {
                double left[row_tiles], right[2];
#pragma unroll
                for (int r = 0; r < row_tiles; ++r) left[r] = a(i + 8 * r + g, d + t);
#pragma unroll
                for (int c = 0; c < 2; ++c) right[c] = b(d + t, j + 8 * c + g);
#pragma unroll
                for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) ptx::multiply_f64(sums[r][c], left[r], right[c]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
            for (int c = 0; c < 4; ++c) leave(i + 8 * r + g, j + 8 * (c / 2) + 2 * t + c % 2, sums[r][c / 2][c % 2]);
        }
    }
    ptx::sync_block();
}

template <class T, int parts, class A, class B, class Leave>
HEADRACE_DEVICE void multiply(A a, B b, int rows, int columns, int depth, Part part, Leave leave) {
    if constexpr (sizeof(T) == 8)
        return multiply_doubles<(parts < wide ? 1 : 2)>(a, b, rows, columns, depth, part, leave);
    const int height = 4 * warps();
    HEADRACE_ROLLED
    for (int step = 0; step * height < rows; ++step) {
        const int i = step * height + 4 * warp();
        HEADRACE_ROLLED
        for (int first = 0; first < columns; first += warp_lanes * parts) {
            T sums[4][parts] = {};
            const int begin = part == Part::a_upper ? i : 0,
                      end = part == Part::a_lower && i + 4 < depth ? i + 4 : depth;
            HEADRACE_ROLLED
            for (int d = begin; d < end && i < rows; ++d) {
                T left[4];
                for (int r = 0; r < 4; ++r) left[r] = a(i + r, d);
                for (int p = 0; p < parts; ++p) {
                    const int j = first + p * warp_lanes + lane();
                    const T right = j < columns ? b(d, j) : T(0);
                    for (int r = 0; r < 4; ++r) sums[r][p] = fma(left[r], right, sums[r][p]);
                }
            }
            for (int p = 0; p < parts && i < rows; ++p) {
                const int j = first + p * warp_lanes + lane();
                for (int r = 0; r < 4 && j < columns; ++r) leave(i + r, j, sums[r][p]);
            }
        }
    }
    ptx::sync_block();
}

// x <- (I - n)^-1 x, or with the transposed matrix; n [rows, rows] strictly lower, x [rows, columns], sizes multiples
// of
// 16. A thread has a column; of doubles a warp has 8 columns, and 8 rows at once take products of those that are solved
// before they are solved among themselves, in registers.
enum class Side { lower, transposed };

template <Side side>
HEADRACE_DEVICE void solve_doubles(Tile<double> x, Tile<double> n, int rows, int columns) {
    constexpr bool lower = side == Side::lower;
    const int own = lane_here(), g = own / 4, t = own % 4;
    const auto of = [&](int i, int m) { return lower ? n.at(i, m) : n.at(m, i); };  // what x_i takes of x_m
    HEADRACE_ROLLED
    for (int j = 8 * warp_here(); j < columns; j += 8 * warps()) {
        HEADRACE_ROLLED
        for (int step = 0; step < rows / 8; ++step) {
            const int first = lower ? 8 * step : rows - 8 * (step + 1);
            double factors[8], sums[2] = {x.at(first + g, j + 2 * t), x.at(first + g, j + 2 * t + 1)};
#pragma unroll
            for (int m = 0; m < 8; ++m) factors[m] = of(first + g, first + m);
            const int begin = lower ? 0 : first + 8, end = lower ? first : rows;
            HEADRACE_ROLLED
            for (int d = begin; d < end; d += 8) {
                ptx::multiply_f64(sums, of(first + g, d + t), x.at(d + t, j + g));
                ptx::multiply_f64(sums, of(first + g, d + 4 + t), x.at(d + 4 + t, j + g));
            }
#pragma unroll
            for (int each = 0; each < 7; ++each) {
                const int m = lower ? each : 7 - each;
                const double even = ptx::shuffle_from(sums[0], 4 * m + t), odd = ptx::shuffle_from(sums[1], 4 * m + t);
                const bool takes = lower ? g > m : g < m;
                sums[0] = takes ? fma(factors[m], even, sums[0]) : sums[0];
                sums[1] = takes ? fma(factors[m], odd, sums[1]) : sums[1];
            }
            x.at(first + g, j + 2 * t) = sums[0];
            x.at(first + g, j + 2 * t + 1) = sums[1];
            ptx::sync_warp();
        }
    }
    ptx::sync_block();
}

template <Side side, class T>
HEADRACE_DEVICE void solve_unit_lower(Tile<T> x, Tile<T> n, int rows, int columns) {
    if constexpr (sizeof(T) == 8) return solve_doubles<side>(x, n, rows, columns);
    each(columns, [&](int j) {
        HEADRACE_ROLLED
        for (int step = 1; step < rows; ++step) {
            const int i = side == Side::lower ? step : rows - 1 - step;
            T value = x.at(i, j);
            if (side == Side::lower) {
                HEADRACE_ROLLED
                for (int m = 0; m < i; ++m) value = fma(n.at(i, m), x.at(m, j), value);
            } else {
                HEADRACE_ROLLED
                for (int m = i + 1; m < rows; ++m) value = fma(n.at(m, i), x.at(m, j), value);
            }
            x.at(i, j) = value;
        }
    });
    ptx::sync_block();
}

// A decay x as whole + part, whole 0 or 1: y whole + (y part + z) rounds once and differently at every step, where y x
// + z would be off in the same direction for a constant x near 1.
template <class T>
struct SplitDecay {
    T whole, part;
};
template <class T>
HEADRACE_DEVICE SplitDecay<T> split_decay(double x) {
    const double whole = x >= 0.5 ? 1 : 0;
    return {static_cast<T>(whole), static_cast<T>(x - whole)};
}

}  // namespace headrace::cuda
