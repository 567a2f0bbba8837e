// avx512: 512-bit vectors (F, BW, DQ, VL); avx512_bf16 has them too.
#pragma once

#include <immintrin.h>

#include "core/types.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

inline constexpr int register_bytes = 64;
// 8x2 tile: 16 accumulators hide the FMA latency; 10 loads for 16 FMAs stay below two loads a cycle.
inline constexpr int row_block = 8, column_block = 2;

HEADRACE_INLINE __m512 fused_multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE __m512d fused_multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }

// Left to the compiler, this becomes two conversions of half registers and what joins them.
HEADRACE_INLINE __m512d widen_floats(const float* source) { return _mm512_cvtps_pd(_mm256_loadu_ps(source)); }

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

}  // namespace headrace::cpu::inline HEADRACE_ISA
