// layer_module: short convolution and gated RMS normalisation on arrays, lists in a fixed order as in core_module.
#include "layer_module.hpp"

#include <nanobind/stl/string.h>

#include "arrays.hpp"
#include "headrace/layers.hpp"
#include "names.hpp"

namespace headrace::python {
namespace {

// What the calls of one function share.
template <typename Inputs, typename Options>
struct LayerCall {
    Arrays arrays;
    Inputs in;
    Options options;

    // body() runs the call with the options.
    template <typename Body>
    void run(const Body& body) {
        options.stream = arrays.stream();
        python::run(body);
    }
};

struct Convolution : LayerCall<ConvolutionInputs, ConvolutionOptions> {
    Convolution(const nb::list& inputs, const char* activation) {
        arrays.read(inputs, {{"x", &in.x},
                             {"weight", &in.weight},
                             {"bias", &in.bias},
                             {"initial_state", &in.initial_state},
                             {"cu_seqlens", &in.cu_seqlens}});
        options.activation = activation_named(activation);
    }
};

void convolution_forward(const nb::list& inputs, const nb::list& outputs, const char* activation) {
    Convolution c(inputs, activation);
    ConvolutionOutputs out;
    c.arrays.read(outputs, {{"y", &out.y}, {"final_state", &out.final_state}});
    c.run([&] { return short_convolution_forward(c.in, out, c.options); });
}

void convolution_backward(const nb::list& inputs, const nb::list& d_outputs, const nb::list& gradients,
                          const char* activation) {
    Convolution c(inputs, activation);
    ConvolutionOutputGradients d_out;
    ConvolutionGradients g;
    c.arrays.read(d_outputs, {{"d_y", &d_out.d_y}, {"d_final_state", &d_out.d_final_state}});
    c.arrays.read(
        gradients,
        {{"d_x", &g.d_x}, {"d_weight", &g.d_weight}, {"d_bias", &g.d_bias}, {"d_initial_state", &g.d_initial_state}});
    c.run([&] { return short_convolution_backward(c.in, d_out, g, c.options); });
}

void convolution_step(const nb::list& inputs, const nb::list& outputs, const nb::list& pool_arrays,
                      const char* activation) {
    Convolution c(inputs, activation);
    ConvolutionOutputs out;
    ConvolutionPool pool;
    c.arrays.read(outputs, {{"y", &out.y}});
    c.arrays.read(pool_arrays, {{"state", &pool.states}, {"indices", &pool.indices}});
    c.run([&] { return short_convolution_step(c.in, out, pool, c.options); });
}

struct RmsNorm : LayerCall<RmsNormInputs, RmsNormOptions> {
    RmsNorm(const nb::list& inputs, double eps, const char* activation) {
        arrays.read(inputs, {{"x", &in.x}, {"gate", &in.gate}, {"weight", &in.weight}});
        options.eps = eps;
        options.activation = activation_named(activation);
    }
};

void norm_forward(const nb::list& inputs, const nb::list& outputs, double eps, const char* activation) {
    RmsNorm n(inputs, eps, activation);
    TensorView y;
    n.arrays.read(outputs, {{"y", &y}});
    n.run([&] { return rms_norm_gated_forward(n.in, y, n.options); });
}

void norm_backward(const nb::list& inputs, const nb::list& d_outputs, const nb::list& gradients, double eps,
                   const char* activation) {
    RmsNorm n(inputs, eps, activation);
    TensorView d_y;
    RmsNormGradients g;
    n.arrays.read(d_outputs, {{"d_y", &d_y}});
    n.arrays.read(gradients, {{"d_x", &g.d_x}, {"d_gate", &g.d_gate}, {"d_weight", &g.d_weight}});
    n.run([&] { return rms_norm_gated_backward(n.in, d_y, g, n.options); });
}

}  // namespace

void add_layer_functions(nb::module_& module) {
    module.def("short_convolution_forward", &convolution_forward, nb::arg("inputs"), nb::arg("outputs"),
               nb::arg("activation"), "Inputs x, weight, bias, initial_state, cu_seqlens; outputs y, final_state.");
    module.def("short_convolution_backward", &convolution_backward, nb::arg("inputs"), nb::arg("d_outputs"),
               nb::arg("gradients"), nb::arg("activation"),
               "d_outputs d_y, d_final_state; gradients d_x, d_weight, d_bias, d_initial_state.");
    module.def("short_convolution_step", &convolution_step, nb::arg("inputs"), nb::arg("outputs"), nb::arg("pool"),
               nb::arg("activation"), "Inputs as in the forward call, output y, pool state and indices.");
    module.def("rms_norm_gated_forward", &norm_forward, nb::arg("inputs"), nb::arg("outputs"), nb::arg("eps"),
               nb::arg("activation"), "Inputs x, gate, weight; output y.");
    module.def("rms_norm_gated_backward", &norm_backward, nb::arg("inputs"), nb::arg("d_outputs"), nb::arg("gradients"),
               nb::arg("eps"), nb::arg("activation"), "d_outputs d_y; gradients d_x, d_gate, d_weight.");
}

}  // namespace headrace::python
