// RmsNorm: gated RMS normalisation of rows, forward and backward (math.md 11).
#pragma once

#include "cpu/activation.hpp"
#include "cpu/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
class RmsNorm {
  public:
    RmsNorm(const RmsNormArgs& args, Arena& arena)
        : args_(args),
          D_(args.D),
          padded_(round_up(args.D, 16)),
          weight_(arena.take<T>(static_cast<std::size_t>(padded_))),
          x_(arena.tile<T>(1, padded_)),
          gate_(arena.take<T>(static_cast<std::size_t>(padded_))),
          slope_(arena.take<T>(static_cast<std::size_t>(padded_))),
          d_y_(arena.take<T>(static_cast<std::size_t>(padded_))),
          row_(arena.tile<T>(1, padded_)),
          terms_(arena.take<T>(static_cast<std::size_t>(padded_))) {}

    void forward(std::int64_t group) {
        load_weight();
        for (std::int64_t row = args_.groups.first(group); row < args_.groups.first(group + 1); ++row) {
            const Position at = position_of(row);
            load_normalised(at);
            for (int c = 0; c < padded_; c += lanes<T>) {
                store<T>(row_.data + c, load<T>(x_.data + c) * load<T>(weight_ + c) * load<T>(gate_ + c));
            }
            store_at(args_.y, at);
        }
    }

    void backward(std::int64_t group) {
        load_weight();
        double* sums = args_.sums == nullptr ? nullptr : args_.sums + group * D_;
        for (int c = 0; sums != nullptr && c < D_; ++c) sums[c] = 0;
        fill(terms_, T(0));
        int pending = 0;
        for (std::int64_t row = args_.groups.first(group); row < args_.groups.first(group + 1); ++row) {
            backward_row(position_of(row));
            if (++pending == most_terms) {
                move_terms(sums);
                pending = 0;
            }
        }
        move_terms(sums);
    }

  private:
    static constexpr int most_terms = 128;  // rows that are added in T before they join the sum in double

    struct Position {
        std::int64_t i, j, k;
    };
    Position position_of(std::int64_t row) const {
        const std::int64_t k = row % args_.shape[1], ij = row / args_.shape[1];
        return {ij / args_.shape[0], ij % args_.shape[0], k};
    }
    void load_at(T* row, const Strided& tensor, const Position& at) const {
        load_row<T>(row, element_at(tensor, at.i, at.j, at.k), tensor.dtype, tensor.stride[3], D_, padded_);
    }
    void store_at(const Strided& tensor, const Position& at) const {
        char* place = element_at(tensor, at.i, at.j, at.k);
        tensor.stream ? stream_row<T>(place, tensor.dtype, tensor.stride[3], row_.data, D_)
                      : store_row<T>(place, tensor.dtype, tensor.stride[3], row_.data, D_);
    }
    void fill(T* row, T value) const {
        for (int c = 0; c < padded_; ++c) row[c] = value;
    }
    void load_weight() {
        fill(weight_, T(1));
        if (args_.weight.given)
            load_row<T>(weight_, args_.weight.data, args_.weight.dtype, args_.weight.stride[0], D_, padded_);
    }

    // x_ = x / sqrt(mean(x^2) + eps), gate_ = activation(gate); returns the reciprocal of the root.
    T load_normalised(const Position& at) {
        load_at(x_.data, args_.x, at);
        const double mean = static_cast<double>(row_dot(x_, x_, 0, padded_)) / D_;
        const T inverse = static_cast<T>(1 / __builtin_sqrt(mean + args_.eps));
        for (int c = 0; c < padded_; c += lanes<T>) store<T>(x_.data + c, load<T>(x_.data + c) * inverse);
        if (!args_.gate.given) {
            fill(gate_, T(1));
            return inverse;
        }
        load_at(gate_, args_.gate, at);
        args_.d_gate.given ? activate_with_slope(gate_, slope_, args_.activation, padded_)
                           : activate(gate_, args_.activation, padded_);
        return inverse;
    }

    void backward_row(const Position& at) {
        const T inverse = load_normalised(at);
        load_at(d_y_, args_.d_y, at);
        if (args_.d_gate.given) {
            for (int c = 0; c < padded_; c += lanes<T>) {
                store<T>(row_.data + c,
                         load<T>(d_y_ + c) * load<T>(weight_ + c) * load<T>(x_.data + c) * load<T>(slope_ + c));
            }
            store_at(args_.d_gate, at);
        }
        for (int c = 0; c < padded_; c += lanes<T>) {
            const reg<T> d = load<T>(d_y_ + c) * load<T>(gate_ + c);
            store<T>(terms_ + c, fma(d, load<T>(x_.data + c), load<T>(terms_ + c)));
            store<T>(row_.data + c, d * load<T>(weight_ + c));
        }
        if (!args_.d_x.given) return;
        // row_ is the gradient of x_; what lies along x_ changes nothing.
        const T along = -row_dot(row_, x_, 0, padded_) / static_cast<T>(D_);
        for (int c = 0; c < padded_; c += lanes<T>) {
            const reg<T> across = fma(broadcast<T>(along), load<T>(x_.data + c), load<T>(row_.data + c));
            store<T>(row_.data + c, across * inverse);
        }
        store_at(args_.d_x, at);
    }

    void move_terms(double* sums) {
        for (int c = 0; sums != nullptr && c < D_; ++c) sums[c] += static_cast<double>(terms_[c]);
        fill(terms_, T(0));
    }

    const RmsNormArgs& args_;
    const int D_, padded_;
    T* weight_;
    Tile<T> x_;  // normalised
    T *gate_, *slope_, *d_y_;
    Tile<T> row_;
    T* terms_;  // of the gradient of the weight
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
