// avx512_bf16: AVX-512 with the bf16 dot product (two multiply-adds a lane).
#pragma once

#include "cpu/isa/avx512.hpp"

namespace headrace::cpu::inline avx512_bf16 {

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
