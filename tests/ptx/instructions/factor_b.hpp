// FactorB: the factor of a product of a warpgroup that lies in shared memory, as a descriptor says.
#pragma once

#include <cstdint>

#include "machine/fault.hpp"

namespace headrace::ptx {

// B of 16 rows k and N columns n, as it lies in shared memory with 128-byte swizzle: the 16-byte pieces of 1024 bytes
// are permuted within their 128 bytes.
struct FactorB {
    static constexpr int depth = 16;

    std::uint64_t start = 0, leading = 0, stride = 0;  // bytes
    bool by_rows = false;
    int columns = 0;

    // Pieces that follow each other below fill an aligned part of shared memory: so many.
    int pieces_together() const {
        if (by_rows) return columns % 64 == 0 && (start | leading | stride) % 128 == 0 ? 8 : 1;
        return (start | stride) % 32 == 0 ? 2 : 1;
    }
    // f(k, n, address) for the pieces of eight elements: k to k + 7 of a column, or n to n + 7 of a row.
    template <class F>
    void each_piece(F f) const {
        const auto at = [](int factor, std::uint64_t bytes) { return static_cast<std::uint64_t>(factor) * bytes; };
        const auto swizzled = [](std::uint64_t address) { return address ^ (address >> 3 & 0x70); };
        if (by_rows) {
            for (int k = 0; k < depth; ++k)
                for (int n = 0; n < columns; n += 8)
                    f(k, n, swizzled(start + at(n / 64, leading) + at(n % 64, 2) + at(k / 8, stride) + at(k % 8, 128)));
        } else {
            for (int n = 0; n < columns; ++n)
                for (int k = 0; k < depth; k += 8)
                    f(k, n, swizzled(start + at(n / 8, stride) + at(n % 8, 128) + at(k, 2)));
        }
    }
};

// Bits 0-13 start, 16-29 leading and 32-45 stride, each in 16 bytes; 49-51 base offset; 62-63 swizzle.
inline FactorB decode_descriptor(std::uint64_t bits, bool by_rows, int columns) {
    constexpr std::uint64_t field = 0x3fff, known = field | field << 16 | field << 32 | 7ULL << 49 | 3ULL << 62;
    if ((bits >> 62) != 1)
        throw_fault("not done by this interpreter: a descriptor of swizzle mode ", bits >> 62, ", only 1 (128 bytes)");
    if ((bits >> 49 & 7) != 0)
        throw_fault("not done by this interpreter: a descriptor with base offset ", bits >> 49 & 7);
    if ((bits & ~known) != 0) throw_fault("a descriptor with bits outside its fields: ", std::hex, "0x", bits & ~known);
    return {(bits & field) * 16, (bits >> 16 & field) * 16, (bits >> 32 & field) * 16, by_rows, columns};
}

}  // namespace headrace::ptx
