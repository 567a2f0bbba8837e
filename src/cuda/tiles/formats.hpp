// formats: the types of 16 bits that rows of tensors enter products on tensor cores in, as they came.
//
// What is computed on the way becomes a left operand of the same type. bf16 has the range of fp32. f16 has not: there
// each row of the operand is multiplied by a power of two that takes its largest element to [2^14, 2^15), and the
// product's row by its inverse; an element that then is too small for 11 bits is below 2^-28 of the largest. What is
// no product with rows of the caller's, scores and solves, is in bf16, in f16's case as high and low: 16 bits.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/tiles/tile_ops.hpp"

namespace headrace::cuda {

// Of a pair of bf16.
HEADRACE_DEVICE float low_half(std::uint32_t pair) { return __uint_as_float(pair << 16); }
HEADRACE_DEVICE float high_half(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

struct Bf16 {
    // Whether 8 bits of scores are too few; whether four warps multiply together.
    static constexpr bool splits_scores = false, by_group = false;

    HEADRACE_DEVICE static float first(std::uint32_t pair) { return low_half(pair); }
    HEADRACE_DEVICE static float second(std::uint32_t pair) { return high_half(pair); }
    HEADRACE_DEVICE static std::uint32_t round(float first, float second) { return ptx::round_to_bf16(first, second); }
    HEADRACE_DEVICE static void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
        ptx::multiply_bf16(d, a, b);
    }

    template <bool transposed, int tiles>
    HEADRACE_DEVICE static void multiply_group(float (&d)[tiles][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                               bool add) {
        ptx::multiply_group_bf16<transposed>(d, a, b, add);
    }

    // Of rows g and g + 8 of a left operand, half 0 and 1: none.
    struct RowFactors {
        template <int tiles>
        HEADRACE_DEVICE static RowFactors of(const float (&/*sums*/)[tiles][4]) {
            return {};
        }
        HEADRACE_DEVICE float scaled(float x, int /*half*/) const { return x; }
        template <int tiles>
        HEADRACE_DEVICE void take_back(float (&/*sums*/)[tiles][4]) const {}
    };
};

struct F16 {
    static constexpr bool splits_scores = true, by_group = false;

    HEADRACE_DEVICE static float first(std::uint32_t pair) { return __low2float(both(pair)); }
    HEADRACE_DEVICE static float second(std::uint32_t pair) { return __high2float(both(pair)); }
    HEADRACE_DEVICE static std::uint32_t round(float first, float second) { return ptx::round_to_f16(first, second); }
    HEADRACE_DEVICE static void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
        ptx::multiply_f16(d, a, b);
    }
    template <bool transposed, int tiles>
    HEADRACE_DEVICE static void multiply_group(float (&d)[tiles][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                               bool add) {
        ptx::multiply_group_f16<transposed>(d, a, b, add);
    }

    // Powers of two, of the largest elements in accumulators whose rows four lanes share. NaN and infinity stay what
    // they are, and spread.
    struct RowFactors {
        float factors[2], inverse[2];

        template <int tiles>
        HEADRACE_DEVICE static RowFactors of(const float (&sums)[tiles][4]) {
            RowFactors rows;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float most = 0;
#pragma unroll
                for (int tile = 0; tile < tiles; ++tile)
                    most = fmaxf(most, fmaxf(fabsf(sums[tile][2 * half]), fabsf(sums[tile][2 * half + 1])));
                most = fmaxf(most, ptx::shuffle_xor(most, 1));
                rows.set(half, fmaxf(most, ptx::shuffle_xor(most, 2)));
            }
            return rows;
        }
        HEADRACE_DEVICE float scaled(float x, int half) const { return x * factors[half]; }
        template <int tiles>
        HEADRACE_DEVICE void take_back(float (&sums)[tiles][4]) const {
#pragma unroll
            for (auto& tile : sums)
                for (int place = 0; place < 4; ++place) tile[place] *= inverse[place / 2];
        }

      private:
        // 2^14 over the power of two in `most`; both it and its inverse are normal numbers.
        HEADRACE_DEVICE void set(int half, float most) {
            constexpr std::uint32_t bias = 127, least = 15, greatest = 2 * bias;
            std::uint32_t exponent = __float_as_uint(most) >> 23;
            exponent = exponent < least ? least : exponent > greatest ? greatest : exponent;
            factors[half] = __uint_as_float((2 * bias + 14 - exponent) << 23);
            inverse[half] = __uint_as_float((exponent - 14) << 23);
        }
    };

  private:
    HEADRACE_DEVICE static __half2 both(std::uint32_t pair) {
        __half2 numbers;
        memcpy(&numbers, &pair, sizeof numbers);
        return numbers;
    }
};

// The same of warps that come to their products four at a time (group_products.hpp), on GPUs that have those.
template <class Format>
struct ByGroup : Format {
    static constexpr bool by_group = ptx::multiplies_by_group;
};

}  // namespace headrace::cuda
