// The oracle of the layer functions: values written out by hand, gradients against central finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "harness/random.hpp"
#include "reference/layers.hpp"

namespace headrace::reference {
namespace {

std::vector<double> draw(const char* name, std::int64_t count, std::uint64_t seed) {
    const harness::Stream stream(seed, name);
    std::vector<double> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = stream.normal(static_cast<std::int64_t>(i));
    return values;
}

double inner(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < b.size(); ++i) sum += a[i] * b[i];
    return sum;
}

// Moves each element of `input` and compares the change of objective() with the gradient.
template <typename Objective>
void expect_gradient(std::vector<double>& input, const std::vector<double>& gradient, const Objective& objective,
                     const std::string& what) {
    constexpr double step = 1e-5;  // truncation step^2 and rounding 1e-16 / step are both about 1e-10
    ASSERT_TRUE(input.empty() || input.size() == gradient.size()) << what;
    for (std::size_t i = 0; i < input.size(); ++i) {
        const double kept = input[i];
        input[i] = kept + step;
        const double above = objective();
        input[i] = kept - step;
        const double below = objective();
        input[i] = kept;
        const double expected = (above - below) / (2 * step);
        EXPECT_NEAR(gradient[i], expected, 2e-8 * (1 + std::fabs(expected))) << what << "[" << i << "]";
    }
}

Convolution convolution(std::int64_t W, Activation activation, std::vector<std::int64_t> cu_seqlens) {
    Convolution c;
    c.D = 2, c.W = W, c.activation = activation, c.cu_seqlens = std::move(cu_seqlens);
    c.B = c.cu_seqlens.empty() ? 2 : 1;
    c.T = c.cu_seqlens.empty() ? 5 : c.cu_seqlens.back();
    const std::int64_t states = c.sequences() * c.D * c.W;
    c.x = draw("x", c.B * c.T * c.D, 1), c.weight = draw("weight", c.D * W, 1), c.bias = draw("bias", c.D, 1);
    c.initial_state = draw("initial_state", states, 1);
    c.d_y = draw("d_y", c.B * c.T * c.D, 1), c.d_final_state = draw("d_final_state", states, 1);
    return c;
}

void expect_true_gradients(Convolution c, const std::string& what) {
    const ConvolutionGradients grads = backward(c);
    const auto objective = [&] {
        const ConvolutionOutputs out = forward(c);
        return inner(out.y, c.d_y) + inner(out.final_state, c.d_final_state);
    };
    expect_gradient(c.x, grads.d_x, objective, what + " d_x");
    expect_gradient(c.weight, grads.d_weight, objective, what + " d_weight");
    expect_gradient(c.bias, grads.d_bias, objective, what + " d_bias");
    expect_gradient(c.initial_state, grads.d_initial_state, objective, what + " d_initial_state");
}

TEST(reference, a_convolution_by_hand) {
    Convolution c;
    c.T = 2, c.D = 1, c.W = 3;
    c.x = {10, 20}, c.weight = {1, 2, 3}, c.bias = {0.5}, c.initial_state = {7, 8, 9};
    const ConvolutionOutputs out = forward(c);
    EXPECT_EQ(out.y, (std::vector<double>{0.5 + 8 + 2 * 9 + 3 * 10, 0.5 + 9 + 2 * 10 + 3 * 20}));
    EXPECT_EQ(out.final_state, (std::vector<double>{9, 10, 20}));
    c.activation = Activation::silu;
    EXPECT_DOUBLE_EQ(forward(c).y[0], 56.5 / (1 + std::exp(-56.5)));
}

TEST(reference, gradients_of_convolutions) {
    for (const std::int64_t W : {1, 2, 4, 7}) {
        for (const Activation activation : {Activation::none, Activation::silu}) {
            for (const std::vector<std::int64_t>& cu_seqlens : {std::vector<std::int64_t>{}, {0, 0, 3, 4, 9}}) {
                Convolution c = convolution(W, activation, cu_seqlens);
                const std::string what = "W " + std::to_string(W) + (cu_seqlens.empty() ? " dense" : " ragged");
                expect_true_gradients(c, what);
                c.bias.clear(), c.initial_state.clear();
                expect_true_gradients(c, what + ", without bias and state");
                c.d_y.clear();
                expect_true_gradients(c, what + ", final state only");
            }
        }
    }
}

RmsNorm rms_norm(Activation activation) {
    RmsNorm norm;
    norm.rows = 3, norm.D = 5, norm.activation = activation, norm.eps = 0.1;
    norm.x = draw("x", 15, 1), norm.gate = draw("gate", 15, 1), norm.weight = draw("weight", 5, 1);
    norm.d_y = draw("d_y", 15, 1);
    return norm;
}

TEST(reference, a_norm_by_hand) {
    RmsNorm norm;
    norm.rows = 1, norm.D = 2, norm.eps = 3.5;
    norm.x = {3, 4}, norm.weight = {2, 5}, norm.gate = {1, -2};  // mean of squares 12.5, root of 16
    const std::vector<double> y = forward(norm);
    EXPECT_DOUBLE_EQ(y[0], 3.0 / 4 * 2 * (1 / (1 + std::exp(-1.0))));
    EXPECT_DOUBLE_EQ(y[1], 4.0 / 4 * 5 * (-2 / (1 + std::exp(2.0))));
}

TEST(reference, gradients_of_norms) {
    for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
        for (const bool bare : {false, true}) {
            RmsNorm norm = rms_norm(activation);
            if (bare) norm.gate.clear(), norm.weight.clear();
            const RmsNormGradients grads = backward(norm);
            const auto objective = [&] { return inner(forward(norm), norm.d_y); };
            expect_gradient(norm.x, grads.d_x, objective, "d_x");
            expect_gradient(norm.gate, grads.d_gate, objective, "d_gate");
            expect_gradient(norm.weight, grads.d_weight, objective, "d_weight");
        }
    }
}

}  // namespace
}  // namespace headrace::reference
