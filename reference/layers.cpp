// The oracle of the layer functions, element by element, with hand-written adjoints.
#include "reference/layers.hpp"

#include <cmath>

namespace headrace::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double sigmoid(double z) { return z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z)); }

double value(Activation activation, double z) {
    return activation == Activation::none ? z : activation == Activation::silu ? z * sigmoid(z) : sigmoid(z);
}

double slope(Activation activation, double z) {
    const double s = sigmoid(z), ds = s * sigmoid(-z);
    return activation == Activation::none ? 1 : activation == Activation::silu ? s + z * ds : ds;
}

// One channel of one sequence: the state's W inputs, then its tokens.
struct Line {
    const Convolution& c;
    std::int64_t n, d;

    std::int64_t length() const { return c.first_token(n + 1) - c.first_token(n); }
    std::size_t token(std::int64_t t) const { return at((c.first_token(n) + t) * c.D + d); }
    std::size_t state(std::int64_t place) const { return at((n * c.D + d) * c.W + place); }
    double weight(std::int64_t i) const { return c.weight[at(d * c.W + i)]; }

    double input(std::int64_t time) const {
        if (time >= 0) return c.x[token(time)];
        return c.initial_state.empty() ? 0 : c.initial_state[state(c.W + time)];
    }
    double sum(std::int64_t t) const {
        double z = c.bias.empty() ? 0 : c.bias[at(d)];
        for (std::int64_t i = 0; i < c.W; ++i) z += weight(i) * input(t - (c.W - 1) + i);
        return z;
    }
};

template <typename Body>
void for_each_line(const Convolution& c, const Body& body) {
    for (std::int64_t n = 0; n < c.sequences(); ++n) {
        for (std::int64_t d = 0; d < c.D; ++d) body(Line{c, n, d});
    }
}

}  // namespace

ConvolutionOutputs forward(const Convolution& c) {
    ConvolutionOutputs out{std::vector<double>(c.x.size()), std::vector<double>(at(c.sequences() * c.D * c.W))};
    for_each_line(c, [&](const Line& line) {
        const std::int64_t length = line.length();
        for (std::int64_t t = 0; t < length; ++t) out.y[line.token(t)] = value(c.activation, line.sum(t));
        for (std::int64_t i = 0; i < c.W; ++i) out.final_state[line.state(i)] = line.input(length - c.W + i);
    });
    return out;
}

ConvolutionGradients backward(const Convolution& c) {
    ConvolutionGradients grads{std::vector<double>(c.x.size()), std::vector<double>(c.weight.size()),
                               std::vector<double>(at(c.D)), std::vector<double>(at(c.sequences() * c.D * c.W))};
    for_each_line(c, [&](const Line& line) {
        const std::int64_t length = line.length();
        const auto add = [&](std::int64_t time, double gradient) {
            (time >= 0 ? grads.d_x[line.token(time)] : grads.d_initial_state[line.state(c.W + time)]) += gradient;
        };
        for (std::int64_t t = 0; t < length && !c.d_y.empty(); ++t) {
            const double d_sum = c.d_y[line.token(t)] * slope(c.activation, line.sum(t));
            grads.d_bias[at(line.d)] += d_sum;
            for (std::int64_t i = 0; i < c.W; ++i) {
                const std::int64_t time = t - (c.W - 1) + i;
                grads.d_weight[at(line.d * c.W + i)] += d_sum * line.input(time);
                add(time, d_sum * line.weight(i));
            }
        }
        for (std::int64_t i = 0; i < c.W && !c.d_final_state.empty(); ++i) {
            add(length - c.W + i, c.d_final_state[line.state(i)]);
        }
    });
    return grads;
}

std::vector<double> forward(const RmsNorm& norm) {
    std::vector<double> y(norm.x.size());
    for (std::int64_t row = 0; row < norm.rows; ++row) {
        double squares = 0;
        for (std::int64_t d = 0; d < norm.D; ++d)
            squares += norm.x[at(row * norm.D + d)] * norm.x[at(row * norm.D + d)];
        const double root = std::sqrt(squares / static_cast<double>(norm.D) + norm.eps);
        for (std::int64_t d = 0; d < norm.D; ++d) {
            const std::size_t i = at(row * norm.D + d);
            y[i] = norm.x[i] / root * (norm.weight.empty() ? 1 : norm.weight[at(d)]) *
                   (norm.gate.empty() ? 1 : value(norm.activation, norm.gate[i]));
        }
    }
    return y;
}

// With m the mean of squares and r = (m + eps)^(-1/2): dr/dx_d = -r^3 x_d / D.
RmsNormGradients backward(const RmsNorm& norm) {
    RmsNormGradients grads{std::vector<double>(norm.x.size()), std::vector<double>(norm.x.size()),
                           std::vector<double>(at(norm.D))};
    const auto D = static_cast<double>(norm.D);
    for (std::int64_t row = 0; row < norm.rows; ++row) {
        double squares = 0, d_r = 0;
        for (std::int64_t d = 0; d < norm.D; ++d)
            squares += norm.x[at(row * norm.D + d)] * norm.x[at(row * norm.D + d)];
        const double r = 1 / std::sqrt(squares / D + norm.eps);
        for (std::int64_t d = 0; d < norm.D; ++d) {
            const std::size_t i = at(row * norm.D + d);
            const double weight = norm.weight.empty() ? 1 : norm.weight[at(d)];
            const double gate = norm.gate.empty() ? 1 : value(norm.activation, norm.gate[i]);
            d_r += norm.d_y[i] * weight * gate * norm.x[i];
            grads.d_x[i] = norm.d_y[i] * weight * gate * r;
            grads.d_weight[at(d)] += norm.d_y[i] * gate * norm.x[i] * r;
            if (!norm.gate.empty())
                grads.d_gate[i] = norm.d_y[i] * weight * norm.x[i] * r * slope(norm.activation, norm.gate[i]);
        }
        for (std::int64_t d = 0; d < norm.D; ++d)
            grads.d_x[at(row * norm.D + d)] -= d_r * r * r * r * norm.x[at(row * norm.D + d)] / D;
    }
    return grads;
}

}  // namespace headrace::reference
