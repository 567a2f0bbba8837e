// SavedStates: the states of chunks between the sweeps of a backward, in the tile's type or a narrower one.
#pragma once

#include "cpu/plumbing/kernel_args.hpp"
#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

struct SavedStates {
    char* data;
    float* scales;  // [index] the power of two that a state was multiplied by, or null
    DType dtype;
};
// Where they are kept: chunk c of value head j of a task at index first + c * per_chunk + j.
struct SavedSlot {
    SavedStates states, adjoints;
    void* residuals;  // [C,V + C] of the delta rule, beside them l
    std::int64_t first, per_chunk;
    std::int64_t index(std::int64_t chunk, std::int64_t j) const { return first + chunk * per_chunk + j; }
};

// Puts tiles [keys, columns] there and takes them back.
template <class T>
struct StateKeeper {
    using Tile = cpu::Tile<T>;
    int keys, columns;
    Tile scaled;  // [1, columns] a row on its way to f16

    static bool in_place(SavedStates saved) { return size_of(saved.dtype) == sizeof(T); }
    Tile tile(SavedStates saved, std::int64_t index) const { return {reinterpret_cast<T*>(saved.data) + index * keys * columns, columns}; }

    void save(SavedStates saved, std::int64_t index, Tile state) const {
        const std::int64_t row_bytes = columns * static_cast<std::int64_t>(size_of(saved.dtype));
        char* target = saved.data + index * keys * row_bytes;
        T scale = 1;
        if (saved.scales != nullptr) {
            scale = power_of_two_below(T(1 << 14) / largest(state, keys, columns));
            saved.scales[index] = static_cast<float>(scale);
        }
        for (int c = 0; c < keys; ++c, target += row_bytes) {
            const T* row = state.at(c);
            if (saved.scales != nullptr) {
                scale_rows(scaled, Tile{state.at(c)}, &scale, T(1), 1, columns);
                row = scaled.data;
            }
            store_row<T>(target, saved.dtype, 1, row, columns);
        }
    }
    // The saved state in place, or widened into `state`.
    Tile restore(Tile state, SavedStates saved, std::int64_t index) const {
        if (in_place(saved)) return tile(saved, index);
        const std::int64_t row_bytes = columns * static_cast<std::int64_t>(size_of(saved.dtype));
        const char* source = saved.data + index * keys * row_bytes;
        for (int c = 0; c < keys; ++c) load_row<T>(state.at(c), source + c * row_bytes, saved.dtype, 1, columns, columns);
        if (saved.scales != nullptr) {
            const T inverse = T(1) / static_cast<T>(saved.scales[index]);
            for_each(state, keys, columns, [&](int i, int j) { return load<T>(state.at(i) + j) * inverse; });
        }
        return state;
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
