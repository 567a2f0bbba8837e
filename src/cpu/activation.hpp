// Activations of the layer functions on rows; exponentials only of numbers <= 0.
#pragma once

#include "cpu/layer_args.hpp"
#include "cpu/simd/vec.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// z <- activation(z); count a multiple of the vector length.
template <class T>
void activate(T* z, ActivationFormula formula, int count) {
    if (formula == ActivationFormula::none) return;
    for (int j = 0; j < count; j += lanes<T>) {
        const reg<T> x = load<T>(z + j), s = sigmoid<T>(x);
        store<T>(z + j, formula == ActivationFormula::silu ? x * s : s);
    }
}

// The same, and slope <- activation'(z): (x sigmoid(x))' = sigmoid(x) + x sigmoid'(x). One division serves both
// sigmoids.
template <class T>
void activate_with_slope(T* z, T* slope, ActivationFormula formula, int count) {
    const reg<T> one = broadcast<T>(1);
    for (int j = 0; j < count; j += lanes<T>) {
        if (formula == ActivationFormula::none) {
            store<T>(slope + j, one);
            continue;
        }
        const reg<T> x = load<T>(z + j), e = exp<T>(x < reg<T>{} ? x : -x), inverse = one / (one + e);
        const reg<T> s = (x < reg<T>{} ? e : one) * inverse, ds = e * inverse * inverse;
        store<T>(z + j, formula == ActivationFormula::silu ? x * s : s);
        store<T>(slope + j, formula == ActivationFormula::silu ? fma(x, ds, s) : ds);
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
