// xla_layers: call frames of XLA as calls of the layer functions.
#pragma once

#include "xla_frame.hpp"

namespace headrace::python {

// What xla_handlers() says of the handlers of these names.
Status run_convolution_forward(const xla::Frame& frame);
Status run_convolution_backward(const xla::Frame& frame);
Status run_norm_forward(const xla::Frame& frame);
Status run_norm_backward(const xla::Frame& frame);

}  // namespace headrace::python
