// layer_ops: what the kernels of the layer functions share: activations, exponentials only of numbers <= 0; the items
// of a group.
#pragma once

#include "cuda/layers/layer_args.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// Items [first_of(g), first_of(g + 1)) form group g.
HEADRACE_DEVICE std::int64_t first_of(const Groups& groups, std::int64_t group) {
    const std::int64_t more = groups.items % groups.count;
    return group * (groups.items / groups.count) + (group < more ? group : more);
}

// Elements of x, y and d_y, which are f64 where T is and only there.
template <class T>
HEADRACE_DEVICE T load_own(const Strided& tensor, std::int64_t index) {
    if (sizeof(T) == 8) return reinterpret_cast<const T*>(tensor.data)[index];
    return load_element<T>(tensor.data, tensor.dtype, index);
}
template <class T>
HEADRACE_DEVICE void store_own(const Strided& tensor, std::int64_t index, T value) {
    if (sizeof(T) == 8) {
        reinterpret_cast<T*>(tensor.data)[index] = value;
    } else {
        store_element<T>(tensor.data, tensor.dtype, index, value);
    }
}
// Of the others, which may have any type, f64 beside an x of less too.
template <class T>
HEADRACE_DEVICE T load_any(const Strided& tensor, std::int64_t index) {
    if (sizeof(T) < 8 && tensor.dtype == DType::f64)
        return static_cast<T>(reinterpret_cast<const double*>(tensor.data)[index]);
    return load_element<T>(tensor.data, tensor.dtype, index);
}
template <class T>
HEADRACE_DEVICE void store_any(const Strided& tensor, std::int64_t index, T value) {
    if (sizeof(T) < 8 && tensor.dtype == DType::f64) {
        reinterpret_cast<double*>(tensor.data)[index] = static_cast<double>(value);
    } else {
        store_element<T>(tensor.data, tensor.dtype, index, value);
    }
}

// activation(z) and its derivative at z.
template <class T>
struct Activated {
    T value, slope;
};

// (z sigmoid(z))' = sigmoid(z) + z sigmoid'(z)
template <class T>
HEADRACE_DEVICE Activated<T> activated(T z, ActivationFormula formula) {
    if (formula == ActivationFormula::none) return {z, T(1)};
    const T s = sigmoid(z), ds = sigmoid_slope(z);
    if (formula == ActivationFormula::sigmoid) return {s, ds};
    return {z * s, fma(z, ds, s)};
}

}  // namespace headrace::cuda
