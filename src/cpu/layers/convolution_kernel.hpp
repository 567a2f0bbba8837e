// Convolution: the short convolution of a block of channels over runs of tokens: forward, backward and step.
#pragma once

#include "cpu/layers/activation.hpp"
#include "cpu/layers/interleave.hpp"
#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// sums[t] += sum_i weights[i] * rows[t + i], t < tokens, in the columns of one register.
template <class T, int tokens, int taps>
HEADRACE_INLINE void add_taps(reg<T>* sums, Tile<T> weights, Tile<T> rows) {
    unroll<taps, tokens>([&](auto i, auto t) __attribute__((always_inline)) {
        sums[t] = fma(load<T>(weights.at(i)), load<T>(rows.at(t + i)), sums[t]);
    });
}
// sums[t] = start + sum_i weights[i] * rows[t + i], i < terms.
template <class T, int tokens>
HEADRACE_INLINE void weighted_sums(reg<T>* sums, reg<T> start, Tile<T> weights, Tile<T> rows, int terms) {
    unroll<1, tokens>([&](auto, auto t) __attribute__((always_inline)) { sums[t] = start; });
    int i = 0;
    for (; i + 4 <= terms; i += 4) add_taps<T, tokens, 4>(sums, weights.from(i, 0), rows.from(i, 0));
    for (; i < terms; ++i) add_taps<T, tokens, 1>(sums, weights.from(i, 0), rows.from(i, 0));
}

// sums[i] += sum_t factors[t] * rows[t + i], t < tokens, in the columns of one register.
template <class T, int tokens, int taps>
HEADRACE_INLINE void add_dots(Tile<T> sums, Tile<T> factors, Tile<T> rows) {
    reg<T> total[taps];
    unroll<1, taps>([&](auto, auto i) __attribute__((always_inline)) { total[i] = load<T>(sums.at(i)); });
    unroll<tokens, taps>([&](auto t, auto i) __attribute__((always_inline)) {
        total[i] = fma(load<T>(factors.at(t)), load<T>(rows.at(t + i)), total[i]);
    });
    unroll<1, taps>([&](auto, auto i) __attribute__((always_inline)) { store<T>(sums.at(i), total[i]); });
}
template <class T, int tokens>
HEADRACE_INLINE void add_products(Tile<T> sums, Tile<T> factors, Tile<T> rows, int terms) {
    int i = 0;
    for (; i + 4 <= terms; i += 4) add_dots<T, tokens, 4>(sums.from(i, 0), factors, rows.from(i, 0));
    for (; i < terms; ++i) add_dots<T, tokens, 1>(sums.from(i, 0), factors, rows.from(i, 0));
}

// Rows of a run that is yet to come; none where their elements have gaps.
struct ComingRows {
    const char* first = nullptr;
    std::int64_t step = 0, element = 1;  // bytes
    int count = 0;
};

// Brings a line of each row into the cache, if one begins at the column. The run before is computed between lines: in
// one go they would wait for each other, and the computation for all of them.
HEADRACE_INLINE void fetch(const ComingRows& rows, int column) {
    const std::int64_t byte = column * rows.element;
    if (byte % 64 != 0) return;
    for (int i = 0; i < rows.count; ++i) __builtin_prefetch(rows.first + i * rows.step + byte, 0, 2);
}

// Rows [first, end) of a run.
struct RunRows {
    int first = 0, end = 0;
    bool holds(int i) const { return i >= first && i < end; }
};

// body(tokens, first): a whole run, whose sums stay in registers and share the loads of weights and rows, or tokens one
// at a time. The order of a token's sum is the same in both.
template <class Body>
HEADRACE_INLINE void in_groups(const RunRows& rows, const Body& body) {
    int first = rows.first;
    for (; first + run_tokens <= rows.end; first += run_tokens) {
        body(std::integral_constant<int, run_tokens>{}, first);
    }
    for (; first < rows.end; ++first) body(std::integral_constant<int, 1>{}, first);
}

// Times count from the first token of a sequence; the W inputs of its initial state have times -W to -1. Tokens are
// taken in runs; before the rows of a run a tile holds those of the W - 1 tokens before it.
template <class T>
class Convolution {
  public:
    Convolution(const ConvolutionArgs& args, Arena& arena)
        : args_(args),
          W_(args.W),
          delay_(args.W - 1),
          weights_(arena.tile<T>(W_, args.channels)),
          inputs_(arena.tile<T>(delay_ + run_tokens, args.channels)),
          d_sums_(arena.tile<T>(delay_ + run_tokens, args.channels)),
          terms_(arena.tile<T>(W_ + 1, args.channels)),
          row_(arena.tile<T>(1, args.channels)),
          bias_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          flat_(arena.take<T>(static_cast<std::size_t>(4 * args.channels))) {}

    void forward(std::int64_t group, std::int64_t first_channel) {
        load_parameters(first_channel);
        for (std::int64_t b = args_.groups.first(group); b < args_.groups.first(group + 1); ++b) {
            forward_block(args_.blocks[b]);
        }
    }

    void backward(std::int64_t group, std::int64_t first_channel) {
        load_parameters(first_channel);
        double* sums = args_.sums == nullptr ? nullptr : args_.sums + group * (W_ + 1) * args_.D + first_channel;
        for (int i = 0; sums != nullptr && i <= W_; ++i) {
            for (int c = 0; c < count_; ++c) sums[i * args_.D + c] = 0;
        }
        for (std::int64_t b = args_.groups.first(group); b < args_.groups.first(group + 1); ++b) {
            backward_block(args_.blocks[b], sums);
        }
    }

    void step(std::int64_t group, std::int64_t first_channel) {
        load_parameters(first_channel);
        for (std::int64_t n = args_.groups.first(group); n < args_.groups.first(group + 1); ++n) step_sequence(n);
    }

  private:
    void load_parameters(std::int64_t first_channel) {
        first_ = first_channel;
        count_ = static_cast<int>(args_.D - first_ < args_.channels ? args_.D - first_ : args_.channels);
        padded_ = round_up(count_, 16);
        const Strided& weight = args_.weight;
        load_columns(weights_, weight, element_at(weight, first_, 0, 0), weight.stride[0], weight.stride[1]);
        clear(bias_);
        if (args_.bias.given) {
            load_row<T>(bias_, element_at(args_.bias, first_, 0, 0), args_.bias.dtype, args_.bias.stride[0], count_,
                        padded_);
        }
    }

    void clear(T* row) const {
        for (int c = 0; c < padded_; ++c) row[c] = 0;
    }
    // Columns of a matrix [channels, W] at `place`. The layout of four neighbours per channel moves as whole registers.
    bool is_flat(std::int64_t channel_stride, std::int64_t stride) const {
        return W_ == 4 && channel_stride == 4 && stride == 1;
    }
    void load_columns(Tile<T> rows, const Strided& matrix, const char* place, std::int64_t channel_stride,
                      std::int64_t stride) const {
        if (is_flat(channel_stride, stride)) {
            load_row<T>(flat_, place, matrix.dtype, 1, 4 * count_, 4 * padded_);
            return split4(rows, flat_, padded_);
        }
        const std::int64_t bytes = stride * static_cast<std::int64_t>(size_of(matrix.dtype));
        for (int i = 0; i < W_; ++i) {
            load_row<T>(rows.at(i), place + i * bytes, matrix.dtype, channel_stride, count_, padded_);
        }
    }
    void store_columns(const Strided& matrix, char* place, std::int64_t channel_stride, std::int64_t stride,
                       Tile<T> rows) const {
        if (is_flat(channel_stride, stride)) {
            join4(flat_, rows, padded_);
            return store_row<T>(place, matrix.dtype, 1, flat_, 4 * count_);
        }
        const std::int64_t bytes = stride * static_cast<std::int64_t>(size_of(matrix.dtype));
        for (int i = 0; i < W_; ++i) store_row<T>(place + i * bytes, matrix.dtype, channel_stride, rows.at(i), count_);
    }
    std::int64_t length_of(std::int64_t n) const { return args_.sequences[n].end - args_.sequences[n].begin; }

    // Rows of [B,T,D] tensors at a time >= 0, and of state n, [D,W], at a place of its W.
    char* token_at(const Strided& tensor, std::int64_t n, std::int64_t time) const {
        const TokenRange& range = args_.sequences[n];
        return element_at(tensor, range.row, range.begin + time, first_);
    }
    void load_token(T* row, const Strided& tensor, std::int64_t n, std::int64_t time) const {
        load_row<T>(row, token_at(tensor, n, time), tensor.dtype, tensor.stride[2], count_, padded_);
    }
    void store_token(const Strided& tensor, std::int64_t n, std::int64_t time, const T* row) const {
        char* place = token_at(tensor, n, time);
        tensor.stream ? stream_row<T>(place, tensor.dtype, tensor.stride[2], row, count_)
                      : store_row<T>(place, tensor.dtype, tensor.stride[2], row, count_);
    }
    void load_from_state(T* row, const Strided& state, std::int64_t n, std::int64_t place) const {
        load_row<T>(row, element_at(state, n, first_, place), state.dtype, state.stride[1], count_, padded_);
    }
    void store_to_state(const Strided& state, std::int64_t n, std::int64_t place, const T* row) const {
        store_row<T>(element_at(state, n, first_, place), state.dtype, state.stride[1], row, count_);
    }

    void load_input(T* row, std::int64_t n, std::int64_t time) const {
        if (time >= 0) return load_token(row, args_.x, n, time);
        if (time >= -W_ && args_.initial_state.given) return load_from_state(row, args_.initial_state, n, W_ + time);
        clear(row);
    }
    // The inputs before a run that begins at `time`.
    void open_inputs(std::int64_t n, std::int64_t time) const {
        for (int i = 0; i < delay_; ++i) load_input(inputs_.at(i), n, time - delay_ + i);
    }
    // The last W - 1 rows of a run of `count` tokens become those before the next run.
    void keep_last(Tile<T> rows, int count) const { copy(rows, rows.from(count, 0), delay_, padded_); }

    // The rows that times [first, end) have in the run of `count` tokens that begins at `begin`.
    static RunRows rows_of(std::int64_t first, std::int64_t end, std::int64_t begin, int count) {
        const auto row = [&](std::int64_t time) {
            return static_cast<int>(time <= begin ? 0 : time >= begin + count ? count : time - begin);
        };
        return {row(first), row(end)};
    }

    ComingRows coming_rows(const Strided& tensor, std::int64_t n, std::int64_t time) const {
        const RunRows rows = rows_of(0, length_of(n), time, run_tokens);
        if (!tensor.given || tensor.stride[2] != 1 || rows.first == rows.end) return {};
        const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
        return {token_at(tensor, n, time + rows.first), tensor.stride[1] * element, element, rows.end - rows.first};
    }

    // Outputs in the columns of one register; each takes the place of the first row of its window.
    void compute_outputs(Tile<T> inputs, const RunRows& rows, int column) const {
        in_groups(rows, [&](auto tokens, int first) {
            reg<T> sums[tokens()];
            weighted_sums<T, tokens()>(sums, load<T>(bias_ + column), weights_.from(0, column),
                                       inputs.from(first, column), W_);
            unroll<1, tokens()>([&](auto, auto t) __attribute__((always_inline)) {
                store<T>(inputs.at(first + t) + column, activated<T>(sums[t], args_.activation).value);
            });
        });
    }

    void forward_block(const TokenBlock& block) const {
        const std::int64_t n = block.sequence;
        open_inputs(n, block.begin);
        for (std::int64_t t = block.begin; t < block.end; t += run_tokens) {
            const RunRows run = rows_of(t, block.end, t, run_tokens);
            for (int i = 0; i < run.end; ++i) load_token(inputs_.at(delay_ + i), args_.x, n, t + i);
            const ComingRows x = coming_rows(args_.x, n, t + run_tokens);
            for (int c = 0; c < padded_; c += lanes<T>) {
                fetch(x, c);
                compute_outputs(inputs_, run, c);
            }
            for (int i = 0; i < run.end; ++i) store_token(args_.y, n, t + i, inputs_.at(i));
            keep_last(inputs_, run.end);
        }
        if (block.end < length_of(n) || !args_.final_state.given) return;
        for (int i = 0; i < W_; ++i) {
            load_input(row_.data, n, block.end - W_ + i);
            store_to_state(args_.final_state, n, i, row_.data);
        }
    }

    // An input's gradient needs those of the W sums it enters: it is complete W - 1 tokens later.
    void backward_block(const TokenBlock& block, double* sums) const {
        const std::int64_t n = block.sequence, length = args_.d_y.given ? length_of(n) : 0;
        const bool of_inputs = args_.d_x.given || args_.d_initial_state.given;
        const std::int64_t begin = of_inputs && block.begin == 0 ? -W_ : block.begin;
        const std::int64_t end = of_inputs ? block.end + delay_ : block.end;
        const std::int64_t counted_end = sums == nullptr || !args_.d_y.given ? block.begin : block.end;
        fill(terms_, T(0), W_ + 1, padded_);
        open_inputs(n, begin);
        for (std::int64_t t = begin; t < end; t += run_tokens) {
            const RunRows run = rows_of(t, end, t, run_tokens), with_sum = rows_of(0, length, t, run.end),
                          counted = rows_of(block.begin, counted_end, t, run.end),
                          complete = of_inputs ? rows_of(begin + delay_, end, t, run.end) : RunRows{};
            for (int i = 0; i < run.end; ++i) load_run_row(n, t, i, with_sum);
            const ComingRows x = coming_rows(args_.x, n, t + run_tokens),
                             d_y = coming_rows(args_.d_y, n, t + run_tokens);
            for (int c = 0; c < padded_; c += lanes<T>) {
                fetch(x, c);
                fetch(d_y, c);
                multiply_by_slopes(with_sum, c);
                add_terms(counted, c);
                compute_input_gradients(complete, c);
            }
            for (int i = complete.first; i < complete.end; ++i) store_input_gradient(n, t + i - delay_, d_sums_.at(i));
            keep_last(inputs_, run.end);
            keep_last(d_sums_, run.end);
        }
        for (int i = 0; sums != nullptr && i <= W_; ++i) {
            for (int c = 0; c < count_; ++c) sums[i * args_.D + c] += static_cast<double>(terms_.at(i)[c]);
        }
    }

    // Row i of the run at `begin`: no sum follows the last token, hence nothing reads an input there.
    void load_run_row(std::int64_t n, std::int64_t begin, int i, const RunRows& with_sum) const {
        if (begin + i < length_of(n)) load_input(inputs_.at(delay_ + i), n, begin + i);
        with_sum.holds(i) ? load_token(d_sums_.at(delay_ + i), args_.d_y, n, begin + i) : clear(d_sums_.at(delay_ + i));
    }

    // From the gradient of the activation to that of the weighted sum.
    void multiply_by_slopes(const RunRows& rows, int column) const {
        if (args_.activation == ActivationFormula::none) return;
        in_groups(rows, [&](auto tokens, int first) {
            reg<T> sums[tokens()];
            weighted_sums<T, tokens()>(sums, load<T>(bias_ + column), weights_.from(0, column),
                                       inputs_.from(first, column), W_);
            const Tile<T> d_sums = d_sums_.from(delay_ + first, column);
            unroll<1, tokens()>([&](auto, auto t) __attribute__((always_inline)) {
                store<T>(d_sums.at(t), load<T>(d_sums.at(t)) * activated<T>(sums[t], args_.activation).slope);
            });
        });
    }

    // The gradients of the weights, then of the bias.
    void add_terms(const RunRows& rows, int column) const {
        in_groups(rows, [&](auto tokens, int first) {
            const Tile<T> d_sums = d_sums_.from(delay_ + first, column);
            add_products<T, tokens()>(terms_.from(0, column), d_sums, inputs_.from(first, column), W_);
            T* bias_terms = terms_.at(W_) + column;
            reg<T> total = load<T>(bias_terms);
            for (int t = 0; t < tokens(); ++t) total += load<T>(d_sums.at(t));
            store<T>(bias_terms, total);
        });
    }

    // What the sums of a window give to its oldest input takes the place of that input's own d_sum.
    void compute_input_gradients(const RunRows& rows, int column) const {
        const Tile<T> newest_first = {weights_.at(delay_) + column, -weights_.row};
        in_groups(rows, [&](auto tokens, int first) {
            reg<T> sums[tokens()];
            weighted_sums<T, tokens()>(sums, reg<T>{}, newest_first, d_sums_.from(first, column), W_);
            unroll<1, tokens()>([&](auto, auto t) __attribute__((always_inline)) { store<T>(d_sums_.at(first + t) + column, sums[t]); });
        });
    }

    // Completes the gradient of the input at `time` with that of the final state.
    void store_input_gradient(std::int64_t n, std::int64_t time, T* row) const {
        const std::int64_t place = time - (length_of(n) - W_);
        if (place >= 0 && args_.d_final_state.given) {
            load_from_state(row_.data, args_.d_final_state, n, place);
            add(Tile<T>{row}, row_, 1, padded_);
        }
        const Strided& target = time < 0 ? args_.d_initial_state : args_.d_x;
        if (!target.given) return;
        time < 0 ? store_to_state(target, n, W_ + time, row) : store_token(target, n, time, row);
    }

    void step_sequence(std::int64_t n) const {
        const Strided& states = args_.states;
        const std::int64_t state = args_.rows == nullptr ? n : args_.rows[n];
        char* y = element_at(args_.y, 0, n, first_);
        if (state < 0) {
            clear(row_.data);
            return store_row<T>(y, args_.y.dtype, args_.y.stride[2], row_.data, count_);
        }
        char* place = element_at(states, state, first_, 0);
        load_columns(inputs_, states, place, states.stride[1], states.stride[2]);
        load_row<T>(inputs_.at(W_), element_at(args_.x, 0, n, first_), args_.x.dtype, args_.x.stride[2], count_,
                    padded_);
        const Tile<T> window = inputs_.from(1, 0);
        store_columns(states, place, states.stride[1], states.stride[2], window);
        for (int c = 0; c < padded_; c += lanes<T>) compute_outputs(window, {0, 1}, c);
        store_row<T>(y, args_.y.dtype, args_.y.stride[2], window.data, count_);
    }

    const ConvolutionArgs& args_;
    const int W_, delay_;
    Tile<T> weights_;          // [W, channels]
    Tile<T> inputs_, d_sums_;  // [W - 1 + run, channels]
    Tile<T> terms_;            // [W + 1, channels], gradients of weights and bias within a block of tokens
    Tile<T> row_;
    T *bias_, *flat_;             // [channels], [channels, 4]
    std::int64_t first_ = 0;      // channel of the task
    int count_ = 0, padded_ = 0;  // its channels, and those in whole groups of registers
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
