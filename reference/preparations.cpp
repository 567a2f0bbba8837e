// Preparations inside the operators and their adjoints, formulas of docs/math.md 2.
#include "reference/preparations.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace headrace::reference {
namespace {

constexpr double l2norm_epsilon = 1e-6;  // part of the operators' definition

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

// A pre-activation of +-inf saturates the gate; its gradient is an exact 0 and stays 0 times that infinity.
double times(double gradient, double factor) { return gradient == 0.0 ? 0.0 : gradient * factor; }

double beta_factor(BetaForm form) { return form == BetaForm::two_sigmoid ? 2.0 : 1.0; }

double inverse_norm(const double* x, std::size_t size) {
    double sum = l2norm_epsilon;
    for (std::size_t c = 0; c < size; ++c) sum += x[c] * x[c];
    return 1.0 / std::sqrt(sum);
}

std::vector<double> normalised(const std::vector<double>& x, std::size_t size) {
    std::vector<double> y(x.size());
    for (std::size_t at = 0; at < x.size(); at += size) {
        const double r = inverse_norm(&x[at], size);
        for (std::size_t c = 0; c < size; ++c) y[at + c] = x[at + c] * r;
    }
    return y;
}

// dx = r (dy - y (y . dy)), in place
void normalised_adjoint(std::vector<double>& d, const std::vector<double>& x, const std::vector<double>& y,
                        std::size_t size) {
    for (std::size_t at = 0; at < x.size(); at += size) {
        const double r = inverse_norm(&x[at], size);
        double dot = 0.0;
        for (std::size_t c = 0; c < size; ++c) dot += y[at + c] * d[at + c];
        for (std::size_t c = 0; c < size; ++c) d[at + c] = r * (d[at + c] - y[at + c] * dot);
    }
}

// Where element i of g reads A_log and dt_bias.
struct GateIndex {
    std::size_t head, bias;
    GateIndex(const Spec& spec, std::size_t i) {
        const std::size_t channels = spec.channel_gate ? static_cast<std::size_t>(spec.K) : 1;
        head = i / channels % static_cast<std::size_t>(spec.HV);
        bias = spec.dt_bias_per_channel ? head * channels + i % channels : head;
    }
};

double preactivation(const Spec& spec, const Arrays& arrays, std::size_t i) {
    return arrays.g[i] + (spec.has_dt_bias ? arrays.dt_bias[GateIndex(spec, i).bias] : 0.0);
}

// g and its derivatives, from the pre-activations.
void prepare_log_decay(Prepared& prepared, const Spec& spec, const Arrays& arrays) {
    prepared.g = arrays.g;
    if (spec.gate_form == GateForm::log_decay) return;
    prepared.g_by_A_log.resize(arrays.g.size());
    prepared.g_by_dt_bias.resize(arrays.g.size());
    for (std::size_t i = 0; i < arrays.g.size(); ++i) {
        const double x = preactivation(spec, arrays, i), slope = std::exp(arrays.A_log[GateIndex(spec, i).head]);
        if (spec.gate_form == GateForm::softplus) {
            prepared.g[i] = prepared.g_by_A_log[i] = -slope * softplus(x);
            prepared.g_by_dt_bias[i] = -slope * sigmoid(x);
        } else {
            const double gate = sigmoid(slope * x);
            prepared.g[i] = spec.lower_bound * gate;
            prepared.g_by_dt_bias[i] = spec.lower_bound * gate * sigmoid(-slope * x) * slope;  // 1 - gate would cancel
            prepared.g_by_A_log[i] = times(prepared.g_by_dt_bias[i], x);
        }
    }
}

// In units of the smallest number: how much element i of a gate's gradient changes where a number below it becomes
// zero, be it the slope w of the gate's formula, its product with the gradient d of the log decay, or the whole. By the
// pre-activation x the gradient is d w, with w = rate sigmoid(x) (softplus) or lower_bound rate sigmoid'(rate x)
// (bounded); by A_log it has softplus(x) in place of sigmoid(x), or is d w x. At rate x = -700 w is no normal number of
// f64, and d x, some thousands, makes one of it. Where w is zero in the oracle nothing is lost.
struct Underflow {
    double by_dt_bias, by_A_log;
};
Underflow underflow(const Spec& spec, const Arrays& arrays, const Prepared& prepared, std::size_t i, double d) {
    if (prepared.g_by_dt_bias[i] == 0.0) return {0.0, 0.0};
    const bool bounded = spec.gate_form == GateForm::bounded;
    const double rate = std::exp(arrays.A_log[GateIndex(spec, i).head]);
    const double factor = rate * (bounded ? std::fabs(spec.lower_bound) : 1.0);
    const double lost = 1.0 + factor * (1.0 + std::fabs(d));
    return {lost, bounded ? lost * std::fabs(preactivation(spec, arrays, i)) : lost};
}

void log_decay_adjoint(Gradients& grads, const Spec& spec, const Arrays& arrays, const Prepared& prepared) {
    if (spec.gate_form == GateForm::log_decay) return;
    grads.d_A_log.assign(arrays.A_log.size(), 0.0);
    grads.d_dt_bias.assign(arrays.dt_bias.size(), 0.0);
    grads.d_g_underflow.assign(arrays.g.size(), 0.0);
    grads.d_A_log_underflow.assign(arrays.A_log.size(), 0.0);
    grads.d_dt_bias_underflow.assign(arrays.dt_bias.size(), 0.0);
    for (std::size_t i = 0; i < arrays.g.size(); ++i) {
        const GateIndex index(spec, i);
        const double d_log_decay = grads.d_g[i];
        const Underflow lost = underflow(spec, arrays, prepared, i, d_log_decay);
        grads.d_g_underflow[i] = lost.by_dt_bias;
        grads.d_A_log_underflow[index.head] += lost.by_A_log;
        if (spec.has_dt_bias) grads.d_dt_bias_underflow[index.bias] += lost.by_dt_bias;
        grads.d_g[i] = d_log_decay * prepared.g_by_dt_bias[i];
        grads.d_A_log[index.head] += times(d_log_decay, prepared.g_by_A_log[i]);
        if (spec.has_dt_bias) grads.d_dt_bias[index.bias] += grads.d_g[i];
    }
}

}  // namespace

Prepared prepare(const Spec& spec, const Arrays& arrays) {
    const auto key_size = static_cast<std::size_t>(spec.K);
    Prepared prepared;
    prepared.q = spec.l2norm ? normalised(arrays.q, key_size) : arrays.q;
    prepared.k = spec.l2norm ? normalised(arrays.k, key_size) : arrays.k;
    prepared.p = spec.l2norm ? normalised(arrays.p, key_size) : arrays.p;
    prepare_log_decay(prepared, spec, arrays);
    prepared.beta = arrays.beta;
    if (spec.beta_form != BetaForm::value) {
        for (double& beta : prepared.beta) beta = beta_factor(spec.beta_form) * sigmoid(beta);
    }
    return prepared;
}

void prepare_adjoint(Gradients& grads, const Spec& spec, const Arrays& arrays, const Prepared& prepared) {
    const auto key_size = static_cast<std::size_t>(spec.K);
    if (spec.l2norm) {
        normalised_adjoint(grads.d_q, arrays.q, prepared.q, key_size);
        normalised_adjoint(grads.d_k, arrays.k, prepared.k, key_size);
        normalised_adjoint(grads.d_p, arrays.p, prepared.p, key_size);
        for (std::size_t i = 0; i < arrays.p.size(); ++i) {
            grads.d_p_terms[i] *= inverse_norm(&arrays.p[i / key_size * key_size], key_size);
        }
    }
    log_decay_adjoint(grads, spec, arrays, prepared);
    if (spec.beta_form != BetaForm::value) {
        for (std::size_t i = 0; i < arrays.beta.size(); ++i) {
            const double logit = arrays.beta[i];
            const double slope = beta_factor(spec.beta_form) * sigmoid(logit) * sigmoid(-logit);
            grads.d_beta[i] *= slope;
            grads.d_beta_terms[i] *= slope;
        }
    }
}

}  // namespace headrace::reference
