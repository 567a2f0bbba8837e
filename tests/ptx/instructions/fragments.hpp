// How a warp holds the matrices of mma and wgmma: registers of fragments to and from the places of a Product.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
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
// the column t of four; the registers of A go through rows g and g + 8 first, then through the columns. So a register's
// elements are those of eight rows, one row behind the other.
template <class Element>
inline constexpr int register_columns = std::is_same_v<Element, Tf32> ? 4 : 8;  // of a register

template <class Element>
void values_of(const std::uint32_t* bits, double (&values)[8 * register_columns<Element>]) {
    using Bits = std::conditional_t<std::is_same_v<Element, Tf32>, std::uint32_t, std::uint16_t>;
    Bits elements[8 * register_columns<Element>];
    std::memcpy(elements, bits, sizeof(elements));
    for (int i = 0; i < 8 * register_columns<Element>; ++i) values[i] = Element::value(elements[i]);
}

template <class Element>
void place_a(const std::uint32_t* a, int r, Product& product) {
    constexpr int columns = register_columns<Element>;
    double values[8 * columns];
    values_of<Element>(a, values);
    for (int g = 0; g < 8; ++g)
        std::copy_n(values + columns * g, columns, &product.a[g + 8 * (r % 2)][columns * (r / 2)]);
}

template <class Element>
void place_b(const std::uint32_t* b, int r, Product& product) {
    constexpr int columns = register_columns<Element>;
    double values[8 * columns];
    values_of<Element>(b, values);
    for (int k = 0; k < columns; ++k)
        for (int n = 0; n < 8; ++n) product.b[columns * r + k][n] = values[columns * n + k];
}

// C and D of f32: registers 2 h and 2 h + 1 have the columns 2t and 2t + 1 of row g + 8 h: neighbours are neighbours.
inline void place_c(const std::uint32_t* even, const std::uint32_t* odd, int h, Product& product) {
    double* const c = product.c[8 * h];
    for (int lane = 0; lane < lanes; ++lane) {
        c[2 * lane] = std::bit_cast<float>(even[lane]);
        c[2 * lane + 1] = std::bit_cast<float>(odd[lane]);
    }
}
inline void take_d(const Product& product, int r, std::uint32_t* d) {
    const double* const from = product.d[8 * (r / 2)] + r % 2;
    for (int lane = 0; lane < lanes; ++lane) d[lane] = bits_of_f32(from[2 * lane]);
}

inline void multiply(Product& product, int depth, SumType type, MmaArithmetic arithmetic) {
    if (arithmetic == MmaArithmetic::exact)
        multiply_exactly(product, depth, type);
    else
        multiply_truncating(product, depth, type);
}

}  // namespace headrace::ptx
