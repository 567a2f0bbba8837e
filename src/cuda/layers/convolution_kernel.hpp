// Convolution: the short convolution of 32 channels over windows of tokens: forward, backward and step (math.md,
// section 10).
#pragma once

#include "cuda/layers/layer_ops.hpp"

namespace headrace::cuda {

// A lane has a channel. Times count from the first token of a row; what lies before a sequence is its initial state.
template <class T>
struct Convolution {
    const ConvolutionArgs& args;
    std::int64_t channel;  // of the lane
    bool inside;           // the channel exists
    // of a window, in shared memory
    Tile<T> d_sums;  // [window_tokens + W - 1, 32] gradients of the weighted sums of its tokens and of those behind it
    std::int64_t *begin, *end;  // [window_tokens + W - 1] of the sequences of these tokens, in their row
    std::int64_t* sequence;     // their numbers; -1: no token

    __host__ __device__ Convolution(const ConvolutionArgs& arguments, Arena& arena, std::int64_t first_channel)
        : args(arguments), channel(first_channel), inside(false) {
        const int tokens = window_tokens + args.W - 1;
        d_sums = arena.tile<T>(tokens, warp_lanes);
        for (std::int64_t** row : {&begin, &end, &sequence}) *row = arena.take<std::int64_t>(tokens);
    }
    HEADRACE_DEVICE void take_channel() {
        channel += lane();
        inside = channel < args.D;
    }

    HEADRACE_DEVICE void forward(std::int64_t group) {
        take_channel();
        HEADRACE_ROLLED
        for (std::int64_t window = first_of(args.groups, group); window < first_of(args.groups, group + 1); ++window) {
            const std::int64_t row = window / windows(), first = window % windows() * window_tokens;
            find_sequences(row, first, window_tokens);
            HEADRACE_ROLLED
            for (int i = warp(); i < window_tokens; i += block_warps) {
                if (sequence[i] < 0 || !inside) continue;
                const T z = weighted_sum(row, i, first + i);
                store_own(args.y, offset_of(args.y, row, first + i, channel), activated(z, args.activation).value);
            }
        }
    }

    // The last W inputs of sequence n, with those of its initial state where it is shorter.
    HEADRACE_DEVICE void leave_state(std::int64_t n) {
        take_channel();
        const TokenRange range = range_of(n);
        HEADRACE_ROLLED
        for (int i = warp(); i < args.W && inside; i += block_warps) {
            const T value = input(range.row, n, range.begin, range.end - args.W + i);
            store_any(args.final_state, offset_of(args.final_state, n, channel, i), value);
        }
    }

    HEADRACE_DEVICE void backward(std::int64_t group) {
        take_channel();
        HEADRACE_ROLLED
        for (std::int64_t window = first_of(args.groups, group); window < first_of(args.groups, group + 1); ++window) {
            const std::int64_t row = window / windows(), first = window % windows() * window_tokens;
            find_sequences(row, first, window_tokens + args.W - 1);
            fill_gradients(row, first);
            if (args.d_x.given) store_input_gradients(row, first);
            if (args.sums != nullptr)
                add_parameter_gradients(row, first, group, window == first_of(args.groups, group));
        }
    }

    // d_initial_state of sequence n: of the inputs at times -W to -1 before it.
    HEADRACE_DEVICE void leave_state_gradient(std::int64_t n) {
        take_channel();
        const TokenRange range = range_of(n);
        HEADRACE_ROLLED
        for (int place = warp(); place < args.W && inside; place += block_warps) {
            const std::int64_t time = range.begin - args.W + place;
            T sum = state_gradient(n, range.end, time);
            HEADRACE_ROLLED
            for (int i = 0; i < args.W; ++i) {
                const std::int64_t t = time + args.W - 1 - i;
                if (t >= range.begin && t < range.end)
                    sum = fma(weight(i), sum_gradient(range.row, n, range.begin, t), sum);
            }
            store_any(args.d_initial_state, offset_of(args.d_initial_state, n, channel, place), sum);
        }
    }

    // One token of sequence n: the row of the pool loses its oldest input. Row -1 stands for padding, which leaves
    // zeros; another that the pool does not have leaves NaN.
    HEADRACE_DEVICE void step(std::int64_t n) {
        take_channel();
        if (warp() != 0 || !inside) return;
        const std::int64_t row = args.indices.given ? load_integer(args.indices, n * args.indices.stride[0]) : n;
        T z = row == -1 ? T(0) : not_a_number<T>();
        if (row >= 0 && row < args.pool_rows) {
            z = bias();
            HEADRACE_ROLLED
            for (int i = 0; i < args.W; ++i) {
                const bool newest = i + 1 == args.W;
                const T value = newest ? load_own<T>(args.x, offset_of(args.x, n, channel, 0))
                                       : load_any<T>(args.states, offset_of(args.states, row, channel, i + 1));
                store_any(args.states, offset_of(args.states, row, channel, i), value);
                z = fma(weight(i), value, z);
            }
            z = activated(z, args.activation).value;
        }
        store_own(args.y, offset_of(args.y, n, channel, 0), z);
    }

  private:
    HEADRACE_DEVICE std::int64_t windows() const { return (args.T + window_tokens - 1) / window_tokens; }
    HEADRACE_DEVICE TokenRange range_of(std::int64_t n) const {
        if (!args.cu_seqlens.given) return {n, 0, args.T};
        const std::int64_t stride = args.cu_seqlens.stride[0];
        return {0, load_integer(args.cu_seqlens, n * stride), load_integer(args.cu_seqlens, (n + 1) * stride)};
    }
    HEADRACE_DEVICE T weight(int i) const {
        return load_any<T>(args.weight, channel * args.weight.stride[0] + i * args.weight.stride[1]);
    }
    HEADRACE_DEVICE T bias() const {
        return args.bias.given ? load_any<T>(args.bias, channel * args.bias.stride[0]) : T(0);
    }
    // The sequences of tokens [first, first + count) of a row, by binary search for the last that begins at or before
    // each.
    HEADRACE_DEVICE void find_sequences(std::int64_t row, std::int64_t first, int count) const {
        ptx::sync_block();
        each(count, [&](int i) {
            const std::int64_t time = first + i;
            std::int64_t low = args.cu_seqlens.given ? 0 : row, high = args.cu_seqlens.given ? args.N : row + 1;
            while (high - low > 1) {
                const std::int64_t middle = (low + high) / 2;
                (range_of(middle).begin <= time ? low : high) = middle;
            }
            const bool exists = time < args.T && low < args.N;
            const TokenRange range = exists ? range_of(low) : TokenRange{0, 0, 0};
            begin[i] = range.begin;
            end[i] = range.end;
            sequence[i] = exists ? low : -1;
        });
        ptx::sync_block();
    }
    // The input of sequence n at a time, which may lie before it.
    HEADRACE_DEVICE T input(std::int64_t row, std::int64_t n, std::int64_t first, std::int64_t time) const {
        if (time >= first) return load_own<T>(args.x, offset_of(args.x, row, time, channel));
        if (time < first - args.W || !args.initial_state.given) return T(0);
        return load_any<T>(args.initial_state, offset_of(args.initial_state, n, channel, args.W + time - first));
    }
    HEADRACE_DEVICE T weighted_sum(std::int64_t row, std::int64_t n, std::int64_t first, std::int64_t time) const {
        T z = bias();
        HEADRACE_ROLLED
        for (int i = 0; i < args.W; ++i) z = fma(weight(i), input(row, n, first, time - (args.W - 1) + i), z);
        return z;
    }
    HEADRACE_DEVICE T weighted_sum(std::int64_t row, int i, std::int64_t time) const {
        return weighted_sum(row, sequence[i], begin[i], time);
    }
    // The gradient of a token's weighted sum.
    HEADRACE_DEVICE T sum_gradient(std::int64_t row, std::int64_t n, std::int64_t first, std::int64_t time) const {
        if (!args.d_y.given) return T(0);
        const T d_y = load_own<T>(args.d_y, offset_of(args.d_y, row, time, channel));
        if (args.activation == ActivationFormula::none) return d_y;
        return d_y * activated(weighted_sum(row, n, first, time), args.activation).slope;
    }
    // What the final state's gradient gives to an input that it holds.
    HEADRACE_DEVICE T state_gradient(std::int64_t n, std::int64_t last, std::int64_t time) const {
        const std::int64_t place = time - (last - args.W);
        if (!args.d_final_state.given || place < 0 || place >= args.W) return T(0);
        return load_any<T>(args.d_final_state, offset_of(args.d_final_state, n, channel, place));
    }
    HEADRACE_DEVICE void fill_gradients(std::int64_t row, std::int64_t first) const {
        HEADRACE_ROLLED
        for (int i = warp(); i < window_tokens + args.W - 1; i += block_warps) {
            d_sums.at(i, lane()) =
                inside && sequence[i] >= 0 ? sum_gradient(row, sequence[i], begin[i], first + i) : T(0);
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE void store_input_gradients(std::int64_t row, std::int64_t first) const {
        HEADRACE_ROLLED
        for (int s = warp(); s < window_tokens; s += block_warps) {
            if (sequence[s] < 0 || !inside) continue;
            T sum = state_gradient(sequence[s], end[s], first + s);
            HEADRACE_ROLLED
            for (int i = 0; i < args.W; ++i) {
                const int t = s + args.W - 1 - i;
                if (sequence[t] == sequence[s]) sum = fma(weight(i), d_sums.at(t, lane()), sum);
            }
            store_any(args.d_x, offset_of(args.d_x, row, first + s, channel), sum);
        }
    }
    // sums[group, i, channel], i = W for the bias: a window's terms in T, windows in double.
    HEADRACE_DEVICE void add_parameter_gradients(std::int64_t row, std::int64_t first, std::int64_t group,
                                                 bool begins) const {
        HEADRACE_ROLLED
        for (int i = warp(); i <= args.W && inside; i += block_warps) {
            T sum = 0;
            HEADRACE_ROLLED
            for (int t = 0; t < window_tokens; ++t) {
                if (sequence[t] < 0) continue;
                const T x = i == args.W ? T(1) : input(row, sequence[t], begin[t], first + t - (args.W - 1) + i);
                sum = fma(d_sums.at(t, lane()), x, sum);
            }
            double& total = args.sums[(group * (args.W + 1) + i) * args.D + channel];
            total = begins ? static_cast<double>(sum) : total + static_cast<double>(sum);
        }
    }
};

}  // namespace headrace::cuda
