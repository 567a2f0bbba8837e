// xla_layers: call frames of XLA as calls of the layer functions.
#include "headrace/layers.hpp"

#include "names.hpp"
#include "xla_frame.hpp"
#include "xla_handlers.hpp"

namespace headrace::python {
namespace {

using namespace xla;

struct Convolution {
    AttributeReader attributes;
    ConvolutionInputs in;
    ConvolutionOutputGradients d_out;
    ConvolutionOptions options;

    explicit Convolution(const CallFrame& frame) : attributes(frame.attributes) {
        options.activation = activation_named(attributes.text("activation"));
        read(frame.arguments, attributes.integer("given"),
             {&in.x, &in.weight, &in.bias, &in.initial_state, &in.cu_seqlens, &d_out.d_y, &d_out.d_final_state});
    }
};

Status convolution_forward(const CallFrame& frame) {
    const Convolution call(frame);
    ConvolutionOutputs out;
    read(frame.results, call.attributes.integer("wanted"), {&out.y, &out.final_state});
    return short_convolution_forward(call.in, out, call.options);
}

Status convolution_backward(const CallFrame& frame) {
    const Convolution call(frame);
    ConvolutionGradients g;
    read(frame.results, call.attributes.integer("wanted"), {&g.d_x, &g.d_weight, &g.d_bias, &g.d_initial_state});
    return short_convolution_backward(call.in, call.d_out, g, call.options);
}

struct Norm {
    AttributeReader attributes;
    RmsNormInputs in;
    TensorView d_y;
    RmsNormOptions options;

    explicit Norm(const CallFrame& frame) : attributes(frame.attributes) {
        options.eps = attributes.real("eps");
        options.activation = activation_named(attributes.text("activation"));
        read(frame.arguments, attributes.integer("given"), {&in.x, &in.gate, &in.weight, &d_y});
    }
};

Status norm_forward(const CallFrame& frame) {
    const Norm call(frame);
    TensorView y;
    read(frame.results, call.attributes.integer("wanted"), {&y});
    return rms_norm_gated_forward(call.in, y, call.options);
}

Status norm_backward(const CallFrame& frame) {
    const Norm call(frame);
    RmsNormGradients g;
    read(frame.results, call.attributes.integer("wanted"), {&g.d_x, &g.d_gate, &g.d_weight});
    return rms_norm_gated_backward(call.in, call.d_y, g, call.options);
}

}  // namespace

Error* xla_convolution_forward(CallFrame* frame) { return handle(frame, convolution_forward); }
Error* xla_convolution_backward(CallFrame* frame) { return handle(frame, convolution_backward); }
Error* xla_norm_forward(CallFrame* frame) { return handle(frame, norm_forward); }
Error* xla_norm_backward(CallFrame* frame) { return handle(frame, norm_backward); }

}  // namespace headrace::python
