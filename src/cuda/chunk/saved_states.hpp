// SavedStates: the states of chunks between the launches of a backward, in double or, where that may be, narrower.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// of_16_bits: or f32 at least.
template <bool of_16_bits>
struct SavedStates {
    using T = double;
    static constexpr int warps = chunk_threads(true) / warp_lanes;

    char* data;      // [places, rows, columns] in multiples of 16 channels; may be null
    float* factors;  // [places, blocks] the powers of two that `block` columns are to be multiplied by, or null
    DType dtype;
    int rows, columns, block;
    Tile<T> widened;      // [rows, columns] where the type is narrower
    T* largest_of_warps;  // [warps] with factors

    // Columns [first, first + count) of the state at a place.
    HEADRACE_DEVICE void save(std::int64_t place, Tile<T> state, int first, int count) const {
        T factor = 1;
        if (of_16_bits && factors != nullptr) {
            const int exponent = exponent_of(largest(state, count));
            factor = ldexp(T(1), -exponent);
            if (threadIdx.x == 0) *factor_at(place, first) = static_cast<float>(ldexp(T(1), exponent));
        }
        each_element(rows, count, [&](int c, int j) {
            store_element<T>(data, dtype, offset(place) + c * columns + first + j, state.at(c, j) * factor);
        });
        ptx::sync_block();
    }
    // The state where it lies, or widened.
    HEADRACE_DEVICE Tile<T> restore(std::int64_t place) const {
        if (dtype == DType::f64) return {reinterpret_cast<T*>(data) + offset(place), columns};
        if (!of_16_bits || dtype == DType::f32) {
            widen<float>(place);
            return widened;
        }
        widen<std::uint16_t>(place);
        if (factors != nullptr) {
            each_element(rows, columns,
                         [&](int c, int j) { widened.at(c, j) *= static_cast<T>(*factor_at(place, j)); });
            ptx::sync_block();
        }
        return widened;
    }

  private:
    template <class Element>
    HEADRACE_DEVICE void widen(std::int64_t place) const {
        const auto size = static_cast<std::int64_t>(sizeof(Element));
        load_fours<Element, 4>(widened, data + offset(place) * size, columns * size, rows, rows, columns, columns,
                               dtype);
    }
    HEADRACE_DEVICE std::int64_t offset(std::int64_t place) const { return place * rows * columns; }
    HEADRACE_DEVICE float* factor_at(std::int64_t place, int column) const {
        return factors + place * ((columns + block - 1) / block) + column / block;
    }
    // f16 spans 2^-14 to 2^15; a state may lie anywhere. Divided by 2 to this power, the largest magnitude comes to lie
    // below 2^14.
    HEADRACE_DEVICE static int exponent_of(T largest) {
        const int below = 14, most = 100;  // a power that f32 has
        const int exponent = largest > 0 ? ilogb(largest) + 1 : 0;
        return (exponent > most ? most : exponent < -most ? -most : exponent) - below;
    }
    HEADRACE_DEVICE T largest(Tile<T> state, int count) const {
        T most = 0;
        each_element(rows, count, [&](int c, int j) { most = fmax(most, fabs(state.at(c, j))); });
        HEADRACE_ROLLED
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2)
            most = fmax(most, ptx::shuffle_xor(most, distance));
        if (lane() == 0) largest_of_warps[warp()] = most;
        ptx::sync_block();
        HEADRACE_ROLLED
        for (int w = 0; w < warps; ++w) most = fmax(most, largest_of_warps[w]);
        return most;
    }
};

}  // namespace headrace::cuda
