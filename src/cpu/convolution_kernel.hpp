// Convolution: the short convolution of a block of channels over runs of tokens: forward, backward and step.
#pragma once

#include "cpu/activation.hpp"
#include "cpu/interleave.hpp"
#include "cpu/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Pointers of `taps` rows in local memory: stores to rows cannot change them, hence they stay in registers.
template <class T, int taps>
struct Rows {
    T* at[taps];
    explicit Rows(T* const* rows) {
        for (int i = 0; i < taps; ++i) at[i] = rows[i];
    }
};

// dst = start + sum_i weights[i] * rows[i] in columns [first, end), a multiple of the vector length.
template <class T, int taps>
HEADRACE_INLINE void add_weighted(T* dst, const T* start, T* const* weights, T* const* rows, int first, int end) {
    const Rows<T, taps> w(weights), x(rows);
    for (int c = first; c < end; c += lanes<T>) {
        reg<T> total = load<T>(start + c);
        for (int i = 0; i < taps; ++i) total = fma(load<T>(w.at[i] + c), load<T>(x.at[i] + c), total);
        store<T>(dst + c, total);
    }
}
template <class T>
void weighted_sum(T* dst, const T* start, T* const* weights, T* const* rows, int terms, int first, int end) {
    int i = 0;
    for (; i + 4 <= terms; i += 4) add_weighted<T, 4>(dst, i == 0 ? start : dst, weights + i, rows + i, first, end);
    for (; i < terms; ++i) add_weighted<T, 1>(dst, i == 0 ? start : dst, weights + i, rows + i, first, end);
}

// sums[i] += factor * rows[i] in columns [first, end).
template <class T, int taps>
HEADRACE_INLINE void add_multiples(T* const* sums, const T* factor, T* const* rows, int first, int end) {
    const Rows<T, taps> sum(sums), x(rows);
    for (int c = first; c < end; c += lanes<T>) {
        const reg<T> f = load<T>(factor + c);
        for (int i = 0; i < taps; ++i) store<T>(sum.at[i] + c, fma(f, load<T>(x.at[i] + c), load<T>(sum.at[i] + c)));
    }
}
template <class T>
void add_products(T* const* sums, const T* factor, T* const* rows, int terms, int first, int end) {
    int i = 0;
    for (; i + 4 <= terms; i += 4) add_multiples<T, 4>(sums + i, factor, rows + i, first, end);
    for (; i < terms; ++i) add_multiples<T, 1>(sums + i, factor, rows + i, first, end);
}

// Brings bytes into the cache. Inlined by force: a function that does nothing else has no effect for a compiler to
// keep.
HEADRACE_INLINE void fetch(const char* source, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(source + at);
}

// Rows of the last W tokens, the oldest at 0.
template <class T>
struct Window {
    T** rows;
    int width;
    Window(Arena& arena, int tokens, int channels)
        : rows(arena.take<T*>(static_cast<std::size_t>(tokens))), width(tokens) {
        const Tile<T> memory = arena.tile<T>(width, channels);
        for (int i = 0; rows != nullptr && i < width; ++i) rows[i] = memory.at(i);
    }
    // The row of the next token, in place of the oldest.
    T* advance() {
        T* row = rows[0];
        for (int i = 1; i < width; ++i) rows[i - 1] = rows[i];
        return rows[width - 1] = row;
    }
};

// Times count from the first token of a sequence; the W inputs of its initial state have times -W to -1.
template <class T>
class Convolution {
  public:
    Convolution(const ConvolutionArgs& args, Arena& arena)
        : args_(args),
          W_(args.W),
          weights_(arena, W_, args.channels),
          inputs_(arena, W_, args.channels),
          d_sums_(arena, W_, args.channels),
          newest_first_(arena.take<T*>(static_cast<std::size_t>(W_))),
          weight_terms_(arena, W_, args.channels),
          bias_terms_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          bias_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          row_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          z_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          slope_(arena.take<T>(static_cast<std::size_t>(args.channels))),
          zeros_(arena.take<T>(static_cast<std::size_t>(args.channels))),
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
    static constexpr int fetched_ahead = 2;  // tokens

    void load_parameters(std::int64_t first_channel) {
        first_ = first_channel;
        count_ = static_cast<int>(args_.D - first_ < args_.channels ? args_.D - first_ : args_.channels);
        padded_ = round_up(count_, 16);
        const Strided& weight = args_.weight;
        load_columns(weights_.rows, weight, element_at(weight, first_, 0, 0), weight.stride[0], weight.stride[1]);
        for (int i = 0; i < W_; ++i) newest_first_[W_ - 1 - i] = weights_.rows[i];
        clear(zeros_);
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
    void load_columns(T* const* rows, const Strided& matrix, const char* place, std::int64_t channel_stride,
                      std::int64_t stride) const {
        if (is_flat(channel_stride, stride)) {
            load_row<T>(flat_, place, matrix.dtype, 1, 4 * count_, 4 * padded_);
            return split4(rows, flat_, padded_);
        }
        const std::int64_t bytes = stride * static_cast<std::int64_t>(size_of(matrix.dtype));
        for (int i = 0; i < W_; ++i) {
            load_row<T>(rows[i], place + i * bytes, matrix.dtype, channel_stride, count_, padded_);
        }
    }
    void store_columns(const Strided& matrix, char* place, std::int64_t channel_stride, std::int64_t stride,
                       T* const* rows) const {
        if (is_flat(channel_stride, stride)) {
            join4(flat_, rows, padded_);
            return store_row<T>(place, matrix.dtype, 1, flat_, 4 * count_);
        }
        const std::int64_t bytes = stride * static_cast<std::int64_t>(size_of(matrix.dtype));
        for (int i = 0; i < W_; ++i) store_row<T>(place + i * bytes, matrix.dtype, channel_stride, rows[i], count_);
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
    // The window as it is before the token at `time`: advance() and that token's input complete it.
    void open_inputs(std::int64_t n, std::int64_t time) {
        for (int i = 1; i < W_; ++i) load_input(inputs_.rows[i], n, time - W_ + i);
    }

    // body(first, end) over pieces of the channels. Between them the rows of a later token are fetched, a few lines at
    // a time: in one go they would wait for each other, and the computation for all of them.
    template <class Body>
    void in_pieces(std::int64_t n, std::int64_t later_token, const Body& body) const {
        constexpr int piece = 64;
        const char *x = row_to_fetch(args_.x, n, later_token), *d_y = row_to_fetch(args_.d_y, n, later_token);
        for (int first = 0; first < padded_; first += piece) {
            const int end = first + piece < padded_ ? first + piece : padded_;
            const int last = end < count_ ? end : count_, bytes = static_cast<int>(size_of(args_.x.dtype));
            if (x != nullptr) fetch(x + first * bytes, (last - first) * bytes);
            if (d_y != nullptr) fetch(d_y + first * bytes, (last - first) * bytes);
            body(first, end);
        }
    }
    const char* row_to_fetch(const Strided& tensor, std::int64_t n, std::int64_t time) const {
        const bool is_row = tensor.given && tensor.stride[2] == 1 && time >= 0 && time < length_of(n);
        return is_row ? token_at(tensor, n, time) : nullptr;
    }

    void forward_block(const TokenBlock& block) {
        const std::int64_t n = block.sequence;
        open_inputs(n, block.begin);
        for (std::int64_t t = block.begin; t < block.end; ++t) {
            load_input(inputs_.advance(), n, t);
            in_pieces(n, t + fetched_ahead, [&](int first, int end) {
                weighted_sum(row_, bias_, weights_.rows, inputs_.rows, W_, first, end);
                activate(row_ + first, args_.activation, end - first);
            });
            store_token(args_.y, n, t, row_);
        }
        if (block.end < length_of(n) || !args_.final_state.given) return;
        for (int i = 0; i < W_; ++i) {
            load_input(row_, n, block.end - W_ + i);
            store_to_state(args_.final_state, n, i, row_);
        }
    }

    // An input's gradient needs those of the W sums it enters: it is complete W - 1 tokens later.
    void backward_block(const TokenBlock& block, double* sums) {
        const std::int64_t n = block.sequence, delay = W_ - 1, length = length_of(n);
        const bool of_inputs = args_.d_x.given || args_.d_initial_state.given;
        const std::int64_t begin = of_inputs && block.begin == 0 ? -W_ : block.begin;
        const std::int64_t end = of_inputs ? block.end + delay : block.end;
        for (int i = 0; i < W_; ++i) clear(weight_terms_.rows[i]);
        clear(bias_terms_);
        open_inputs(n, begin);
        for (std::int64_t t = begin; t < end; ++t) {
            T *input = inputs_.advance(), *d_sum = d_sums_.advance();
            if (t < length) load_input(input, n, t);
            const bool has_sum = t >= 0 && t < length && args_.d_y.given;
            has_sum ? load_token(d_sum, args_.d_y, n, t) : clear(d_sum);
            const bool counts = has_sum && sums != nullptr && t >= block.begin && t < block.end;
            const bool completes = of_inputs && t >= begin + delay;
            const T* start = completes ? load_state_gradient(n, t - delay) : nullptr;
            in_pieces(n, t + fetched_ahead, [&](int first, int last) {
                if (has_sum) multiply_by_slope(d_sum, first, last);
                if (counts) add_terms(d_sum, first, last);
                if (completes) weighted_sum(row_, start, newest_first_, d_sums_.rows, W_, first, last);
            });
            if (completes) store_input_gradient(n, t - delay);
        }
        for (int i = 0; sums != nullptr && i <= W_; ++i) {
            const T* terms = i < W_ ? weight_terms_.rows[i] : bias_terms_;
            for (int c = 0; c < count_; ++c) sums[i * args_.D + c] += static_cast<double>(terms[c]);
        }
    }

    // From the gradient of the activation to that of the weighted sum; inputs_ is its window.
    void multiply_by_slope(T* d_sum, int first, int end) {
        if (args_.activation == ActivationFormula::none) return;
        weighted_sum(z_, bias_, weights_.rows, inputs_.rows, W_, first, end);
        activate_with_slope(z_ + first, slope_ + first, args_.activation, end - first);
        for (int c = first; c < end; c += lanes<T>) store<T>(d_sum + c, load<T>(d_sum + c) * load<T>(slope_ + c));
    }

    void add_terms(const T* d_sum, int first, int end) {
        add_products(weight_terms_.rows, d_sum, inputs_.rows, W_, first, end);
        for (int c = first; c < end; c += lanes<T>) {
            store<T>(bias_terms_ + c, load<T>(bias_terms_ + c) + load<T>(d_sum + c));
        }
    }

    // What the gradient of the final state adds to that of the input at a time.
    const T* load_state_gradient(std::int64_t n, std::int64_t time) {
        const std::int64_t place = time - (length_of(n) - W_);
        if (place < 0 || !args_.d_final_state.given) return zeros_;
        load_from_state(row_, args_.d_final_state, n, place);
        return row_;
    }
    void store_input_gradient(std::int64_t n, std::int64_t time) const {
        const Strided& target = time < 0 ? args_.d_initial_state : args_.d_x;
        if (!target.given) return;
        time < 0 ? store_to_state(target, n, W_ + time, row_) : store_token(target, n, time, row_);
    }

    void step_sequence(std::int64_t n) {
        const Strided& states = args_.states;
        const std::int64_t state = args_.rows == nullptr ? n : args_.rows[n];
        char* y = element_at(args_.y, 0, n, first_);
        if (state < 0) {
            clear(row_);
            return store_row<T>(y, args_.y.dtype, args_.y.stride[2], row_, count_);
        }
        char* place = element_at(states, state, first_, 0);
        load_columns(inputs_.rows, states, place, states.stride[1], states.stride[2]);
        load_row<T>(inputs_.advance(), element_at(args_.x, 0, n, first_), args_.x.dtype, args_.x.stride[2], count_,
                    padded_);
        store_columns(states, place, states.stride[1], states.stride[2], inputs_.rows);
        weighted_sum(row_, bias_, weights_.rows, inputs_.rows, W_, 0, padded_);
        activate(row_, args_.activation, padded_);
        store_row<T>(y, args_.y.dtype, args_.y.stride[2], row_, count_);
    }

    const ConvolutionArgs& args_;
    const int W_;
    Window<T> weights_, inputs_, d_sums_;
    T** newest_first_;        // the rows of weights_ from the last to the first
    Window<T> weight_terms_;  // gradients within a block of tokens
    T *bias_terms_, *bias_, *row_, *z_, *slope_, *zeros_;
    T* flat_;                     // [channels, 4]
    std::int64_t first_ = 0;      // channel of the task
    int count_ = 0, padded_ = 0;  // its channels, and those in whole groups of registers
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
