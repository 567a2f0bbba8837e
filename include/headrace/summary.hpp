// headrace, C++ interface of exact summaries: what a piece of a sequence does to the state that enters it.
//
//     #include <headrace/summary.hpp>
//
//     using namespace headrace;
//     Summary first{{M1, DType::f32, {N, HV, K, K}}, {R1, DType::f32, {N, HV, K, V}}}, second = ..., both = ...;
//     Status status = summarize(Operator::gated_delta_rule, tokens_before, first);   // on the process that has them
//     status = summarize(Operator::gated_delta_rule, tokens_behind, second);
//     status = compose(second, first, both);
//     status = apply(both, initial_state, false, final_state);                        // that of all tokens together
//
// A piece of tokens is an affine map of the state, S_out = M S_in + R, and its backward the transposed one, D_in = M^T
// D_out + Dx, with the same M (docs/math.md, 9). Maps compose associatively: processes that hold consecutive pieces of
// a sequence summarise them at the same time, exchange summaries, and then run each its piece from the state that
// enters it. With Options::reverse the piece that runs first is the one behind.
//
// Symbols, errors and threads as in headrace.hpp. A value-side gate (gv) and a beta for each element of v are refused:
// what they do to a state is no K x K matrix.
#pragma once

#include "headrace/headrace.hpp"

namespace headrace {

// transition = M, state = R. What is not given is not computed; at least one is. in.q is not read and may be absent. A
// given initial_state enters `state` (M S + R), not M. M is as exact as a forward over the same tokens
// (docs/numerics.md).
Status summarize(Operator op, const Inputs& in, const Summary& out, const Options& options = {},
                 Workspace workspace = {});

// d_initial_state [N, HV, K, V], any floating dtype: what backward() gives, without the rest of a backward. Without
// d_final_state it is Dx, with it Dx + M^T d_final_state. in.v is not read, but gives sizes; initial_state does not
// matter.
Status summarize_backward(Operator op, const Inputs& in, const OutputGradients& d_out, const TensorView& d_initial_state,
                          const Options& options = {}, Workspace workspace = {});

// The summary of `first` and then `second`: out.transition = second.transition first.transition, out.state =
// second.transition first.state + second.state. Transitions as in Summary, all of one form; one that is not given is
// the identity. A part of `out` that is not given is not computed, and without it nothing it would need is read. All
// tensors are f32 or f64 and share no memory with `out`; where one is f64, sums are f64, else f32, on CUDA f64 in any
// case. stream: of CUDA tensors, as in Options.
Status compose(const Summary& second, const Summary& first, const Summary& out, int threads = 0,
               void* stream = nullptr);

// out [N, HV, K, V] = transition state + summary.state, or with the transposed transition: M^T D + Dx where `state` is
// D and summary.state Dx. A transition that is not given is the identity, a summary.state that is not given zero. state
// has any floating dtype, the rest is f32 or f64; types and memory as in compose.
Status apply(const Summary& summary, const TensorView& state, bool transposed, const TensorView& out, int threads = 0,
             void* stream = nullptr);

}  // namespace headrace
