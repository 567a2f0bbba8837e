// runs: neighbouring elements of the caller's tensors in the registers of one thread, in one access where they lie so.
#pragma once

#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

template <int bytes>
struct alignas(bytes < 16 ? bytes : 16) Words {
    std::uint32_t word[bytes / 4];
};

// n elements, of a type no wider than T, as they came: what they are worth is asked later, so that nothing waits for
// them before.
template <class T, int n>
struct Run {
    static constexpr int size = n * sizeof(T);
    std::uint32_t word[size / 4];  // narrow elements lie in the first words, two in each

    // From `at` on, `step` elements apart; from `count` on zeros.
    HEADRACE_DEVICE void load(const char* at, DType dtype, std::int64_t step, int count) {
        switch (dtype) {
            case DType::f64: load_as<8>(at, step, count); break;
            case DType::f32: load_as<4>(at, step, count); break;
            default: load_as<2>(at, step, count);
        }
    }
    HEADRACE_DEVICE void store(char* at, DType dtype, std::int64_t step, int count) const {
        switch (dtype) {
            case DType::f64: store_as<8>(at, step, count); break;
            case DType::f32: store_as<4>(at, step, count); break;
            default: store_as<2>(at, step, count);
        }
    }

    HEADRACE_DEVICE void values(T (&to)[n], DType dtype) const {
        switch (dtype) {
            case DType::f64: each<8>([&](int i) { to[i] = static_cast<T>(element<8>(i)); }); break;
            case DType::f32: each<4>([&](int i) { to[i] = static_cast<T>(__uint_as_float(element<4>(i))); }); break;
            case DType::bf16:
                each<2>([&](int i) { to[i] = static_cast<T>(__uint_as_float(element<2>(i) << 16)); });
                break;
            default: each<2>([&](int i) { to[i] = static_cast<T>(__half2float(__ushort_as_half(element<2>(i)))); });
        }
    }
    HEADRACE_DEVICE void set(const T (&from)[n], DType dtype) {
        switch (dtype) {
            case DType::f64: each<8>([&](int i) { set_element<8>(i, static_cast<double>(from[i])); }); break;
            case DType::f32:
                each<4>([&](int i) { set_element<4>(i, __float_as_uint(static_cast<float>(from[i]))); });
                break;
            case DType::bf16:
                each<2>([&](int i) {
                    set_element<2>(i, __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(from[i]))));
                });
                break;
            default:
                each<2>(
                    [&](int i) { set_element<2>(i, __half_as_ushort(__float2half_rn(static_cast<float>(from[i])))); });
        }
    }

  private:
    template <int bytes>
    static constexpr bool fits = bytes <= static_cast<int>(sizeof(T));

    template <int bytes, class F>
    HEADRACE_DEVICE static void each(F f) {
        if constexpr (fits<bytes>) {
#pragma unroll
            for (int i = 0; i < n; ++i) f(i);
        }
    }
    template <int bytes>
    HEADRACE_DEVICE auto element(int i) const {
        if constexpr (bytes == 8) {
            return __hiloint2double(static_cast<int>(word[2 * i + 1]), static_cast<int>(word[2 * i]));
        } else if constexpr (bytes == 4) {
            return word[i];
        } else {
            return static_cast<unsigned short>(word[i / 2] >> (i % 2 * 16));
        }
    }
    template <int bytes, class Bits>
    HEADRACE_DEVICE void set_element(int i, Bits bits) {
        if constexpr (bytes == 8) {
            word[2 * i] = static_cast<std::uint32_t>(__double2loint(bits));
            word[2 * i + 1] = static_cast<std::uint32_t>(__double2hiint(bits));
        } else if constexpr (bytes == 4) {
            word[i] = bits;
        } else {
            word[i / 2] = i % 2 == 0 ? bits : word[i / 2] | static_cast<std::uint32_t>(bits) << 16;
        }
    }

    // Pieces of up to 16 bytes.
    template <int bytes>
    static constexpr int piece = n* bytes < 16 ? n* bytes : 16;
    template <int bytes>
    HEADRACE_DEVICE static bool in_pieces(const char* at, std::int64_t step, int count) {
        return n * bytes >= 4 && step == 1 && count >= n && reinterpret_cast<std::uintptr_t>(at) % piece<bytes> == 0;
    }
    template <int bytes>
    HEADRACE_DEVICE void load_as(const char* at, std::int64_t step, int count) {
        if constexpr (!fits<bytes>) return;
        if constexpr (n * bytes >= 4) {
            if (in_pieces<bytes>(at, step, count)) {
#pragma unroll
                for (int i = 0; i < n * bytes / piece<bytes>; ++i) {
                    const auto words = reinterpret_cast<const Words<piece<bytes>>*>(at)[i];
#pragma unroll
                    for (int w = 0; w < piece<bytes> / 4; ++w) word[i * piece<bytes> / 4 + w] = words.word[w];
                }
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const char* const from = at + i * step * bytes;
            if constexpr (bytes == 8) {
                set_element<8>(i, i < count ? *reinterpret_cast<const double*>(from) : 0.0);
            } else if constexpr (bytes == 4) {
                set_element<4>(i, i < count ? *reinterpret_cast<const std::uint32_t*>(from) : 0u);
            } else {
                set_element<2>(
                    i, i < count ? *reinterpret_cast<const unsigned short*>(from) : static_cast<unsigned short>(0));
            }
        }
    }
    template <int bytes>
    HEADRACE_DEVICE void store_as(char* at, std::int64_t step, int count) const {
        if constexpr (!fits<bytes>) return;
        if constexpr (n * bytes >= 4) {
            if (in_pieces<bytes>(at, step, count)) {
#pragma unroll
                for (int i = 0; i < n * bytes / piece<bytes>; ++i) {
                    Words<piece<bytes>> words;
#pragma unroll
                    for (int w = 0; w < piece<bytes> / 4; ++w) words.word[w] = word[i * piece<bytes> / 4 + w];
                    reinterpret_cast<Words<piece<bytes>>*>(at)[i] = words;
                }
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < n; ++i) {
            if (i >= count) continue;
            char* const to = at + i * step * bytes;
            if constexpr (bytes == 8) {
                *reinterpret_cast<double*>(to) = element<8>(i);
            } else if constexpr (bytes == 4) {
                *reinterpret_cast<std::uint32_t*>(to) = element<4>(i);
            } else {
                *reinterpret_cast<unsigned short*>(to) = element<2>(i);
            }
        }
    }
};

// Of so many elements.
HEADRACE_DEVICE std::int64_t bytes_of(DType dtype, std::int64_t count) {
    return count << (dtype == DType::f64 ? 3 : dtype == DType::f32 ? 2 : 1);
}
HEADRACE_DEVICE char* address_of(const Strided& tensor, std::int64_t offset) {
    return tensor.data + bytes_of(tensor.dtype, offset);
}

}  // namespace headrace::cuda
