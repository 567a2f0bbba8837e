// xla_layers: call frames of XLA as calls of the layer functions.
#include "xla_layers.hpp"

#include "headrace/layers.hpp"
#include "names.hpp"

namespace headrace::python {
namespace {

using namespace xla;

struct Convolution {
    AttributeReader attributes;
    ConvolutionInputs in;
    ConvolutionOutputGradients d_out;
    ConvolutionOptions options;

    explicit Convolution(const Frame& frame) : attributes(frame.call.attributes) {
        options.activation = activation_named(attributes.text("activation"));
        options.stream = stream_of(frame);
        read_arguments(
            frame, attributes.integer("given"),
            {&in.x, &in.weight, &in.bias, &in.initial_state, &in.cu_seqlens, &d_out.d_y, &d_out.d_final_state});
    }
};

struct Norm {
    AttributeReader attributes;
    RmsNormInputs in;
    TensorView d_y;
    RmsNormOptions options;

    explicit Norm(const Frame& frame) : attributes(frame.call.attributes) {
        options.eps = attributes.real("eps");
        options.activation = activation_named(attributes.text("activation"));
        options.stream = stream_of(frame);
        read_arguments(frame, attributes.integer("given"), {&in.x, &in.gate, &in.weight, &d_y});
    }
};

}  // namespace

Status run_convolution_forward(const Frame& frame) {
    const Convolution call(frame);
    ConvolutionOutputs out;
    read_results(frame, call.attributes.integer("wanted"), {&out.y, &out.final_state});
    return short_convolution_forward(call.in, out, call.options);
}

Status run_convolution_backward(const Frame& frame) {
    const Convolution call(frame);
    ConvolutionGradients g;
    read_results(frame, call.attributes.integer("wanted"), {&g.d_x, &g.d_weight, &g.d_bias, &g.d_initial_state});
    return short_convolution_backward(call.in, call.d_out, g, call.options);
}

Status run_norm_forward(const Frame& frame) {
    const Norm call(frame);
    TensorView y;
    read_results(frame, call.attributes.integer("wanted"), {&y});
    return rms_norm_gated_forward(call.in, y, call.options);
}

Status run_norm_backward(const Frame& frame) {
    const Norm call(frame);
    RmsNormGradients g;
    read_results(frame, call.attributes.integer("wanted"), {&g.d_x, &g.d_gate, &g.d_weight});
    return rms_norm_gated_backward(call.in, call.d_y, g, call.options);
}

}  // namespace headrace::python
