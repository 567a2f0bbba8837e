// The oracle's backward: the exact adjoint of the recurrence, docs/math.md 3, token before token.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reference/oracle.hpp"
#include "reference/parameter_terms.hpp"
#include "reference/recurrence.hpp"
#include "reference/state_terms.hpp"

namespace headrace::reference {
namespace {

// States are kept every `segment` tokens and recomputed between: T = 4096 with 128 x 128 states would need 512 MiB.
constexpr std::int64_t segment = 64;

// Eight partial sums let the compiler vectorise a reduction whose order is fixed by the language.
double dot(const double* a, const double* b, std::size_t size) {
    constexpr std::size_t lanes = 8;
    double partial[lanes] = {};
    std::size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) partial[lane] += a[i + lane] * b[i + lane];
    }
    double sum = 0.0;
    for (; i < size; ++i) sum += a[i] * b[i];
    for (double value : partial) sum += value;
    return sum;
}

// Where the gradients of one token of one value head go. d_q, d_k, d_p, d_k_erase are shared by a group of value heads
// and are added to; pointers of absent inputs are null.
struct TokenGradients {
    const double* d_o;                    // [V], null: zero
    double *d_q, *d_k, *d_p, *d_k_erase;  // [K]
    double* d_p_terms;                    // [K]
    double *d_v, *d_v_terms;              // [V]
    double* d_g;                          // [1] or [K]
    double *d_gv, *d_gv_terms;            // [V]
    double *d_beta, *d_beta_terms;        // [1] or [V]
    double* d_g_gamma;                    // [1], added to
};

class Adjoint {
  public:
    Adjoint(const Spec& spec, const Arrays& arrays, const Prepared& prepared, std::size_t head, Gradients& grads)
        : spec_(spec),
          arrays_(arrays),
          prepared_(prepared),
          grads_(grads),
          head_(head),
          recurrence_(spec, arrays, prepared, static_cast<std::int64_t>(head)),
          K(recurrence_.K),
          V(recurrence_.V),
          gamma_terms_(K, V, false),
          A_log_terms_(K, V, false),
          dt_bias_terms_(K, V, spec.dt_bias_per_channel),
          state_terms_(spec, K, V),
          after_(K * V),
          d_error_(V),
          d_write_(V) {}

    // Turns d_state from the gradient of the last state of sequence n into that of its initial state.
    void sequence(double* d_state, std::int64_t n);

    // After the last sequence.
    void store_terms() const;

  private:
    TokenGradients gradients_of(std::int64_t token) const;
    void token(double* d_state, std::int64_t token, const double* before);
    void through_write(double* d_state, const TokenGradients& to, const double* before);
    void through_decay(double* d_state, const TokenGradients& to);
    void add_terms(const double* d_state, std::int64_t token, const TokenGradients& to);
    void add_gate_terms(const double* d_state, std::size_t at);
    void add_value_gate_terms(const double* d_state, const TokenGradients& to) const;
    void add_beta_terms(const double* d_state, const TokenGradients& to) const;
    void add_state_part_of_p(double* d_state) const;

    const Spec& spec_;
    const Arrays& arrays_;
    const Prepared& prepared_;
    Gradients& grads_;
    const std::size_t head_;
    Recurrence recurrence_;
    const std::size_t K, V;
    ParameterTerms gamma_terms_, A_log_terms_, dt_bias_terms_;
    StateTerms state_terms_;
    std::vector<double> after_;    // S_t, [K,V]
    std::vector<double> d_error_;  // beta_t dd_t, [V]
    std::vector<double> d_write_;  // dd_t, [V]
};

double* at_or_null(std::vector<double>& values, std::size_t index) {
    return values.empty() ? nullptr : values.data() + index;
}

TokenGradients Adjoint::gradients_of(std::int64_t token) const {
    const auto HV = static_cast<std::size_t>(spec_.HV), H = static_cast<std::size_t>(spec_.H);
    const std::size_t at = static_cast<std::size_t>(token) * HV + head_;
    const std::size_t key_at = (static_cast<std::size_t>(token) * H + head_ / (HV / H)) * K;
    TokenGradients to;
    to.d_o = arrays_.d_o.empty() ? nullptr : &arrays_.d_o[at * V];
    to.d_q = &grads_.d_q[key_at];
    to.d_k = &grads_.d_k[key_at];
    to.d_p = at_or_null(grads_.d_p, key_at);
    to.d_p_terms = at_or_null(grads_.d_p_terms, key_at);
    to.d_k_erase = &grads_.d_k_erase[key_at];
    to.d_v = &grads_.d_v[at * V];
    to.d_v_terms = &grads_.d_v_terms[at * V];
    to.d_g = at_or_null(grads_.d_g, spec_.channel_gate ? at * K : at);
    to.d_gv = at_or_null(grads_.d_gv, at * V);
    to.d_gv_terms = at_or_null(grads_.d_gv_terms, at * V);
    to.d_beta = at_or_null(grads_.d_beta, spec_.elementwise_beta ? at * V : at);
    to.d_beta_terms = at_or_null(grads_.d_beta_terms, spec_.elementwise_beta ? at * V : at);
    to.d_g_gamma = at_or_null(grads_.d_g_gamma, head_);
    return to;
}

// From D_t to D', the gradient of the decayed state, and the gradients of v_t, beta_t and the erase key.
void Adjoint::through_write(double* d_state, const TokenGradients& to, const double* before) {
    const Recurrence& now = recurrence_;
    std::fill(d_write_.begin(), d_write_.end(), 0.0);
    for (std::size_t c = 0; c < K; ++c) {
        to.d_k[c] += dot(d_state + c * V, now.write.data(), V);
        for (std::size_t j = 0; j < V; ++j) d_write_[j] += d_state[c * V + j] * now.k[c];
    }
    if (!spec_.delta) {
        std::copy(d_write_.begin(), d_write_.end(), to.d_v);
        return;
    }
    for (std::size_t j = 0; j < V; ++j) d_error_[j] = to.d_v[j] = now.beta[j] * d_write_[j];
    if (to.d_beta && spec_.elementwise_beta) {
        for (std::size_t j = 0; j < V; ++j) to.d_beta[j] = d_write_[j] * now.error[j];
    } else if (to.d_beta) {
        *to.d_beta = dot(d_write_.data(), now.error.data(), V);
    }
    if (to.d_beta) add_beta_terms(d_state, to);
    for (std::size_t c = 0; c < K; ++c) {
        if (spec_.erase_with_p) {
            to.d_p[c] -= dot(before + c * V, d_error_.data(), V);
            for (std::size_t j = 0; j < V; ++j) {
                to.d_p_terms[c] = std::hypot(to.d_p_terms[c], before[c * V + j] * state_terms_.z_terms()[j]);
            }
        } else {
            const double erased = dot(&now.decayed[c * V], d_error_.data(), V);
            to.d_k[c] -= erased;
            to.d_k_erase[c] -= erased;
            for (std::size_t j = 0; j < V; ++j) d_state[c * V + j] -= now.k[c] * d_error_[j];
        }
    }
}

// The root-sum-square of D_cj k_c r_j for each element of d_beta of the token.
void Adjoint::add_beta_terms(const double* d_state, const TokenGradients& to) const {
    double squares = 0.0;
    for (std::size_t j = 0; j < V; ++j) {
        for (std::size_t c = 0; c < K; ++c) {
            const double term = d_state[c * V + j] * recurrence_.k[c] * recurrence_.error[j];
            squares += term * term;
        }
        if (!spec_.elementwise_beta && j + 1 < V) continue;
        to.d_beta_terms[spec_.elementwise_beta ? j : 0] = std::sqrt(squares);
        squares = 0.0;
    }
}

// From D' to D_{t-1}^+ (comba: but for the state's part through p), and the gradients of all gates.
void Adjoint::through_decay(double* d_state, const TokenGradients& to) {
    const Recurrence& now = recurrence_;
    double d_scalar_gate = 0.0;
    for (std::size_t c = 0; c < K; ++c) {
        double* row = d_state + c * V;
        const double* decayed = &now.decayed[c * V];
        const double d_log_decay = dot(row, decayed, V);
        d_scalar_gate += d_log_decay;
        if (spec_.channel_gate) to.d_g[c] = d_log_decay;
        if (to.d_gv) {
            for (std::size_t j = 0; j < V; ++j) to.d_gv[j] += row[j] * decayed[j];
        }
        for (std::size_t j = 0; j < V; ++j) row[j] *= now.decay[c] * now.value_decay[j];
    }
    if (spec_.step_gate) *to.d_g = d_scalar_gate;
    if (to.d_g_gamma) *to.d_g_gamma += d_scalar_gate;
}

// d_state is D' of the token.
void Adjoint::add_terms(const double* d_state, std::int64_t token, const TokenGradients& to) {
    const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(spec_.HV) + head_;
    for (std::size_t c = 0; c < K; ++c) {
        const double *row = d_state + c * V, *decayed = &recurrence_.decayed[c * V];
        if (spec_.head_gate) gamma_terms_.add(c, 1.0, row, decayed);
        if (spec_.gate_form == GateForm::log_decay) continue;
        const std::size_t gate = spec_.channel_gate ? at * K + c : at;
        A_log_terms_.add(c, prepared_.g_by_A_log[gate], row, decayed);
        if (spec_.has_dt_bias) dt_bias_terms_.add(c, prepared_.g_by_dt_bias[gate], row, decayed);
    }
    // As for d_g, of which these are sums: comba's maps may leave less of D than of its errors.
    const bool raw = spec_.gate_form != GateForm::log_decay;
    const bool summed = spec_.erase_with_p && !spec_.channel_gate && (spec_.head_gate || raw);
    const double least = summed ? state_terms_.size_of_sum(recurrence_.decayed) : 0.0;
    gamma_terms_.end_token(least);
    A_log_terms_.end_token(raw ? least * std::fabs(prepared_.g_by_A_log[at]) : 0.0);
    dt_bias_terms_.end_token(raw && spec_.has_dt_bias ? least * std::fabs(prepared_.g_by_dt_bias[at]) : 0.0);
    if (spec_.step_gate || spec_.channel_gate) add_gate_terms(d_state, at);
    if (to.d_gv_terms) add_value_gate_terms(d_state, to);
}

// The root-sum-square of D'_cj S'_cj for each element of d_g of the token. Strong gates leave S' and d_g to few tokens,
// and comba's maps may leave less of D than of its errors: these then count.
void Adjoint::add_gate_terms(const double* d_state, std::size_t at) {
    double squares = 0.0;
    for (std::size_t c = 0; c < K; ++c) {
        for (std::size_t j = 0; j < V; ++j) {
            const double row = d_state[c * V + j], decayed = recurrence_.decayed[c * V + j];
            const double term = row == 0.0 || decayed == 0.0 ? 0.0 : row * decayed;
            squares += term * term;
        }
        if (!spec_.channel_gate && c + 1 < K) continue;
        const std::size_t gate = spec_.channel_gate ? at * K + c : at;
        const bool raw = spec_.gate_form != GateForm::log_decay;
        double size = std::sqrt(squares);
        if (spec_.erase_with_p && spec_.step_gate) size = std::max(size, state_terms_.size_of_sum(recurrence_.decayed));
        grads_.d_g_terms[gate] = size * (raw ? std::fabs(prepared_.g_by_dt_bias[gate]) : 1.0);
        squares = 0.0;
    }
}

// The same over the channels, for each element of d_gv of the token.
void Adjoint::add_value_gate_terms(const double* d_state, const TokenGradients& to) const {
    for (std::size_t j = 0; j < V; ++j) {
        double squares = 0.0;
        for (std::size_t c = 0; c < K; ++c) {
            const double term = d_state[c * V + j] * recurrence_.decayed[c * V + j];
            squares += term * term;
        }
        to.d_gv_terms[j] = std::sqrt(squares);
        if (!spec_.erase_with_p) continue;
        to.d_gv_terms[j] = std::max(to.d_gv_terms[j], state_terms_.size_of_column(recurrence_.decayed, j));
    }
}

void Adjoint::store_terms() const {
    if (spec_.head_gate) grads_.d_g_gamma_terms[head_] = gamma_terms_.size(0);
    if (spec_.gate_form == GateForm::log_decay) return;
    grads_.d_A_log_terms[head_] = A_log_terms_.size(0);
    const std::size_t biases = !spec_.has_dt_bias ? 0 : spec_.dt_bias_per_channel ? K : 1;
    for (std::size_t c = 0; c < biases; ++c) grads_.d_dt_bias_terms[head_ * biases + c] = dt_bias_terms_.size(c);
}

void Adjoint::add_state_part_of_p(double* d_state) const {
    for (std::size_t c = 0; c < K; ++c) {
        for (std::size_t j = 0; j < V; ++j) d_state[c * V + j] -= recurrence_.erase_key[c] * d_error_[j];
    }
}

void Adjoint::token(double* d_state, std::int64_t token, const double* before) {
    const TokenGradients to = gradients_of(token);
    recurrence_.load(token);
    recurrence_.advance(after_.data(), before);
    if (to.d_o) {
        for (std::size_t c = 0; c < K; ++c) {
            to.d_q[c] += spec_.scale * dot(&after_[c * V], to.d_o, V);
            const double scaled_q = spec_.scale * recurrence_.q[c];
            for (std::size_t j = 0; j < V; ++j) d_state[c * V + j] += scaled_q * to.d_o[j];
        }
    }
    state_terms_.start_token(recurrence_, d_state);
    std::copy(state_terms_.z_terms().begin(), state_terms_.z_terms().end(), to.d_v_terms);
    through_write(d_state, to, before);
    add_terms(d_state, token, to);
    through_decay(d_state, to);
    if (spec_.delta && spec_.erase_with_p) add_state_part_of_p(d_state);
    state_terms_.end_token(recurrence_, d_state);
}

void Adjoint::sequence(double* d_state, std::int64_t n) {
    const std::size_t state_size = K * V;
    const std::int64_t begin = spec_.first_token(n), length = spec_.first_token(n + 1) - begin;
    const auto token_of = [&](std::int64_t i) { return spec_.reverse ? begin + length - 1 - i : begin + i; };
    const auto advance = [&](double* after, const double* before, std::int64_t i) {
        recurrence_.load(token_of(i));
        recurrence_.advance(after, before);
    };
    const std::int64_t segments = (length + segment - 1) / segment;
    std::vector<double> entering(static_cast<std::size_t>(segments + 1) * state_size);  // state before each segment
    std::vector<double> before(static_cast<std::size_t>(segment) * state_size);         // S_{t-1} of one segment
    const auto in = [&](std::vector<double>& states, std::int64_t i) {
        return states.data() + static_cast<std::size_t>(i) * state_size;
    };
    const std::size_t first_element =
        (static_cast<std::size_t>(n) * static_cast<std::size_t>(spec_.HV) + head_) * state_size;
    if (!arrays_.initial_state.empty()) std::copy_n(&arrays_.initial_state[first_element], state_size, entering.data());
    state_terms_.start_sequence();
    for (std::int64_t s = 0; s < segments; ++s) {
        std::copy_n(in(entering, s), state_size, in(entering, s + 1));
        double* state = in(entering, s + 1);
        for (std::int64_t i = s * segment; i < std::min(length, (s + 1) * segment); ++i) advance(state, state, i);
    }
    for (std::int64_t s = segments - 1; s >= 0; --s) {
        const std::int64_t first = s * segment, count = std::min(length - first, segment);
        std::copy_n(in(entering, s), state_size, in(before, 0));
        for (std::int64_t i = 0; i + 1 < count; ++i) advance(in(before, i + 1), in(before, i), first + i);
        for (std::int64_t i = count - 1; i >= 0; --i) token(d_state, token_of(first + i), in(before, i));
    }
    for (ParameterTerms* terms : {&gamma_terms_, &A_log_terms_, &dt_bias_terms_}) terms->end_sequence();
    for (std::size_t i = 0; i < state_size; ++i) grads_.d_initial_state_terms[first_element + i] = state_terms_.size(i);
}

}  // namespace

Gradients backward(const Spec& spec, const Arrays& arrays) {
    const auto HV = static_cast<std::size_t>(spec.HV), N = static_cast<std::size_t>(spec.sequences());
    const std::size_t state_size = static_cast<std::size_t>(spec.K) * static_cast<std::size_t>(spec.V);
    Gradients grads;
    grads.d_q.assign(arrays.q.size(), 0.0);
    grads.d_k.assign(arrays.k.size(), 0.0);
    grads.d_k_erase.assign(arrays.k.size(), 0.0);
    grads.d_v.assign(arrays.v.size(), 0.0);
    grads.d_v_terms.assign(arrays.v.size(), 0.0);
    grads.d_p.assign(arrays.p.size(), 0.0);
    grads.d_p_terms.assign(arrays.p.size(), 0.0);
    grads.d_g.assign(arrays.g.size(), 0.0);
    grads.d_g_terms.assign(arrays.g.size(), 0.0);
    grads.d_gv.assign(arrays.gv.size(), 0.0);
    grads.d_gv_terms.assign(arrays.gv.size(), 0.0);
    grads.d_g_gamma.assign(arrays.g_gamma.size(), 0.0);
    grads.d_g_gamma_terms.assign(arrays.g_gamma.size(), 0.0);
    grads.d_A_log_terms.assign(arrays.A_log.size(), 0.0);
    grads.d_dt_bias_terms.assign(arrays.dt_bias.size(), 0.0);
    grads.d_beta.assign(arrays.beta.size(), 0.0);
    grads.d_beta_terms.assign(arrays.beta.size(), 0.0);
    grads.d_initial_state.assign(N * HV * state_size, 0.0);
    grads.d_initial_state_terms = grads.d_initial_state;
    if (!arrays.d_final_state.empty()) grads.d_initial_state = arrays.d_final_state;

    const Prepared prepared = prepare(spec, arrays);
    for (std::size_t head = 0; head < HV; ++head) {
        Adjoint adjoint(spec, arrays, prepared, head, grads);
        for (std::size_t n = 0; n < N; ++n) {
            double* d_state = grads.d_initial_state.data() + (n * HV + head) * state_size;
            adjoint.sequence(d_state, static_cast<std::int64_t>(n));
        }
        adjoint.store_terms();
    }
    prepare_adjoint(grads, spec, arrays, prepared);
    for (std::vector<double>* terms : {&grads.d_v_terms, &grads.d_p_terms, &grads.d_gv_terms}) {
        if (!rests_on_few_sums(spec)) terms->clear();
    }
    return grads;
}

}  // namespace headrace::reference
