// Products of small matrices as mma computes them, apart from where the warp holds them.
#pragma once

#include <bit>
#include <cstdint>

namespace headrace::ptx {

// D = A B + C of 16 rows and 8 columns, B by rows. Elements of 16 and 19 bits, so that a product is exact in double.
struct Product {
    static constexpr int rows = 16, columns = 8, most_depth = 16;
    alignas(64) double a[rows][most_depth];
    alignas(64) double b[most_depth][columns];
    alignas(64) double c[rows][columns];
    alignas(64) double d[rows][columns];
};

enum class SumType { f32, f16 };  // of D

// Each element is the exact sum, rounded once to nearest even.
void multiply_exactly(Product& product, int depth, SumType type);

// The products and the addend are cut (toward zero) to multiples of 2^(e - 24), where 2^e is the leading bit of the
// largest of them: the leading bit and 24 behind it. Their exact sum is cut (toward zero) to the precision of the
// result. This is coarser than what NVIDIA's tensor cores have shown in measurements, which keep about as many bits,
// with fewer terms at a time. NaN and infinities as in the exact sum.
void multiply_truncating(Product& product, int depth, SumType type);

// Of a value that f32 holds exactly; NaN: 0x7fffffff.
inline std::uint32_t bits_of_f32(double value) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : bits;
}
std::uint32_t bits_of_f16(double value);  // likewise, 0x7fff
double value_of_f16(std::uint32_t bits);  // the low 16

}  // namespace headrace::ptx
