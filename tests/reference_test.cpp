// The oracle's forward by hand, hard resets, chained and ragged sequences, and the global identities of docs/math.md 7.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/reference_cases.hpp"

namespace headrace::reference {
namespace {

// One head, K = V = 1, by hand: S_1 = k v beta, o = s q S.
TEST(reference, values_by_hand) {
    Spec spec;
    spec.T = 2, spec.scale = 0.5;
    Arrays arrays;
    arrays.q = {2, 3}, arrays.k = {1, 2}, arrays.v = {4, 6};
    EXPECT_EQ(forward(spec, arrays).o, (std::vector<double>{4, 24}));  // S = 4, 4 + 12
    arrays.initial_state = {1};
    spec.head_gate = true, arrays.g_gamma = {std::log(0.5)};
    EXPECT_EQ(forward(spec, arrays).final_state, (std::vector<double>{14.25}));  // S = 0.5 + 4, 2.25 + 12
    spec.reverse = true;
    EXPECT_EQ(forward(spec, arrays).final_state, (std::vector<double>{10.25}));  // S = 0.5 + 12, 6.25 + 4
    spec.reverse = false, spec.delta = spec.has_beta = true, arrays.beta = {0.5, 0.25};
    // S' = 0.5, S = 0.5 + 0.5 * 3.5 = 2.25;  S' = 1.125, S = 1.125 + 2 * 0.25 * (6 - 2.25)
    EXPECT_EQ(forward(spec, arrays).final_state, (std::vector<double>{3.0}));
    spec.erase_with_p = true, arrays.p = {2, 1};
    // S = 0.5 + 0.5 * (4 - 2 * 1) = 1.5;  S = 0.75 + 2 * 0.25 * (6 - 1.5)
    EXPECT_EQ(forward(spec, arrays).final_state, (std::vector<double>{3.0}));
}

// One token, K = V = 1: the output shows each preparation by itself.
TEST(reference, preparations_by_hand) {
    Spec spec;
    spec.T = 1;
    Arrays arrays;
    arrays.q = {3}, arrays.k = {-0.001}, arrays.v = {2};
    spec.l2norm = true;  // q = 3 / sqrt(9 + 1e-6), k = -0.001 / sqrt(2e-6)
    EXPECT_NEAR(forward(spec, arrays).o[0], 3 / std::sqrt(9.000001) * -std::sqrt(0.5) * 2, 1e-15);

    spec.l2norm = false, arrays.q = arrays.k = {1}, arrays.v = {0}, arrays.initial_state = {1};  // o = a
    spec.step_gate = true, arrays.g = {0.25}, arrays.A_log = {std::log(3.0)};
    spec.has_dt_bias = true, arrays.dt_bias = {0.5};
    spec.gate_form = GateForm::softplus;
    EXPECT_NEAR(forward(spec, arrays).o[0], std::exp(-3 * std::log(1 + std::exp(0.75))), 1e-15);
    spec.gate_form = GateForm::bounded, spec.lower_bound = -2;
    EXPECT_NEAR(forward(spec, arrays).o[0], std::exp(-2 / (1 + std::exp(-3 * 0.75))), 1e-15);

    spec.gate_form = GateForm::log_decay, spec.has_dt_bias = spec.step_gate = false, arrays.initial_state.clear();
    spec.delta = spec.has_beta = true, arrays.v = {1}, arrays.beta = {std::log(3.0)};  // o = beta, sigmoid = 3/4
    spec.beta_form = BetaForm::sigmoid;
    EXPECT_NEAR(forward(spec, arrays).o[0], 0.75, 1e-15);
    spec.beta_form = BetaForm::two_sigmoid;
    EXPECT_NEAR(forward(spec, arrays).o[0], 1.5, 1e-15);
}

bool all_finite(const Gradients& grads) {
    for (const Slot& slot : slots) {
        for (double value : grads.*slot.gradient) {
            if (!std::isfinite(value)) return false;
        }
    }
    return true;
}

TEST(reference, hard_resets_are_exact_and_finite) {
    const double infinity = std::numeric_limits<double>::infinity();
    for (Rule rule : all_rules) {
        for (Gate gate : {Gate::step, Gate::channel, Gate::step_head, Gate::channel_head}) {
            for_each_gate_form(make_spec(rule, gate), [&](const Spec& spec) {
                Arrays arrays = make_arrays(spec, 5);
                for (std::size_t i = 0; i < arrays.g.size(); i += 3) arrays.g[i] = i % 2 ? -infinity : -1e30;
                for (double value : forward(spec, arrays).o) ASSERT_TRUE(std::isfinite(value));
                const Gradients grads = backward(spec, arrays);
                ASSERT_TRUE(all_finite(grads)) << describe(rule, gate, spec);
                for (std::size_t i = 0; i < arrays.g.size(); i += 3) ASSERT_EQ(grads.d_g[i], 0.0);
            });
        }
    }
    // After a reset the past is forgotten: comba's error still sees the state, so the additive and delta rules only.
    for (Rule rule : {Rule::additive, Rule::delta}) {
        Spec spec = make_spec(rule, Gate::step);
        spec.B = 1, spec.cu_seqlens = {};
        Arrays arrays = make_arrays(spec, 6);
        for (std::int64_t h = 0; h < spec.HV; ++h) arrays.g[static_cast<std::size_t>(2 * spec.HV + h)] = -infinity;
        Arrays other = arrays;
        for (std::size_t i = 0; i < static_cast<std::size_t>(2 * spec.H * spec.K); ++i) other.k[i] += 1.0;
        EXPECT_EQ(forward(spec, arrays).final_state, forward(spec, other).final_state);
    }
}

TEST(reference, zero_tokens_pass_the_state_through) {
    Spec spec = make_spec(Rule::delta, Gate::step);
    spec.T = 0;
    const Arrays arrays = make_arrays(spec, 9);
    EXPECT_EQ(forward(spec, arrays).final_state, arrays.initial_state);
    EXPECT_EQ(backward(spec, arrays).d_initial_state, arrays.d_final_state);
    Spec ragged = make_spec(Rule::delta, Gate::step);
    make_ragged(ragged);
    const Arrays packed = make_arrays(ragged, 10);
    const Outputs out = forward(ragged, packed);
    const auto state = static_cast<std::size_t>(ragged.HV * ragged.K * ragged.V);
    for (std::size_t i = 0; i < state; ++i) {
        EXPECT_EQ(out.final_state[i], packed.initial_state[i]);                          // sequence 0 is empty
        EXPECT_EQ(out.final_state[2 * state + i], packed.initial_state[2 * state + i]);  // so is sequence 2
        EXPECT_NE(out.final_state[state + i], packed.initial_state[state + i]);
    }
}

TEST(reference, a_split_sequence_chains_through_its_states_and_their_gradients) {
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            Spec spec = make_spec(rule, gate);
            spec.B = 1, spec.T = 7, spec.value_gate = true;
            const Arrays whole = make_arrays(spec, 11);
            const Outputs expected = forward(spec, whole);
            const Gradients expected_grads = backward(spec, whole);
            for (std::int64_t cut = 0; cut <= spec.T; ++cut) {
                Spec first_spec = spec, second_spec = spec;
                first_spec.T = cut, second_spec.T = spec.T - cut;
                Arrays first = part_of(whole, spec.T, 0, cut), second = part_of(whole, spec.T, cut, spec.T);
                const Outputs first_out = forward(first_spec, first);
                second.initial_state = first_out.final_state;
                const Outputs second_out = forward(second_spec, second);
                EXPECT_EQ(first_out.o, tokens_of(expected.o, spec.T, 0, cut));
                EXPECT_EQ(second_out.o, tokens_of(expected.o, spec.T, cut, spec.T));
                EXPECT_EQ(second_out.final_state, expected.final_state);
                const Gradients second_grads = backward(second_spec, second);
                first.d_final_state = second_grads.d_initial_state;
                const Gradients first_grads = backward(first_spec, first);
                EXPECT_EQ(first_grads.d_initial_state, expected_grads.d_initial_state);
                EXPECT_EQ(first_grads.d_k, tokens_of(expected_grads.d_k, spec.T, 0, cut));
                EXPECT_EQ(second_grads.d_k, tokens_of(expected_grads.d_k, spec.T, cut, spec.T));
            }
        }
    }
}

TEST(reference, a_ragged_batch_equals_its_sequences_alone) {
    Spec spec = make_spec(Rule::comba, Gate::step_head);
    make_ragged(spec);
    spec.reverse = spec.keep_states = true;
    const Arrays packed = make_arrays(spec, 12);
    const Outputs expected = forward(spec, packed);
    const Gradients expected_grads = backward(spec, packed);
    const auto state = spec.HV * spec.K * spec.V;
    for (std::int64_t n = 0; n < spec.sequences(); ++n) {
        const std::int64_t begin = spec.first_token(n), end = spec.first_token(n + 1);
        Spec alone = spec;
        alone.T = end - begin, alone.cu_seqlens = {};
        Arrays part = part_of(packed, spec.T, begin, end);
        const auto of_sequence = [&](const std::vector<double>& states) {
            return tokens_of(states, spec.sequences(), n, n + 1);
        };
        part.initial_state = of_sequence(packed.initial_state);
        part.d_final_state = of_sequence(packed.d_final_state);
        const Gradients grads = backward(alone, part);
        EXPECT_EQ(grads.d_initial_state, of_sequence(expected_grads.d_initial_state));
        EXPECT_EQ(grads.d_initial_state_terms, of_sequence(expected_grads.d_initial_state_terms));
        const Outputs out = forward(alone, part);
        EXPECT_EQ(out.o, tokens_of(expected.o, spec.T, begin, end));
        EXPECT_EQ(out.final_state, of_sequence(expected.final_state));
        if (begin == end) continue;
        const std::vector<double> last_state(out.states.begin(), out.states.begin() + state);
        EXPECT_EQ(last_state, out.final_state);  // reversed: the first token in memory is the last to be read
    }
}

// Row sums over [T,H,K] of a * b, per channel or summed over channels.
std::vector<double> products(const std::vector<double>& a, const std::vector<double>& b, std::int64_t width,
                             bool per_channel) {
    std::vector<double> result(per_channel ? a.size() : a.size() / static_cast<std::size_t>(width), 0.0);
    for (std::size_t i = 0; i < a.size(); ++i)
        result[per_channel ? i : i / static_cast<std::size_t>(width)] += a[i] * b[i];
    return result;
}

// The identities of docs/math.md 7 for one sequence with HV = H: dg = R(local terms) + F (comba: - p . dp).
std::vector<double> gate_gradient_by_identity(const Spec& spec, const Arrays& arrays, const Gradients& grads) {
    const bool per_channel = spec.channel_gate;
    const auto size = static_cast<std::size_t>(spec.HV * (per_channel ? spec.K : 1));
    std::vector<double> local = products(arrays.q, grads.d_q, spec.K, per_channel);
    const auto add = [&](double factor, const std::vector<double>& term) {
        for (std::size_t i = 0; i < local.size(); ++i) local[i] += factor * term[i];
    };
    if (!spec.delta) {
        add(-1, products(arrays.k, grads.d_k, spec.K, per_channel));
    } else if (per_channel) {  // k * (dk_read - dk_write), dk_write = dk - dk_read
        add(-1, products(arrays.k, grads.d_k, spec.K, true));
        add(2, products(arrays.k, grads.d_k_erase, spec.K, true));
    } else {
        add(-1, products(arrays.v, grads.d_v, spec.V, false));
    }
    const Outputs out = forward(spec, arrays);
    std::vector<double> running(size, 0.0), result(local.size());
    for (std::size_t i = 0; i < out.final_state.size(); ++i) {
        const auto row = i / static_cast<std::size_t>(spec.V);
        running[per_channel ? row : row / static_cast<std::size_t>(spec.K)] +=
            out.final_state[i] * arrays.d_final_state[i];
    }
    const std::vector<double> erased =
        spec.erase_with_p ? products(arrays.p, grads.d_p, spec.K, false) : std::vector<double>(local.size(), 0.0);
    for (std::size_t i = local.size(); i-- > 0;) {
        running[i % size] += local[i];
        result[i] = running[i % size] - erased[i];
    }
    return result;
}

TEST(reference, gate_gradients_obey_the_global_identities) {
    for (Rule rule : all_rules) {
        for (Gate gate : {Gate::step, Gate::channel}) {
            if (rule == Rule::comba && gate == Gate::channel) continue;  // no operator, no identity stated
            Spec spec = make_spec(rule, gate);
            spec.B = 1, spec.T = 40, spec.H = spec.HV = 3, spec.K = 5, spec.V = 4;
            const Arrays arrays = make_arrays(spec, 13);
            const Gradients grads = backward(spec, arrays);
            const std::vector<double> identity = gate_gradient_by_identity(spec, arrays, grads);
            ASSERT_EQ(identity.size(), grads.d_g.size());
            for (std::size_t i = 0; i < identity.size(); ++i) {
                ASSERT_NEAR(identity[i], grads.d_g[i], 1e-11 * (1 + std::fabs(identity[i])))
                    << describe(rule, gate, spec);
            }
        }
    }
}

TEST(reference, head_gate_gradient_is_the_sum_of_the_step_gate_gradients) {
    for (Rule rule : all_rules) {
        for (Gate gate : {Gate::step_head, Gate::channel_head}) {
            const Spec spec = make_spec(rule, gate);
            const Gradients grads = backward(spec, make_arrays(spec, 14));
            const auto channels = static_cast<std::size_t>(spec.channel_gate ? spec.K : 1);
            std::vector<double> sums(static_cast<std::size_t>(spec.HV), 0.0);
            for (std::size_t i = 0; i < grads.d_g.size(); ++i) sums[i / channels % sums.size()] += grads.d_g[i];
            for (std::size_t h = 0; h < sums.size(); ++h) EXPECT_NEAR(grads.d_g_gamma[h], sums[h], 1e-12);
        }
    }
}

}  // namespace
}  // namespace headrace::reference
