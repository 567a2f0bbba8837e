// Calls of the layer functions for tests: inputs drawn, outputs NaN behind guards, what the oracle says.
#pragma once

#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/compare.hpp"
#include "harness/oracle_call.hpp"
#include "harness/random.hpp"
#include "harness/tensors.hpp"
#include "headrace/layers.hpp"
#include "reference/layers.hpp"
#include "relative_error.hpp"

namespace headrace::test {

enum class Layout { contiguous, strided };

// Named tensors in one layout. Strided: the first dimension is the innermost, with gaps.
class LayerTensors {
  public:
    explicit LayerTensors(Layout layout) : layout_(layout) {}

    TensorView add(const char* name, DType dtype, std::vector<std::int64_t> shape) {
        std::vector<std::int64_t> strides;
        std::int64_t extent = 2;
        for (std::size_t i = 0; layout_ == Layout::strided && i < shape.size(); ++i) {
            strides.push_back(extent);
            extent *= shape[i] + 1;
        }
        return (tensors_[name] = harness::Tensor(dtype, std::move(shape), std::move(strides))).view();
    }
    TensorView draw(const char* name, DType dtype, std::vector<std::int64_t> shape, double size = 1) {
        const TensorView view = add(name, dtype, std::move(shape));
        const harness::Stream stream(11, name);
        harness::Tensor& tensor = tensors_.at(name);
        for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, size * stream.normal(i));
        return view;
    }
    TensorView integers(const char* name, const std::vector<std::int64_t>& values, DType dtype = DType::i64) {
        const TensorView view = add(name, dtype, {static_cast<std::int64_t>(values.size())});
        for (std::size_t i = 0; i < values.size(); ++i) {
            tensors_.at(name).set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
        }
        return view;
    }
    // Not given: empty.
    std::vector<double> values(const char* name) const {
        return tensors_.count(name) ? tensors_.at(name).values() : std::vector<double>();
    }
    harness::Tensor& at(const char* name) { return tensors_.at(name); }
    using Bytes = std::vector<unsigned char>;
    Bytes bytes(const char* name) const { return harness::read_bytes(tensors_.at(name).view()); }
    std::map<std::string, Bytes> bytes(std::initializer_list<const char*> names) const {
        std::map<std::string, Bytes> all;
        for (const char* name : names) {
            if (tensors_.count(name)) all[name] = bytes(name);
        }
        return all;
    }
    // The tensors outside whose elements something was written.
    std::string spoiled_guards() const {
        std::string names;
        for (const auto& [name, tensor] : tensors_) names += tensor.guards_intact() ? "" : name + ": guards\n";
        return names;
    }

  private:
    Layout layout_;
    std::map<std::string, harness::Tensor> tensors_;
};

struct ConvolutionCase {
    std::int64_t B = 2, T = 37, D = 70, W = 4;
    std::vector<std::int64_t> cu_seqlens = {};
    Activation activation = Activation::silu;
    bool bias = true, state = true;
    DType dtype = DType::f32, others = DType::f32;  // of x; of all but x, y and d_y
    Layout layout = Layout::contiguous;
    double x_size = 1;
    DType of_lengths = DType::i64;  // of cu_seqlens
    std::string text() const {
        std::string lengths;
        for (const std::int64_t end : cu_seqlens) lengths += " " + std::to_string(end);
        return "B " + std::to_string(B) + " T " + std::to_string(T) + " D " + std::to_string(D) + " W " +
               std::to_string(W) + " cu" + lengths + " " + name_of(dtype) + " " + name_of(others) +
               (activation == Activation::silu ? " silu" : "") + (bias ? " bias" : "") + (state ? " state" : "") +
               (layout == Layout::strided ? " strided" : "");
    }
};

struct ConvolutionCall {
    LayerTensors tensors;
    ConvolutionInputs in;
    ConvolutionOutputs out;
    ConvolutionOutputGradients d_out;
    ConvolutionGradients grads;
    ConvolutionOptions options;
    static constexpr std::initializer_list<const char*> outputs = {"y",        "final_state", "d_x",
                                                                   "d_weight", "d_bias",      "d_initial_state"};

    explicit ConvolutionCall(const ConvolutionCase& c) : tensors(c.layout) {
        const std::int64_t N = c.cu_seqlens.empty() ? c.B : static_cast<std::int64_t>(c.cu_seqlens.size()) - 1;
        in.x = tensors.draw("x", c.dtype, {c.B, c.T, c.D}, c.x_size);
        in.weight = tensors.draw("weight", c.others, {c.D, c.W}, 0.5);
        if (c.bias) in.bias = tensors.draw("bias", c.others, {c.D});
        if (c.state) in.initial_state = tensors.draw("initial_state", c.others, {N, c.D, c.W});
        if (!c.cu_seqlens.empty()) in.cu_seqlens = tensors.integers("cu_seqlens", c.cu_seqlens, c.of_lengths);
        out.y = tensors.add("y", c.dtype, {c.B, c.T, c.D});
        out.final_state = tensors.add("final_state", c.others, {N, c.D, c.W});
        d_out.d_y = tensors.draw("d_y", c.dtype, {c.B, c.T, c.D});
        d_out.d_final_state = tensors.draw("d_final_state", c.others, {N, c.D, c.W});
        grads.d_x = tensors.add("d_x", c.others, {c.B, c.T, c.D});
        grads.d_weight = tensors.add("d_weight", c.others, {c.D, c.W});
        grads.d_bias = tensors.add("d_bias", c.others, {c.D});
        grads.d_initial_state = tensors.add("d_initial_state", c.others, {N, c.D, c.W});
        options.activation = c.activation;
    }
    ConvolutionCall(const ConvolutionCall&) = delete;

    Status forward() const { return short_convolution_forward(in, out, options); }
    Status backward() const { return short_convolution_backward(in, d_out, grads, options); }
    Status run() const {
        if (Status status = forward(); !status.ok()) return status;
        return backward();
    }
    // A call of one token per sequence as a step, whose pool is final_state.
    Status step() {
        const std::vector<double> states = tensors.values("initial_state");
        tensors.at("final_state").write(0, static_cast<std::int64_t>(states.size()), states.data());
        const auto rows = [](TensorView view) {
            view.rank = 2;
            view.shape[1] = view.shape[2], view.strides[1] = view.strides[2];
            return view;
        };
        ConvolutionInputs token = in;
        token.x = rows(in.x), token.initial_state = {};
        return short_convolution_step(token, {rows(out.y), {}}, {out.final_state, {}}, options);
    }
    void forget_outputs() {
        for (const char* name : outputs) tensors.at(name).fill(std::numeric_limits<double>::quiet_NaN());
    }

    std::map<std::string, std::vector<double>> expected() const {
        reference::Convolution c;
        c.B = in.x.shape[0], c.T = in.x.shape[1], c.D = in.x.shape[2], c.W = in.weight.shape[1];
        for (const double end : tensors.values("cu_seqlens")) c.cu_seqlens.push_back(static_cast<std::int64_t>(end));
        c.activation = static_cast<reference::Activation>(options.activation);
        c.x = tensors.values("x"), c.weight = tensors.values("weight"), c.bias = tensors.values("bias");
        c.initial_state = tensors.values("initial_state");
        c.d_y = tensors.values("d_y"), c.d_final_state = tensors.values("d_final_state");
        reference::ConvolutionOutputs o = reference::forward(c);
        reference::ConvolutionGradients g = reference::backward(c);
        return {{"y", o.y},           {"final_state", o.final_state},        {"d_x", g.d_x}, {"d_weight", g.d_weight},
                {"d_bias", g.d_bias}, {"d_initial_state", g.d_initial_state}};
    }
};

struct RmsNormCase {
    std::vector<std::int64_t> shape = {2, 9, 3, 40};
    Activation activation = Activation::silu;
    bool gate = true, weight = true;
    DType dtype = DType::f32, others = DType::f32;  // of x; of gate and weight
    Layout layout = Layout::contiguous;
    double gate_size = 1;
    double eps = 1e-5;
};

struct RmsNormCall {
    LayerTensors tensors;
    RmsNormInputs in;
    TensorView y, d_y;
    RmsNormGradients grads;
    RmsNormOptions options;
    static constexpr std::initializer_list<const char*> outputs = {"y", "d_x", "d_gate", "d_weight"};

    explicit RmsNormCall(const RmsNormCase& c) : tensors(c.layout) {
        in.x = tensors.draw("x", c.dtype, c.shape);
        if (c.gate) in.gate = tensors.draw("gate", c.others, c.shape, c.gate_size);
        if (c.weight) in.weight = tensors.draw("weight", c.others, {c.shape.back()});
        y = tensors.add("y", c.dtype, c.shape);
        d_y = tensors.draw("d_y", c.dtype, c.shape);
        grads.d_x = tensors.add("d_x", c.others, c.shape);
        if (c.gate) grads.d_gate = tensors.add("d_gate", c.others, c.shape);
        grads.d_weight = tensors.add("d_weight", c.others, {c.shape.back()});
        options.activation = c.activation;
        options.eps = c.eps;
    }
    RmsNormCall(const RmsNormCall&) = delete;

    Status forward() const { return rms_norm_gated_forward(in, y, options); }
    Status backward() const { return rms_norm_gated_backward(in, d_y, grads, options); }
    Status run() const {
        if (Status status = forward(); !status.ok()) return status;
        return backward();
    }

    std::map<std::string, std::vector<double>> expected() const {
        reference::RmsNorm norm;
        norm.D = in.x.shape[in.x.rank - 1], norm.rows = norm.D == 0 ? 0 : in.x.numel() / norm.D;
        norm.activation = static_cast<reference::Activation>(options.activation), norm.eps = options.eps;
        norm.x = tensors.values("x"), norm.gate = tensors.values("gate"), norm.weight = tensors.values("weight");
        norm.d_y = tensors.values("d_y");
        reference::RmsNormGradients g = reference::backward(norm);
        return {{"y", reference::forward(norm)}, {"d_x", g.d_x}, {"d_gate", g.d_gate}, {"d_weight", g.d_weight}};
    }
};

// The outputs of the call beyond the bars of its type (docs/numerics.md), o's and d_q's; empty is right.
template <typename LayerCall>
std::string misses(const LayerCall& call, const std::map<std::string, std::vector<double>>& expected,
                   std::initializer_list<const char*> outputs) {
    const DType dtype = call.in.x.dtype;
    std::string text;
    for (const char* name : outputs) {
        if (call.tensors.values(name).empty()) continue;
        const DType stored = const_cast<LayerCall&>(call).tensors.at(name).dtype();
        const double bar = harness::bar_of(name[0] == 'd' ? "d_q" : "o", dtype, stored);
        const double error = relative_error(call.tensors.values(name), expected.at(name));
        if (!(error <= bar)) text += std::string(name) + ": " + std::to_string(error / bar) + " of the bar\n";
    }
    return text + call.tensors.spoiled_guards();
}
template <typename LayerCall>
std::string misses(const LayerCall& call, std::initializer_list<const char*> outputs = LayerCall::outputs) {
    return misses(call, call.expected(), outputs);
}

}  // namespace headrace::test
