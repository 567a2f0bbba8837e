// RmsNorm: gated RMS normalisation of rows, forward and backward (math.md 11).
#pragma once

#include "cpu/layers/activation.hpp"
#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
class RmsNorm {
  public:
    RmsNorm(const RmsNormArgs& args, Arena& arena)
        : args_(args),
          D_(args.D),
          padded_(round_up(args.D, 16)),
          formula_(args.gate.given ? args.activation : ActivationFormula::none),
          weight_(arena.take<T>(static_cast<std::size_t>(padded_))),
          x_(arena.tile<T>(1, padded_)),
          gate_(arena.take<T>(static_cast<std::size_t>(padded_))),
          d_y_(arena.take<T>(static_cast<std::size_t>(padded_))),
          terms_(arena.take<T>(static_cast<std::size_t>(padded_))) {}

    void forward(std::int64_t group) {
        load_parameters();
        for (std::int64_t row = args_.groups.first(group); row < args_.groups.first(group + 1); ++row) {
            const Position at = position_of(row);
            const T inverse = load_inputs(at);
            for (int c = 0; c < padded_; c += lanes<T>) {
                const reg<T> gate = activated<T>(load<T>(gate_ + c), formula_).value;
                store<T>(x_.data + c, load<T>(x_.data + c) * inverse * load<T>(weight_ + c) * gate);
            }
            store_at(args_.y, at, x_.data);
        }
    }

    void backward(std::int64_t group) {
        load_parameters();
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
    void store_at(const Strided& tensor, const Position& at, const T* row) const {
        char* place = element_at(tensor, at.i, at.j, at.k);
        tensor.stream ? stream_row<T>(place, tensor.dtype, tensor.stride[3], row, D_)
                      : store_row<T>(place, tensor.dtype, tensor.stride[3], row, D_);
    }
    void fill(T* row, T value) const {
        for (int c = 0; c < padded_; ++c) row[c] = value;
    }
    // The weight, and the gate where none is given: ones.
    void load_parameters() {
        fill(gate_, T(1));
        fill(weight_, T(1));
        if (args_.weight.given)
            load_row<T>(weight_, args_.weight.data, args_.weight.dtype, args_.weight.stride[0], D_, padded_);
    }

    // Rows of x and the gate; returns 1 / sqrt(mean(x^2) + eps).
    T load_inputs(const Position& at) {
        if (args_.gate.given) load_at(gate_, args_.gate, at);
        load_at(x_.data, args_.x, at);
        const double mean = static_cast<double>(row_dot(x_, x_, 0, padded_)) / D_;
        return static_cast<T>(1 / __builtin_sqrt(mean + args_.eps));
    }

    // The gradient of the gate takes its place, that of the normalised x and then of x that of y.
    void backward_row(const Position& at) {
        const T inverse = load_inputs(at);
        load_at(d_y_, args_.d_y, at);
        reg<T> dots = {};
        for (int c = 0; c < padded_; c += lanes<T>) {
            const Activated<T> gate = activated<T>(load<T>(gate_ + c), formula_);
            const reg<T> x = load<T>(x_.data + c) * inverse, weight = load<T>(weight_ + c), d_y = load<T>(d_y_ + c);
            const reg<T> d = d_y * gate.value, d_x = d * weight;
            if (args_.d_gate.given) store<T>(gate_ + c, d_y * weight * x * gate.slope);
            store<T>(terms_ + c, fma(d, x, load<T>(terms_ + c)));
            store<T>(d_y_ + c, d_x);
            dots = fma(d_x, x, dots);
        }
        if (args_.d_gate.given) store_at(args_.d_gate, at, gate_);
        if (!args_.d_x.given) return;
        if (D_ == 1) {  // all lies along it: what is left is eps / (x^2 + eps), where the difference below would cancel
            d_y_[0] *= inverse * (static_cast<T>(args_.eps) * inverse * inverse);
            return store_at(args_.d_x, at, d_y_);
        }
        // What lies along the normalised x changes nothing.
        const T along = -sum<T>(dots) / static_cast<T>(D_);
        for (int c = 0; c < padded_; c += lanes<T>) {
            const reg<T> x = load<T>(x_.data + c) * inverse;
            store<T>(d_y_ + c, fma(broadcast<T>(along), x, load<T>(d_y_ + c)) * inverse);
        }
        store_at(args_.d_x, at, d_y_);
    }

    void move_terms(double* sums) {
        for (int c = 0; sums != nullptr && c < D_; ++c) sums[c] += static_cast<double>(terms_[c]);
        fill(terms_, T(0));
    }

    const RmsNormArgs& args_;
    const int D_, padded_;
    const ActivationFormula formula_;  // of the gate
    T* weight_;
    Tile<T> x_;
    T *gate_, *d_y_;
    T* terms_;  // of the gradient of the weight
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
