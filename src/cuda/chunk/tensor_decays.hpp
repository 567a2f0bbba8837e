// tensor_decays: what the tensor-core form knows of a chunk's tokens: decays of a scalar gate, norms, and how exact the
// delta rule must be.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// G_i, the sum of the chunk's log decays up to token i, as a number of powers of two in two floats: summed in double,
// so that a constant gate's roundings do not add up, and differences lose nothing. A gate below `reset` decays to zero
// whatever it is exactly, and keeps the small ones behind it in the sum.
struct ScalarDecays {
    static constexpr double reset = -7e4, log2_e = 1.4426950408889634;

    float *log_decay, *high, *low;  // [C]
    float *start, *before, *end;    // [C] e^{G_i}; the same without the token's own gate; e^{G_L - G_i}
    double* through;                // [1] e^{G_L}

    __host__ __device__ void carve(Arena& arena) {
        for (float** vector : {&log_decay, &high, &low, &start, &before, &end})
            *vector = arena.take<float>(tensor_chunk);
        through = arena.take<double>(1);
    }
    // From log_decay, zero behind the chunk's length. By one warp.
    HEADRACE_DEVICE void prepare() const {
        const int i = 2 * lane();
        const double first = limited(log_decay[i]), second = limited(log_decay[i + 1]);
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

// Which products of a chunk of the delta rule are computed as exactly as fp32 would: decision 3, "Reads that come back"
// and "Writes into states that hardly forget". The estimate is that of the CPU's StateRoundings, of which a scalar gate
// leaves one number for all channels.
template <int K>
struct DeltaExactness {
    static constexpr float limit = 0.75f, most = 1e6f, hardly_forgets = 0.6f;  // e^{-0.008 C}
    static constexpr int parts = 512 / K;  // of the chunk's tokens: eight warps with two channels a lane

    float *k_k, *e_e, *k_e;  // [C] squares of norms, k.e
    float* energy;           // [parts, K] sums of squares of k over the tokens of a part
    float* estimate;         // [2] errors in the state; what a chunk like the last would add
    int* exact;              // [2] reads, writes

    __host__ __device__ void carve(Arena& arena) {
        for (float** vector : {&k_k, &e_e, &k_e}) *vector = arena.take<float>(tensor_chunk);
        energy = arena.take<float>(static_cast<std::size_t>(parts) * K);
        estimate = arena.take<float>(2);
        exact = arena.take<int>(2);
    }
    HEADRACE_DEVICE void start_sequence() const {
        if (threadIdx.x < 2) estimate[threadIdx.x] = 0;
    }
    HEADRACE_DEVICE bool reads() const { return exact[0] != 0; }
    HEADRACE_DEVICE bool writes() const { return exact[1] != 0; }

    // By all warps: the energies of the channels.
    HEADRACE_DEVICE void add_up(Matrix<K> k) const {
        const int part = static_cast<int>(threadIdx.x) / (K / 2), c = static_cast<int>(threadIdx.x) % (K / 2) * 2;
        const int tokens = tensor_chunk / parts;
        float low = 0, high = 0;
#pragma unroll 4
        for (int i = part * tokens; i < (part + 1) * tokens; ++i) {
            const std::uint32_t pair = k.pair(i, c);
            low = fmaf(low_half(pair), low_half(pair), low);
            high = fmaf(high_half(pair), high_half(pair), high);
        }
        energy[part * K + c] = low;
        energy[part * K + c + 1] = high;
    }
    // By one warp, behind the decays. `always`: whatever the numbers.
    HEADRACE_DEVICE void decide(const ScalarDecays& decays, const float* beta, bool always) const {
        float all = 0, squares = 0;
#pragma unroll
        for (int c = lane(); c < K; c += warp_lanes) {
            float sum = 0;
#pragma unroll
            for (int part = 0; part < parts; ++part) sum += energy[part * K + c];
            all += sum;
            squares = fmaf(sum, sum, squares);
        }
        all = sum_of_warp(all), squares = sum_of_warp(squares);
        const float share = all > 0 ? squares / (all * all) : 0.0f;
        float written = 0, kept = 1;
        bool reflects = false;
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            const float of_token = beta[i] * beta[i] * k_k[i] * e_e[i],
                        left = 1 - (2 * beta[i] * k_e[i] - of_token) * share;
            written = fmaf(of_token, decays.end[i] * decays.end[i], written);
            kept *= left < 1 ? left : 1.0f;
            reflects |= beta[i] * k_e[i] > 1;
        }
        written = sum_of_warp(written);
#pragma unroll
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) kept *= ptx::shuffle_xor(kept, distance);
        reflects = sum_of_warp(reflects ? 1 : 0) > 0;
        if (lane() != 0) return;
        const float through = static_cast<float>(*decays.through),
                    added = written * share < most ? written * share : most;
        const bool fine = estimate[0] + estimate[1] > limit;
        estimate[0] = estimate[0] * kept * through * through + (fine ? 0.0f : added);
        estimate[1] = added;
        exact[0] = always || fine;
        exact[1] = always || (reflects && through > hardly_forgets);
    }
};

}  // namespace headrace::cuda
