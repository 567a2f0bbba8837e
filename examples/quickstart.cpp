// Quick start in C++: one simple_gla layer forward, then the gradients of q, k, v and the gate.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <headrace/headrace.hpp>
#include <vector>

int main() {
    using namespace headrace;
    const std::int64_t B = 1, T = 256, H = 4, K = 64, V = 64;
    std::vector<float> q(B * T * H * K, 0.1f), k = q, v(B * T * H * V, 0.2f), g(B * T * H, -0.05f), o(v.size());

    Inputs in;
    in.q = {q.data(), DType::f32, {B, T, H, K}};
    in.k = {k.data(), DType::f32, {B, T, H, K}};
    in.v = {v.data(), DType::f32, {B, T, H, V}};
    in.g = {g.data(), DType::f32, {B, T, H}};  // natural-log decay of each step, <= 0
    Outputs out;
    out.o = {o.data(), DType::f32, {B, T, H, V}};
    Status status = simple_gla_forward(in, out);

    std::vector<float> d_o(o.size(), 1.0f), d_q(q.size()), d_k(k.size()), d_v(v.size()), d_g(g.size());
    OutputGradients d_out;
    d_out.d_o = {d_o.data(), DType::f32, {B, T, H, V}};
    Gradients grads;  // what is not asked for is not computed
    grads.d_q = {d_q.data(), DType::f32, {B, T, H, K}};
    grads.d_k = {d_k.data(), DType::f32, {B, T, H, K}};
    grads.d_v = {d_v.data(), DType::f32, {B, T, H, V}};
    grads.d_g = {d_g.data(), DType::f32, {B, T, H}};
    if (status.ok()) status = simple_gla_backward(in, d_out, grads);
    if (!status.ok()) {
        std::fprintf(stderr, "%s\n", status.message().c_str());
        return 1;
    }

    // Constant inputs have a closed form: o_t = scale (q.k) v (1 - a^(t+1)) / (1 - a), a = exp(g).
    const double a = std::exp(-0.05), dot = K * 0.1 * 0.1, last = dot / 8 * 0.2 * (1 - std::pow(a, T)) / (1 - a);
    std::printf("o[last] = %.6f, expected %.6f; d_g[1] = %.4f\n", double(o.back()), last, double(d_g[H]));
    return std::abs(double(o.back()) - last) < 1e-5 * last ? 0 : 1;
}
