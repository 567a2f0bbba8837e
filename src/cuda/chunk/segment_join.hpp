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
        const Strided& tensor = args.initial_state;  // in fp32 (plumbing/staging.hpp)
        return tensor.given ? reinterpret_cast<const float*>(tensor.data)[offset_of(tensor, n, head, c, j)] : 0.0f;
    }
};

// The additive rule; per_channel: a decay of a segment for each key channel. A thread has the same places of [K,
// join_columns] in all segments, and the next segment's numbers arrive meanwhile.
template <bool per_channel>
struct DecayJoin {
    static constexpr int threads = join_threads(false),
                         places = 128 * join_columns / threads;  // of up to 128 channels

    const KernelArgs& args;

    __host__ __device__ DecayJoin(const KernelArgs& arguments, Arena& /*arena*/) : args(arguments) {}
    HEADRACE_DEVICE void join(std::int64_t n, std::int64_t head, int first) {
        const JoinedSegments segments(args, n, head);
        float entering[places] = {};
        each_place(first, [&](int own, int c, int j) { entering[own] = segments.initial(c, first + j); });
        Leaving leaving = load(segments, 0, first);
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            const Leaving next = load(segments, segment + 1, first);
            float* const states = args.segments.states + segments.place(segment) * args.K * args.V + first;
            each_place(first, [&](int own, int c, int j) {
                states[c * args.V + j] = entering[own];
                const SplitDecay<float> decay = split_decay<float>(leaving.decays[own]);
                entering[own] = fmaf(entering[own], decay.whole, fmaf(entering[own], decay.part, leaving.states[own]));
            });
            leaving = next;
        }
    }

  private:
    // What leaves a segment that no state enters, and the decays through it; of the last one nothing is needed.
    struct Leaving {
        float states[places];
        double decays[places];
    };
    HEADRACE_DEVICE Leaving load(const JoinedSegments& segments, std::int64_t segment, int first) const {
        Leaving of{};
        if (segment + 1 >= segments.count) return of;
        const std::int64_t place = segments.place(segment);
        const float* const states = args.segments.states + place * args.K * args.V + first;
        const double* const decays = args.segments.decays + place * (per_channel ? args.K : 1);
        each_place(first, [&](int own, int c, int j) {
            of.states[own] = states[c * args.V + j], of.decays[own] = decays[per_channel ? c : 0];
        });
        return of;
    }
    // f(which of the thread's, c, j)
    template <class F>
    HEADRACE_DEVICE void each_place(int first, F f) const {
#pragma unroll
        for (int own = 0; own < places; ++own) {
            const int place = static_cast<int>(threadIdx.x) + own * threads, c = place / join_columns,
                      j = place % join_columns;
            if (c < args.K && first + j < args.V) f(own, c, j);
        }
    }
};

// The delta rule: a thread has two rows of M, K / 2 apart, and some columns. M arrives by halves of its columns, two at
// a time.
template <int K>
struct TransitionJoin {
    static constexpr int threads = join_threads(true, K), columns = join_columns * K / 2 / threads,  // of a thread
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
        const int c = static_cast<int>(threadIdx.x) % (K / 2),
                  column = static_cast<int>(threadIdx.x) / (K / 2) * columns;
        const auto each_own = [&](auto f) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < columns; ++j) f(i, j, c + i * (K / 2), column + j);
        };
        const auto inside = [&](int row, int j) { return row < args.K && first + j < args.V; };
        float entering[2][columns], sums[2][columns];
        each_own([&](int i, int j, int row, int value) {
            entering[i][j] = inside(row, value) ? segments.initial(row, first + value) : 0.0f;
            S[row * join_columns + value] = entering[i][j];
        });
        fetch(segments, 0), fetch(segments, 1);
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            const bool last = segment + 1 == segments.count;
            float* const states = args.segments.states + segments.place(segment) * args.K * args.V + first;
            if (!last) {
                each_own([&](int i, int j, int row, int value) {
                    sums[i][j] = inside(row, value) ? states[row * args.V + value] : 0.0f;
                });
                HEADRACE_ROLLED
                for (int part = 0; part < 2; ++part) {
                    ptx::wait_for_copies<1>();
                    ptx::sync_block();
                    add_product(sums, c, column, part);
                    ptx::sync_block();
                    fetch(segments, 2 * (segment + 1) + part);
                }
            }
            each_own([&](int i, int j, int row, int value) {
                if (inside(row, value)) states[row * args.V + value] = entering[i][j];
                if (last) return;
                entering[i][j] = sums[i][j];
                S[row * join_columns + value] = sums[i][j];
            });
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
    // sums += M S, of a half of M's columns. Rows of M that are not there count for nothing.
    HEADRACE_DEVICE void add_product(float (&sums)[2][columns], int c, int column, int part) const {
        const float* const x = S + part * half * join_columns + column;
        const int count = args.K - part * half < half ? args.K - part * half : half;
        const float* M[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) M[i] = halves + (part * K + (c + i * (K / 2) < args.K ? c + i * (K / 2) : 0)) * row;
#pragma unroll(K > 64 ? 2 : 1)
        for (int m = 0; m < count; m += 4) {
            const float4 upper = *reinterpret_cast<const float4*>(M[0] + m),
                         lower = *reinterpret_cast<const float4*>(M[1] + m);
            const float left[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
#pragma unroll
                for (int j = 0; j < columns; j += 4) {
                    const float4 of = *reinterpret_cast<const float4*>(x + (m + step) * join_columns + j);
                    const float right[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        for (int k = 0; k < 4; ++k) sums[i][j + k] = fmaf(left[i][step], right[k], sums[i][j + k]);
                }
            }
        }
    }
};

}  // namespace headrace::cuda
