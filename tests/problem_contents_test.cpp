// I2, N4: gate values and pool rows that Problem refuses, with the whole message; what plans do not read.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "core/problem.hpp"
#include "core/scan.hpp"
#include "core/types.hpp"
#include "sample_call.hpp"

namespace headrace::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

std::string message_of(const Call& call, Contents contents = Contents::check) {
    Problem problem;
    return make_problem(call, contents, &problem).message();
}

// g of a forward is looked at where it is read, so the call has to run.
std::string message_of_forward(const Call& call) { return forward(call.op, call.in, call.out, call.options).message(); }

float* floats(const TensorView& view) { return static_cast<float*>(view.data); }

TEST(ProblemContents, N4NamesTheFirstBadGate) {
    SampleCall sample(Operator::gla, Direction::forward);
    floats(sample.call.in.g)[((1 * 5 + 3) * 4 + 2) * 3 + 1] = 0.25f;
    floats(sample.call.in.g)[((1 * 5 + 3) * 4 + 3) * 3 + 1] = 0.5f;
    EXPECT_EQ(message_of_forward(sample.call), "g: expected values <= 0, got 0.25 at [1, 3, 2, 1]");
    sample.call.options.allow_positive_gates = true;
    EXPECT_EQ(message_of_forward(sample.call), "");
    floats(sample.call.in.g)[7] = nan;
    EXPECT_EQ(message_of_forward(sample.call), "g: expected no NaN, got nan at [0, 0, 2, 1]");
    sample.call.options.allow_positive_gates = false;
    EXPECT_EQ(message_of_forward(sample.call), "g: expected values <= 0, got nan at [0, 0, 2, 1]");
    floats(sample.call.in.g)[7] = -infinity;
    floats(sample.call.in.g)[8] = -0.0f;
    floats(sample.call.in.g)[9] = infinity;
    EXPECT_EQ(message_of_forward(sample.call), "g: expected values <= 0, got inf at [0, 0, 3, 0]");
    EXPECT_EQ(message_of(sample.call, Contents::ignore), "");
}

TEST(ProblemContents, N4CoversEveryGate) {
    SampleCall head(Operator::retention, Direction::step);
    floats(head.call.in.g_gamma)[3] = 1e-30f;
    EXPECT_EQ(message_of(head.call), "g_gamma: expected values <= 0, got 1e-30 at [3]");
    SampleCall value(Operator::gla, Direction::backward);
    value.call.in.gv = value.tensor(DType::f32, {2, 5, 4, 6}, -1.0f);
    floats(value.call.in.gv)[6] = 2.0f;
    EXPECT_EQ(message_of(value.call), "gv: expected values <= 0, got 2 at [0, 0, 1, 0]");

    SampleCall raw(Operator::gated_delta_rule, Direction::forward);
    raw.call.options.gate_form = GateForm::softplus;
    raw.call.in.A_log = raw.tensor(DType::f32, {4}, 0.5f);
    raw.call.in.dt_bias = raw.tensor(DType::f32, {4}, 0.5f);
    floats(raw.call.in.g)[1] = 3.0f;  // a pre-activation may have any sign
    EXPECT_EQ(message_of(raw.call), "");
    floats(raw.call.in.g)[1] = nan;
    EXPECT_EQ(message_of_forward(raw.call), "g: expected no NaN, got nan at [0, 0, 1]");
    floats(raw.call.in.g)[1] = 0;
    floats(raw.call.in.dt_bias)[2] = nan;
    EXPECT_EQ(message_of(raw.call), "dt_bias: expected no NaN, got nan at [2]");
    floats(raw.call.in.A_log)[0] = nan;
    EXPECT_EQ(message_of(raw.call), "A_log: expected no NaN, got nan at [0]");
}

// Before anything is written; a logit may be infinite.
TEST(ProblemContents, N4CoversBeta) {
    for (const Direction direction : {Direction::forward, Direction::backward, Direction::step}) {
        SampleCall sample(Operator::kda, direction);
        float& bad = floats(sample.call.in.beta)[(1 * 5 + 3) * 4 + 2];
        for (const float value : {nan, infinity, -infinity}) {
            sample.call.options.beta_form = BetaForm::value;
            bad = value;
            std::ostringstream shown;
            shown << value;
            EXPECT_EQ(message_of(sample.call), "beta: expected finite values, got " + shown.str() + " at [1, 3, 2]");
            for (const BetaForm form : {BetaForm::sigmoid, BetaForm::two_sigmoid}) {
                sample.call.options.beta_form = form;
                EXPECT_EQ(message_of(sample.call), std::isnan(value) ? "beta: expected no NaN, got nan at [1, 3, 2]" : "");
            }
        }
        bad = 3e38f;
        sample.call.options.beta_form = BetaForm::value;
        EXPECT_EQ(message_of(sample.call), "");
    }
    SampleCall wide(Operator::delta_rule, Direction::forward);
    wide.call.in.beta = wide.tensor(DType::f32, {2, 5, 4, 6}, 0.5f);
    floats(wide.call.in.beta)[7] = infinity;
    EXPECT_EQ(message_of(wide.call), "beta: expected finite values, got inf at [0, 0, 1, 1]");
}

// The scan agrees with a plain loop over values for every dtype, layout and position.
TEST(ProblemContents, ScanFindsEachBadElementInEachLayout) {
    const float values[] = {0.0f, -0.0f, -1.0f, -infinity, 1e-6f, 1.0f, infinity, nan, -nan};
    const TensorView layouts[] = {TensorView(nullptr, DType::f32, {2, 3, 4, 5}),
                                  TensorView(nullptr, DType::f32, {5, 4, 3, 2}).transposed(0, 3),
                                  TensorView(nullptr, DType::f32, {4, 1, 7}).transposed(0, 2),
                                  TensorView(nullptr, DType::f32, {9}), TensorView(nullptr, DType::f32, {1, 1, 1})};
    for (TensorView view : layouts) {
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
            for (std::int64_t at = 0; at < view.numel(); at += 3) {
                for (const float value : values) {
                    std::vector<double> memory(static_cast<std::size_t>(view.numel()), 0.0);  // zero in every dtype
                    view.data = memory.data();
                    view.dtype = dtype;
                    std::int64_t offset = 0, rest = at;
                    for (int i = view.rank - 1; i >= 0; rest /= view.shape[i--])
                        offset += rest % view.shape[i] * view.strides[i];
                    const std::uint16_t half = dtype == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
                    char* target = static_cast<char*>(view.data) + offset * static_cast<std::int64_t>(size_of(dtype));
                    const double wide = value;
                    if (dtype == DType::f64) std::memcpy(target, &wide, 8);
                    if (dtype == DType::f32) std::memcpy(target, &value, 4);
                    if (size_of(dtype) == 2) std::memcpy(target, &half, 2);
                    EXPECT_EQ(find_refused(view, Refused::nan, 2), std::isnan(value) ? at : -1);
                    EXPECT_EQ(find_refused(view, Refused::nan_or_positive, 2), value <= 0 ? -1 : at) << value;
                    EXPECT_EQ(find_refused(view, Refused::nan_or_infinite, 2), std::isfinite(value) ? -1 : at) << value;
                }
            }
        }
    }
}

TEST(ProblemContents, ScanOfManyBlocksUsesThreads) {
    std::vector<float> memory(800000, -1.0f);
    const TensorView view(memory.data(), DType::f32, {4, 200000});
    for (const std::size_t bad : {std::size_t{0}, std::size_t{32768}, std::size_t{199999}, std::size_t{799999}}) {
        memory[bad] = 1.0f;
        for (const int threads : {1, 2, 4}) {
            EXPECT_EQ(find_refused(view, Refused::nan_or_positive, threads), static_cast<std::int64_t>(bad));
        }
        memory[bad] = -1.0f;
    }
    const TensorView columns(memory.data(), DType::f32, {100000, 2});
    TensorView strided = columns;
    strided.shape[1] = 1, strided.strides[0] = 4;
    memory[4 * 99999] = nan;
    EXPECT_EQ(find_refused(strided, Refused::nan, 2), 99999);
    memory[4 * 99999] = -1.0f;
    memory[4 * 99999 - 1] = nan;  // between the elements of the view
    EXPECT_EQ(find_refused(strided, Refused::nan, 2), -1);
}

TEST(ProblemContents, NamesWrongPoolRows) {
    const auto message = [](const std::vector<std::int64_t>& indices) {
        SampleCall sample(Operator::gla, Direction::step);
        sample.call.pool.indices = sample.integers(indices);
        return message_of(sample.call);
    };
    EXPECT_EQ(message({2, 0}), "");
    EXPECT_EQ(message({-1, -1}), "");
    EXPECT_EQ(message({0, 3}), "pool.indices: expected -1 or a row below 3 of pool.states, got 3 at [1]");
    EXPECT_EQ(message({-2, 0}), "pool.indices: expected -1 or a row below 3 of pool.states, got -2 at [0]");
    EXPECT_EQ(message({1, 1}), "pool.indices: expected different rows, got 1 at [0] and [1]");
}

TEST(ProblemContents, NamesWrongSpeculativeRows) {
    const auto message = [](std::int64_t slots, const std::vector<std::int64_t>& indices,
                            const std::vector<std::int64_t>& accepted) {
        SampleCall sample(Operator::gla, Direction::step);
        sample.call.pool.states = sample.tensor(DType::f32, {9, 4, 3, 6});
        sample.pack({0, 2, 4}, 4);
        sample.call.pool.indices = sample.integers(2, slots, indices);
        if (!accepted.empty()) sample.call.pool.num_accepted_tokens = sample.integers(accepted);
        return message_of(sample.call);
    };
    EXPECT_EQ(message(2, {0, 1, 2, 3}, {}), "");
    EXPECT_EQ(message(2, {0, 1, 2, 3}, {2, 1}), "");
    EXPECT_EQ(message(2, {-1, -1, 2, 3}, {0, 1}), "");
    EXPECT_EQ(message(3, {0, 1, 8, 2, 3, 8}, {3, 1}), "");  // slots past the tokens are not written
    EXPECT_EQ(message(2, {0, 1, 1, 3}, {}), "pool.indices: expected different rows, got 1 at [0, 1] and [1, 0]");
    EXPECT_EQ(message(2, {4, 4, 1, 3}, {}), "pool.indices: expected different rows, got 4 at [0, 0] and [0, 1]");
    EXPECT_EQ(message(1, {0, 1}, {}), "pool.indices: expected an index for each of the 2 tokens of sequence 0, got 1");
    EXPECT_EQ(message(2, {0, -1, 2, 3}, {}), "pool.indices: expected a row as at [0, 0], got -1 at [0, 1]");
    EXPECT_EQ(message(2, {-1, 5, 2, 3}, {}), "pool.indices: expected -1 as at [0, 0], got 5 at [0, 1]");
    EXPECT_EQ(message(2, {0, 1, 2, 9}, {}),
              "pool.indices: expected -1 or a row below 9 of pool.states, got 9 at [1, 1]");
    EXPECT_EQ(message(2, {0, 1, 2, 3}, {1, 3}), "pool.num_accepted_tokens: expected 1 to 2, got 3 at [1]");
    EXPECT_EQ(message(2, {0, 1, 2, 3}, {0, 1}), "pool.num_accepted_tokens: expected 1 to 2, got 0 at [0]");
    EXPECT_EQ(message(3, {0, 1, 2, 2, 3, 4}, {3, 1}),
              "pool.indices: expected different rows, got 2, from which sequence 0 starts, also at [1, 0]");
    EXPECT_EQ(message(3, {0, 1, -1, 2, 3, 4}, {3, 1}), "pool.indices: expected a row to start from, got -1 at [0, 2]");
}

TEST(ProblemContents, PlansNeedNoData) {
    SampleCall sample(Operator::comba, Direction::backward);
    sample.pack({0, 2, 4}, 4);
    Inputs& in = sample.call.in;
    for (TensorView* view :
         {&in.q, &in.k, &in.v, &in.p, &in.g, &in.beta, &sample.call.d_out.d_o, &sample.call.grads.d_q}) {
        view->data = nullptr;
    }
    EXPECT_EQ(message_of(sample.call, Contents::ignore), "");
    EXPECT_EQ(message_of(sample.call), "q: expected data, got a null pointer");
    in.cu_seqlens.data = nullptr;
    EXPECT_EQ(message_of(sample.call, Contents::ignore), "cu_seqlens: expected data, got a null pointer");
}

}  // namespace
}  // namespace headrace::test
