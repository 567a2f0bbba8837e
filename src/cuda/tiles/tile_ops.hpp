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
// Of tokens, parts of so many, a multiple of 16, of which there are fewer than 2^32: those that are whole, and all.
HEADRACE_DEVICE std::int64_t whole_parts(std::int64_t tokens, int of) {
    return quotient(static_cast<std::int64_t>(static_cast<std::uint64_t>(tokens) / 16), static_cast<unsigned>(of) / 16);
}
HEADRACE_DEVICE std::int64_t parts_of(std::int64_t tokens, int of) { return whole_parts(tokens + of - 1, of); }
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
// Of those that call the first nothing that they have written is there behind it for products of groups, and nothing
// that they have queued; of those that call the second what they have written; the third, both.
inline constexpr int meeting_barrier = 3;
HEADRACE_DEVICE void wait_for_block() { ptx::meet_threads(meeting_barrier, static_cast<int>(blockDim.x)); }
HEADRACE_DEVICE void meet_block() {
    ptx::publish_to_products();
    wait_for_block();
}
// For all but the `pending` groups of copies that ended last.
template <int pending = 0>
HEADRACE_DEVICE void end_copies_of_block() {
    ptx::wait_for_copies<pending>();
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
    constexpr int together = sizeof(T) == 4 ? 5 : 1;  // the code is no longer than the loop's
#pragma unroll together
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
// The decays of a walk's chunks, one after another, as one number each: what rounding leaves of one enters the next. So
// their products are right to two roundings however many there are, and y x + z rounds once, and not in the same
// direction where x is constant.
struct CarriedDecay {
    float rest = 0;  // beside 1: a decay far from it leaves the states behind it little of what it was off by

    HEADRACE_DEVICE float next(SplitDecay<float> of) {
        const float part = fmaf(rest, of.whole + of.part, of.part), decay = of.whole + part;
        rest = (of.whole - decay) + part;
        return decay;
    }
};

}  // namespace headrace::cuda
