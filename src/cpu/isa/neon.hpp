// neon: the 128-bit vectors of AArch64.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "core/types.hpp"

namespace headrace::cpu::inline neon {

inline constexpr int register_bytes = 16;
// 8x2 tile: 16 accumulators + 2 loads + 1 broadcast of 32 registers.
inline constexpr int row_block = 8, column_block = 2;

HEADRACE_INLINE float32x4_t fused_multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
HEADRACE_INLINE float64x2_t fused_multiply_add(float64x2_t a, float64x2_t b, float64x2_t c) { return vfmaq_f64(c, a, b); }

HEADRACE_INLINE float32x4_t load_f16(const std::uint16_t* source) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
}
HEADRACE_INLINE void store_f16(std::uint16_t* destination, float32x4_t value) {
    vst1_u16(destination, vreinterpret_u16_f16(vcvt_f16_f32(value)));
}

// Ordinary stores: AArch64 streams pairs of registers only.
template <class Element, class Value>
HEADRACE_INLINE void stream(Element* destination, Value value) {
    std::memcpy(destination, &value, sizeof value);
}

}  // namespace headrace::cpu::inline neon
