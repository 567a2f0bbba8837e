// The oracle: every operator in double precision, token by token, forward and hand-written adjoint (docs/math.md 2, 3).
#pragma once

#include <cstdint>
#include <vector>

namespace headrace::reference {

enum class GateForm { log_decay, softplus, bounded };
enum class BetaForm { value, sigmoid, two_sigmoid };

// What is computed. Symbols as in docs/math.md: B, T, H, HV, K, V, N sequences.
struct Spec {
    std::int64_t B = 1, T = 0, H = 1, HV = 1, K = 1, V = 1;
    std::vector<std::int64_t> cu_seqlens;  // [N + 1], B = 1; empty: B sequences of T tokens
    bool delta = false;                    // the delta rule; otherwise additive
    bool erase_with_p = false;             // comba: the error is taken with p, against the undecayed state
    bool step_gate = false;                // g is [B,T,HV]
    bool channel_gate = false;             // g is [B,T,HV,K]
    bool head_gate = false;                // g_gamma [HV]
    bool value_gate = false;               // gv [B,T,HV,V]
    bool has_beta = false;                 // otherwise beta = 1
    bool elementwise_beta = false;         // beta is [B,T,HV,V], otherwise [B,T,HV]
    double scale = 1.0;
    bool reverse = false;
    bool l2norm = false;
    GateForm gate_form = GateForm::log_decay;
    bool has_dt_bias = false;
    bool dt_bias_per_channel = false;  // dt_bias is [HV,K], otherwise [HV]
    double lower_bound = -5.0;
    BetaForm beta_form = BetaForm::value;
    bool keep_states = false;  // forward also returns the state after every token

    std::int64_t sequences() const { return cu_seqlens.empty() ? B : static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
    // Sequence n is tokens [first_token(n), first_token(n + 1)) of the B * T tokens in memory order.
    std::int64_t first_token(std::int64_t n) const {
        return cu_seqlens.empty() ? n * T : cu_seqlens[static_cast<std::size_t>(n)];
    }

    bool operator==(const Spec&) const = default;
};

// Row-major tensors with the shapes of Spec and of the API; empty: absent.
struct Arrays {
    std::vector<double> q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias;
    std::vector<double> initial_state;       // [N,HV,K,V]
    std::vector<double> d_o, d_final_state;  // of backward; absent: zero

    bool operator==(const Arrays&) const = default;
};

struct Outputs {
    std::vector<double> o;            // [B,T,HV,V]
    std::vector<double> final_state;  // [N,HV,K,V]
    std::vector<double> states;       // [B,T,HV,K,V], the state after each token; with keep_states only
    // How large the terms are that each element sums (WriteTerms); empty where the tensors rest on many sums.
    std::vector<double> o_terms, final_state_terms, states_terms;
};

// Gradients of sum(o * d_o) + sum(final_state * d_final_state); one for each given input, and d_initial_state always.
struct Gradients {
    std::vector<double> d_q, d_k, d_v, d_p, d_g, d_gv, d_g_gamma, d_beta, d_A_log, d_dt_bias, d_initial_state;
    // How large the terms are that each element of d_g_gamma, d_A_log, d_dt_bias is the sum of (ParameterTerms).
    std::vector<double> d_g_gamma_terms, d_A_log_terms, d_dt_bias_terms;
    // The same for d_g and d_beta, which sum products with state elements of one token: their root-sum-square. And for
    // d_v, d_gv and d_p = -S z, whose z = d_v may be next to nothing beside its own terms; these are empty where the
    // tensors rest on many sums.
    std::vector<double> d_g_terms, d_beta_terms, d_v_terms, d_gv_terms, d_p_terms;
    // Of the gradients of raw gates: what the smallest numbers, which an implementation may take for zero, come to
    // after the factors that follow them.
    std::vector<double> d_g_underflow, d_A_log_underflow, d_dt_bias_underflow;
    // What roundings of the state's gradient come to in d_initial_state (StateTerms).
    std::vector<double> d_initial_state_terms;
    // [B,T,H,K], the part of d_k that came through the error term, before the l2norm adjoint; for the identities of
    // docs/math.md 7 only.
    std::vector<double> d_k_erase;
};

Outputs forward(const Spec& spec, const Arrays& arrays);
Gradients backward(const Spec& spec, const Arrays& arrays);

}  // namespace headrace::reference
