// How a warp holds the matrices of mma and wgmma: registers of fragments to and from the places of a Product.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "instructions/mma.hpp"
#include "machine/settings.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

struct Bf16 {
    static double value(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }
};
struct F16 {
    static double value(std::uint32_t bits) { return value_of_f16(bits); }
};
struct Tf32 {
    static double value(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000U); }
};

// With g = lane / 4 and t = lane % 4: a register of 16-bit elements has the columns 2t and 2t + 1 of eight, one of tf32
// the column t of four; the registers of A go through rows g and g + 8 first, then through the columns.
template <class Element>
void place_a(const std::uint32_t* a, int r, Product& product) {
    constexpr bool is_pair = !std::is_same_v<Element, Tf32>;
    constexpr int columns = is_pair ? 8 : 4;
    for (int lane = 0; lane < lanes; ++lane) {
        const int t = lane % 4, row = lane / 4 + 8 * (r % 2), k = columns * (r / 2) + (is_pair ? 2 * t : t);
        product.a[row][k] = Element::value(a[lane]);
        if (is_pair) product.a[row][k + 1] = Element::value(a[lane] >> 16);
    }
}

template <class Element>
void place_b(const std::uint32_t* b, int r, Product& product) {
    constexpr bool is_pair = !std::is_same_v<Element, Tf32>;
    constexpr int columns = is_pair ? 8 : 4;
    for (int lane = 0; lane < lanes; ++lane) {
        const int t = lane % 4, n = lane / 4, k = columns * r + (is_pair ? 2 * t : t);
        product.b[k][n] = Element::value(b[lane]);
        if (is_pair) product.b[k + 1][n] = Element::value(b[lane] >> 16);
    }
}

// C and D of f32: registers 0 and 1 have the columns 2t and 2t + 1 of row g, 2 and 3 those of row g + 8.
inline void place_c(const std::uint32_t* c, int r, Product& product) {
    for (int lane = 0; lane < lanes; ++lane)
        product.c[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2] = std::bit_cast<float>(c[lane]);
}
inline void take_d(const Product& product, int r, std::uint32_t* d) {
    for (int lane = 0; lane < lanes; ++lane)
        d[lane] = bits_of_f32(product.d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2]);
}

inline void multiply(Product& product, int depth, Rounding rounding, MmaArithmetic arithmetic) {
    if (arithmetic == MmaArithmetic::exact)
        multiply_exactly(product, depth, rounding);
    else
        multiply_truncating(product, depth, rounding);
}

}  // namespace headrace::ptx
