// xla_handlers: what the library computes as handlers of XLA custom calls, and the layout that they were compiled for.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "headrace/tensor.hpp"
#include "xla_ffi.hpp"

namespace headrace::python {

// Handlers by name, whose buffers lie on `device`; where that is a GPU, on XLA's stream of it. Errors are XLA errors
// with the library's message.
//
// "forward", "backward", "step", "agree", "summarize", "summarize_backward": calls of operators. Arguments: the tensors
// given, in the order of headrace._arguments.INPUTS, then d_o and d_final_state in the backward, the states in the
// step, and last a span of tokens, i32 [2], which alone are then read (of a summary, whose results have no tokens).
// Results: o and final_state; the gradients in the order of the inputs; o and the states, in the memory of the
// argument; transition and state; d_initial_state; of the forward and of summaries also words, i32 [B, HV, 32], which
// take the message of an error. Attributes: `given` and `wanted`, one bit for each possible argument and result; op,
// scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first. Spans and words, and so pieces of
// sequences, on CPUs only.
//
// "convolution_forward", "convolution_backward", "norm_forward", "norm_backward": layer functions. Arguments of the
// convolution: x, weight, bias, initial_state, cu_seqlens, d_y, d_final_state; results: y and final_state, or the
// gradients of the first four. Arguments of the norm: x, gate, weight, d_y; results: y, or the gradients of the first
// three. Attributes: given, wanted, activation, and eps of the norm.
std::vector<std::pair<std::string, xla::Handler*>> xla_handlers(Device device);

// ("XLA_FFI_Buffer.dims", 40) for every field and ("XLA_FFI_Buffer", 48) for every structure and constant that the
// handlers rely on, under the names of XLA's header.
std::vector<std::pair<std::string, std::int64_t>> xla_layout();

}  // namespace headrace::python
