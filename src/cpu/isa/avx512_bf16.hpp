// avx512_bf16: AVX-512 with the bf16 dot product (two multiply-adds a lane).
#pragma once

#include <immintrin.h>

#include "core/types.hpp"

namespace headrace::cpu::inline avx512_bf16 {

inline constexpr int register_bytes = 64;
inline constexpr int row_block = 8, column_block = 2;  // as avx512

HEADRACE_INLINE __m512 fused_multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE __m512d fused_multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }

HEADRACE_INLINE __m512 load_f16(const std::uint16_t* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
HEADRACE_INLINE void store_f16(std::uint16_t* destination, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// Past the caches; destination aligned to the register.
HEADRACE_INLINE void stream(float* destination, __m512 value) { _mm512_stream_ps(destination, value); }
HEADRACE_INLINE void stream(double* destination, __m512d value) { _mm512_stream_pd(destination, value); }

// sum + a_low b_low + a_high b_high per lane; each 32-bit unit holds a pair of bf16.
HEADRACE_INLINE __m512 dot_pairs(__m512 sum, std::uint32_t a, const std::uint32_t* b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)_mm512_loadu_si512(b));
}
// Sixteen pairs: low halves from `low`, high halves from `high`.
HEADRACE_INLINE void store_pairs(std::uint32_t* destination, __m512 low, __m512 high) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(destination, _mm512_permutexvar_epi16(order, both));
}
HEADRACE_INLINE __m256i nearest_bf16(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }
// Sixteen neighbouring floats as eight pairs.
HEADRACE_INLINE void store_pairs_of(std::uint32_t* destination, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), nearest_bf16(value));
}
// Thirty-two neighbouring floats as sixteen pairs.
HEADRACE_INLINE void store_neighbours(std::uint32_t* destination, __m512 first, __m512 second) {
    _mm512_storeu_si512(destination, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

}  // namespace headrace::cpu::inline avx512_bf16
