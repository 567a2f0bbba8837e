// avx2: 256-bit vectors with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "core/types.hpp"

namespace headrace::cpu::inline avx2 {

inline constexpr int register_bytes = 32;
// 4x3 tile: 12 accumulators + 3 loads + 1 broadcast fill the 16 registers.
inline constexpr int row_block = 4, column_block = 3;

HEADRACE_INLINE __m256 fused_multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
HEADRACE_INLINE __m256d fused_multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }

HEADRACE_INLINE __m256 load_f16(const std::uint16_t* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
HEADRACE_INLINE void store_f16(std::uint16_t* destination, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// Past the caches; destination aligned to the register.
HEADRACE_INLINE void stream(float* destination, __m256 value) { _mm256_stream_ps(destination, value); }
HEADRACE_INLINE void stream(double* destination, __m256d value) { _mm256_stream_pd(destination, value); }

}  // namespace headrace::cpu::inline avx2
