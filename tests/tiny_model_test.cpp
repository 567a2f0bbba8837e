// I4: a tiny language model with the head gates of a real one, trained through the library, follows the oracle's loss.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/convert.hpp"
#include "harness/random.hpp"
#include "headrace/headrace.hpp"
#include "reference/oracle.hpp"

namespace headrace {
namespace {

using Values = std::vector<double>;

// ling-mini-linear's heads and gates (docs of the checkpoints: layer l of 20), small head sizes and vocabulary.
constexpr std::int64_t B = 2, T = 300, H = 16, K = 8, V = 8;
constexpr std::size_t rows = B * T, width = 32, vocabulary = 24, key_width = H * K, value_width = H * V, num_layers = 2;
constexpr int steps = 10, chunk = 128;  // T: two chunks and a part of one

Values head_gates(std::size_t layer) {
    Values gates;
    for (std::int64_t h = 0; h < H; ++h) {
        const double slope = std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(H));
        gates.push_back(-slope * (1.0 - (static_cast<double>(layer) - 1.0) / 19.0 + 1e-5));
    }
    return gates;
}

// The operator, as the model sees it: rows of tokens in, rows of tokens out.
struct Attention {
    std::function<Values(const Values& gates, const Values& q, const Values& k, const Values& v)> forward;
    struct Gradients {
        Values d_q, d_k, d_v;
    };
    std::function<Gradients(const Values& gates, const Values& q, const Values& k, const Values& v, const Values& d_o)>
        backward;
};

Attention oracle() {
    const auto make = [](const Values& gates, const Values& q, const Values& k, const Values& v) {
        reference::Spec spec;
        spec.B = B, spec.T = T, spec.H = spec.HV = H, spec.K = K, spec.V = V;
        spec.head_gate = true;
        spec.scale = 1.0 / std::sqrt(static_cast<double>(K));
        reference::Arrays arrays;
        arrays.q = q, arrays.k = k, arrays.v = v, arrays.g_gamma = gates;
        return std::pair(spec, arrays);
    };
    Attention attention;
    attention.forward = [make](const Values& gates, const Values& q, const Values& k, const Values& v) {
        const auto [spec, arrays] = make(gates, q, k, v);
        return reference::forward(spec, arrays).o;
    };
    attention.backward = [make](const Values& gates, const Values& q, const Values& k, const Values& v,
                                const Values& d_o) -> Attention::Gradients {
        auto [spec, arrays] = make(gates, q, k, v);
        arrays.d_o = d_o;
        reference::Gradients grads = reference::backward(spec, arrays);
        return {grads.d_q, grads.d_k, grads.d_v};
    };
    return attention;
}

// A tensor in the library's type, and back.
struct Stored {
    std::vector<unsigned char> bytes;
    TensorView view;

    Stored(DType dtype, const Values& values, std::initializer_list<std::int64_t> shape)
        : bytes(values.size() * size_of(dtype)), view(bytes.data(), dtype, shape) {
        harness::store_elements(bytes.data(), dtype, 1, static_cast<std::int64_t>(values.size()), values.data());
    }
    Values values() const {
        Values result(static_cast<std::size_t>(view.numel()));
        harness::load_elements(bytes.data(), view.dtype, 1, view.numel(), result.data());
        return result;
    }
};

// The library, activations rounded to `dtype` on the way in and out; gates times `gate_factor`.
Attention library(DType dtype, double gate_factor = 1.0) {
    const auto scaled = [gate_factor](Values gates) {
        for (double& gate : gates) gate *= gate_factor;
        return gates;
    };
    Options options;
    options.chunk = chunk;
    Attention attention;
    attention.forward = [=](const Values& gates, const Values& q, const Values& k, const Values& v) {
        const Stored sq(dtype, q, {B, T, H, K}), sk(dtype, k, {B, T, H, K}), sv(dtype, v, {B, T, H, V});
        const Stored gamma(DType::f32, scaled(gates), {H});
        Stored o(dtype, v, {B, T, H, V});
        Inputs in;
        in.q = sq.view, in.k = sk.view, in.v = sv.view, in.g_gamma = gamma.view;
        const Status status = simple_gla_forward(in, {o.view, {}}, options);
        EXPECT_TRUE(status.ok()) << status.message();
        return o.values();
    };
    attention.backward = [=](const Values& gates, const Values& q, const Values& k, const Values& v,
                             const Values& d_o) -> Attention::Gradients {
        const Stored sq(dtype, q, {B, T, H, K}), sk(dtype, k, {B, T, H, K}), sv(dtype, v, {B, T, H, V});
        const Stored gamma(DType::f32, scaled(gates), {H}), sd(dtype, d_o, {B, T, H, V});
        Stored d_q(dtype, q, {B, T, H, K}), d_k(dtype, k, {B, T, H, K}), d_v(dtype, v, {B, T, H, V});
        Inputs in;
        in.q = sq.view, in.k = sk.view, in.v = sv.view, in.g_gamma = gamma.view;
        Gradients grads;
        grads.d_q = d_q.view, grads.d_k = d_k.view, grads.d_v = d_v.view;
        const Status status = simple_gla_backward(in, {sd.view, {}}, grads, options);
        EXPECT_TRUE(status.ok()) << status.message();
        return {d_q.values(), d_k.values(), d_v.values()};
    };
    return attention;
}

// c[m,n] += a[m,k] b[k,n]; the other two give the gradients of a product's factors.
void multiply(Values& c, const Values& a, const Values& b, std::size_t m, std::size_t k, std::size_t n) {
    for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t l = 0; l < k; ++l) {
            for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + l] * b[l * n + j];
        }
    }
}
void multiply_by_transposed(Values& d_a, const Values& d_c, const Values& b, std::size_t m, std::size_t k,
                            std::size_t n) {
    for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t l = 0; l < k; ++l) {
            double sum = 0;
            for (std::size_t j = 0; j < n; ++j) sum += d_c[i * n + j] * b[l * n + j];
            d_a[i * k + l] += sum;
        }
    }
}
void transposed_multiply(Values& d_b, const Values& a, const Values& d_c, std::size_t m, std::size_t k, std::size_t n) {
    for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t l = 0; l < k; ++l) {
            for (std::size_t j = 0; j < n; ++j) d_b[l * n + j] += a[i * k + l] * d_c[i * n + j];
        }
    }
}

double inverse_rms(const double* x) {
    double sum = 1e-6 * static_cast<double>(width);
    for (std::size_t c = 0; c < width; ++c) sum += x[c] * x[c];
    return std::sqrt(static_cast<double>(width) / sum);
}

Values rms_norm(const Values& x) {
    Values y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * inverse_rms(&x[i / width * width]);
    return y;
}

// d_x += r (d_y - y (y . d_y) / width)
void rms_norm_backward(Values& d_x, const Values& d_y, const Values& x) {
    for (std::size_t row = 0; row < x.size(); row += width) {
        const double r = inverse_rms(&x[row]);
        double dot = 0;
        for (std::size_t c = 0; c < width; ++c) dot += x[row + c] * r * d_y[row + c];
        for (std::size_t c = 0; c < width; ++c) {
            d_x[row + c] += r * (d_y[row + c] - x[row + c] * r * dot / static_cast<double>(width));
        }
    }
}

struct Parameter {
    Values value, gradient, mean, square;

    Parameter(std::size_t inputs, std::size_t outputs, const std::string& name) : value(inputs * outputs) {
        const harness::Stream stream(1, name);
        const double deviation = 1.0 / std::sqrt(static_cast<double>(inputs));
        for (std::size_t i = 0; i < value.size(); ++i)
            value[i] = deviation * stream.normal(static_cast<std::int64_t>(i));
        gradient = mean = square = Values(value.size());
    }
    // Adam with its usual constants.
    void update(int step) {
        constexpr double rate = 3e-3, decay1 = 0.9, decay2 = 0.999, epsilon = 1e-8;
        for (std::size_t i = 0; i < value.size(); ++i) {
            mean[i] = decay1 * mean[i] + (1 - decay1) * gradient[i];
            square[i] = decay2 * square[i] + (1 - decay2) * gradient[i] * gradient[i];
            const double m = mean[i] / (1 - std::pow(decay1, step)), v = square[i] / (1 - std::pow(decay2, step));
            value[i] -= rate * m / (std::sqrt(v) + epsilon);
            gradient[i] = 0;
        }
    }
};

struct Layer {
    Parameter q, k, v, out;
    Values gates, x, normed, q_rows, k_rows, v_rows, o_rows;  // what the backward reads again

    explicit Layer(std::size_t index)
        : q(width, key_width, "q" + std::to_string(index)),
          k(width, key_width, "k" + std::to_string(index)),
          v(width, value_width, "v" + std::to_string(index)),
          out(value_width, width, "out" + std::to_string(index)),
          gates(head_gates(index)) {}

    Values forward(const Values& input, const Attention& attention) {
        x = input;
        normed = rms_norm(x);
        q_rows = k_rows = Values(rows * key_width);
        v_rows = Values(rows * value_width);
        multiply(q_rows, normed, q.value, rows, width, key_width);
        multiply(k_rows, normed, k.value, rows, width, key_width);
        multiply(v_rows, normed, v.value, rows, width, value_width);
        o_rows = attention.forward(gates, q_rows, k_rows, v_rows);
        Values y = x;
        multiply(y, o_rows, out.value, rows, value_width, width);
        return y;
    }
    // d_y becomes the gradient of the layer's input.
    void backward(Values& d_y, const Attention& attention) {
        Values d_o(rows * value_width), d_normed(rows * width);
        multiply_by_transposed(d_o, d_y, out.value, rows, value_width, width);
        transposed_multiply(out.gradient, o_rows, d_y, rows, value_width, width);
        const Attention::Gradients d = attention.backward(gates, q_rows, k_rows, v_rows, d_o);
        multiply_by_transposed(d_normed, d.d_q, q.value, rows, width, key_width);
        multiply_by_transposed(d_normed, d.d_k, k.value, rows, width, key_width);
        multiply_by_transposed(d_normed, d.d_v, v.value, rows, width, value_width);
        transposed_multiply(q.gradient, normed, d.d_q, rows, width, key_width);
        transposed_multiply(k.gradient, normed, d.d_k, rows, width, key_width);
        transposed_multiply(v.gradient, normed, d.d_v, rows, width, value_width);
        rms_norm_backward(d_y, d_normed, x);
    }
    void update(int step) {
        for (Parameter* parameter : {&q, &k, &v, &out}) parameter->update(step);
    }
};

struct Text {
    std::vector<std::size_t> now, next;  // [rows]
};

// Every token mostly decides the next one; now and then a token is drawn anew.
Text make_text() {
    const harness::Stream stream(2, "text");
    Text text;
    for (std::int64_t row = 0; row < B * T; ++row) {
        const bool drawn = row % T == 0 || stream.uniform(2 * row) < 0.15;
        const std::size_t token = drawn ? static_cast<std::size_t>(stream.below(2 * row + 1, vocabulary))
                                        : (text.now.back() * 7 + 3) % vocabulary;
        text.now.push_back(token);
    }
    for (std::size_t row = 0; row < rows; ++row) text.next.push_back(text.now[(row + 1) % rows]);
    return text;
}

// Mean cross-entropy; logits become its gradient.
double cross_entropy(Values& logits, const Text& text) {
    double loss = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        double* z = &logits[row * vocabulary];
        double highest = z[0], sum = 0;
        for (std::size_t i = 0; i < vocabulary; ++i) highest = std::fmax(highest, z[i]);
        for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(z[i] - highest);
        loss += std::log(sum) + highest - z[text.next[row]];
        for (std::size_t i = 0; i < vocabulary; ++i) {
            const double wanted = i == text.next[row] ? 1.0 : 0.0;
            z[i] = (std::exp(z[i] - highest) / sum - wanted) / static_cast<double>(rows);
        }
    }
    return loss / static_cast<double>(rows);
}

// The loss before each of the steps.
Values train(const Attention& attention) {
    const Text text = make_text();
    Parameter embedding(vocabulary, width, "embedding"), head(width, vocabulary, "head");
    std::vector<Layer> layers;
    for (std::size_t l = 0; l < num_layers; ++l) layers.emplace_back(l);
    Values losses;
    for (int step = 1; step <= steps; ++step) {
        Values x(rows * width);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = embedding.value[text.now[i / width] * width + i % width];
        for (Layer& layer : layers) x = layer.forward(x, attention);
        const Values normed = rms_norm(x);
        Values logits(rows * vocabulary), d_normed(rows * width), d_x(rows * width);
        multiply(logits, normed, head.value, rows, width, vocabulary);
        losses.push_back(cross_entropy(logits, text));
        multiply_by_transposed(d_normed, logits, head.value, rows, width, vocabulary);
        transposed_multiply(head.gradient, normed, logits, rows, width, vocabulary);
        rms_norm_backward(d_x, d_normed, x);
        for (std::size_t l = num_layers; l-- > 0;) layers[l].backward(d_x, attention);
        for (std::size_t i = 0; i < d_x.size(); ++i)
            embedding.gradient[text.now[i / width] * width + i % width] += d_x[i];
        for (Layer& layer : layers) layer.update(step);
        embedding.update(step);
        head.update(step);
    }
    return losses;
}

const Values& oracle_losses() {
    static const Values losses = train(oracle());
    return losses;
}

// The largest relative distance from the oracle's loss over the steps; infinite if a loss is not finite.
double distance(const Values& losses) {
    double largest = 0;
    for (std::size_t i = 0; i < losses.size(); ++i) {
        const double relative = std::fabs(losses[i] - oracle_losses()[i]) / oracle_losses()[i];
        if (!std::isfinite(relative)) return std::numeric_limits<double>::infinity();
        largest = std::fmax(largest, relative);
    }
    return largest;
}

TEST(tiny_model_I4, the_oracle_learns) {
    ASSERT_EQ(oracle_losses().size(), static_cast<std::size_t>(steps));
    std::printf("loss %.4f -> %.4f\n", oracle_losses().front(), oracle_losses().back());
    EXPECT_LT(oracle_losses().back(), 0.8 * oracle_losses().front());
}

TEST(tiny_model_I4, losses_in_f32_and_bf16_follow_the_oracle) {
    const double f32 = distance(train(library(DType::f32))), bf16 = distance(train(library(DType::bf16)));
    std::printf("distance f32 %.2e, bf16 %.2e\n", f32, bf16);
    EXPECT_LE(f32, 1e-3);
    EXPECT_LE(bf16, 2e-2);
}

TEST(tiny_model_I4, wrong_gates_are_noticed) {
    EXPECT_GT(distance(train(library(DType::f32, 0.5))), 1e-3);
    EXPECT_GT(distance(train(library(DType::bf16, 0.0))), 2e-2);
}

}  // namespace
}  // namespace headrace
