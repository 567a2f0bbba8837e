// Activations of the layer functions in registers; exponentials only of numbers <= 0.
#pragma once

#include "cpu/layers/layer_args.hpp"
#include "cpu/simd/vec.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// activation(z) and its derivative at z.
template <class T>
struct Activated {
    reg<T> value, slope;
};

// (z sigmoid(z))' = sigmoid(z) + z sigmoid'(z). One division serves both sigmoids.
template <class T>
HEADRACE_INLINE Activated<T> activated(reg<T> z, ActivationFormula formula) {
    const reg<T> one = broadcast<T>(1);
    if (formula == ActivationFormula::none) return {z, one};
    const reg<T> e = exp<T>(z < reg<T>{} ? z : -z), inverse = one / (one + e);
    const reg<T> s = (z < reg<T>{} ? e : one) * inverse, ds = e * inverse * inverse;
    if (formula == ActivationFormula::sigmoid) return {s, ds};
    return {z * s, fma(z, ds, s)};
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
