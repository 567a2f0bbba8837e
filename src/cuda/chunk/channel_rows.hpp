// ChannelRows: the rows of a chunk under channel gates as a walk of the delta rule multiplies them, decayed by four or
// eight warps of its block while the first four walk the chunk before.
#pragma once

#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

// A thread has four neighbouring channels of `tokens` tokens that follow each other. Decays on the way from the chunk's
// start, and to its end, are products of decays of single tokens: of its own one after another, of the other threads'
// through what each leaves of all of its tokens.
template <int K, int threads>
struct ChannelRows {
    static_assert(threads <= most_decaying_threads);
    static constexpr int pieces = K / lane_channels, groups = threads / pieces, tokens = tensor_chunk / groups;
    static constexpr int barrier = 1;  // of these warps

    static constexpr int factors = 3 * tensor_chunk,  // of reads, erases, writes
        own_factors = (factors + threads - 1) / threads;

    struct To {
        Matrix<K> reads, erases, writes;
    };
    // Of the thread's tokens, as they came.
    struct Own {
        float decays[tokens][lane_channels];  // their logarithms at first
        Piece q[tokens], k[tokens];
        float factors[own_factors];  // those that the thread lets others read
    };
    struct Shared {
        float4 totals[most_decaying_threads];
        float factors[ChannelRows::factors];
    };

    ChannelInputs inputs;
    Shared* shared;

    // Rows of `length` tokens from `first` on, and zeros, of the chunk prepared at that place: asked for; decayed.
    HEADRACE_DEVICE void load(Own& own, std::int64_t first, int length, std::int64_t place) const {
        const Place at;
        load_rows(own, at, first, length);
        const float* const from = inputs.args.prepared.factors + place * 4 * tensor_chunk;
        at.each_factor([&](int n, int factor) { own.factors[n] = from[factor]; });
    }
    HEADRACE_DEVICE void decay(const To& to, Own& own) const {
        const Place at;
        float through[lane_channels] = {1, 1, 1, 1};
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            find_decays(own.decays[n]);
            multiply(through, own.decays[n]);
        }
        shared->totals[at.thread] = {through[0], through[1], through[2], through[3]};
        at.each_factor([&](int n, int factor) { shared->factors[factor] = own.factors[n]; });
        ptx::sync_threads(barrier, threads);
        const float* const from = shared->factors + at.first_token();
        float decays[lane_channels];
        multiply_totals(decays, at, at.group() + 1, groups);
        store_writes(to.writes, at, own, decays, from + 2 * tensor_chunk);
        multiply_totals(decays, at, 0, at.group());
        store_reads(to, at, own, decays, from);
    }

  private:
    // The thread's, found where it is needed, as registers are few.
    struct Place {
        int thread;

        HEADRACE_DEVICE Place() : thread(thread_here() - block_threads) {}
        HEADRACE_DEVICE int group() const { return static_cast<int>(static_cast<unsigned>(thread) / pieces); }
        HEADRACE_DEVICE int piece() const { return static_cast<int>(static_cast<unsigned>(thread) % pieces); }
        HEADRACE_DEVICE int first_token() const { return group() * tokens; }
        HEADRACE_DEVICE int channel() const { return piece() * lane_channels; }
        template <class F>
        HEADRACE_DEVICE void each_factor(F f) const {
#pragma unroll
            for (int n = 0; n < own_factors; ++n) {
                if (const int factor = n * threads + thread; factor < factors) f(n, factor);
            }
        }
    };

    // ---- what arrives ----
    HEADRACE_DEVICE void load_rows(Own& own, Place at, std::int64_t first, int length) const {
        const ChannelInputs::Sources& from = *inputs.sources;
        const KernelArgs& args = inputs.args;
        const int left = at.channel() < args.K ? length - at.first_token() : 0;  // of the thread's tokens
        const std::int64_t token = first + at.first_token();
        const auto row = [&](const Strided& tensor, const ChannelInputs::Source& source, int size) {
            return tensor.data + (source.first + token * source.step + size * at.channel());
        };
        const char *g = row(args.log_decays, from.log_decays, 4), *k = row(args.k, from.k, 2),
                   *q = row(args.q, from.q, 2);
        const std::int64_t g_step = from.log_decays.step, k_step = from.k.step, q_step = from.q.step;
        // What must not be given needs no look here: of what it decays, what was prepared makes NaN.
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            float4 gates{};
            uint2 of_k{}, of_q{};
            if (n < left) {
                gates = *reinterpret_cast<const float4*>(g), of_k = *reinterpret_cast<const uint2*>(k);
                of_q = *reinterpret_cast<const uint2*>(q);
                g += g_step, k += k_step, q += q_step;
            }
            own.k[n] = {{of_k.x, of_k.y}}, own.q[n] = {{of_q.x, of_q.y}};
            float(&decays)[lane_channels] = own.decays[n];
            decays[0] = gates.x, decays[1] = gates.y, decays[2] = gates.z, decays[3] = gates.w;
        }
    }

    // ---- what leaves ----
    // Of the groups' tokens from `first` to `end`.
    HEADRACE_DEVICE void multiply_totals(float (&decays)[lane_channels], Place at, int first, int end) const {
#pragma unroll
        for (float& decay : decays) decay = 1;
        const float4* const totals = shared->totals + at.piece();
        // All at once, so that they do not wait for each other.
#pragma unroll
        for (int other = 0; other < groups; ++other) {
            const float4 of = totals[other * pieces];
            if (other < first || other >= end) continue;
            decays[0] *= of.x, decays[1] *= of.y, decays[2] *= of.z, decays[3] *= of.w;
        }
    }
    HEADRACE_DEVICE static void store_writes(Matrix<K> writes, Place at, const Own& own, float (&end)[lane_channels],
                                             const float* factors) {
#pragma unroll
        for (int four = tokens - 4; four >= 0; four -= 4) {
            float of[4];
            load_four(of, factors + four);
#pragma unroll
            for (int n = four + 3; n >= four; --n) {
                store(writes, at, n, own.k[n], end, of[n - four]);
                multiply(end, own.decays[n]);
            }
        }
    }
    HEADRACE_DEVICE static void store_reads(const To& to, Place at, const Own& own, float (&start)[lane_channels],
                                            const float* factors) {
#pragma unroll
        for (int four = 0; four < tokens; four += 4) {
            float read[4], erase[4];
            load_four(read, factors + four), load_four(erase, factors + tensor_chunk + four);
#pragma unroll
            for (int n = four; n < four + 4; ++n) {
                multiply(start, own.decays[n]);
                store(to.reads, at, n, own.q[n], start, read[n - four]);
                store(to.erases, at, n, own.k[n], start, erase[n - four]);
            }
        }
    }
    // Of four tokens.
    HEADRACE_DEVICE static void load_four(float (&of)[4], const float* factors) {
        const float4 all = *reinterpret_cast<const float4*>(factors);
        of[0] = all.x, of[1] = all.y, of[2] = all.z, of[3] = all.w;
    }
    HEADRACE_DEVICE static void multiply(float (&decays)[lane_channels], const float (&by)[lane_channels]) {
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) decays[c] *= by[c];
    }
    HEADRACE_DEVICE static void store(Matrix<K> to, Place at, int n, const Piece& row,
                                      const float (&decays)[lane_channels], float factor) {
        float values[lane_channels];
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) values[c] = row.at(c) * (decays[c] * factor);
        *reinterpret_cast<uint2*>(&to.pair(at.first_token() + n, at.channel())) = {
            ptx::round_to_bf16(values[0], values[1]), ptx::round_to_bf16(values[2], values[3])};
    }
};

}  // namespace headrace::cuda
