// The oracle of the layer functions: short convolution and gated RMS normalisation in double (docs/math.md 10, 11).
#pragma once

#include <cstdint>
#include <vector>

namespace headrace::reference {

enum class Activation { none, silu, sigmoid };

// Row-major arrays; empty: absent.
struct Convolution {
    std::int64_t B = 1, T = 0, D = 1, W = 1;
    std::vector<std::int64_t> cu_seqlens;  // [N + 1], B = 1; empty: B sequences of T tokens
    Activation activation = Activation::none;
    std::vector<double> x, weight, bias;     // [B,T,D], [D,W], [D]
    std::vector<double> initial_state;       // [N,D,W]
    std::vector<double> d_y, d_final_state;  // [B,T,D], [N,D,W], of backward

    std::int64_t sequences() const { return cu_seqlens.empty() ? B : static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
    std::int64_t first_token(std::int64_t n) const {
        return cu_seqlens.empty() ? n * T : cu_seqlens[static_cast<std::size_t>(n)];
    }
};

struct ConvolutionOutputs {
    std::vector<double> y, final_state;  // [B,T,D], [N,D,W]
};

struct ConvolutionGradients {
    std::vector<double> d_x, d_weight, d_bias, d_initial_state;  // all four always
};

ConvolutionOutputs forward(const Convolution& c);
ConvolutionGradients backward(const Convolution& c);

struct RmsNorm {
    std::int64_t rows = 0, D = 1;
    double eps = 1e-5;
    Activation activation = Activation::silu;
    std::vector<double> x, gate, weight;  // [rows,D], [rows,D], [D]
    std::vector<double> d_y;              // [rows,D], of backward
};

struct RmsNormGradients {
    std::vector<double> d_x, d_gate, d_weight;  // all three always
};

std::vector<double> forward(const RmsNorm& norm);
RmsNormGradients backward(const RmsNorm& norm);

}  // namespace headrace::reference
