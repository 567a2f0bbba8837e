// Recurrence: one value head of the operators, one token at a time.
#include "reference/recurrence.hpp"

#include <algorithm>
#include <cmath>

namespace headrace::reference {

Recurrence::Recurrence(const Spec& spec, const Arrays& arrays, const Prepared& prepared, std::int64_t value_head)
    : K(static_cast<std::size_t>(spec.K)),
      V(static_cast<std::size_t>(spec.V)),
      decay(K, 1.0),
      value_decay(V, 1.0),
      beta(V, 1.0),
      error(V, 0.0),
      write(V, 0.0),
      decayed(K * V, 0.0),
      spec_(spec),
      arrays_(arrays),
      prepared_(prepared),
      value_head_(static_cast<std::size_t>(value_head)),
      head_(static_cast<std::size_t>(value_head / (spec.HV / spec.H))) {}

void Recurrence::load(std::int64_t token) {
    const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(spec_.HV) + value_head_;
    const std::size_t key_at = (static_cast<std::size_t>(token) * static_cast<std::size_t>(spec_.H) + head_) * K;
    q = &prepared_.q[key_at];
    k = &prepared_.k[key_at];
    v = &arrays_.v[at * V];
    erase_key = spec_.erase_with_p ? &prepared_.p[key_at] : k;
    for (std::size_t c = 0; c < K; ++c) {
        double log_decay = 0.0;
        if (spec_.step_gate) log_decay += prepared_.g[at];
        if (spec_.channel_gate) log_decay += prepared_.g[at * K + c];
        if (spec_.head_gate) log_decay += arrays_.g_gamma[value_head_];
        decay[c] = std::exp(log_decay);
    }
    if (spec_.value_gate) {
        for (std::size_t j = 0; j < V; ++j) value_decay[j] = std::exp(arrays_.gv[at * V + j]);
    }
    if (spec_.has_beta) {
        for (std::size_t j = 0; j < V; ++j) beta[j] = prepared_.beta[spec_.elementwise_beta ? at * V + j : at];
    }
}

void Recurrence::advance(double* after, const double* before) {
    for (std::size_t c = 0; c < K; ++c) {
        for (std::size_t j = 0; j < V; ++j) decayed[c * V + j] = decay[c] * before[c * V + j] * value_decay[j];
    }
    std::copy(v, v + V, write.begin());
    if (spec_.delta) {
        const double* erased_from = spec_.erase_with_p ? before : decayed.data();
        std::copy(v, v + V, error.begin());
        for (std::size_t c = 0; c < K; ++c) {
            for (std::size_t j = 0; j < V; ++j) error[j] -= erase_key[c] * erased_from[c * V + j];
        }
        for (std::size_t j = 0; j < V; ++j) write[j] = beta[j] * error[j];
    }
    for (std::size_t c = 0; c < K; ++c) {
        for (std::size_t j = 0; j < V; ++j) after[c * V + j] = decayed[c * V + j] + k[c] * write[j];
    }
}

void Recurrence::read_out(double* o, const double* state) const {
    std::fill(o, o + V, 0.0);
    for (std::size_t c = 0; c < K; ++c) {
        for (std::size_t j = 0; j < V; ++j) o[j] += spec_.scale * q[c] * state[c * V + j];
    }
}

}  // namespace headrace::reference
