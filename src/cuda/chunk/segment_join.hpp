// segment_join: from what leaves the segments of a sequence n, of one head and join_columns values from `first` on, to
// what enters them (math.md, section 9):
//     S_in of the next = M S_in + what leaves this one, M its transition, or its decay.
#pragma once

#include "cuda/chunk/segments.hpp"

namespace headrace::cuda {

// The segments of a sequence and head, and the state that enters the first.
struct JoinedSegments {
    const KernelArgs& args;
    std::int64_t n, head, slot, count;

    HEADRACE_DEVICE JoinedSegments(const KernelArgs& arguments, std::int64_t n_, std::int64_t head_)
        : args(arguments), n(n_), head(head_) {
        const TokenRange sequence = sequence_of(args, n);
        slot = parts_before(args, sequence, n, args.segments.tokens);
        count = segments_of(args, sequence);
    }
    HEADRACE_DEVICE std::int64_t place(std::int64_t segment) const { return (slot + segment) * args.HV + head; }
    HEADRACE_DEVICE float initial(int c, int j) const {
        const Strided& tensor = args.initial_state;
        return tensor.given ? load_element<float>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, j)) : 0.0f;
    }
};

// The additive rule.
struct DecayJoin {
    const KernelArgs& args;
    Tile<float> S;  // [K, join_columns]

    __host__ __device__ DecayJoin(const KernelArgs& arguments, Arena& arena)
        : args(arguments), S(arena.tile<float>(args.K, join_columns)) {}
    HEADRACE_DEVICE void join(std::int64_t n, std::int64_t head, int first) {
        const JoinedSegments segments(args, n, head);
        each_place(first, [&](int c, int j) { S.at(c, j) = segments.initial(c, first + j); });
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            const bool last = segment + 1 == segments.count;
            const std::int64_t place = segments.place(segment);
            float* const states = args.segments.states + place * args.K * args.V + first;
            const SplitDecay<float> decay = split_decay<float>(last ? 1.0 : args.segments.decays[place]);
            each_place(first, [&](int c, int j) {
                const float entering = S.at(c, j);
                if (!last) S.at(c, j) = fmaf(entering, decay.whole, fmaf(entering, decay.part, states[c * args.V + j]));
                states[c * args.V + j] = entering;
            });
        }
    }

  private:
    // f(c, j), by the same thread each time.
    template <class F>
    HEADRACE_DEVICE void each_place(int first, F f) const {
        each(args.K * join_columns, [&](int place) {
            if (first + place % join_columns < args.V) f(place / join_columns, place % join_columns);
        });
    }
};

// The delta rule: a thread has a row of M and some columns. M arrives by halves of its columns, two at a time.
template <int K>
struct TransitionJoin {
    static constexpr int threads = 2 * block_threads, columns = join_columns * K / threads,  // of a thread
        half = K / 2, row = half + 4;  // of a half; rows four banks apart
    static_assert(columns % 4 == 0);

    const KernelArgs& args;
    float* halves;  // [2,K,row]
    float* S;       // [K,join_columns]

    __host__ __device__ TransitionJoin(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        halves = arena.take<float>(2 * K * row);
        S = arena.take<float>(K * join_columns);
    }
    HEADRACE_DEVICE void join(std::int64_t n, std::int64_t head, int first) {
        const JoinedSegments segments(args, n, head);
        const int c = static_cast<int>(threadIdx.x) % K, column = static_cast<int>(threadIdx.x) / K * columns,
                  left = c < args.K ? args.V - first - column : 0;  // of this thread's columns
        float entering[columns], sums[columns];
#pragma unroll
        for (int j = 0; j < columns; ++j) {
            entering[j] = j < left ? segments.initial(c, first + column + j) : 0.0f;
            S[c * join_columns + column + j] = entering[j];
        }
        fetch(segments, 0), fetch(segments, 1);
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            float* const states =
                args.segments.states + (segments.place(segment) * args.K + c) * args.V + first + column;
            if (segment + 1 < segments.count) {
#pragma unroll
                for (int j = 0; j < columns; ++j) sums[j] = j < left ? states[j] : 0.0f;
                HEADRACE_ROLLED
                for (int part = 0; part < 2; ++part) {
                    ptx::wait_for_copies<1>();
                    ptx::sync_block();
                    if (c < args.K) add_product(sums, c, column, part);
                    ptx::sync_block();
                    fetch(segments, 2 * (segment + 1) + part);
                }
            }
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                if (j < left) states[j] = entering[j];
                if (segment + 1 == segments.count) continue;
                entering[j] = sums[j];
                S[c * join_columns + column + j] = sums[j];
            }
        }
    }

  private:
    HEADRACE_DEVICE void fetch(const JoinedSegments& segments, std::int64_t number) const {
        const std::int64_t segment = number / 2;
        const int first = static_cast<int>(number % 2) * half, all = round_up(args.K, 4);
        if (segment + 1 < segments.count) {
            const float* const from = args.segments.transitions + segments.place(segment) * args.K * all + first;
            const std::uint32_t to = ptx::shared_address(halves + number % 2 * K * row);
            each(args.K * (half / 4), [&](int piece) {
                const int c = piece / (half / 4), m = piece % (half / 4) * 4;
                if (first + m < all) ptx::copy_16(to + 4 * (c * row + m), from + c * all + m, 16);
            });
        }
        ptx::end_copies();
    }
    // sums += M S, of a half of M's columns.
    HEADRACE_DEVICE void add_product(float (&sums)[columns], int c, int column, int part) const {
        const float* const M = halves + (part * K + c) * row;
        const float* const x = S + part * half * join_columns + column;
        const int count = args.K - part * half < half ? args.K - part * half : half;
#pragma unroll 2
        for (int m = 0; m < count; m += 4) {
            const float4 of = *reinterpret_cast<const float4*>(M + m);
            const float elements[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < columns; j += 4) {
                    const float4 right = *reinterpret_cast<const float4*>(x + (m + i) * join_columns + j);
                    sums[j] = fmaf(elements[i], right.x, sums[j]);
                    sums[j + 1] = fmaf(elements[i], right.y, sums[j + 1]);
                    sums[j + 2] = fmaf(elements[i], right.z, sums[j + 2]);
                    sums[j + 3] = fmaf(elements[i], right.w, sums[j + 3]);
                }
            }
        }
    }
};

}  // namespace headrace::cuda
