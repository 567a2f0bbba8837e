// StateTerms and WriteTerms: how large errors are that roundings leave in the initial state's gradient, and in a state.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "reference/recurrence.hpp"

namespace headrace::reference {

// Outputs (and d_v) of one token and key head rest on its q.k, states (and d_p) on V columns for each head of each
// sequence. The norm of 64 independent sums never cancels by chance: that it lies below a third of its size has a
// probability of 1e-18. Beyond them the size of terms is no excuse: keys of few directions make D large and d_v small.
template <class Sizes>
bool rests_on_few_sums(const Sizes& of) {
    constexpr std::int64_t few_sums = 64;
    return of.B * of.T * of.H < few_sums || of.sequences() * of.HV * of.V < few_sums;
}

// A sum over elements with random signs has the expected square of their root-sum-square. Several draws of signs where
// V is small: together at least this many columns.
constexpr std::size_t fewest_drawn_columns = 16;
inline std::size_t draws_of_signs(std::size_t V) { return (fewest_drawn_columns + V - 1) / V; }

class RandomSigns {
  public:
    double next() {
        if (left_-- == 0) bits_ = random_(), left_ = 63;
        const double sign = 1.0 - 2.0 * static_cast<double>(bits_ & 1);
        bits_ >>= 1;
        return sign;
    }

  private:
    std::mt19937_64 random_;  // the same numbers with every standard library
    std::uint64_t bits_ = 0;
    int left_ = 0;
};

// Of one value head. An initial state's gradient is what the maps of all tokens leave of D. Comba's map is of rank one
// where the decay is 0, -beta p k^T: if k happens to be nearly orthogonal to D, little is left of D, but as much as
// ever of D's errors. An element x of D at token t that is off by d x, d the relative error of a right implementation,
// makes the gradient wrong by d times what the maps of the tokens before t leave of x. These errors are independent, so
// that the gradient's size in this sense is the root-mean-square over t of the root-sum-square over the elements of
// D_t. Where nothing cancels each t gives about |d_initial_state|. What a token erases, e z^T with z = beta D^T k, is
// off by as much as the terms of z, also where these cancel. The sum over elements is an expectation over the signs of
// errors, which are drawn instead; several times where V is small.
class StateTerms {
  public:
    StateTerms(const Spec& spec, std::size_t K, std::size_t V)
        : spec_(spec), K_(K), V_(V), draws_(draws_of_signs(V)), errors_(draws_ * K * V), z_(V), z_terms_(V) {}

    void start_sequence() {
        std::fill(errors_.begin(), errors_.end(), 0.0);
        tokens_ = 0;
        signs_ = {};
    }

    // d_state is D after the current token, with what its output adds.
    void start_token(const Recurrence& now, const double* d_state) {
        for (std::size_t j = 0; j < V_; ++j) {
            double squares = 0.0;
            for (std::size_t c = 0; c < K_; ++c) {
                const double term = now.k[c] * d_state[c * V_ + j];
                squares += term * term;
            }
            z_terms_[j] = now.beta[j] * std::sqrt(squares);
        }
    }
    // The root-sum-square of the terms of z, which is d_v of the current token.
    const std::vector<double>& z_terms() const { return z_terms_; }

    // The errors of all later tokens pass the current one; d_state, D before it, and z add their own.
    void end_token(const Recurrence& now, const double* d_state) {
        for (std::size_t draw = 0; draw < draws_; ++draw) {
            double* errors = &errors_[draw * K_ * V_];
            pass(errors, now);
            for (std::size_t i = 0; i < K_ * V_; ++i) errors[i] += d_state[i] * signs_.next();
            if (spec_.delta) add_erased(errors, now);
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

    // Of the sum of column j of D, each element times a weight [K,V]: before end_token() is called, of the current D.
    double size_of_column(const std::vector<double>& weights, std::size_t j) const {
        if (tokens_ == 0) return 0.0;
        double squares = 0.0;
        for (std::size_t i = j; i < errors_.size(); i += V_) {
            const double error = errors_[i] * weights[i % (K_ * V_)];
            squares += error * error;
        }
        return std::sqrt(squares / (static_cast<double>(draws_) * static_cast<double>(tokens_)));
    }
    double size_of_sum(const std::vector<double>& weights) const {
        double size = 0.0;
        for (std::size_t j = 0; j < V_; ++j) size = std::hypot(size, size_of_column(weights, j));
        return size;
    }

  private:
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

    void add_erased(double* errors, const Recurrence& now) {
        for (std::size_t j = 0; j < V_; ++j) {
            const double error = z_terms_[j] * signs_.next();
            for (std::size_t c = 0; c < K_; ++c) {
                const double decay = spec_.erase_with_p ? 1.0 : now.decay[c] * now.value_decay[j];
                errors[c * V_ + j] -= decay * now.erase_key[c] * error;
            }
        }
    }

    const Spec& spec_;
    std::size_t K_, V_, draws_;
    std::vector<double> errors_;       // [draws, K, V]
    std::vector<double> z_, z_terms_;  // beta k^T E, and the terms of beta k^T D, [V]
    std::int64_t tokens_ = 0;
    RandomSigns signs_;
};

// Of one value head. A state sums what the maps of later tokens leave of every write beta k v^T, and of the initial
// state; an output sums q_c S_cj over the channels. Both may cancel, a whole tensor where it rests on few such sums:
// one token of one key head without a state gives o = s (q.k) d whatever V is, and K = V = 1 makes a state one number.
// An implementation's errors are relative to the terms, and independent from write to write and from channel to
// channel: they are as large as E, the state of the same writes each with a random sign. Where nothing cancels E is as
// large as the state.
class WriteTerms {
  public:
    WriteTerms(const Spec& spec, std::size_t K, std::size_t V)
        : spec_(spec), K_(K), V_(V), draws_(draws_of_signs(V)), writes_(draws_ * K * V), read_(V) {}

    // initial_state [K,V]
    void start_sequence(const double* initial_state) {
        signs_ = {};
        for (std::size_t i = 0; i < writes_.size(); ++i) writes_[i] = initial_state[i % (K_ * V_)] * signs_.next();
    }

    // E before the current token becomes that after it.
    void token(const Recurrence& now) {
        for (std::size_t draw = 0; draw < draws_; ++draw) {
            double* writes = &writes_[draw * K_ * V_];
            std::fill(read_.begin(), read_.end(), 0.0);
            for (std::size_t c = 0; c < K_; ++c) {
                for (std::size_t j = 0; j < V_; ++j) {
                    const double before = writes[c * V_ + j], decayed = now.decay[c] * before * now.value_decay[j];
                    if (spec_.delta) read_[j] += now.erase_key[c] * (spec_.erase_with_p ? before : decayed);
                    writes[c * V_ + j] = decayed;
                }
            }
            for (std::size_t c = 0; c < K_; ++c) {
                for (std::size_t j = 0; j < V_; ++j) {
                    writes[c * V_ + j] += now.k[c] * now.beta[j] * (signs_.next() * now.v[j] - read_[j]);
                }
            }
        }
    }

    double size_of_state(std::size_t element) const {
        double size = 0.0;
        for (std::size_t i = element; i < writes_.size(); i += K_ * V_) size = std::hypot(size, writes_[i]);
        return size / std::sqrt(static_cast<double>(draws_));
    }
    // Of element j of the current token's output.
    double size_of_output(const Recurrence& now, std::size_t j) const {
        double squares = 0.0;
        for (std::size_t i = j; i < writes_.size(); i += V_) {
            const double term = spec_.scale * now.q[i / V_ % K_] * writes_[i];
            squares += term * term;
        }
        return std::sqrt(squares / static_cast<double>(draws_));
    }

  private:
    const Spec& spec_;
    std::size_t K_, V_, draws_;
    std::vector<double> writes_;  // E, [draws, K, V]
    std::vector<double> read_;    // E^T e, [V]
    RandomSigns signs_;
};

}  // namespace headrace::reference
