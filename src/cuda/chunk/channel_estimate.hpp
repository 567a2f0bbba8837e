// ChannelEstimate: which chunks of the delta rule under channel gates read and write with 16 bits in place of 8:
// decision 3, "Reads that come back" and "Writes into states that hardly forget".
#pragma once

#include "cuda/chunk/segments.hpp"

namespace headrace::cuda {

// The estimate of the CPU's StateRoundings: errors in each channel of the state, in units of those of one read. A warp
// follows a head of a sequence through the numbers that its chunks prepared, and leaves there what they need:
// numbers [1] and [2], writes and reads. What a chunk needs follows from chunks that are past.
template <int K>
struct ChannelEstimate {
    static constexpr int own = K / warp_lanes;  // channels of a lane
    static constexpr float limit = 0.75f;
    static constexpr int ahead = 4;  // chunks whose numbers are on their way while one is looked at

    struct Numbers {
        float kept, added_mean;
        float added[own];
        float2 decay[own];  // as they were prepared: a sum would wait for them
    };

    const KernelArgs& args;

    HEADRACE_DEVICE void run(std::int64_t n, std::int64_t head) const {
        const TokenRange s = sequence_of(args, n);
        const std::int64_t chunks = (s.end - s.begin + tensor_chunk - 1) / tensor_chunk,
                           first = saved_place(args, s, n, head, 0, tensor_chunk);
        float held[own] = {}, latest = 0;
        Numbers next[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i)
            if (i < chunks) next[i] = load(first + i * args.HV);
        HEADRACE_ROLLED
        for (std::int64_t chunk = 0; chunk < chunks; chunk += ahead) {
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                if (chunk + i >= chunks) break;
                const Numbers now = next[i];
                const std::int64_t place = first + (chunk + i) * args.HV;
                if (chunk + i + ahead < chunks) next[i] = load(place + ahead * args.HV);
                float sum = 0;
#pragma unroll
                for (float of_channel : held) sum += of_channel;
                const bool fine = sum_of_warp(sum) / args.K + latest > limit;
#pragma unroll
                for (int c = 0; c < own; ++c) {
                    const float decay = now.decay[c].x + now.decay[c].y;
                    held[c] = held[c] * now.kept * decay * decay + (fine ? 0.0f : now.added[c]);
                }
                latest = now.added_mean;
                if (fine && lane() == 0) {
                    float* const numbers = args.prepared.numbers + 4 * place;
                    numbers[1] = numbers[2] = 1;
                }
            }
        }
    }

  private:
    HEADRACE_DEVICE Numbers load(std::int64_t place) const {
        const float4 of = *reinterpret_cast<const float4*>(args.prepared.numbers + 4 * place);
        Numbers numbers{of.x, of.w, {}, {}};
#pragma unroll
        for (int i = 0; i < own; ++i) {
            const std::int64_t c = place * K + lane() + i * warp_lanes;
            numbers.added[i] = args.prepared.added[c];
            numbers.decay[i] = reinterpret_cast<const float2*>(args.prepared.decay)[c];
        }
        return numbers;
    }
};

}  // namespace headrace::cuda
