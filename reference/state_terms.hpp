// StateTerms: how large the errors are that roundings of the state's gradient leave in that of the initial state.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "reference/recurrence.hpp"

namespace headrace::reference {

// Of one value head. An initial state's gradient is what the maps of all tokens leave of D. Comba's map is of rank one
// where the decay is 0, -beta p k^T: if k happens to be nearly orthogonal to D, little is left of D, but as much as
// ever of D's errors. An element x of D at token t that is off by d x, d the relative error of a right implementation,
// makes the gradient wrong by d times what the maps of the tokens before t leave of x. These errors are independent, so
// that the gradient's size in this sense is the root-mean-square over t of the root-sum-square over the elements of
// D_t. Where nothing cancels each t gives about |d_initial_state|. The sum over elements is an expectation over the
// signs of errors, which are drawn instead; several times where V is small.
class StateTerms {
  public:
    StateTerms(const Spec& spec, std::size_t K, std::size_t V)
        : spec_(spec), K_(K), V_(V), draws_((fewest_columns + V - 1) / V), errors_(draws_ * K * V), z_(V) {}

    void start_sequence() {
        std::fill(errors_.begin(), errors_.end(), 0.0);
        tokens_ = 0;
        random_.seed(random_.default_seed);
    }

    // The errors of all later tokens pass the current one; d_state, D before it, adds its own.
    void token(const Recurrence& now, const double* d_state) {
        for (std::size_t draw = 0; draw < draws_; ++draw) {
            double* errors = &errors_[draw * K_ * V_];
            pass(errors, now);
            std::uint64_t signs = 0;
            for (std::size_t i = 0; i < K_ * V_; ++i, signs >>= 1) {
                if (i % 64 == 0) signs = random_();
                errors[i] += d_state[i] * (1.0 - 2.0 * static_cast<double>(signs & 1));
            }
        }
        ++tokens_;
    }

    // Of one element of the gradient of the initial state.
    double size(std::size_t element) const {
        if (tokens_ == 0) return 0.0;
        double size = 0.0;
        for (std::size_t i = element; i < errors_.size(); i += K_ * V_) size = std::hypot(size, errors_[i]);
        return size / std::sqrt(static_cast<double>(draws_) * static_cast<double>(tokens_));
    }

    // Of the sum of all elements of D, each times a weight [K,V]: before token() is called, of the current D.
    double size_of_sum(const std::vector<double>& weights) const {
        if (tokens_ == 0) return 0.0;
        double squares = 0.0;
        for (std::size_t draw = 0; draw < draws_; ++draw) {
            for (std::size_t i = 0; i < K_ * V_; ++i) {
                const double error = errors_[draw * K_ * V_ + i] * weights[i];
                squares += error * error;
            }
        }
        return std::sqrt(squares / (static_cast<double>(draws_) * static_cast<double>(tokens_)));
    }

  private:
    static constexpr std::size_t fewest_columns = 16;

    // The map of D, docs/math.md 3, for E [K,V].
    void pass(double* errors, const Recurrence& now) {
        std::fill(z_.begin(), z_.end(), 0.0);
        for (std::size_t c = 0; spec_.delta && c < K_; ++c) {
            for (std::size_t j = 0; j < V_; ++j) z_[j] += now.beta[j] * now.k[c] * errors[c * V_ + j];
        }
        for (std::size_t c = 0; c < K_; ++c) {
            for (std::size_t j = 0; j < V_; ++j) {
                const double decay = now.decay[c] * now.value_decay[j], erased = now.erase_key[c] * z_[j];
                double& error = errors[c * V_ + j];
                error = spec_.erase_with_p ? decay * error - erased : decay * (error - erased);
            }
        }
    }

    const Spec& spec_;
    std::size_t K_, V_, draws_;
    std::vector<double> errors_;  // [draws, K, V]
    std::vector<double> z_;       // beta k^T E, [V]
    std::int64_t tokens_ = 0;
    std::mt19937_64 random_;  // the same numbers with every standard library
};

}  // namespace headrace::reference
