// headrace, C++ interface of what layers put around the operators: short convolution and gated RMS normalisation.
//
//     #include <headrace/layers.hpp>
//
//     using namespace headrace;
//     ConvolutionInputs in;
//     in.x = {x.data(), DType::f32, {B, T, D}};
//     in.weight = {weight.data(), DType::f32, {D, 4}};
//     ConvolutionOutputs out;
//     out.y = {y.data(), DType::f32, {B, T, D}};
//     Status status = short_convolution_forward(in, out, {.activation = Activation::silu});
//
// Symbols: B batch, T tokens, D channels, W width of the convolution (1 to 64), N sequences (B, or
// len(cu_seqlens) - 1). Formulas: docs/math.md, 10 and 11.
//
// x, y and d_y share one dtype of f64, f32, bf16, f16; everything else may have any floating dtype. Arithmetic is fp32
// (double where x is f64). Views may have any strides >= 0; an output shares no memory with another tensor. As in
// headrace.hpp every function returns a Status that names the argument, never throws, prints or exits, and leaves the
// same bits for any number of threads; outputs of a token never depend on later ones. A call allocates its own scratch
// memory: up to 1 MB per thread, longer rows of a norm aside, and for d_weight and d_bias up to 64 doubles per element.
#pragma once

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"

namespace headrace {

enum class Activation {
    none,
    silu,     // z sigmoid(z), also known as swish
    sigmoid,  // of the norm's gate only
};

// y_t = activation(bias + sum_i weight[:, i] x_{t - (W-1) + i}), per channel; tokens before the first come from the
// initial state and are zero without one.
struct ConvolutionInputs {
    TensorView x;              // [B, T, D]
    TensorView weight;         // [D, W], the newest token's weight last (conv1d's [D, 1, W] without its dimension of 1)
    TensorView bias;           // [D], optional
    TensorView initial_state;  // [N, D, W], the W inputs before the first token, oldest first; optional
    TensorView cu_seqlens;     // i32 or i64 [N + 1]: ragged batch, B = 1, sequence n is [cu[n], cu[n+1]); on the
                               // host, or with CUDA tensors on the device, where others make NaN of all results
};

struct ConvolutionOutputs {
    TensorView y;            // [B, T, D], dtype of x; required in forward, [N, D] in step
    TensorView final_state;  // [N, D, W], the last W inputs of each sequence and, where it is shorter, of its initial
                             // state; optional, not in step
};

// The incoming gradients; at least one is given.
struct ConvolutionOutputGradients {
    TensorView d_y;            // [B, T, D], dtype of x
    TensorView d_final_state;  // [N, D, W]
};

// The gradients to compute, each of the shape of its input. A view not given costs nothing.
struct ConvolutionGradients {
    TensorView d_x, d_weight, d_bias;
    TensorView d_initial_state;  // [N, D, W]; needs no initial_state
};

// States of many sequences kept by the caller between steps.
struct ConvolutionPool {
    TensorView states;   // [rows, D, W], updated in place
    TensorView indices;  // i32 or i64 [N], the row of each sequence, each row once; not given: row n. -1: padding, the
                         // output is zero and no row changes
};

struct ConvolutionOptions {
    Activation activation = Activation::none;  // none or silu
    int threads = 0;                           // 0: as many as OpenMP would use; 1 inside an OpenMP region
    const char* force = nullptr;  // instruction set to use: "avx512", "avx2" or "generic"; HEADRACE_FORCE, which
                                  // names implementations of operators, has no effect here
    void* stream = nullptr;       // of CUDA tensors: the cudaStream_t that the call is queued on; null: the default
};

Status short_convolution_forward(const ConvolutionInputs& in, const ConvolutionOutputs& out,
                                 const ConvolutionOptions& options = {});

// Gradients of sum(y * d_y) + sum(final_state * d_final_state). Recomputes what it needs from the inputs.
Status short_convolution_backward(const ConvolutionInputs& in, const ConvolutionOutputGradients& d_out,
                                  const ConvolutionGradients& grads, const ConvolutionOptions& options = {});

// One token of each of N sequences: x and y are [N, D]; the rows of the pool lose their oldest input and take x.
// initial_state, cu_seqlens and final_state must not be given.
Status short_convolution_step(const ConvolutionInputs& in, const ConvolutionOutputs& out, const ConvolutionPool& pool,
                              const ConvolutionOptions& options = {});

// y = x / sqrt(mean(x^2) + eps) * weight * activation(gate), over the last dimension of 1 to 4.
struct RmsNormInputs {
    TensorView x;       // [..., D]
    TensorView gate;    // shape of x; not given: 1
    TensorView weight;  // [D]; not given: 1
};

struct RmsNormGradients {
    TensorView d_x, d_gate, d_weight;  // those that are given are computed; d_gate only with a gate
};

struct RmsNormOptions {
    double eps = 1e-5;
    Activation activation = Activation::silu;  // of the gate: silu or sigmoid
    int threads = 0;                           // 0: as many as OpenMP would use; 1 inside an OpenMP region
    const char* force = nullptr;               // as in ConvolutionOptions
    void* stream = nullptr;                    // as in ConvolutionOptions
};

// y: shape and dtype of x.
Status rms_norm_gated_forward(const RmsNormInputs& in, const TensorView& y, const RmsNormOptions& options = {});

// Gradients of sum(y * d_y); d_y has the shape and dtype of x.
Status rms_norm_gated_backward(const RmsNormInputs& in, const TensorView& d_y, const RmsNormGradients& grads,
                               const RmsNormOptions& options = {});

}  // namespace headrace
