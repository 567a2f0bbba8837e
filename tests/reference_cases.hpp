// Small problems for the oracle's own tests: every rule x gate, inputs of every tensor that they name.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "reference/oracle.hpp"

namespace headrace::reference {

enum class Rule { additive, delta, comba };
enum class Gate { none, head, step, channel, step_head, channel_head };
inline constexpr Rule all_rules[] = {Rule::additive, Rule::delta, Rule::comba};
inline constexpr Gate all_gates[] = {Gate::none,    Gate::head,      Gate::step,
                                     Gate::channel, Gate::step_head, Gate::channel_head};

inline Spec make_spec(Rule rule, Gate gate) {
    Spec spec;
    spec.B = 2, spec.T = 5, spec.H = 2, spec.HV = 4, spec.K = 3, spec.V = 2;
    spec.scale = 0.7;
    spec.delta = rule != Rule::additive;
    spec.erase_with_p = rule == Rule::comba;
    spec.has_beta = spec.delta;
    spec.head_gate = gate == Gate::head || gate == Gate::step_head || gate == Gate::channel_head;
    spec.step_gate = gate == Gate::step || gate == Gate::step_head;
    spec.channel_gate = gate == Gate::channel || gate == Gate::channel_head;
    return spec;
}

inline bool has_g(const Spec& spec) { return spec.step_gate || spec.channel_gate; }

inline void make_ragged(Spec& spec) {
    spec.B = 1, spec.T = 8;
    spec.cu_seqlens = {0, 0, 3, 3, 4, 8, 8};
}

// Inputs of every tensor that the spec names; initial and final states are given.
inline Arrays make_arrays(const Spec& spec, unsigned seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::int64_t count, double low, double high) {
        std::uniform_real_distribution<double> uniform(low, high);
        std::vector<double> values(static_cast<std::size_t>(count));
        for (double& value : values) value = uniform(random);
        return values;
    };
    const std::int64_t tokens = spec.B * spec.T, heads = tokens * spec.HV;
    const std::int64_t state = spec.sequences() * spec.HV * spec.K * spec.V;
    const bool raw = spec.gate_form != GateForm::log_decay;
    Arrays arrays;
    arrays.q = draw(tokens * spec.H * spec.K, -1, 1);
    arrays.k = draw(tokens * spec.H * spec.K, -1, 1);
    arrays.v = draw(heads * spec.V, -1, 1);
    if (spec.erase_with_p) arrays.p = draw(tokens * spec.H * spec.K, -1, 1);
    if (spec.step_gate) arrays.g = draw(heads, raw ? -2 : -1, raw ? 2 : 0);
    if (spec.channel_gate) arrays.g = draw(heads * spec.K, raw ? -2 : -1, raw ? 2 : 0);
    if (spec.head_gate) arrays.g_gamma = draw(spec.HV, -1, 0);
    if (spec.value_gate) arrays.gv = draw(heads * spec.V, -1, 0);
    if (spec.has_beta) arrays.beta = draw(spec.elementwise_beta ? heads * spec.V : heads, 0.1, 1);
    if (raw) arrays.A_log = draw(spec.HV, -1, 0.5);
    if (spec.has_dt_bias) arrays.dt_bias = draw(spec.dt_bias_per_channel ? spec.HV * spec.K : spec.HV, -1, 1);
    arrays.initial_state = draw(state, -1, 1);
    arrays.d_o = draw(heads * spec.V, -1, 1);
    arrays.d_final_state = draw(state, -1, 1);
    return arrays;
}

// Tokens [begin, end) of a tensor [1,T,...].
inline std::vector<double> tokens_of(const std::vector<double>& values, std::int64_t T, std::int64_t begin,
                                     std::int64_t end) {
    const std::int64_t width = static_cast<std::int64_t>(values.size()) / T;
    return {values.begin() + begin * width, values.begin() + end * width};
}

inline Arrays part_of(const Arrays& whole, std::int64_t T, std::int64_t begin, std::int64_t end) {
    Arrays part = whole;
    for (auto tensor :
         {&Arrays::q, &Arrays::k, &Arrays::v, &Arrays::p, &Arrays::g, &Arrays::gv, &Arrays::beta, &Arrays::d_o}) {
        part.*tensor = tokens_of(whole.*tensor, T, begin, end);
    }
    return part;
}

struct Slot {
    const char* name;
    std::vector<double> Arrays::*input;
    std::vector<double> Gradients::*gradient;
};
inline constexpr Slot slots[] = {
    {"q", &Arrays::q, &Gradients::d_q},
    {"k", &Arrays::k, &Gradients::d_k},
    {"v", &Arrays::v, &Gradients::d_v},
    {"p", &Arrays::p, &Gradients::d_p},
    {"g", &Arrays::g, &Gradients::d_g},
    {"gv", &Arrays::gv, &Gradients::d_gv},
    {"g_gamma", &Arrays::g_gamma, &Gradients::d_g_gamma},
    {"beta", &Arrays::beta, &Gradients::d_beta},
    {"A_log", &Arrays::A_log, &Gradients::d_A_log},
    {"dt_bias", &Arrays::dt_bias, &Gradients::d_dt_bias},
    {"initial_state", &Arrays::initial_state, &Gradients::d_initial_state},
};

inline std::string describe(Rule rule, Gate gate, const Spec& spec) {
    return "rule " + std::to_string(static_cast<int>(rule)) + " gate " + std::to_string(static_cast<int>(gate)) +
           " l2norm " + std::to_string(spec.l2norm) + " gate_form " + std::to_string(static_cast<int>(spec.gate_form)) +
           " bias " + std::to_string(spec.has_dt_bias) + std::to_string(spec.dt_bias_per_channel) + " beta_form " +
           std::to_string(static_cast<int>(spec.beta_form));
}

// Calls `visit` with the spec in every form of the gate's preparation.
inline void for_each_gate_form(Spec spec, const std::function<void(const Spec&)>& visit) {
    visit(spec);
    if (!has_g(spec)) return;
    for (GateForm form : {GateForm::softplus, GateForm::bounded}) {
        spec.gate_form = form;
        spec.lower_bound = -3.0;
        for (int bias = 0; bias < (spec.channel_gate ? 3 : 2); ++bias) {
            spec.has_dt_bias = bias > 0;
            spec.dt_bias_per_channel = bias == 2;
            visit(spec);
        }
    }
}

}  // namespace headrace::reference
