// ParameterTerms: how large the terms are that a gate parameter's gradient sums; its tolerance follows them.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace headrace::reference {

// Of one value head. A log decay acts on every element of the state, so that the gradient of a parameter is a sum over
// tokens t and state elements (c, j) of products w_tc D'_cj S'_cj, w the derivative of the log decay by the parameter.
// Both sums cancel where the products have random signs. An implementation's errors are independent from token to token
// (its products), or from element to element (a state carries its rounding from token to token). Hence two sizes, the
// root-sum-square over tokens of sums over elements, and the other way round; the larger counts. Sequences are
// independent.
class ParameterTerms {
  public:
    // per_channel: the parameter has an element for each key channel c.
    ParameterTerms(std::size_t K, std::size_t V, bool per_channel)
        : V_(V),
          per_channel_(per_channel),
          elements_(K * V),
          token_(per_channel ? K : 1),
          token_squares_(token_.size()),
          element_squares_(token_.size()) {}

    // Channel c of the current token: rows [V] of D' and S'.
    void add(std::size_t c, double weight, const double* d_state, const double* decayed) {
        if (weight == 0.0) return;
        double sum = 0.0;
        for (std::size_t j = 0; j < V_; ++j) {
            const double term = d_state[j] == 0.0 || decayed[j] == 0.0 ? 0.0 : weight * d_state[j] * decayed[j];
            elements_[c * V_ + j] += term;
            sum += term;
        }
        token_[slot(c)] += sum;
    }
    // `least` counts instead of smaller sums over elements: what the errors of D leave in this token's.
    void end_token(double least) {
        for (std::size_t i = 0; i < token_.size(); ++i) {
            const double size = std::fmax(std::fabs(token_[i]), least);
            token_squares_[i] += size * size;
            token_[i] = 0.0;
        }
    }
    void end_sequence() {
        for (std::size_t i = 0; i < elements_.size(); ++i) {
            element_squares_[slot(i / V_)] += elements_[i] * elements_[i];
            elements_[i] = 0.0;
        }
    }

    // Of element i of the parameter's gradient for this head.
    double size(std::size_t i) const { return std::sqrt(std::fmax(token_squares_[i], element_squares_[i])); }

  private:
    std::size_t slot(std::size_t c) const { return per_channel_ ? c : 0; }

    std::size_t V_;
    bool per_channel_;
    std::vector<double> elements_, token_, token_squares_, element_squares_;
};

}  // namespace headrace::reference
