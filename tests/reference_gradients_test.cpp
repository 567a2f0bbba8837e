// The oracle's gradients against central finite differences: every rule x gate x preparation x structure.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/reference_cases.hpp"

namespace headrace::reference {
namespace {

double inner(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < b.size(); ++i) sum += a[i] * b[i];
    return sum;
}

double objective(const Spec& spec, const Arrays& arrays) {
    const Outputs out = forward(spec, arrays);
    return inner(out.o, arrays.d_o) + inner(out.final_state, arrays.d_final_state);
}

// The first gradient that differs from the finite differences by more than `tolerance`; empty: none does.
std::string first_wrong_gradient(const Spec& spec, Arrays arrays, const Gradients& grads, double tolerance) {
    constexpr double step = 1e-5;  // truncation step^2 and rounding 1e-16 / step are both about 1e-10
    for (const Slot& slot : slots) {
        std::vector<double>& input = arrays.*slot.input;
        const std::vector<double>& gradient = grads.*slot.gradient;
        if (!input.empty() && gradient.size() != input.size()) return std::string(slot.name) + ": wrong size";
        for (std::size_t i = 0; i < input.size(); ++i) {
            const double kept = input[i];
            input[i] = kept + step;
            const double above = objective(spec, arrays);
            input[i] = kept - step;
            const double below = objective(spec, arrays);
            input[i] = kept;
            const double expected = (above - below) / (2 * step);
            if (!(std::fabs(gradient[i] - expected) <= tolerance * (1.0 + std::fabs(expected)))) {
                return std::string(slot.name) + "[" + std::to_string(i) + "]: expected " + std::to_string(expected) +
                       ", got " + std::to_string(gradient[i]);
            }
        }
    }
    return "";
}

constexpr double tolerance = 2e-8;

void expect_true_gradients(const Spec& spec, const Arrays& arrays, const std::string& what) {
    const std::string wrong = first_wrong_gradient(spec, arrays, backward(spec, arrays), tolerance);
    EXPECT_EQ(wrong, "") << what;
}

// The structure (ragged, reverse, value gate ...) changes from one combination to the next.
void vary_structure(Spec& spec, unsigned turn) {
    if (turn % 2 == 1) make_ragged(spec);
    spec.reverse = turn % 3 == 1;
    spec.value_gate = turn % 5 == 2;
    spec.elementwise_beta = spec.has_beta && turn % 7 == 3;
}

TEST(reference, gradients_of_every_rule_gate_and_preparation) {
    unsigned turn = 0;
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            for_each_gate_form(make_spec(rule, gate), [&](Spec spec) {
                for (bool l2norm : {false, true}) {
                    for (BetaForm form : {BetaForm::value, BetaForm::sigmoid, BetaForm::two_sigmoid}) {
                        if (!spec.delta && form != BetaForm::value) continue;
                        Spec varied = spec;
                        varied.l2norm = l2norm;
                        varied.beta_form = form;
                        vary_structure(varied, ++turn);
                        expect_true_gradients(varied, make_arrays(varied, turn), describe(rule, gate, varied));
                    }
                }
            });
        }
    }
    // additive: (no g 2 + step 2 x 5 + channel 2 x 7 gate forms) x 2; both delta rules: the same x 3 forms of beta
    EXPECT_EQ(turn, 26u * 2 + 2 * 26u * 2 * 3);
}

TEST(reference, gradients_of_every_rule_gate_and_structure) {
    struct Change {
        const char* name;
        std::function<void(Spec&, Arrays&)> arrays_change;
        std::function<void(Spec&)> spec_change;
    };
    const auto keep = [](Spec&, Arrays&) {};
    const auto same = [](Spec&) {};
    const Change changes[] = {
        {"ragged", keep, [](Spec& spec) { make_ragged(spec); }},
        {"reverse", keep, [](Spec& spec) { spec.reverse = true; }},
        {"ragged reverse", keep, [](Spec& spec) { make_ragged(spec), spec.reverse = true; }},
        {"value gate", keep, [](Spec& spec) { spec.value_gate = true; }},
        {"elementwise beta", keep, [](Spec& spec) { spec.elementwise_beta = spec.has_beta; }},
        {"no beta", keep, [](Spec& spec) { spec.has_beta = false; }},
        {"K = V = 1", keep, [](Spec& spec) { spec.K = spec.V = 1; }},
        {"H = HV = 1", keep, [](Spec& spec) { spec.H = spec.HV = 1; }},
        {"no initial state", [](Spec&, Arrays& arrays) { arrays.initial_state.clear(); }, same},
        {"final state only", [](Spec&, Arrays& arrays) { arrays.d_o.clear(); }, same},
        {"outputs only", [](Spec&, Arrays& arrays) { arrays.d_final_state.clear(); }, same},
    };
    unsigned seed = 1000;
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            for (const Change& change : changes) {
                Spec spec = make_spec(rule, gate);
                change.spec_change(spec);
                Arrays arrays = make_arrays(spec, ++seed);
                change.arrays_change(spec, arrays);
                expect_true_gradients(spec, arrays, describe(rule, gate, spec) + ", " + change.name);
            }
        }
    }
}

// Longer than the stretch after which the backward stores states (64 tokens), with a partial last stretch.
TEST(reference, gradients_of_long_sequences) {
    for (Rule rule : all_rules) {
        for (std::int64_t T : {63, 64, 65, 150}) {
            Spec spec = make_spec(rule, Gate::channel_head);
            spec.B = spec.H = spec.HV = 1, spec.K = spec.V = 2, spec.T = T;
            expect_true_gradients(spec, make_arrays(spec, static_cast<unsigned>(T)), "T = " + std::to_string(T));
        }
    }
}

// The reductions over V go eight at a time: whole blocks, and blocks with a rest.
TEST(reference, gradients_of_wide_values) {
    for (Rule rule : all_rules) {
        for (std::int64_t V : {7, 8, 9, 19}) {
            Spec spec = make_spec(rule, Gate::channel_head);
            spec.B = spec.H = 1, spec.HV = 2, spec.V = V, spec.T = 3, spec.value_gate = true;
            expect_true_gradients(spec, make_arrays(spec, static_cast<unsigned>(V)), "V = " + std::to_string(V));
        }
    }
}

TEST(reference, a_one_percent_error_in_any_gradient_is_found) {
    Spec spec = make_spec(Rule::comba, Gate::channel_head);
    spec.gate_form = GateForm::softplus, spec.has_dt_bias = spec.value_gate = true;
    const Arrays arrays = make_arrays(spec, 7);
    for (const Slot& slot : slots) {
        Gradients grads = backward(spec, arrays);
        ASSERT_EQ(first_wrong_gradient(spec, arrays, grads, tolerance), "");
        ASSERT_FALSE((grads.*slot.gradient).empty()) << slot.name;
        (grads.*slot.gradient).back() *= 1.01;
        EXPECT_EQ(first_wrong_gradient(spec, arrays, grads, tolerance).rfind(slot.name, 0), 0u) << slot.name;
    }
}

}  // namespace
}  // namespace headrace::reference
