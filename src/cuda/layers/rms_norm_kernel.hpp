// RmsNorm: gated RMS normalisation of rows, a block for a group of rows: forward and backward (math.md, section 11).
#pragma once

#include "cuda/layers/layer_ops.hpp"

namespace headrace::cuda {

template <class T>
struct RmsNorm {
    const RmsNormArgs& args;
    ActivationFormula formula;  // of the gate
    T* partial;                 // [warps]

    __host__ __device__ RmsNorm(const RmsNormArgs& arguments, Arena& arena)
        : args(arguments),
          formula(args.gate.given ? args.activation : ActivationFormula::none),
          partial(arena.take<T>(block_warps)) {}

    HEADRACE_DEVICE void forward(std::int64_t group) const {
        each_row(group, [&](const Position& at, T inverse, bool) {
            each_channel([&](std::int64_t c) {
                const T n = number(args.x, at, c) * inverse;
                store_own(args.y, place(args.y, at, c), n * weight(c) * gate(at, c).value);
            });
        });
    }

    HEADRACE_DEVICE void backward(std::int64_t group) const {
        each_row(group, [&](const Position& at, T inverse, bool begins) {
            T along = 0;
            each_channel([&](std::int64_t c) {
                const T n = number(args.x, at, c) * inverse, d_y = number(args.d_y, at, c);
                along = fma(d_y * gate(at, c).value * weight(c), n, along);
            });
            along = sum_of_block(along) / static_cast<T>(args.D);  // what lies along the normalised x changes nothing
            each_channel([&](std::int64_t c) {
                const Activated<T> of_gate = gate(at, c);
                const T n = number(args.x, at, c) * inverse, d_y = number(args.d_y, at, c), d = d_y * of_gate.value;
                if (args.d_gate.given)
                    store_any(args.d_gate, place(args.d_gate, at, c), d_y * weight(c) * n * of_gate.slope);
                if (args.d_x.given)
                    store_any(args.d_x, place(args.d_x, at, c), input_gradient(d * weight(c), along * n, inverse));
                if (args.sums == nullptr) return;
                double& total = args.sums[group * args.D + c];
                total = begins ? static_cast<double>(d * n) : total + static_cast<double>(d * n);
            });
        });
    }

  private:
    struct Position {
        std::int64_t i, j, k;
    };
    // body(place, 1 / sqrt(mean(x^2) + eps), whether it is the group's first row) for the rows of a group
    template <class Body>
    HEADRACE_DEVICE void each_row(std::int64_t group, Body body) const {
        const std::int64_t first = first_of(args.groups, group);
        HEADRACE_ROLLED
        for (std::int64_t row = first; row < first_of(args.groups, group + 1); ++row) {
            const std::int64_t ij = row / args.shape[1];
            const Position at{ij / args.shape[0], ij % args.shape[0], row % args.shape[1]};
            T squares = 0;
            each_channel([&](std::int64_t c) { squares = fma(number(args.x, at, c), number(args.x, at, c), squares); });
            const double mean = static_cast<double>(sum_of_block(squares)) / static_cast<double>(args.D);
            body(at, static_cast<T>(1 / sqrt(mean + args.eps)), row == first);
        }
    }
    // r (dn - n mean(n * dn)); of one channel that is r dn eps / (x^2 + eps), where the difference would cancel.
    HEADRACE_DEVICE T input_gradient(T d_n, T along, T inverse) const {
        if (args.D == 1) return d_n * inverse * (static_cast<T>(args.eps) * inverse * inverse);
        return (d_n - along) * inverse;
    }
    template <class F>
    HEADRACE_DEVICE void each_channel(F f) const {
        HEADRACE_ROLLED
        for (std::int64_t c = threadIdx.x; c < args.D; c += block_threads) f(c);
    }
    HEADRACE_DEVICE T sum_of_block(T value) const {
        const T sum = sum_of_warp(value);
        ptx::sync_block();
        if (lane() == 0) partial[warp()] = sum;
        ptx::sync_block();
        return (partial[0] + partial[1]) + (partial[2] + partial[3]);
    }
    // Of x, y and d_y.
    HEADRACE_DEVICE T number(const Strided& tensor, const Position& at, std::int64_t c) const {
        return load_own<T>(tensor, place(tensor, at, c));
    }
    HEADRACE_DEVICE static std::int64_t place(const Strided& tensor, const Position& at, std::int64_t c) {
        return offset_of(tensor, at.i, at.j, at.k, c);
    }
    HEADRACE_DEVICE T weight(std::int64_t c) const {
        return args.weight.given ? load_any<T>(args.weight, c * args.weight.stride[0]) : T(1);
    }
    HEADRACE_DEVICE Activated<T> gate(const Position& at, std::int64_t c) const {
        if (!args.gate.given) return {1, 0};
        return activated(load_any<T>(args.gate, place(args.gate, at, c)), formula);
    }
};

}  // namespace headrace::cuda
