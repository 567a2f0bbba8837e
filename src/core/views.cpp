// Questions about tensor views that validation asks: sizes without overflow, memory extents, overlap, text.
#include "core/views.hpp"

#include <algorithm>
#include <cstring>

#include "core/types.hpp"

namespace headrace {

std::int64_t span_of(const TensorView& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return 0;
        last = std::min(max_elements, last + bounded_product(view.shape[i] - 1, view.strides[i]));
    }
    return view.rank == 0 ? 0 : std::min(max_elements, last + 1);
}

Extent extent_of(const TensorView& view) {
    const std::int64_t span = span_of(view);
    if (view.data == nullptr || span == 0) return {};
    const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
    return {begin, begin + static_cast<std::uintptr_t>(span) * size_of(view.dtype)};
}

bool has_distinct_elements(const TensorView& view) {
    int order[TensorView::max_rank], count = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return true;
        if (view.shape[i] > 1) order[count++] = i;
    }
    // Insertion sort by stride: a std::sort of four numbers costs more than it says.
    for (int i = 1; i < count; ++i) {
        for (int j = i; j > 0 && view.strides[order[j]] < view.strides[order[j - 1]]; --j) {
            std::swap(order[j], order[j - 1]);
        }
    }
    std::int64_t extent = 1;
    for (int i = 0; i < count; ++i) {
        if (view.strides[order[i]] < extent) return false;
        extent += (view.shape[order[i]] - 1) * view.strides[order[i]];
    }
    return true;
}

std::string shape_text(const std::int64_t* sizes, int rank) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    return text + "]";
}

std::string shape_text(const TensorView& view) { return shape_text(view.shape, view.rank); }

std::string position_text(const TensorView& view, std::int64_t number) {
    std::int64_t position[TensorView::max_rank] = {};
    for (int i = view.rank - 1; i >= 0; --i) {
        position[i] = number % view.shape[i];
        number /= view.shape[i];
    }
    return shape_text(position, view.rank);
}

std::int64_t offset_of(const TensorView& view, std::int64_t number) {
    std::int64_t offset = 0;
    for (int i = view.rank - 1; i >= 0; --i) {
        offset += number % view.shape[i] * view.strides[i];
        number /= view.shape[i];
    }
    return offset;
}

namespace {

template <typename T>
T load(const TensorView& view, std::int64_t offset) {
    T value;
    std::memcpy(&value, static_cast<const char*>(view.data) + offset * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
}

}  // namespace

double element_at(const TensorView& view, std::int64_t offset) {
    switch (view.dtype) {
        case DType::f64: return load<double>(view, offset);
        case DType::f32: return load<float>(view, offset);
        case DType::bf16: return bf16_to_float(load<std::uint16_t>(view, offset));
        case DType::f16: return f16_to_float(load<std::uint16_t>(view, offset));
        case DType::i32: return load<std::int32_t>(view, offset);
        case DType::i64: return static_cast<double>(load<std::int64_t>(view, offset));
    }
    return 0;
}

void set_element(const TensorView& view, std::int64_t offset, double value) {
    const auto rounded = static_cast<float>(value);
    switch (view.dtype) {
        case DType::f64: static_cast<double*>(view.data)[offset] = value; break;
        case DType::f32: static_cast<float*>(view.data)[offset] = rounded; break;
        case DType::bf16: static_cast<std::uint16_t*>(view.data)[offset] = float_to_bf16(rounded); break;
        case DType::f16: static_cast<std::uint16_t*>(view.data)[offset] = float_to_f16(rounded); break;
        default: break;
    }
}

std::int64_t integer_at(const TensorView& view, std::int64_t offset) {
    return view.dtype == DType::i32 ? load<std::int32_t>(view, offset) : load<std::int64_t>(view, offset);
}

}  // namespace headrace
