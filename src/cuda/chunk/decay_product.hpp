// DecayProduct: what a piece of tokens multiplies a state of the additive rule by, the product of its decays
// (docs/math.md, section 9).
#pragma once

#include "cuda/chunk/scalar_gate.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// A block has all tokens of a sequence, of a head and of up to 32 of its channels; gates in T, their sums in double.
template <class T>
struct DecayProduct {
    static constexpr int at_once = decay_product_at_once;

    const KernelArgs& args;
    std::int64_t n, head;
    int first;  // channel

    HEADRACE_DEVICE void multiply(double* shared) const {
        const TokenRange sequence = sequence_of(args, n);
        const GateParameters<T> gate = gate_parameters<T>(args, head);
        const int own = thread_here() % columns(), channel = first + own;
        const bool inside = channel < channels();
        double sum = 0;
        if (args.g.given && inside) sum = log_decays(sequence, gate, channel);
        shared[threadIdx.x] = sum;
        HEADRACE_ROLLED
        for (int half = decay_product_threads / 2; half >= columns(); half /= 2) {
            ptx::sync_block();
            if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        }
        if (static_cast<int>(threadIdx.x) >= columns() || !inside) return;
        sum = shared[threadIdx.x];
        if (args.g_gamma.given)
            sum += static_cast<double>(accepted(args, gate.gamma)) * static_cast<double>(sequence.end - sequence.begin);
        const Strided& to = args.transition;
        const std::int64_t place = offset_of(to, n, head, channel);
        const double product = exp(sum);
        if (sizeof(T) == 8 && to.dtype == DType::f64) {
            reinterpret_cast<double*>(to.data)[place] = product;
        } else {
            reinterpret_cast<float*>(to.data)[place] = static_cast<float>(product);
        }
    }

  private:
    HEADRACE_DEVICE int columns() const { return args.channel_gate ? warp_lanes : 1; }
    HEADRACE_DEVICE int channels() const { return args.channel_gate ? args.K : 1; }
    HEADRACE_DEVICE double log_decays(const TokenRange& sequence, const GateParameters<T>& gate, int channel) const {
        const std::int64_t apart = decay_product_threads / columns();
        double sum = 0;
        HEADRACE_ROLLED
        for (std::int64_t t = sequence.begin + thread_here() / columns(); t < sequence.end; t += at_once * apart) {
            T g[at_once] = {};
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                if (t + i * apart < sequence.end)
                    g[i] = pre_activation<T>(args, sequence.row, t + i * apart, head, channel);
            HEADRACE_ROLLED
            for (int i = 0; i < at_once; ++i)
                if (t + i * apart < sequence.end) sum += static_cast<double>(accepted(args, gate_value(g[i], gate)));
        }
        return sum;
    }
};

}  // namespace headrace::cuda
