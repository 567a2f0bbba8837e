// The sizes of the terms of the oracle's gradients, by which sums that cancel are judged.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference_cases.hpp"

namespace headrace::reference {
namespace {

// Terms [B,T,HV,K] of a parameter's gradient, one for each token and state element (V = 1): their sums, and their size
// as ParameterTerms defines it. `least` [B,T,HV]: counts instead of smaller sums over the elements of a token; or
// empty.
struct SumsAndSizes {
    std::vector<double> sums, sizes;
};
SumsAndSizes sums_and_sizes(const Spec& spec, const std::vector<double>& terms, bool per_channel,
                            const std::vector<double>& least = {}) {
    const std::int64_t slots = per_channel ? spec.K : 1;
    SumsAndSizes result;
    for (std::int64_t slot = 0; slot < spec.HV * slots; ++slot) {
        const std::int64_t h = slot / slots, first = per_channel ? slot % slots : 0,
                           last = per_channel ? first + 1 : spec.K;
        double sum = 0, token_squares = 0, element_squares = 0;
        for (std::int64_t b = 0; b < spec.B; ++b) {
            std::vector<double> over_elements(static_cast<std::size_t>(spec.T)),
                over_tokens(static_cast<std::size_t>(spec.K));
            for (std::int64_t t = 0; t < spec.T; ++t) {
                for (std::int64_t c = first; c < last; ++c) {
                    const double term = terms[static_cast<std::size_t>(((b * spec.T + t) * spec.HV + h) * spec.K + c)];
                    sum += term;
                    over_elements[static_cast<std::size_t>(t)] += term;
                    over_tokens[static_cast<std::size_t>(c)] += term;
                }
            }
            for (std::int64_t t = 0; t < spec.T; ++t) {
                double size = std::fabs(over_elements[static_cast<std::size_t>(t)]);
                if (!least.empty()) size = std::max(size, least[static_cast<std::size_t>((b * spec.T + t) * spec.HV + h)]);
                token_squares += size * size;
            }
            for (double value : over_tokens) element_squares += value * value;
        }
        result.sums.push_back(sum);
        result.sizes.push_back(std::sqrt(std::max(token_squares, element_squares)));
    }
    return result;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-12 * (1 + std::fabs(expected[i])));
}

// g_gamma acts as g does, dt_bias as the raw g does; a softplus gate changes with A_log by its own value. T = 1: no
// token repeats another's elements; T = 9: the sums over tokens count. Comba's sizes are at least those of d_g.
void expect_terms(Spec spec, unsigned seed) {
    Gradients grads = backward(spec, make_arrays(spec, seed));
    const auto least = [&](const std::vector<double>& terms) { return spec.erase_with_p && !spec.channel_gate ? terms : std::vector<double>(); };
    SumsAndSizes expected = sums_and_sizes(spec, grads.d_g, false, least(grads.d_g_terms));
    expect_near(grads.d_g_gamma, expected.sums);
    expect_near(grads.d_g_gamma_terms, expected.sizes);

    spec.gate_form = GateForm::softplus, spec.has_dt_bias = true;
    for (bool per_channel : {false, spec.channel_gate}) {
        spec.dt_bias_per_channel = per_channel;
        const Arrays arrays = make_arrays(spec, seed + 1);
        grads = backward(spec, arrays);
        expected = sums_and_sizes(spec, grads.d_g, per_channel, least(grads.d_g_terms));
        expect_near(grads.d_dt_bias, expected.sums);
        expect_near(grads.d_dt_bias_terms, expected.sizes);

        Spec plain = spec;
        plain.gate_form = GateForm::log_decay, plain.has_dt_bias = plain.dt_bias_per_channel = false;
        Arrays decays = arrays;
        const std::size_t K = static_cast<std::size_t>(spec.K), HV = static_cast<std::size_t>(spec.HV);
        for (std::size_t i = 0; i < decays.g.size(); ++i) {
            const double bias = per_channel ? arrays.dt_bias[i % (HV * K)] : arrays.dt_bias[i / K % HV];
            decays.g[i] = -std::exp(arrays.A_log[i / K % HV]) * std::log1p(std::exp(arrays.g[i] + bias));
        }
        Gradients of_decays = backward(plain, decays);
        for (std::size_t i = 0; i < decays.g.size(); ++i) {
            of_decays.d_g[i] *= decays.g[i];
            of_decays.d_g_terms[i] *= std::fabs(decays.g[i]);
        }
        expected = sums_and_sizes(spec, of_decays.d_g, false, least(of_decays.d_g_terms));
        expect_near(grads.d_A_log, expected.sums);
        expect_near(grads.d_A_log_terms, expected.sizes);
    }
}

TEST(reference, terms_are_those_that_the_gradients_of_parameters_sum) {
    for (Rule rule : all_rules) {
        for (bool channel : {false, true}) {
            for (std::int64_t T : {1, 9}) {
                Spec spec = make_spec(rule, channel ? Gate::channel_head : Gate::step_head);
                spec.T = T, spec.V = 1, spec.K = channel ? 3 : 1;
                expect_terms(spec, static_cast<unsigned>(20 + T));
            }
        }
    }
}

// What token t erases of D with column j of head h of z as large as the terms of z: [HV,K,V].
std::vector<double> erased_by_z_terms(const Spec& spec, const Arrays& arrays, std::int64_t t, std::size_t h,
                                      std::size_t j) {
    Spec later = spec;
    later.T = spec.T - t - 1;
    const Arrays now = part_of(arrays, spec.T, t, t + 1);
    const std::vector<double> d_state = backward(later, part_of(arrays, spec.T, t + 1, spec.T)).d_initial_state;
    const auto K = static_cast<std::size_t>(spec.K), V = static_cast<std::size_t>(spec.V);
    const std::size_t key_head = h / static_cast<std::size_t>(spec.HV / spec.H);
    double z = 0;
    for (std::size_t c = 0; c < K; ++c) {
        const double d_o = now.d_o.empty() ? 0.0 : spec.scale * now.q[key_head * K + c] * now.d_o[h * V + j];
        z = std::hypot(z, now.k[key_head * K + c] * (d_state[(h * K + c) * V + j] + d_o));
    }
    z *= now.beta[spec.elementwise_beta ? h * V + j : h];
    std::vector<double> erased(d_state.size());
    for (std::size_t c = 0; c < K; ++c) {
        double log_decay = now.gv[h * V + j];
        if (spec.step_gate) log_decay += now.g[h];
        if (spec.channel_gate) log_decay += now.g[h * K + c];
        if (spec.head_gate) log_decay += now.g_gamma[h];
        const double key = spec.erase_with_p ? now.p[key_head * K + c] : now.k[key_head * K + c] * std::exp(log_decay);
        erased[(h * K + c) * V + j] = z * key;
    }
    return erased;
}

// By their definition: an error of the size of one element of D_t comes to |d_initial_state| of tokens 1..t alone, with
// that element for d_final_state and no d_o.
double size_of_state_errors(const Spec& spec, const Arrays& arrays) {
    double squares = 0;
    for (std::int64_t t = 0; t < spec.T; ++t) {
        Spec later = spec, earlier = spec;
        later.T = spec.T - t, earlier.T = t;
        Arrays impulse = part_of(arrays, spec.T, 0, t);
        impulse.d_o.clear();
        const std::vector<double> d_state = backward(later, part_of(arrays, spec.T, t, spec.T)).d_initial_state;
        for (std::size_t i = 0; i < d_state.size(); ++i) {
            impulse.d_final_state.assign(d_state.size(), 0.0);
            impulse.d_final_state[i] = d_state[i];
            for (double value : backward(earlier, impulse).d_initial_state) squares += value * value;
        }
        for (std::int64_t j = 0; spec.delta && j < spec.HV * spec.V; ++j) {
            impulse.d_final_state = erased_by_z_terms(spec, arrays, t, static_cast<std::size_t>(j / spec.V),
                                                      static_cast<std::size_t>(j % spec.V));
            for (double value : backward(earlier, impulse).d_initial_state) squares += value * value;
        }
    }
    return std::sqrt(squares / static_cast<double>(spec.T));
}

double norm(const std::vector<double>& values) {
    double squares = 0;
    for (double value : values) squares += value * value;
    return std::sqrt(squares);
}

// Their signs are drawn: 8 seeds of 32 columns each know the size to about 5 %.
TEST(reference, terms_of_the_initial_state_are_errors_of_the_states_gradients) {
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            Spec spec = make_spec(rule, gate);
            spec.B = 1, spec.T = 4, spec.V = 8;
            spec.value_gate = true, spec.elementwise_beta = spec.delta;
            double got = 0, expected = 0;
            for (unsigned seed = 40; seed < 48; ++seed) {
                Arrays arrays = make_arrays(spec, seed);
                if (seed % 2 == 0) arrays.d_o.clear();
                got += norm(backward(spec, arrays).d_initial_state_terms);
                expected += size_of_state_errors(spec, arrays);
            }
            EXPECT_NEAR(got, expected, 0.1 * expected) << describe(rule, gate, spec);
        }
    }
}

// Comba's tokens with a gate of -inf are maps -beta p k^T, and k_1 is nearly orthogonal to p_2: little is left of D,
// as much as ever of its errors. Where all decays are alike errors shrink as D does.
TEST(reference, terms_of_the_initial_state_outgrow_it_where_a_map_cancels) {
    Spec spec;
    spec.T = 2, spec.K = 2, spec.V = 64;
    spec.step_gate = true;
    Arrays arrays = make_arrays(spec, 32);
    arrays.d_o.clear();
    arrays.g = {-0.5, -1};
    Gradients grads = backward(spec, arrays);
    EXPECT_NEAR(norm(grads.d_initial_state_terms), norm(grads.d_initial_state), 0.2 * norm(grads.d_initial_state));

    spec.delta = spec.erase_with_p = true;
    arrays.g.assign(2, -std::numeric_limits<double>::infinity());
    arrays.k = {1, 1, 0.5, 0.5};
    arrays.p = {1, 0, 1, -1.001};
    grads = backward(spec, arrays);
    EXPECT_GT(norm(grads.d_initial_state_terms), 500 * norm(grads.d_initial_state));
    EXPECT_LT(norm(grads.d_initial_state_terms), 2000 * norm(grads.d_initial_state));
}

// By their definition: each element of each write, and of the initial state, alone in a state that later tokens write
// nothing to. sizes is [T,K,V]: what they leave after every token, root-sum-square.
std::vector<double> sizes_of_writes(Spec spec, const Arrays& arrays) {
    const std::size_t T = static_cast<std::size_t>(spec.T), V = static_cast<std::size_t>(spec.V);
    const std::size_t elements = static_cast<std::size_t>(spec.K) * V;
    std::vector<double> squares(T * elements);
    for (std::size_t t = 0; t <= T; ++t) {  // token t, counted from 1; 0: the initial state
        Spec later = spec;
        later.T = spec.T - static_cast<std::int64_t>(t), later.keep_states = true;
        Arrays impulse = part_of(arrays, spec.T, static_cast<std::int64_t>(t), spec.T);
        impulse.v.assign(impulse.v.size(), 0.0);
        for (std::size_t i = 0; i < elements; ++i) {
            impulse.initial_state.assign(elements, 0.0);
            double& write = impulse.initial_state[i] = arrays.initial_state[i];
            if (t > 0) write = arrays.k[(t - 1) * elements / V + i / V] * arrays.v[(t - 1) * V + i % V];
            if (t > 0 && spec.delta) write *= arrays.beta[spec.elementwise_beta ? (t - 1) * V + i % V : t - 1];
            if (t > 0) squares[(t - 1) * elements + i] += write * write;
            const std::vector<double> states = forward(later, impulse).states;
            for (std::size_t s = 0; s < states.size(); ++s) squares[t * elements + s] += states[s] * states[s];
        }
    }
    for (double& square : squares) square = std::sqrt(square);
    return squares;
}

// Their signs are drawn.
TEST(reference, terms_of_outputs_and_states_are_their_writes) {
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            Spec spec = make_spec(rule, gate);
            spec.B = spec.H = spec.HV = 1, spec.T = 4, spec.V = 7, spec.keep_states = true;
            spec.value_gate = true, spec.elementwise_beta = spec.delta;
            double states = 0, expected_states = 0, final_states = 0, expected_final_states = 0, o = 0, expected_o = 0;
            for (unsigned seed = 60; seed < 76; ++seed) {
                const Arrays arrays = make_arrays(spec, seed);
                const Outputs outputs = forward(spec, arrays);
                const std::vector<double> sizes = sizes_of_writes(spec, arrays);
                const std::size_t last = sizes.size() - outputs.final_state.size();
                std::vector<double> terms(outputs.o.size());
                for (std::size_t i = 0; i < sizes.size(); ++i) {
                    const std::size_t t = i / outputs.final_state.size(), c = i / 7 % 3;
                    double& term = terms[t * 7 + i % 7];
                    term = std::hypot(term, spec.scale * arrays.q[t * 3 + c] * sizes[i]);
                }
                states += norm(outputs.states_terms), expected_states += norm(sizes);
                final_states += norm(outputs.final_state_terms);
                expected_final_states += norm({sizes.begin() + static_cast<std::ptrdiff_t>(last), sizes.end()});
                o += norm(outputs.o_terms), expected_o += norm(terms);
            }
            EXPECT_NEAR(states, expected_states, 0.1 * expected_states) << describe(rule, gate, spec);
            EXPECT_NEAR(final_states, expected_final_states, 0.1 * expected_final_states) << describe(rule, gate, spec);
            EXPECT_NEAR(o, expected_o, 0.1 * expected_o) << describe(rule, gate, spec);
        }
    }
}

// One token without a state: o = s (q.k) v. Two numbers: S = k_1 v_1 + k_2 v_2. Many tokens: they are no larger than
// what they are the terms of, and many heads rest on so many sums that nobody asks.
TEST(reference, terms_of_outputs_and_states_outgrow_them_where_they_cancel) {
    Spec spec;
    spec.T = 1, spec.K = 2, spec.V = 3, spec.scale = 0.5;
    Arrays arrays;
    arrays.q = {1, -1}, arrays.k = {3, 3.001}, arrays.v = {1, 2, -4};
    Outputs outputs = forward(spec, arrays);
    for (std::size_t j = 0; j < 3; ++j) {
        EXPECT_NEAR(outputs.o[j], 0.5 * -0.001 * arrays.v[j], 1e-12);
        EXPECT_NEAR(outputs.o_terms[j], 0.5 * std::hypot(3, 3.001) * std::fabs(arrays.v[j]), 1e-12);
    }
    spec.T = 2, spec.K = spec.V = 1;
    arrays.q = {1, 1}, arrays.k = {2, -1}, arrays.v = {3, 6.001};
    outputs = forward(spec, arrays);
    EXPECT_NEAR(outputs.final_state[0], -0.001, 1e-12);
    EXPECT_NEAR(outputs.final_state_terms[0], std::hypot(6, 6.001), 4);  // 16 draws of either 0.001 or 12.001
    EXPECT_NEAR(outputs.o_terms[1], 0.5 * outputs.final_state_terms[0], 1e-12);

    spec.T = 60, spec.K = 16, spec.V = 8;
    arrays = make_arrays(spec, 34);
    outputs = forward(spec, arrays);
    EXPECT_LT(norm(outputs.o_terms), 1.15 * norm(outputs.o));
    EXPECT_LT(norm(outputs.final_state_terms), 1.15 * norm(outputs.final_state));
    spec.T = 64, spec.V = 64;
    outputs = forward(spec, make_arrays(spec, 35));
    EXPECT_TRUE(outputs.o_terms.empty() && outputs.final_state_terms.empty());
}

// One token of comba: dp_c = -sum over j of S_cj z_j, with z_j = beta k.D_j next to nothing.
TEST(reference, terms_of_the_erase_key_follow_those_of_what_it_erases) {
    Spec spec = make_spec(Rule::comba, Gate::none);
    spec.B = spec.T = spec.H = spec.HV = 1, spec.scale = 0, spec.K = 2, spec.V = 1;
    for (bool l2norm : {false, true}) {
        spec.l2norm = l2norm;
        Arrays arrays = make_arrays(spec, 37);
        arrays.k = {0.6, 0.8}, arrays.p = {2, 0}, arrays.d_final_state = {1, -0.7501};
        const Gradients grads = backward(spec, arrays);
        const double z_terms = arrays.beta[0] * std::hypot(0.6, 0.8 * 0.7501), norm_of_p = l2norm ? 2 : 1;
        for (std::size_t c = 0; c < 2; ++c) {
            const double expected = std::fabs(arrays.initial_state[c]) * z_terms / norm_of_p;
            EXPECT_NEAR(grads.d_p_terms[c], expected, 1e-5 * expected);
        }
        EXPECT_LT(norm(grads.d_p), 1e-3 * norm(grads.d_p_terms));
    }
}

// d_gv_tj = sum over c of D'_cj S'_cj. One token: S' = S_0 e^{gv}, D' = D + s q d_o^T.
TEST(reference, terms_of_a_value_gate_are_products_of_state_elements) {
    Spec spec = make_spec(Rule::additive, Gate::none);
    spec.B = spec.T = spec.H = spec.HV = 1, spec.value_gate = true;
    const Arrays arrays = make_arrays(spec, 36);
    const Gradients grads = backward(spec, arrays);
    std::vector<double> sums(2), sizes(2);
    for (std::size_t i = 0; i < 6; ++i) {
        const std::size_t c = i / 2, j = i % 2;
        const double adjoint = arrays.d_final_state[i] + spec.scale * arrays.q[c] * arrays.d_o[j];
        const double term = adjoint * arrays.initial_state[i] * std::exp(arrays.gv[j]);
        sums[j] += term;
        sizes[j] = std::hypot(sizes[j], term);
    }
    expect_near(grads.d_gv, sums);
    expect_near(grads.d_gv_terms, sizes);
}

// One token: dv_j = beta_j sum over c of D_cj k_c, dbeta = sum over c, j of D_cj k_c r_j, with an element for each j
// where beta has them.
TEST(reference, terms_of_values_and_beta_are_products_of_state_elements) {
    for (bool elementwise : {false, true}) {
        Spec spec = make_spec(Rule::delta, Gate::none);
        spec.B = spec.T = spec.H = spec.HV = 1, spec.scale = 0, spec.elementwise_beta = elementwise;
        spec.beta_form = BetaForm::sigmoid;
        const Arrays arrays = make_arrays(spec, 33);
        const Gradients grads = backward(spec, arrays);
        std::vector<double> sums(arrays.beta.size()), sizes(arrays.beta.size()), v_sums(2), v_sizes(2);
        for (std::size_t j = 0; j < 2; ++j) {
            double residual = arrays.v[j];
            for (std::size_t c = 0; c < 3; ++c) residual -= arrays.k[c] * arrays.initial_state[c * 2 + j];
            for (std::size_t c = 0; c < 3; ++c) {
                const std::size_t i = elementwise ? j : 0;
                const double logit = arrays.beta[i], slope = 1 / (2 + std::exp(logit) + std::exp(-logit));
                const double term = slope * arrays.d_final_state[c * 2 + j] * arrays.k[c] * residual;
                sums[i] += term;
                sizes[i] += term * term;
                const double v_term = arrays.d_final_state[c * 2 + j] * arrays.k[c] / (1 + std::exp(-logit));
                v_sums[j] += v_term;
                v_sizes[j] = std::hypot(v_sizes[j], v_term);
            }
        }
        for (double& size : sizes) size = std::sqrt(size);
        expect_near(grads.d_beta, sums);
        expect_near(grads.d_beta_terms, sizes);
        expect_near(grads.d_v, v_sums);
        expect_near(grads.d_v_terms, v_sizes);
    }
}

}  // namespace
}  // namespace headrace::reference
