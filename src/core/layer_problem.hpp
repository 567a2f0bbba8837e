// ConvolutionProblem, RmsNormProblem: validated calls of the layer functions; nothing below checks user input again.
#pragma once

#include <cstdint>
#include <vector>

#include "core/validation.hpp"
#include "headrace/layers.hpp"

namespace headrace {

struct ConvolutionProblem {
    Direction direction;
    std::int64_t B, T, D, N;  // step: B = 1, T = N
    int W;
    bool wide;  // x is f64: everything is computed in double
    Device device;
    int threads;
    std::vector<Sequence> sequences;  // not in step; empty where cu_seqlens lie on another device

    ConvolutionInputs in;
    ConvolutionOutputs out;
    ConvolutionOutputGradients d_out;
    ConvolutionGradients grads;
    ConvolutionPool pool;
    ConvolutionOptions options;
};

struct RmsNormProblem {
    Direction direction;
    std::int64_t rows, D;
    bool wide;
    Device device;
    int threads;

    RmsNormInputs in;
    TensorView y, d_y;
    RmsNormGradients grads;
    RmsNormOptions options;
};

// All views that are given.
std::vector<NamedView> named_views(const ConvolutionProblem& problem);
std::vector<NamedView> named_views(const RmsNormProblem& problem);

// They take what the caller gave, from the fields behind the blank line, and fill in the rest.
Status validate(ConvolutionProblem& problem);
Status validate(RmsNormProblem& problem);

}  // namespace headrace
