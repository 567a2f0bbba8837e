// segment_join: from what leaves the segments of a sequence n, of one head and a block's values from `first` on, to
// what enters them (math.md, section 9):
//     S_in of the next = M S_in + what leaves this one, M its transition, or its decay;
// and of a backward, from the last segment on, the same of gradients of states with M transposed.
#pragma once

#include "cuda/chunk/segments.hpp"
#include "cuda/tiles/matrices.hpp"

namespace headrace::cuda {

// The segments of a sequence and head in the order in which they are joined, and the state that enters the first. Of
// `row`, sequences of the one direction, if there are two behind those of the other.
struct JoinedSegments {
    const KernelArgs& args;
    bool back;
    std::int64_t n, head, slot, count;
    float* states;  // [slots,HV,K,V]

    HEADRACE_DEVICE JoinedSegments(const KernelArgs& arguments, std::int64_t row, std::int64_t head_)
        : args(arguments), back(args.segments.adjoints != nullptr && row < args.N), head(head_) {
        n = row < args.N ? row : row - args.N;
        const TokenRange sequence = sequence_of(args, n);
        slot = parts_before(args, sequence, n, args.segments.tokens);
        count = segments_of(args, sequence);
        states = back ? args.segments.adjoints : args.segments.states;
    }
    HEADRACE_DEVICE std::int64_t place(std::int64_t segment) const {
        return (slot + (back ? count - 1 - segment : segment)) * args.HV + head;
    }
    HEADRACE_DEVICE std::int64_t to_next() const { return back ? -args.HV : args.HV; }
    HEADRACE_DEVICE const float* transitions() const {
        return back ? args.segments.transposed_transitions : args.segments.transitions;
    }
    HEADRACE_DEVICE float initial(int c, int j) const {
        const Strided& tensor = back ? args.d_final_state : args.initial_state;  // in fp32 (plumbing/staging.hpp)
        return tensor.given ? reinterpret_cast<const float*>(tensor.data)[offset_of(tensor, n, head, c, j)] : 0.0f;
    }
    HEADRACE_DEVICE void store(int c, int j, float value) const {
        reinterpret_cast<float*>(args.final_state.data)[offset_of(args.final_state, n, head, c, j)] = value;
    }
};

// The additive rule; per_channel: a decay of a segment for each key channel. A thread has the same places of [K,
// columns] in all segments, and the next segment's numbers arrive meanwhile.
template <bool per_channel>
struct DecayJoin {
    static constexpr int threads = join_threads(false), columns = decay_columns,
                         places = 128 * columns / threads;  // of up to 128 channels

    const KernelArgs& args;

    __host__ __device__ DecayJoin(const KernelArgs& arguments, Arena& /*arena*/) : args(arguments) {}
    HEADRACE_DEVICE void join(std::int64_t row, std::int64_t head, int first) {
        const JoinedSegments segments(args, row, head);
        float entering[places] = {};
        each_place(first, [&](int own, int c, int j) { entering[own] = segments.initial(c, first + j); });
        Leaving leaving = load(segments, 0, first);
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            const Leaving next = load(segments, segment + 1, first);
            float* const states = segments.states + segments.place(segment) * args.K * args.V + first;
            each_place(first, [&](int own, int c, int j) {
                if (!args.segments.to_end) states[c * args.V + j] = entering[own];
                const SplitDecay<float> decay = split_decay<float>(leaving.decays[own]);
                entering[own] = fmaf(entering[own], decay.whole, fmaf(entering[own], decay.part, leaving.states[own]));
            });
            leaving = next;
        }
        if (args.segments.to_end)
            each_place(first, [&](int own, int c, int j) { segments.store(c, first + j, entering[own]); });
    }

  private:
    // What leaves a segment that no state enters, and the decays through it; of the last one nothing is needed, but for
    // the final state.
    struct Leaving {
        float states[places];
        double decays[places];
    };
    HEADRACE_DEVICE Leaving load(const JoinedSegments& segments, std::int64_t segment, int first) const {
        Leaving of{};
        if (segment + (args.segments.to_end ? 0 : 1) >= segments.count) return of;
        const std::int64_t place = segments.place(segment);
        const float* const states = segments.states + place * args.K * args.V + first;
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
            const int place = static_cast<int>(threadIdx.x) + own * threads, c = place / columns, j = place % columns;
            if (c < args.K && first + j < args.V) f(own, c, j);
        }
    }
};

// The delta rule: M S on tensor cores, as three products of upper and lower parts of 11 bits (tf32). A warp has 16 rows
// of M, which arrive in its registers a segment ahead; the state is in shared memory, twice, as the next one is written
// while others read.
template <int K>
struct TransitionJoin {
    static constexpr int threads = join_threads(true, K), columns = transition_columns, windows = K / 16,
                         stride = K + 16,  // of columns: pieces of two are in different banks
        part = columns * stride, state = 2 * part;
    static_assert(threads == 2 * K && columns == 8);

    const KernelArgs& args;
    float* S;  // [2,2,columns,stride]: twice upper and lower parts

    __host__ __device__ TransitionJoin(const KernelArgs& arguments, Arena& arena)
        : args(arguments), S(arena.take<float>(2 * state)) {}
    HEADRACE_DEVICE void join(std::int64_t row, std::int64_t head, int first) {
        const JoinedSegments segments(args, row, head);
        float entering[4] = {}, leaving[4];
        each_place(first, [&](int own, int row, int j) { entering[own] = segments.initial(row, first + j); });
        Rows rows = {};
        OwnRows transition(args, segments);
        if (segments.count > 1) {
            load(leaving, segments, 0, first);
            each_window([&](int window) { transition.load(rows, window); });
        }
        HEADRACE_ROLLED
        for (std::int64_t segment = 0; segment < segments.count; ++segment) {
            float* const states = segments.states + segments.place(segment) * args.K * args.V + first;
            each_place(first, [&](int own, int row, int j) { states[row * args.V + j] = entering[own]; });
            if (segment + 1 == segments.count) return;
            // nothing is needed of the last segment
            const std::int64_t next = segment + 2 < segments.count ? segment + 1 : segment;
            float* const shared = S + segment % 2 * state;
            write(shared, entering);
            ptx::sync_block();
            if (next > segment) transition.advance();
            Sums upper = {}, lower = {};
            each_window([&](int window) {
                multiply(upper, lower, rows, shared, window);
                transition.load(rows, window);
            });
#pragma unroll
            for (float& of : entering) of = 0;
            each_place(first, [&](int own, int, int) {
                entering[own] = (lower[0][own] + lower[1][own]) + (upper[0][own] + upper[1][own]) + leaving[own];
            });
            load(leaving, segments, next, first);
        }
    }

  private:
    using Rows = float4[windows][2];  // of the lane's rows c and c + 8 its four of 16 columns
    using Sums = float[2][4];         // of every other eight of M's columns

    HEADRACE_DEVICE static int own_row() { return 16 * warp() + LanePlace().row; }  // c
    template <class F>
    HEADRACE_DEVICE static void each_window(F f) {
#pragma unroll
        for (int window = 0; window < windows; ++window) f(window);
    }
    // f(which of the lane's, row, j), of those that the state has: as sums of products lie in lanes
    template <class F>
    HEADRACE_DEVICE void each_place(int first, F f) const {
#pragma unroll
        for (int own = 0; own < 4; ++own) {
            const int row = own_row() + own / 2 * 8, j = LanePlace().column + own % 2;
            if (row < args.K && first + j < args.V) f(own, row, j);
        }
    }
    // What leaves a segment that no state enters.
    HEADRACE_DEVICE void load(float (&leaving)[4], const JoinedSegments& segments, std::int64_t segment,
                              int first) const {
#pragma unroll
        for (float& of : leaving) of = 0;
        const float* const states = segments.states + segments.place(segment) * args.K * args.V + first;
        each_place(first, [&](int own, int row, int j) { leaving[own] = states[row * args.V + j]; });
    }
    // The lane's of a segment's transition. Rows that are not there are the first one, as nobody stores their sums.
    struct OwnRows {
        int columns;  // of which the lane's first is one
        const float *upper, *lower;
        std::int64_t step;
        HEADRACE_DEVICE OwnRows(const KernelArgs& args, const JoinedSegments& segments) {
            const int all = round_up(args.K, 4), c = own_row(), first = lane() % 4 * 4;
            columns = all - first, step = segments.to_next() * args.K * all;
            const float* const transition = segments.transitions() + segments.place(0) * args.K * all + first;
            upper = transition + (c < args.K ? c : 0) * all, lower = transition + (c + 8 < args.K ? c + 8 : 0) * all;
        }
        HEADRACE_DEVICE void advance() { upper += step, lower += step; }
        HEADRACE_DEVICE void load(Rows& rows, int window) const {
            if (16 * window >= columns) return;
            rows[window][0] = *reinterpret_cast<const float4*>(upper + 16 * window);
            rows[window][1] = *reinterpret_cast<const float4*>(lower + 16 * window);
        }
    };
    HEADRACE_DEVICE void write(float* shared, const float (&entering)[4]) const {
#pragma unroll
        for (int own = 0; own < 4; ++own) {
            const Parts of = parts_of(entering[own]);
            float* const to = shared + (LanePlace().column + own % 2) * stride + own_row() + own / 2 * 8;
            to[0] = __uint_as_float(of.upper), to[part] = __uint_as_float(of.lower);
        }
    }
    // x = upper + lower, of which tensor cores read 11 bits each. Where x is not finite, lower is NaN: cvt.rna.tf32,
    // which takes care of that, is four instructions.
    struct Parts {
        std::uint32_t upper, lower;
    };
    HEADRACE_DEVICE static Parts parts_of(float x) {
        const std::uint32_t upper = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        return {upper, __float_as_uint(x - __uint_as_float(upper))};
    }
    // Sums over 16 columns of M, in any order: what products take for columns t and t + 4 are neighbours of a lane.
    HEADRACE_DEVICE static void multiply(Sums& upper, Sums& lower, const Rows& rows, const float* shared, int window) {
        const float* const from = shared + lane() / 4 * stride + 16 * window + lane() % 4 * 4;
        const float4 uppers = *reinterpret_cast<const float4*>(from),
                     lowers = *reinterpret_cast<const float4*>(from + part);
        const float4 &above = rows[window][0], &below = rows[window][1];
        const auto add = [&](int half, const float(&left)[4], const float(&high)[2], const float(&low)[2]) {
            const Parts of[4] = {parts_of(left[0]), parts_of(left[1]), parts_of(left[2]), parts_of(left[3])};
            const std::uint32_t left_upper[4] = {of[0].upper, of[1].upper, of[2].upper, of[3].upper},
                                left_lower[4] = {of[0].lower, of[1].lower, of[2].lower, of[3].lower},
                                right_upper[2] = {__float_as_uint(high[0]), __float_as_uint(high[1])},
                                right_lower[2] = {__float_as_uint(low[0]), __float_as_uint(low[1])};
            ptx::multiply_tf32(lower[half], left_lower, right_upper);
            ptx::multiply_tf32(lower[half], left_upper, right_lower);
            ptx::multiply_tf32(upper[half], left_upper, right_upper);
        };
        add(0, {above.x, below.x, above.y, below.y}, {uppers.x, uppers.y}, {lowers.x, lowers.y});
        add(1, {above.z, below.z, above.w, below.w}, {uppers.z, uppers.w}, {lowers.z, lowers.w});
    }
};

}  // namespace headrace::cuda
