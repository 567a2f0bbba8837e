// TokenColumns: what the kernels that go token by token share: the way of a warp's columns of a state between the
// caller's memory and registers, the decays of gates, and one token on the columns.
#pragma once

#include "cuda/recurrent/state_columns.hpp"
#include "cuda/tiles/runs.hpp"

namespace headrace::cuda {

// e^g as whole + part, whole 0 or 1, with all digits of a gate near 0.
template <class T>
struct ExpParts {
    T whole, part;
};
template <class T>
HEADRACE_DEVICE ExpParts<T> exp_parts(T g) {
    const bool near = g > T(-0.6875);
    // Both for every lane: a branch would part lanes that have other gates.
    const T of_near = expm1(near ? g : T(0)), of_far = exponential(near ? T(0) : g);
    return {near ? T(1) : T(0), near ? of_near : of_far};
}

template <class T, bool delta, int key_channels>
struct TokenColumns {
    using Ops = StateColumns<T, key_channels>;
    static constexpr int rows = Ops::rows, columns = Ops::columns;
    using Keys = Run<T, rows>;
    using Number = Run<T, 1>;
    using Rows = T[rows];  // of a row vector of keys, the lane's

    const KernelArgs& args;
    Ops ops;
    GateParameters<T> gate;
    int head, own;  // own: this lane's column of v

    HEADRACE_DEVICE TokenColumns(const KernelArgs& arguments, int value_head, int first)
        : args(arguments), head(value_head), own(first + Ops::own_column()) {
        ops.value_decays = args.gv.given;
    }
    HEADRACE_DEVICE bool undecayed_error() const { return delta && args.undecayed_error; }

    // ---- the state's rows in the caller's memory ----
    // -1 stands for padding, which leaves zeros and no state; what is neither that nor a row of the pool is refused.
    static constexpr std::int64_t padding = -1, no_row = -2;
    HEADRACE_DEVICE std::int64_t checked_row(std::int64_t row) const {
        if (row >= padding && row < args.pool_rows) return row;
        if (threadIdx.x == 0) atomicOr(args.refused, refused_index);
        return no_row;
    }
    // Where a slot's state goes.
    HEADRACE_DEVICE std::int64_t row_of(std::int64_t n, std::int64_t slot) const {
        if (!args.indices.given) return n;
        return checked_row(load_integer(args.indices, n * args.indices.stride[0] + slot * args.indices.stride[1]));
    }
    struct alignas(16) Piece {
        T values[columns];
    };
    // The first of the lane's rows of the state.
    HEADRACE_DEVICE char* place_of_state(const Strided& tensor, std::int64_t row, int first) const {
        return address_of(tensor, offset_of(tensor, row, head, Ops::row(), first + Ops::column()));
    }
    // f(i, row of the state, columns inside it) for the lane's rows.
    template <class F>
    HEADRACE_DEVICE void each_row(const Strided& tensor, std::int64_t row, int first, F f) const {
        const int count = args.V - first - Ops::column();
        char* at = place_of_state(tensor, row, first);
        const std::int64_t step = bytes_of(tensor.dtype, tensor.stride[2]);
#pragma unroll
        for (int i = 0; i < rows; ++i, at += step) f(i, at, Ops::row() + i < args.K && count > 0 ? count : 0);
    }
    // Whether the lane's part of the state lies there as it does in registers: one branch for all of its rows.
    HEADRACE_DEVICE bool lies_so(const Strided& tensor, const char* at, int first) const {
        constexpr DType own_type = sizeof(T) == 8 ? DType::f64 : DType::f32;
        return tensor.dtype == own_type && tensor.stride[3] == 1 && Ops::row() + rows <= args.K &&
               first + Ops::column() + columns <= args.V && reinterpret_cast<std::uintptr_t>(at) % sizeof(Piece) == 0 &&
               tensor.stride[2] % columns == 0;
    }
    HEADRACE_DEVICE void load_state(std::int64_t row, int first) {
        const Strided& tensor = args.initial_state;
        const bool given = tensor.given && row >= 0;
        if (const char* at = place_of_state(tensor, row, first); given && lies_so(tensor, at, first)) {
            const std::int64_t step = tensor.stride[2] * static_cast<std::int64_t>(sizeof(T));
#pragma unroll
            for (int i = 0; i < rows; ++i, at += step) {
                const Piece piece = *reinterpret_cast<const Piece*>(at);
#pragma unroll
                for (int j = 0; j < columns; ++j) ops.state[i][j] = piece.values[j];
            }
            return;
        }
        Run<T, columns> of_rows[rows];
        each_row(tensor, row, first, [&](int i, const char* at, int count) {
            of_rows[i].load(at, tensor.dtype, tensor.stride[3], given ? count : 0);
        });
#pragma unroll
        for (int i = 0; i < rows; ++i) of_rows[i].values(ops.state[i], tensor.dtype);
    }
    HEADRACE_DEVICE void store_state(std::int64_t row, int first) const {
        const Strided& tensor = args.final_state;
        if (!tensor.given || row < 0) return;
        if (char* at = place_of_state(tensor, row, first); lies_so(tensor, at, first)) {
            const std::int64_t step = tensor.stride[2] * static_cast<std::int64_t>(sizeof(T));
#pragma unroll
            for (int i = 0; i < rows; ++i, at += step) {
                Piece piece;
#pragma unroll
                for (int j = 0; j < columns; ++j) piece.values[j] = ops.state[i][j];
                *reinterpret_cast<Piece*>(at) = piece;
            }
            return;
        }
        each_row(tensor, row, first, [&](int i, char* at, int count) {
            Run<T, columns> of_row;
            of_row.set(ops.state[i], tensor.dtype);
            of_row.store(at, tensor.dtype, tensor.stride[3], count);
        });
    }

    // ---- one token ----
    HEADRACE_DEVICE static T number(const Number& of, const Strided& tensor) {
        T value[1];
        of.values(value, tensor.dtype);
        return value[0];
    }
    HEADRACE_DEVICE static void normalise(Rows& x) {
        T squares = 0;
#pragma unroll
        for (int i = 0; i < rows; ++i) squares = fma(x[i], x[i], squares);
        const T inverse_norm = 1 / sqrt(Ops::sum_over_rows(squares) + T(1e-6));
#pragma unroll
        for (int i = 0; i < rows; ++i) x[i] *= inverse_norm;
    }
    // The decay of a gate as it came, its bias added. What is refused says so.
    HEADRACE_DEVICE ExpParts<T> decay_of(T g, bool& refused) const {
        const auto checked = [&](T of) {
            const bool fine = acceptable(args, of);
            refused = refused || !fine;
            return fine ? of : not_a_number<T>();
        };
        T sum = 0;
        if (args.g.given) sum = checked(gate_value(g, gate));
        if (args.g_gamma.given) sum += checked(gate.gamma);
        return exp_parts(sum);
    }
    HEADRACE_DEVICE bool has_bias() const { return args.dt_bias.given && args.gate_formula != GateFormula::log_decay; }
    HEADRACE_DEVICE T beta_of(const Number& given) const {
        if (!args.beta.given) return 1;
        if (args.elementwise_beta && own >= args.V) return 0;
        return accepted_beta(args, number(given, args.beta)).value;
    }
    // The lane's rows of keys, and of decays; of its own column the value, its gate and beta as they came. Returns the
    // output of that column.
    HEADRACE_DEVICE T advance(const Rows& q, const Rows& k, const Rows& e, const Rows& whole, const Rows& part,
                              const Number& given_v, const Number& given_gv, const Number& given_beta) {
        T q_dot_k = 0, decay[rows], decayed_q[rows], decayed_e[rows];
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            decay[i] = whole[i] + part[i];
            q_dot_k = fma(q[i], k[i], q_dot_k);
        }
        ExpParts<T> of_value{1, 0};
        if (ops.value_decays) of_value = exp_parts(own < args.V ? accepted(args, number(given_gv, args.gv)) : T(0));
        const T v = number(given_v, args.v), value_decay = of_value.whole + of_value.part,
                beta = delta ? beta_of(given_beta) : T(0);
        T o = 0;
        const algorithms::Token<T> token{q,
                                         k,
                                         e,
                                         Ops::sum_over_rows(q_dot_k),
                                         decay,
                                         whole,
                                         part,
                                         &v,
                                         &beta,
                                         &value_decay,
                                         &of_value.whole,
                                         &of_value.part,
                                         static_cast<T>(args.scale),
                                         undecayed_error()};
        algorithms::token_forward<delta>(ops, &o, cuda::Tile<T>{}, cuda::Tile<T>{}, token,
                                         {decayed_q, decayed_e, nullptr, nullptr, nullptr});
        return o;
    }
    // At `to`, by the first lane of each column, of a token whose state came from that row.
    HEADRACE_DEVICE void store_output(char* to, T o, std::int64_t row) const {
        if (lane() >= Ops::warp_columns || own >= args.V || !args.o.given) return;
        store_element<T>(to, args.o.dtype, 0, row >= 0 ? o : row == padding ? T(0) : not_a_number<T>());
    }
};

}  // namespace headrace::cuda
