// TensorView: a pointer with dtype, shape and strides; owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace headrace {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i32, i64 };
enum class Device : std::uint8_t { cpu, cuda };

// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
        case DType::i64: return 8;
        case DType::f32:
        case DType::i32: return 4;
        case DType::bf16:
        case DType::f16: return 2;
    }
    return 0;
}

// "f64", "f32", "bf16", "f16", "i32" or "i64".
constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::f64: return "f64";
        case DType::f32: return "f32";
        case DType::bf16: return "bf16";
        case DType::f16: return "f16";
        case DType::i32: return "i32";
        case DType::i64: return "i64";
    }
    return "?";
}

// A view of a tensor of up to four dimensions. A default-constructed view (rank 0) means "not given".
// `strides` count elements, not bytes, and must be >= 0. The library writes only through views that are outputs.
struct TensorView {
    static constexpr int max_rank = 4;

    void* data = nullptr;
    DType dtype = DType::f32;
    Device device = Device::cpu;
    int rank = 0;
    std::int64_t shape[max_rank] = {};
    std::int64_t strides[max_rank] = {};

    TensorView() = default;

    // A contiguous (row-major) view.
    TensorView(const void* pointer, DType type, std::initializer_list<std::int64_t> sizes)
        : data(const_cast<void*>(pointer)), dtype(type) {
        for (std::int64_t size : sizes) {
            if (rank < max_rank) shape[rank++] = size;
        }
        std::int64_t stride = 1;
        for (int i = rank - 1; i >= 0; --i) {
            strides[i] = stride;
            stride *= shape[i] > 0 ? shape[i] : 1;
        }
    }

    bool given() const { return rank > 0; }

    std::int64_t numel() const {
        std::int64_t count = rank > 0 ? 1 : 0;
        for (int i = 0; i < rank; ++i) count *= shape[i];
        return count;
    }

    // The same memory with dimensions a and b exchanged: [N,HV,V,K] seen as [N,HV,K,V].
    TensorView transposed(int a, int b) const {
        TensorView view = *this;
        view.shape[a] = shape[b];
        view.shape[b] = shape[a];
        view.strides[a] = strides[b];
        view.strides[b] = strides[a];
        return view;
    }
};

}  // namespace headrace
