// The judge itself: NaN never passes, 1 % never passes, the bars and floors are those documented, views are read right.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/compare.hpp"
#include "harness/oracle_call.hpp"

namespace headrace::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr DType float_types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
const char* const all_names[] = {
    "o",         "final_state",     "pool",     "d_q", "d_k", "d_v", "d_p", "d_g", "d_gv", "d_beta", "d_A_log",
    "d_dt_bias", "d_initial_state", "d_g_gamma"};

Judged make_judged(const std::string& name, DType dtype, std::vector<double> reference) {
    Judged judged;
    judged.name = name;
    judged.shape = {static_cast<std::int64_t>(reference.size())};
    judged.problem = judged.stored = dtype;
    judged.values = reference;
    judged.reference = std::move(reference);
    return judged;
}

TEST(compare, bars_are_those_of_the_requirements) {
    EXPECT_EQ(bar_of("o", DType::f64, DType::f64), 1e-11);
    EXPECT_EQ(bar_of("d_g", DType::f64, DType::f64), 1e-11);
    EXPECT_EQ(bar_of("o", DType::f32, DType::f32), 3e-6);
    EXPECT_EQ(bar_of("final_state", DType::f32, DType::f32), 3e-6);
    EXPECT_EQ(bar_of("d_g_gamma", DType::f32, DType::f32), 1e-5);
    EXPECT_EQ(bar_of("o", DType::bf16, DType::bf16), 4e-3);
    EXPECT_EQ(bar_of("final_state", DType::bf16, DType::f32), 4e-3);
    EXPECT_EQ(bar_of("pool", DType::f32, DType::bf16), 4e-3);
    for (const char* name : {"d_q", "d_k", "d_v", "d_p", "d_initial_state"}) {
        EXPECT_EQ(bar_of(name, DType::bf16, DType::bf16), 6e-3) << name;
        EXPECT_EQ(bar_of(name, DType::f16, DType::f16), 3e-3) << name;
    }
    for (const char* name : {"d_g", "d_gv", "d_g_gamma", "d_beta", "d_A_log", "d_dt_bias"}) {
        EXPECT_EQ(bar_of(name, DType::bf16, DType::f32), 1.5e-2) << name;
        EXPECT_EQ(bar_of(name, DType::f16, DType::f32), 7.5e-3) << name;
    }
}

TEST(compare, exact_values_pass_and_empty_tensors_pass) {
    for (DType dtype : float_types) {
        EXPECT_TRUE(compare(make_judged("o", dtype, {1, -2, 0, 3})).ok);
        EXPECT_TRUE(compare(make_judged("o", dtype, {})).ok);
        EXPECT_TRUE(compare(make_judged("o", dtype, {0, 0})).ok);
    }
}

TEST(compare, the_error_is_the_relative_l2_norm) {
    Judged judged = make_judged("o", DType::f64, {3, 4});
    judged.values = {3, 4.5};
    EXPECT_NEAR(compare(judged).error, 0.1, 1e-15);
    for (double scale : {1e-200, 1e200}) {  // squares of these leave the range of double
        judged = make_judged("o", DType::f64, {3 * scale, 4 * scale});
        judged.values[1] = 4.5 * scale;
        EXPECT_NEAR(compare(judged).error, 0.1, 1e-15);
    }
}

TEST(compare, errors_on_both_sides_of_each_bar) {
    for (DType dtype : float_types) {
        for (const char* name : all_names) {
            Judged judged = make_judged(name, dtype, {8, 8, 8, 8});
            const double bar = bar_of(name, dtype, dtype);
            for (double& value : judged.values) value = 8 * (1 + 0.99 * bar);
            EXPECT_TRUE(compare(judged).ok) << name;
            for (double& value : judged.values) value = 8 * (1 + 1.01 * bar);
            EXPECT_FALSE(compare(judged).ok) << name;
        }
    }
}

TEST(compare, nan_and_infinity_fail_and_never_equal_themselves) {
    for (double bad : {not_a_number, infinity, -infinity}) {
        for (std::size_t at = 0; at < 3; ++at) {
            Judged judged = make_judged("o", DType::f32, {1, 2, 3});
            judged.values[at] = bad;
            TensorError result = compare(judged);
            EXPECT_FALSE(result.ok);
            EXPECT_EQ(result.nan_count, 1);
            EXPECT_NE(result.detail.find("[" + std::to_string(at) + "]"), std::string::npos) << result.detail;
            judged.reference[at] = bad;
            result = compare(judged);
            EXPECT_FALSE(result.ok);
            EXPECT_NE(result.detail.find("oracle"), std::string::npos) << result.detail;
            judged.values[at] = 1;
            EXPECT_FALSE(compare(judged).ok);
        }
    }
    Judged all_bad = make_judged("o", DType::f32, {1, 2, 3});
    all_bad.values.assign(3, not_a_number);
    EXPECT_EQ(compare(all_bad).nan_count, 3);
}

TEST(compare, a_one_percent_perturbation_fails_wherever_the_bar_is_below_it) {
    for (DType dtype : float_types) {
        for (const char* name : all_names) {
            const bool bar_too_wide = bar_of(name, dtype, dtype) >= 0.01;  // gradients of gates and beta in bf16
            EXPECT_EQ(compare(perturbed(make_judged(name, dtype, {1, -2, 0.5}))).ok, bar_too_wide) << name;
            EXPECT_FALSE(compare(perturbed(make_judged(name, dtype, {0, 0, 0}))).ok) << name;
        }
    }
}

TEST(compare, a_missing_value_fails) {
    Judged judged = make_judged("o", DType::f32, {1, 2, 3});
    judged.values.pop_back();
    EXPECT_FALSE(compare(judged).ok);
}

TEST(compare, floors_admit_what_the_type_cannot_hold_and_no_more) {
    // f16: 2^-25 rounds to zero, half of the smallest subnormal; twice that must be there.
    Judged judged = make_judged("o", DType::f16, std::vector<double>(100, std::ldexp(1.0, -25)));
    judged.values.assign(100, 0.0);
    EXPECT_TRUE(compare(judged).ok);
    judged.reference.assign(100, std::ldexp(1.0, -24));
    EXPECT_FALSE(compare(judged).ok);
    judged.stored = DType::f32;  // a state of an f16 problem has f32's range
    judged.reference.assign(100, std::ldexp(1.0, -25));
    EXPECT_FALSE(compare(judged).ok);
    for (DType dtype : {DType::f32, DType::bf16}) {
        judged = make_judged("o", dtype, std::vector<double>(100, 1e-38));
        judged.values.assign(100, 0.0);  // flushed
        EXPECT_TRUE(compare(judged).ok);
        judged.reference.assign(100, 1e-36);
        EXPECT_FALSE(compare(judged).ok);
    }
    judged = make_judged("o", DType::f64, {1e-300});
    judged.values = {0};
    EXPECT_FALSE(compare(judged).ok);
    judged = make_judged("o", DType::f32, {0, 0});
    judged.values = {0, 1e-30};  // something where the oracle has exactly nothing
    EXPECT_FALSE(compare(judged).ok);
    EXPECT_EQ(compare(judged).error, infinity);
}

// Terms of 1 and -1 that cancel down to 0.05 and 0.03: each term within half the bar, but the sum is not.
TEST(compare, sums_are_measured_by_their_terms) {
    Judged judged = make_judged("d_g_gamma", DType::f32, {0.05, 0.03});
    for (double& value : judged.values) value += 5e-6;
    EXPECT_FALSE(compare(judged).ok);
    judged.terms = {1, 1};
    EXPECT_TRUE(compare(judged).ok);
    EXPECT_NEAR(compare(judged).error, 5e-6, 1e-9);
    EXPECT_NEAR(compare(judged).noticeable, 1e-5 * std::sqrt(2 / (0.05 * 0.05 + 0.03 * 0.03)), 1e-9);
    EXPECT_FALSE(compare(perturbed(judged)).ok);
    judged.problem = judged.stored = DType::f16;
    EXPECT_GT(compare(judged).noticeable, 0.01);
    EXPECT_TRUE(compare(perturbed(judged)).ok);
    judged.terms = {1e-3, 1e-3};  // terms of one sign: the sum is larger than they are
    EXPECT_NEAR(compare(judged).noticeable, compare(judged).bar, 2e-6);  // f16 rounds in steps of 2^-24
    EXPECT_FALSE(compare(perturbed(judged)).ok);
    judged.terms = {not_a_number, 1};
    EXPECT_FALSE(compare(judged).ok);
    judged.terms = {1, infinity};
    EXPECT_FALSE(compare(judged).ok);
}

// The gradient of a saturated gate: factors of 1e5 behind a derivative that may count as zero, in f64 and in f32.
TEST(compare, what_underflows_before_large_factors_counts_as_zero_and_no_more_does) {
    for (const auto& [dtype, smallest] : {std::pair{DType::f64, 0x1p-1022}, std::pair{DType::f32, 0x1p-126}}) {
        Judged judged = make_judged("d_A_log", dtype, {1e5 * smallest, 0});
        judged.values = {0, 0};
        EXPECT_FALSE(compare(judged).ok);
        judged.underflow = {1e5, 0};
        EXPECT_TRUE(compare(judged).ok);
        EXPECT_GT(compare(judged).noticeable, 0.01);
        judged.reference[0] *= 1.001;
        EXPECT_FALSE(compare(judged).ok);
        judged.values = judged.reference;
        EXPECT_FALSE(compare(perturbed(judged)).ok);  // as of a tensor of zeros
        judged.values = judged.reference = {1, 1};
        EXPECT_NEAR(compare(judged).noticeable, compare(judged).bar, 1e-30);
        EXPECT_FALSE(compare(perturbed(judged)).ok);
    }
}

TEST(compare, the_floor_does_not_hide_errors_of_ordinary_values) {
    Judged judged = make_judged("o", DType::f16, std::vector<double>(1000, 0.01));
    for (double& value : judged.values) value *= 1.0025;
    EXPECT_FALSE(compare(judged).ok);
}

TEST(oracle_call, views_are_read_in_logical_order) {
    const std::vector<float> memory = {0, 1, 2, 3, 4, 5};
    TensorView view(memory.data(), DType::f32, {2, 3});
    EXPECT_EQ(read_values(view), (std::vector<double>{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(read_values(view.transposed(0, 1)), (std::vector<double>{0, 3, 1, 4, 2, 5}));
    view.shape[1] = 1;
    EXPECT_EQ(read_values(view), (std::vector<double>{0, 3}));
    EXPECT_EQ(read_bytes(view).size(), 8u);
    EXPECT_TRUE(read_values(TensorView{}).empty());
    const std::vector<std::uint16_t> halves = {0x3f80, 0xc000};  // bf16 1, -2
    EXPECT_EQ(read_values({halves.data(), DType::bf16, {2}}), (std::vector<double>{1, -2}));
    EXPECT_EQ(read_values({halves.data(), DType::f16, {2}}), (std::vector<double>{1.875, -2}));
    const std::vector<std::int64_t> wide = {-1, std::int64_t{1} << 40};
    EXPECT_EQ(read_integers({wide.data(), DType::i64, {2}}), wide);
}

TEST(oracle_call, the_spec_follows_the_operator_and_the_given_tensors) {
    const std::vector<double> memory(1000, 0.0);
    Call call;
    call.op = Operator::kda;
    call.in.q = call.in.k = {memory.data(), DType::f64, {1, 5, 2, 4}};
    call.in.v = {memory.data(), DType::f64, {1, 5, 4, 3}};
    call.in.g = {memory.data(), DType::f64, {1, 5, 4, 4}};
    call.in.beta = {memory.data(), DType::f64, {1, 5, 4}};
    call.in.A_log = {memory.data(), DType::f64, {4}};
    call.in.dt_bias = {memory.data(), DType::f64, {16}};
    const std::vector<std::int32_t> cu = {0, 2, 5};
    call.in.cu_seqlens = {cu.data(), DType::i32, {3}};
    call.options.gate_form = GateForm::bounded;
    const reference::Spec spec = to_spec(call);
    EXPECT_TRUE(spec.delta && spec.channel_gate && spec.has_beta && spec.has_dt_bias && spec.dt_bias_per_channel);
    EXPECT_FALSE(spec.erase_with_p || spec.step_gate || spec.head_gate || spec.value_gate || spec.elementwise_beta);
    EXPECT_EQ(spec.scale, 0.5);
    EXPECT_EQ(spec.HV, 4);
    EXPECT_EQ(spec.V, 3);
    EXPECT_EQ(spec.sequences(), 2);
    EXPECT_EQ(spec.gate_form, reference::GateForm::bounded);
    call.in.dt_bias = {memory.data(), DType::f64, {4}};
    EXPECT_FALSE(to_spec(call).dt_bias_per_channel);
    call.op = Operator::comba;
    EXPECT_TRUE(to_spec(call).erase_with_p);
    call.op = Operator::gla;
    EXPECT_FALSE(to_spec(call).delta);
}

// Two tokens for each of three sequences; K = V = 1, no gate, scale 1: S adds k v, o = q S.
struct StepCase {
    std::vector<double> q = {1, 1, 1, 1, 1, 1}, k = {1, 2, 3, 4, 5, 6}, o = std::vector<double>(6);
    std::vector<double> pool = {10, 20, 30, 40, 50, 60};
    std::vector<std::int32_t> indices;
    std::vector<std::int64_t> accepted;
    Call call;

    StepCase() {
        call.direction = Direction::step;
        call.in.q = {q.data(), DType::f64, {3, 2, 1, 1}};
        call.in.k = call.in.v = {k.data(), DType::f64, {3, 2, 1, 1}};
        call.out.o = {o.data(), DType::f64, {3, 2, 1, 1}};
        call.pool.states = {pool.data(), DType::f64, {6, 1, 1, 1}};
    }
};

using Rows = std::map<std::int64_t, std::vector<double>>;

TEST(oracle_call, a_step_without_indices_uses_row_n_for_sequence_n) {
    StepCase c;
    const Expected expected = expect(c.call);
    EXPECT_EQ(expected.outputs.at("o"), (std::vector<double>{11, 15, 29, 45, 55, 91}));
    EXPECT_EQ(expected.pool_rows, (Rows{{0, {15}}, {1, {45}}, {2, {91}}}));
}

TEST(oracle_call, a_step_follows_its_indices_and_skips_padding) {
    StepCase c;
    c.indices = {5, -1, 0};
    c.call.pool.indices = {c.indices.data(), DType::i32, {3}};
    const Expected expected = expect(c.call);
    EXPECT_EQ(expected.outputs.at("o"), (std::vector<double>{61, 65, 0, 0, 35, 71}));
    EXPECT_EQ(expected.pool_rows, (Rows{{5, {65}}, {0, {71}}}));
}

TEST(oracle_call, a_speculative_step_stores_the_state_after_each_token) {
    StepCase c;
    c.indices = {5, 4, -1, -1, 0, 1};
    c.call.pool.indices = {c.indices.data(), DType::i32, {3, 2}};
    Expected expected = expect(c.call);  // each starts from its first row
    EXPECT_EQ(expected.outputs.at("o"), (std::vector<double>{61, 65, 0, 0, 35, 71}));
    EXPECT_EQ(expected.pool_rows, (Rows{{5, {61}}, {4, {65}}, {0, {35}}, {1, {71}}}));
    c.accepted = {2, 1, 1};
    c.call.pool.num_accepted_tokens = {c.accepted.data(), DType::i64, {3}};
    expected = expect(c.call);
    EXPECT_EQ(expected.outputs.at("o"), (std::vector<double>{51, 55, 0, 0, 35, 71}));
    EXPECT_EQ(expected.pool_rows, (Rows{{5, {51}}, {4, {55}}, {0, {35}}, {1, {71}}}));
}

}  // namespace
}  // namespace headrace::harness
