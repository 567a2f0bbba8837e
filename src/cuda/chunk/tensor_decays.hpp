// tensor_decays: what the tensor-core form knows of a chunk's tokens: decays of a scalar gate, norms.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/matrices.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// Of one token, as it came: for who has other things to do before it is there, and then asks whether it is accepted.
HEADRACE_DEVICE float given_log_decay(const KernelArgs& args, const ChunkRange& range, int i, std::int64_t head) {
    const Strided& from = args.log_decays;
    return from.given ? reinterpret_cast<const float*>(from.data)[offset_of(from, range.row, range.token(i), head)]
                      : 0.0f;
}
HEADRACE_DEVICE float token_log_decay(const KernelArgs& args, const ChunkRange& range, int i, std::int64_t head) {
    return accepted(args, given_log_decay(args, range, i, head));
}
// Of a row of l2norm, from its square.
HEADRACE_DEVICE float inverse_norm(float square) {
    return static_cast<float>(1 / sqrt(static_cast<double>(square) + 1e-6));
}

// Of rows i, the same in each of the four lanes that share it.
template <class Format = Bf16, int K>
HEADRACE_DEVICE float dot_of_rows(Matrix<K> a, Matrix<K> b, int i) {
    const int first = lane_here() % 4 * 8;
    float sum = 0;
#pragma unroll
    for (int c = first; c < K; c += 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(&a.pair(i, c)),
                    y = *reinterpret_cast<const uint4*>(&b.pair(i, c));
        const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            sum = fmaf(Format::first(xs[pair]), Format::first(ys[pair]),
                       fmaf(Format::second(xs[pair]), Format::second(ys[pair]), sum));
    }
    return sum_of_quad(sum);
}

// G_i, the sum of the chunk's log decays up to token i, as a number of powers of two in two floats: summed in double,
// so that a constant gate's roundings do not add up, and differences lose nothing. A gate below `reset` decays to zero
// whatever it is exactly, and keeps the small ones behind it in the sum.
struct ScalarDecays {
    static constexpr double reset = -7e4, log2_e = 1.4426950408889634;

    // Of a lane's two tokens: e^{G_i}; the same without the token's own gate; e^{G_L - G_i}. Of the chunk: G_L.
    struct OfLane {
        float start[2], before[2], end[2];
        double total;
        HEADRACE_DEVICE double through() const { return exp(total); }
        // The same in floats: the instructions of a double's exponential are many for one warp that others wait for.
        HEADRACE_DEVICE SplitDecay<float> split_through() const {
            const auto log = static_cast<float>(total);
            const bool half = log >= -0.69314718f;
            return {half ? 1.0f : 0.0f, half ? expm1f(log) : expf(log)};
        }
    };
    // G_i, for decays between two tokens.
    struct Power {
        float high, low;
    };

    Power* powers;  // [C]

    __host__ __device__ void carve(Arena& arena) { powers = arena.take<Power>(tensor_chunk); }
    // From the log decays of tokens 2 lane and 2 lane + 1, zero behind the chunk's length. By one warp.
    HEADRACE_DEVICE OfLane prepare(float log_decay, float next_log_decay) const {
        const int i = 2 * lane();
        const double own[2] = {limited(log_decay), limited(next_log_decay)};
        double sum = own[0] + own[1];
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2) {
            const double earlier = ptx::shuffle_from(sum, (lane() - distance) & (warp_lanes - 1));
            if (lane() >= distance) sum += earlier;
        }
        const double total = ptx::shuffle_from(sum, warp_lanes - 1), sums[2] = {sum - own[1], sum};
        OfLane of;
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const double power = sums[token] * log2_e;
            const float high = static_cast<float>(power);
            powers[i + token] = {high, static_cast<float>(power - high)};
            of.start[token] = power_of_two(static_cast<float>(power));
            of.before[token] = power_of_two(static_cast<float>((sums[token] - own[token]) * log2_e));
            of.end[token] = power_of_two(static_cast<float>((total - sums[token]) * log2_e));
        }
        of.total = total;
        return of;
    }
    HEADRACE_DEVICE Power at(int i) const {
        const float2 of = *reinterpret_cast<const float2*>(powers + i);
        return {of.x, of.y};
    }
    // Of token i, even, and the next.
    HEADRACE_DEVICE void pair_at(Power (&of)[2], int i) const {
        const float4 both = *reinterpret_cast<const float4*>(powers + i);
        of[0] = {both.x, both.y}, of[1] = {both.z, both.w};
    }
    // e^{G_i - G_j}, j <= i; 1 of later tokens j.
    HEADRACE_DEVICE static float between(Power i, Power j) { return power_of_two((i.high - j.high) + (i.low - j.low)); }
    HEADRACE_DEVICE float between(int i, int j) const { return between(at(i), at(j)); }

  private:
    // Of a number that is not positive but for roundings; NaN of one.
    HEADRACE_DEVICE static float power_of_two(float x) { return ptx::exp2_approximate(ptx::minimum(x, 0.0f)); }
    HEADRACE_DEVICE static double limited(float g) { return g < static_cast<float>(reset) ? reset : g; }
};

}  // namespace headrace::cuda
