// ConvolutionProblem, RmsNormProblem: validated calls of the layer functions; nothing below checks user input again.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "headrace/layers.hpp"

namespace headrace {

struct ConvolutionProblem {
    Direction direction;
    std::int64_t B, T, D, N;  // step: B = 1, T = N
    int W;
    bool wide;  // x is f64: everything is computed in double
    int threads;
    std::vector<Sequence> sequences;  // not in step

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
    int threads;

    RmsNormInputs in;
    TensorView y, d_y;
    RmsNormGradients grads;
    RmsNormOptions options;
};

// They take what the caller gave, from the fields behind the blank line, and fill in the rest.
Status validate(ConvolutionProblem& problem);
Status validate(RmsNormProblem& problem);

}  // namespace headrace
