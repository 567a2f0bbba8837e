// The oracle of summaries: pieces of a sequence as maps of its state, against the oracle over the whole sequence.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/summary.hpp"
#include "tests/reference_cases.hpp"

namespace headrace::reference {
namespace {

void expect_near(const std::vector<double>& values, const std::vector<double>& expected, const std::string& what) {
    ASSERT_EQ(values.size(), expected.size()) << what;
    double error = 0.0, size = 1e-300;
    for (std::size_t i = 0; i < values.size(); ++i) {
        error += (values[i] - expected[i]) * (values[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    EXPECT_LT(std::sqrt(error / size), 1e-13) << what;
}

// Every rule, gate and form of preparation, plain and reversed, with and without l2norm; `ragged` ones too.
void for_each_case(bool ragged, const std::function<void(const Spec&, const Arrays&, const std::string&)>& visit) {
    unsigned seed = 100;
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            Spec spec = make_spec(rule, gate);
            if (ragged) make_ragged(spec);
            for_each_gate_form(spec, [&](const Spec& form) {
                Spec variant = form;
                variant.reverse = seed % 2 == 0, variant.l2norm = seed % 3 == 0;
                if (variant.delta && seed % 5 == 0) variant.beta_form = BetaForm::two_sigmoid;
                Arrays arrays = make_arrays(variant, ++seed);
                if (form.gate_form == GateForm::log_decay && has_g(form)) {
                    for (std::size_t i = 0; i < arrays.g.size(); i += 7) arrays.g[i] = -std::numeric_limits<double>::infinity();
                }
                visit(variant, arrays, describe(rule, gate, variant));
            });
        }
    }
}

TEST(reference_summary, a_piece_is_an_affine_map_of_the_state) {
    for (bool ragged : {false, true}) {
        for_each_case(ragged, [](const Spec& spec, const Arrays& arrays, const std::string& what) {
            Arrays piece = arrays;
            piece.initial_state.clear();
            const Summary summary = summarize(spec, piece);
            expect_near(apply(spec, summary, arrays.initial_state, false), forward(spec, arrays).final_state, what);
            const Summary entered = summarize(spec, arrays);
            EXPECT_EQ(entered.transition, summary.transition) << what;
            EXPECT_EQ(entered.state, forward(spec, arrays).final_state) << what;
        });
    }
}

TEST(reference_summary, the_adjoint_is_the_transposed_map) {
    for (bool ragged : {false, true}) {
        for_each_case(ragged, [](const Spec& spec, const Arrays& arrays, const std::string& what) {
            const std::vector<double> whole = backward(spec, arrays).d_initial_state;
            expect_near(summarize_backward(spec, arrays).d_initial_state, whole, what);
            expect_near(summarize_backward(spec, arrays).terms, backward(spec, arrays).d_initial_state_terms, what);
            Arrays piece = arrays;
            piece.d_final_state.clear();
            const Summary map{summarize(spec, piece).transition, summarize_backward(spec, piece).d_initial_state, {}, {}};
            expect_near(apply(spec, map, arrays.d_final_state, true), whole, what);
        });
    }
}

TEST(reference_summary, additive_transitions_are_diagonal) {
    for (Gate gate : all_gates) {
        const Spec spec = make_spec(Rule::additive, gate);
        const std::vector<double> transition = summarize(spec, make_arrays(spec, 3)).transition;
        for (std::size_t i = 0; i < transition.size(); ++i) {
            const std::size_t row = i / 3 % 3, column = i % 3;
            const bool diagonal = row == column, one_number = diagonal && !spec.channel_gate;
            EXPECT_EQ(diagonal ? 0.0 : transition[i], 0.0);
            EXPECT_EQ(one_number ? transition[i - row * 4] : transition[i], transition[i]);
            EXPECT_EQ(diagonal && gate == Gate::none ? transition[i] : 1.0, 1.0);
        }
    }
}

// Three pieces, folded from either side, at all pairs of cuts, empty pieces among them.
TEST(reference_summary, maps_compose_associatively_to_that_of_the_whole) {
    for (Rule rule : all_rules) {
        for (Gate gate : all_gates) {
            Spec spec = make_spec(rule, gate);
            spec.B = 1, spec.T = 6;
            Arrays arrays = make_arrays(spec, 21);
            arrays.initial_state.clear();
            const Summary whole = summarize(spec, arrays);
            const auto piece = [&](std::int64_t begin, std::int64_t end) {
                Spec part = spec;
                part.T = end - begin;
                return summarize(part, part_of(arrays, spec.T, begin, end));
            };
            for (std::int64_t a = 0; a <= spec.T; ++a) {
                for (std::int64_t b = a; b <= spec.T; ++b) {
                    const Summary x = piece(0, a), y = piece(a, b), z = piece(b, spec.T);
                    const Summary left = compose(spec, z, compose(spec, y, x)), right = compose(spec, compose(spec, z, y), x);
                    expect_near(left.transition, whole.transition, describe(rule, gate, spec));
                    expect_near(right.transition, whole.transition, describe(rule, gate, spec));
                    expect_near(left.state, whole.state, describe(rule, gate, spec));
                    expect_near(right.state, whole.state, describe(rule, gate, spec));
                }
            }
        }
    }
}

// Judged by its terms a right transition is no smaller than one that is all rounding.
TEST(reference_summary, terms_of_a_transition_lie_between_it_and_the_identity) {
    for_each_case(true, [](const Spec& spec, const Arrays& arrays, const std::string& what) {
        const Summary summary = summarize(spec, arrays);
        const auto norm = [](const std::vector<double>& values) {
            double squares = 0.0;
            for (double value : values) squares += value * value;
            return std::sqrt(squares);
        };
        EXPECT_LE(norm(summary.transition_terms), std::sqrt(static_cast<double>(spec.sequences() * spec.HV * spec.K)) + 1e-9) << what;
        if (spec.delta || spec.gate_form != GateForm::log_decay) return;
        EXPECT_NEAR(norm(summary.transition_terms), norm(summary.transition), 1e-12) << what;
    });
}

// A_log + e makes each log decay g (1 + e) where softplus prepares it, resets among them.
TEST(reference_summary, terms_of_a_transition_hold_an_error_of_all_prepared_gates) {
    int cases = 0;
    for_each_case(true, [&](const Spec& spec, const Arrays& given, const std::string& what) {
        if (spec.gate_form != GateForm::softplus) return;
        Arrays arrays = given;
        for (std::size_t i = 0; i < arrays.g.size(); i += 7) arrays.g[i] = 2e4;
        const Summary summary = summarize(spec, arrays);
        constexpr double error = 1e-6;
        for (double& rate : arrays.A_log) rate += error;
        const std::vector<double> moved = summarize(spec, arrays).transition;
        double left = 0.0, terms = 0.0;
        for (std::size_t i = 0; i < moved.size(); ++i) {
            left += std::pow((moved[i] - summary.transition[i]) / error, 2);
            terms += summary.transition_terms[i] * summary.transition_terms[i];
        }
        const double identity = static_cast<double>(spec.sequences() * spec.HV * spec.K);
        EXPECT_GE(std::sqrt(terms) * (1 + 1e-4), std::sqrt(std::min(left, identity))) << what;
        ++cases;
    });
    EXPECT_GT(cases, 10);
}

}  // namespace
}  // namespace headrace::reference
