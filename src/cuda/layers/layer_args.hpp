// LayerArgs: calls of the layer functions as plain data, the parameters of their kernels.
#pragma once

#include "cuda/plumbing/kernel_args.hpp"

namespace headrace::cuda {

enum class ActivationFormula { none, silu, sigmoid };

// A window is window_tokens tokens of a row, whatever sequences they belong to. Windows, or rows of a norm, form
// groups, whose parameter gradients are summed in order.
inline constexpr int window_tokens = 32;

struct Groups {
    std::int64_t items, count;
};

struct ConvolutionArgs {
    std::int64_t B, T, D, N;
    int W;
    ActivationFormula activation;
    Groups groups;                                           // of windows
    Strided cu_seqlens;                                      // [N + 1], or absent: a sequence is a row
    Strided x, weight, bias, initial_state, y, final_state;  // step: x and y are [N,D]
    Strided states, indices;                                 // step: [rows,D,W], [N]
    std::int64_t pool_rows;
    Strided d_y, d_final_state, d_x, d_initial_state;
    double* sums;  // [groups, W + 1, D], for d_weight and d_bias, or null
};

struct RmsNormArgs {
    std::int64_t shape[2];  // the last two dimensions before D
    std::int64_t rows, D;
    double eps;
    ActivationFormula activation;
    Groups groups;                                 // of rows
    Strided x, gate, weight, y, d_y, d_x, d_gate;  // four dimensions, D the last; weight one
    double* sums;                                  // [groups, D], for d_weight, or null
};

}  // namespace headrace::cuda
