// segments: which chunks a block walks, and the states that enter segments of a sequence (math.md, section 6).
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// Chunks [first_chunk, end_chunk) of sequence n, in running order; first_chunk -1: an empty slot.
struct Walk {
    std::int64_t n;
    TokenRange sequence;
    std::int64_t first_chunk, end_chunk;
    bool last;  // of the sequence
};

// Segments of a sequence; one without tokens has one.
HEADRACE_DEVICE std::int64_t segments_of(const KernelArgs& args, const TokenRange& s) {
    const std::int64_t tokens = s.end - s.begin;
    return tokens == 0 ? 1 : (tokens + args.segments.tokens - 1) / args.segments.tokens;
}

// Of sequence `place`, or of the segment in that slot.
HEADRACE_DEVICE Walk walk_of(const KernelArgs& args, std::int64_t place) {
    const auto chunks_of = [](const TokenRange& s) { return (s.end - s.begin + tensor_chunk - 1) / tensor_chunk; };
    if (args.segments.tokens == 0) {
        const TokenRange sequence = sequence_of(args, place);
        return {place, sequence, 0, chunks_of(sequence), true};
    }
    const auto [n, segment] = part_at(args, place, args.segments.tokens);
    const TokenRange sequence = sequence_of(args, n);
    const std::int64_t count = segments_of(args, sequence);
    if (segment >= count) return {n, sequence, -1, -1, false};
    const std::int64_t chunks = chunks_of(sequence), step = args.segments.tokens / tensor_chunk;
    const std::int64_t end = (segment + 1) * step;
    return {n, sequence, segment * step, end < chunks ? end : chunks, segment + 1 == count};
}

// The chunk of a sequence, in running order.
HEADRACE_DEVICE ChunkRange chunk_range(const KernelArgs& args, const TokenRange& s, std::int64_t chunk) {
    const std::int64_t first = chunk * tensor_chunk, left = s.end - s.begin - first;
    return {s.row,        s.begin,     s.end, first, static_cast<int>(left < tensor_chunk ? left : tensor_chunk),
            tensor_chunk, args.reverse};
}

// From what leaves the segments of sequence n, one head, values [first, first + join_columns), to what enters them:
//     S_in of the next = M S_in + what leaves this one, M its transition, or its decay.
template <bool delta>
struct SegmentJoin {
    const KernelArgs& args;
    Tile<float> S, next;  // [K, join_columns]

    __host__ __device__ SegmentJoin(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        S = arena.tile<float>(args.K, join_columns);
        if (delta) next = arena.tile<float>(args.K, join_columns);
    }
    HEADRACE_DEVICE void join(std::int64_t n, std::int64_t head, int first) {
        const int count = args.V - first < join_columns ? args.V - first : join_columns;
        const TokenRange sequence = sequence_of(args, n);
        const std::int64_t slot = parts_before(args, sequence, n, args.segments.tokens),
                           segments = segments_of(args, sequence);
        const Strided& initial = args.initial_state;
        each_place(count, [&](int c, int j) {
            S.at(c, j) = initial.given ? load_element<float>(initial.data, initial.dtype,
                                                             offset_of(initial, n, head, c, first + j))
                                       : 0.0f;
        });
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments; ++segment) {
            const bool last = segment + 1 == segments;
            const std::int64_t place = (slot + segment) * args.HV + head;
            float* const states = args.segments.states + place * args.K * args.V + first;
            if constexpr (delta) {
                const float* const transition = args.segments.transitions + place * args.K * args.K;
                ptx::sync_block();
                each_place(count, [&](int c, int j) {
                    if (last) return;
                    float sum = states[c * args.V + j];
#pragma unroll 8
                    for (int m = 0; m < args.K; ++m) sum = fmaf(transition[c * args.K + m], S.at(m, j), sum);
                    next.at(c, j) = sum;
                });
                ptx::sync_block();
                each_place(count, [&](int c, int j) {
                    states[c * args.V + j] = S.at(c, j);
                    if (!last) S.at(c, j) = next.at(c, j);
                });
            } else {
                const SplitDecay<float> decay = split_decay<float>(last ? 1.0 : args.segments.decays[place]);
                each_place(count, [&](int c, int j) {
                    const float entering = S.at(c, j);
                    if (!last) {
                        S.at(c, j) = fmaf(entering, decay.whole, fmaf(entering, decay.part, states[c * args.V + j]));
                    }
                    states[c * args.V + j] = entering;
                });
            }
        }
    }

  private:
    // f(c, j), by the same thread each time.
    template <class F>
    HEADRACE_DEVICE void each_place(int count, F f) const {
        each(args.K * join_columns, [&](int place) {
            if (place % join_columns < count) f(place / join_columns, place % join_columns);
        });
    }
};

}  // namespace headrace::cuda
