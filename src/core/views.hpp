// Questions about tensor views that validation asks: sizes without overflow, memory extents, overlap, text.
#pragma once

#include <cstdint>
#include <string>

#include "headrace/tensor.hpp"

namespace headrace {

// Element counts and extents stay below this, so that sums of a few and byte counts fit 64 bits.
inline constexpr std::int64_t max_elements = std::int64_t{1} << 58;

// a * b for a, b >= 0, or max_elements where the product would reach it.
inline std::int64_t bounded_product(std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) || product > max_elements ? max_elements : product;
}

// A half-open range of addresses; empty where begin == end.
struct Extent {
    std::uintptr_t begin = 0, end = 0;
};

// The bytes that a view with valid shape and strides spans, gaps included. Empty for no elements or no data.
Extent extent_of(const TensorView& view);

inline bool overlaps(const Extent& a, const Extent& b) {
    return a.begin < a.end && b.begin < b.end && a.begin < b.end && b.begin < a.end;
}

// Elements from the first to behind the last, or max_elements where it would reach it. Strides must be >= 0.
std::int64_t span_of(const TensorView& view);

// Whether no two elements share memory. Sufficient, not necessary: each stride must step over the whole extent of the
// dimensions with smaller strides; interleaved layouts that happen not to collide are called overlapping.
bool has_distinct_elements(const TensorView& view);

// "[1, 256, 4, 64]".
std::string shape_text(const std::int64_t* sizes, int rank);
std::string shape_text(const TensorView& view);

// "[0, 17, 3]", the position of an element given by its row-major number.
std::string position_text(const TensorView& view, std::int64_t number);

// Offset in elements of an element given by its row-major number.
std::int64_t offset_of(const TensorView& view, std::int64_t number);

// An element of any dtype as a double; i64 beyond 2^53 is rounded.
double element_at(const TensorView& view, std::int64_t offset);

// Writes an element of a floating-point view.
void set_element(const TensorView& view, std::int64_t offset, double value);

// An element of an i32 or i64 view.
std::int64_t integer_at(const TensorView& view, std::int64_t offset);

}  // namespace headrace
