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
    static constexpr int own = K / warp_lanes;  // neighbouring channels of a lane
    static constexpr float limit = 0.75f;
    static constexpr int ahead = 4;  // chunks whose numbers are on their way while as many are looked at

    struct alignas(4 * own) Added {
        float of[own];
    };
    struct alignas(8 * own) Decays {
        float2 of[own];  // as they were prepared: a sum would wait for them
    };
    struct Numbers {
        float kept, added_mean;
        Added added;
        Decays decays;
    };
    // Where a chunk's numbers lie, of this lane.
    struct From {
        float* numbers;
        const Added* added;
        const Decays* decays;
        HEADRACE_DEVICE void advance(std::int64_t places) {
            numbers += 4 * places, added += warp_lanes * places, decays += warp_lanes * places;
        }
        HEADRACE_DEVICE Numbers load() const {
            const float4 all = *reinterpret_cast<const float4*>(numbers);
            return {all.x, all.w, *added, *decays};
        }
    };

    const KernelArgs& args;

    HEADRACE_DEVICE void run(std::int64_t n, std::int64_t head) const {
        const TokenRange s = sequence_of(args, n);
        const int chunks = static_cast<int>((s.end - s.begin + tensor_chunk - 1) / tensor_chunk);
        From now{args.prepared.numbers, reinterpret_cast<const Added*>(args.prepared.added) + lane(),
                 reinterpret_cast<const Decays*>(args.prepared.decay) + lane()};
        now.advance(saved_place(args, s, n, head, 0, tensor_chunk));
        From arriving = now;
        Numbers next[ahead];
        ask(next, arriving, chunks);
        float held[own], latest = 0;
#pragma unroll
        for (float& of_channel : held) of_channel = args.rounded_state || args.rounded_gradient ? 1.0f : 0.0f;
        HEADRACE_ROLLED
        for (int chunk = 0; chunk < chunks; chunk += ahead) {
            Numbers numbers[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) numbers[i] = next[i];
            // All at once, as a thread can wait for few loads apart.
            ask(next, arriving, chunks - chunk - ahead);
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                if (chunk + i >= chunks) break;
                const Numbers& of = numbers[i];
                float sum = 0;
#pragma unroll
                for (float of_channel : held) sum += of_channel;
                // All of a summary, whose transition nothing fills up again.
                const bool fine = sum_of_warp(sum) / args.K + latest > limit || args.segments.to_end;
#pragma unroll
                for (int c = 0; c < own; ++c) {
                    const float decay = of.decays.of[c].x + of.decays.of[c].y;
                    held[c] = held[c] * of.kept * decay * decay + (fine ? 0.0f : of.added.of[c]);
                }
                latest = of.added_mean;
                if (fine && lane() == 0) now.numbers[1] = now.numbers[2] = 1;
                now.advance(args.HV);
            }
        }
    }

  private:
    // For the numbers of up to `count` chunks.
    HEADRACE_DEVICE void ask(Numbers (&next)[ahead], From& arriving, int count) const {
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if (i >= count) continue;
            next[i] = arriving.load();
            arriving.advance(args.HV);
        }
    }
};

}  // namespace headrace::cuda
