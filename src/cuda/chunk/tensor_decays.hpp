// tensor_decays: what the tensor-core form knows of a chunk's tokens: decays of a scalar gate, norms.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/matrices.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// Of one token, g and g_gamma together; NaN of what no operator must be given.
HEADRACE_DEVICE float token_log_decay(const KernelArgs& args, const ChunkRange& range, int i, std::int64_t head) {
    const GateParameters<float> gate = gate_parameters<float>(args, head);
    float sum = 0;
    if (args.g.given)
        sum = accepted(args, gate_value(pre_activation<float>(args, range.row, range.token(i), head, 0), gate));
    return args.g_gamma.given ? sum + accepted(args, gate.gamma) : sum;
}
// Of a row of l2norm, from its square.
HEADRACE_DEVICE float inverse_norm(float square) {
    return static_cast<float>(1 / sqrt(static_cast<double>(square) + 1e-6));
}

// G_i, the sum of the chunk's log decays up to token i, as a number of powers of two in two floats: summed in double,
// so that a constant gate's roundings do not add up, and differences lose nothing. A gate below `reset` decays to zero
// whatever it is exactly, and keeps the small ones behind it in the sum.
struct ScalarDecays {
    static constexpr double reset = -7e4, log2_e = 1.4426950408889634;

    float *high, *low;            // [C]
    float *start, *before, *end;  // [C] e^{G_i}; the same without the token's own gate; e^{G_L - G_i}
    double* through;              // [1] e^{G_L}

    __host__ __device__ void carve(Arena& arena) {
        for (float** vector : {&high, &low, &start, &before, &end}) *vector = arena.take<float>(tensor_chunk);
        through = arena.take<double>(1);
    }
    // Of tokens 2 lane and 2 lane + 1, zero behind the chunk's length. By one warp.
    HEADRACE_DEVICE void prepare(float log_decay, float next_log_decay) const {
        const int i = 2 * lane();
        const double first = limited(log_decay), second = limited(next_log_decay);
        double sum = first + second;
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2) {
            const double earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
            if (lane() >= distance) sum += earlier;
        }
        const double total = ptx::shuffle_from(sum, warp_lanes - 1);
        set(i, sum - second, first, total);
        set(i + 1, sum, second, total);
        if (lane() == 0) *through = exp(total);
    }
    // e^{G_i - G_j}, j <= i
    HEADRACE_DEVICE float between(int i, int j) const { return power_of_two((high[i] - high[j]) + (low[i] - low[j])); }

  private:
    // Of a number that is not positive but for roundings; NaN of one.
    HEADRACE_DEVICE static float power_of_two(float x) { return ptx::exp2_approximate(x > 0 ? 0.0f : x); }
    HEADRACE_DEVICE static double limited(float g) { return g < static_cast<float>(reset) ? reset : g; }
    HEADRACE_DEVICE void set(int i, double G, double own, double total) const {
        const double power = G * log2_e;
        high[i] = static_cast<float>(power);
        low[i] = static_cast<float>(power - high[i]);
        start[i] = power_of_two(static_cast<float>(power));
        before[i] = power_of_two(static_cast<float>((G - own) * log2_e));
        end[i] = power_of_two(static_cast<float>((total - G) * log2_e));
    }
};

}  // namespace headrace::cuda
