// LayerArgs: calls of the layer functions as plain data, which crosses from portable code into code compiled per ISA.
#pragma once

#include "cpu/plumbing/kernel_args.hpp"

namespace headrace::cpu {

enum class ActivationFormula { none, silu, sigmoid };

// Tokens [begin, end) of one sequence, counted from its first.
struct TokenBlock {
    std::int64_t sequence, begin, end;
};

// Blocks or rows [first(group), first(group + 1)) form a group, whose parameter gradients are summed in order.
struct Groups {
    std::int64_t items, count;
    std::int64_t first(std::int64_t group) const {
        return group * (items / count) + (group < items % count ? group : items % count);
    }
};

// Tokens that a convolution computes together: their sums share the loads of weights and inputs.
constexpr int run_tokens = 8;

struct ConvolutionArgs {
    std::int64_t D;
    int W;
    int channels;  // of a task, a multiple of 64
    ActivationFormula activation;
    const TokenRange* sequences;                             // [N]
    const TokenBlock* blocks;                                // forward, backward
    const std::int64_t* rows;                                // step: of the pool, or null: row n
    Groups groups;                                           // of blocks; step: of sequences
    Strided x, weight, bias, initial_state, y, final_state;  // step: x and y are [1,N,D]
    Strided states;                                          // step: [rows,D,W]
    Strided d_y, d_final_state, d_x, d_initial_state;
    double* sums;  // [groups, W + 1, D], for d_weight and d_bias, or null
};

struct RmsNormArgs {
    std::int64_t shape[2];  // the last two dimensions before D
    int D;
    double eps;
    ActivationFormula activation;
    Groups groups;                                 // of rows
    Strided x, gate, weight, y, d_y, d_x, d_gate;  // four dimensions, D the last; weight one
    double* sums;                                  // [groups, D], for d_weight, or null
};

}  // namespace headrace::cpu
