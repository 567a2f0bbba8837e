// ChannelRows: the rows of a chunk under channel gates as a walk of the delta rule multiplies them, decayed by four
// warps of its block while others walk the chunk before.
#pragma once

#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

// A thread has four neighbouring channels of `tokens` tokens that follow each other. Decays on the way from the chunk's
// start, and to its end, are products of decays of single tokens: of its own one after another, of the other threads'
// through what each leaves of all of its tokens.
template <int K>
struct ChannelRows {
    static constexpr int pieces = K / lane_channels, groups = block_threads / pieces, tokens = tensor_chunk / groups;
    static constexpr int barrier = 1;  // of these warps

    struct To {
        Matrix<K> reads, erases, writes;
    };
    // Of the thread's tokens.
    struct Own {
        float decays[tokens][lane_channels];
        Piece q[tokens], k[tokens];
    };

    ChannelInputs inputs;
    float4* totals;  // [groups, pieces]

    // Rows of `length` tokens from `first` on, and zeros, of the chunk prepared at that place.
    HEADRACE_DEVICE void decay(const To& to, std::int64_t first, int length, std::int64_t place) const {
        const float* const factors = inputs.args.prepared.factors + place * 4 * tensor_chunk;
        Own own;
        together() ? load(own, first, length, place) : load_singly(own, to, first, length, place);
        float through[lane_channels] = {1, 1, 1, 1};
#pragma unroll
        for (int n = 0; n < tokens; ++n) multiply(through, own.decays[n]);
        totals[thread()] = {through[0], through[1], through[2], through[3]};
        ptx::sync_threads(barrier, block_threads);
        float decays[lane_channels];
        multiply_totals(decays, group() + 1, groups);
        store_writes(to.writes, own, decays, factors + 2 * tensor_chunk + first_token());
        multiply_totals(decays, 0, group());
        store_reads(to, own, decays, factors + first_token());
    }

  private:
    HEADRACE_DEVICE static int thread() { return static_cast<int>(threadIdx.x) % block_threads; }
    HEADRACE_DEVICE static int group() { return thread() / pieces; }
    HEADRACE_DEVICE static int first_token() { return group() * tokens; }
    HEADRACE_DEVICE static int channel() { return thread() % pieces * lane_channels; }

    // ---- what arrives ----
    HEADRACE_DEVICE bool together() const {
        const ChannelInputs::Sources& from = *inputs.sources;
        const bool gates = inputs.args.prepared.log_decays != nullptr || from.gates_together;
        return gates && from.q.together && from.k.together && inputs.args.K % lane_channels == 0;
    }
    HEADRACE_DEVICE const float* prepared_gates(std::int64_t place) const {
        return inputs.args.prepared.log_decays + (place * tensor_chunk + first_token()) * K + channel();
    }
    HEADRACE_DEVICE void load(Own& own, std::int64_t first, int length, std::int64_t place) const {
        const ChannelInputs::Sources& from = *inputs.sources;
        const KernelArgs& args = inputs.args;
        const int left = channel() < args.K ? length - first_token() : 0;  // of the thread's tokens
        const bool made = args.prepared.log_decays != nullptr;
        const std::int64_t token = first + first_token();
        const auto row = [&](const Strided& tensor, const ChannelInputs::Source& source, int size) {
            return tensor.data + (source.first + token * source.step + size * channel());
        };
        const char *g = made ? reinterpret_cast<const char*>(prepared_gates(place)) : row(args.g, from.g, 4),
                   *k = row(args.k, from.k, 2), *q = row(args.q, from.q, 2);
        const std::int64_t g_step = made ? 4 * K : from.g.step, k_step = from.k.step, q_step = from.q.step;
        float most = 0;
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            float4 gates{};
            uint2 of_k{}, of_q{};
            if (n < left) {
                gates = *reinterpret_cast<const float4*>(g), of_k = *reinterpret_cast<const uint2*>(k);
                of_q = *reinterpret_cast<const uint2*>(q);
                g += g_step, k += k_step, q += q_step;
            }
            const float all[lane_channels] = {gates.x, gates.y, gates.z, gates.w};
            own.k[n] = {{of_k.x, of_k.y}}, own.q[n] = {{of_q.x, of_q.y}};
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                most = fmaxf(most, all[c]);
                own.decays[n][c] = ptx::exp2_approximate(all[c] * log2_e);
            }
        }
        if (most <= 0) return;
        // What is refused makes NaN of all that it decays, and here of all channels and tokens of the thread.
#pragma unroll
        for (auto& of_token : own.decays)
            for (float& decay : of_token) decay = ChannelInputs::not_a_number();
    }
    // Of any inputs, through the matrices' memory, where those of erases lie behind those of reads: no thread needs
    // another's.
    HEADRACE_DEVICE void load_singly(Own& own, const To& to, std::int64_t first, int length,
                                     std::int64_t place) const {
        const bool made = inputs.args.prepared.log_decays != nullptr;
        float4* const decays = reinterpret_cast<float4*>(to.reads.data) + thread();
        uint2* const rows = reinterpret_cast<uint2*>(to.writes.data) + thread();
        const ChannelInputs::Sources& from = *inputs.sources;
        const std::int64_t own_first = first + first_token(), end = first + length;
        HEADRACE_ROLLED
        for (int n = 0; n < tokens; ++n) {
            float gates[lane_channels];
            if (made) {
                for (int c = 0; c < lane_channels; ++c) gates[c] = prepared_gates(place)[n * K + c];
            } else {
                inputs.load_gates(gates, own_first + n, channel(), end);
            }
            decays[n * block_threads] = {
                ptx::exp2_approximate(gates[0] * log2_e), ptx::exp2_approximate(gates[1] * log2_e),
                ptx::exp2_approximate(gates[2] * log2_e), ptx::exp2_approximate(gates[3] * log2_e)};
        }
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            const float4 of = decays[n * block_threads];
            own.decays[n][0] = of.x, own.decays[n][1] = of.y, own.decays[n][2] = of.z, own.decays[n][3] = of.w;
        }
        load_rows_singly(own.k, rows, inputs.args.k, from.k, own_first, end);
        load_rows_singly(own.q, rows, inputs.args.q, from.q, own_first, end);
    }
    HEADRACE_DEVICE void load_rows_singly(Piece (&own)[tokens], uint2* by, const Strided& tensor,
                                          const ChannelInputs::Source& source, std::int64_t first,
                                          std::int64_t end) const {
        HEADRACE_ROLLED
        for (int n = 0; n < tokens; ++n) {
            const Piece piece = inputs.load_piece(tensor, source, first + n, channel(), end);
            by[n * block_threads] = {piece.pairs[0], piece.pairs[1]};
        }
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            const uint2 of = by[n * block_threads];
            own[n].pairs[0] = of.x, own[n].pairs[1] = of.y;
        }
    }

    // ---- what leaves ----
    // Of the groups' tokens from `first` to `end`.
    HEADRACE_DEVICE void multiply_totals(float (&decays)[lane_channels], int first, int end) const {
#pragma unroll
        for (float& decay : decays) decay = 1;
        HEADRACE_ROLLED
        for (int other = first; other < end; ++other) {
            const float4 of = totals[other * pieces + thread() % pieces];
            decays[0] *= of.x, decays[1] *= of.y, decays[2] *= of.z, decays[3] *= of.w;
        }
    }
    HEADRACE_DEVICE static void store_writes(Matrix<K> writes, const Own& own, float (&end)[lane_channels],
                                             const float* factors) {
#pragma unroll
        for (int n = tokens - 1; n >= 0; --n) {
            const float factor = factors[n];
            store(writes, n, own.k[n], end, factor);
            multiply(end, own.decays[n]);
        }
    }
    HEADRACE_DEVICE static void store_reads(const To& to, const Own& own, float (&start)[lane_channels],
                                            const float* factors) {
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
            const float read = factors[n], erase = factors[tensor_chunk + n];
            multiply(start, own.decays[n]);
            store(to.reads, n, own.q[n], start, read);
            store(to.erases, n, own.k[n], start, erase);
        }
    }
    HEADRACE_DEVICE static void multiply(float (&decays)[lane_channels], const float (&by)[lane_channels]) {
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) decays[c] *= by[c];
    }
    HEADRACE_DEVICE static void store(Matrix<K> to, int n, const Piece& row, const float (&decays)[lane_channels],
                                      float factor) {
        float values[lane_channels];
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) values[c] = row.at(c) * (decays[c] * factor);
        *reinterpret_cast<uint2*>(&to.pair(first_token() + n, channel())) = {ptx::round_to_bf16(values[0], values[1]),
                                                                             ptx::round_to_bf16(values[2], values[3])};
    }
};

}  // namespace headrace::cuda
