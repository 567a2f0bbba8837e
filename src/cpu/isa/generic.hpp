// generic: 128-bit vectors of plain C++, for every processor.
#pragma once

#include "core/types.hpp"

namespace headrace::cpu::inline generic {

inline constexpr int register_bytes = 16;
// 4x2 tile: 8 accumulators + 2 loads + 1 broadcast of 16 registers.
inline constexpr int row_block = 4, column_block = 2;

typedef float Float16Lanes __attribute__((vector_size(register_bytes), may_alias));

HEADRACE_INLINE Float16Lanes load_f16(const std::uint16_t* source) {
    return Float16Lanes{f16_to_float(source[0]), f16_to_float(source[1]), f16_to_float(source[2]),
                        f16_to_float(source[3])};
}
HEADRACE_INLINE void store_f16(std::uint16_t* destination, Float16Lanes value) {
    for (int i = 0; i < 4; ++i) destination[i] = float_to_f16(value[i]);
}

// Ordinary stores: plain C++ knows no others.
template <class Element, class Value>
HEADRACE_INLINE void stream(Element* destination, Value value) {
    std::memcpy(destination, &value, sizeof value);
}

}  // namespace headrace::cpu::inline generic
