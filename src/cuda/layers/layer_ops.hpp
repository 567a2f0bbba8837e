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
