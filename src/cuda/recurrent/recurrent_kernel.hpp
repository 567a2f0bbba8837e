// RecurrentKernel: a warp walks the tokens of one sequence, head and a few values with the state in registers; the next
// token's numbers arrive meanwhile.
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
struct RecurrentKernel {
    using Ops = StateColumns<T, key_channels>;
    static constexpr int rows = Ops::rows, columns = Ops::columns;
    using Keys = Run<T, rows>;
    using Number = Run<T, 1>;

    // Of a token, as it came.
    struct Token {
        Keys q, k, p, g;  // of g the first alone where channels share it
        Number v, gv, beta;
    };

    // Where this lane reads and writes the next token: a multiplication of indices for each would cost as much as it
    // does.
    struct Place {
        const char *q, *k, *p, *g, *v, *gv, *beta;
        char* o;
    };

    const KernelArgs& args;
    Ops ops;
    GateParameters<T> gate;
    std::int64_t head;
    int own;  // this lane's column of v
    Place place;

    HEADRACE_DEVICE explicit RecurrentKernel(const KernelArgs& arguments) : args(arguments) {}

    // Sequence n, one value head, values [first, first + Ops::warp_columns).
    HEADRACE_DEVICE void forward(std::int64_t n, std::int64_t value_head, int first) {
        find_head(value_head, first);
        gate = gate_parameters<T>(args, head);
        const TokenRange sequence = sequence_of(args, n);
        const std::int64_t from = entering_row(n), length = sequence.end - sequence.begin;
        load_state(from, first);
        find(sequence.row, args.reverse ? sequence.end - 1 : sequence.begin);
        Token next{};
        // Once more than there are tokens: each turn asks for one and computes the one before.
        HEADRACE_ROLLED
        for (std::int64_t t = 0; t <= length; ++t) {
            const Token now = next;
            if (t < length) load(next);
            const bool slots = args.per_token_rows > 0, leaves = slots ? t > 0 : t == length;
            if (t > 0) {
                const T o = forward(now);
                store_output(o, slots && from >= 0 && row_of(n, t - 1) == no_row ? no_row : from);
            }
            if (leaves && from >= 0) store_state(row_of(n, slots ? t - 1 : 0), first);
            ptx::sync_warp();  // lanes that stored wait here for the others, not at the next shuffle
        }
    }
    // The same of a sequence's only token, row n of the tensors, with a state for each sequence: with less in
    // registers.
    HEADRACE_DEVICE void step(std::int64_t n, std::int64_t value_head, int first) {
        find_head(value_head, first);
        find(n, 0);
        Token token{};
        load(token);
        gate = gate_parameters<T>(args, head);
        const std::int64_t row = row_of(n, 0);
        load_state(row, first);
        store_output(forward(token), row);
        store_state(row, first);
    }

  private:
    HEADRACE_DEVICE void find_head(std::int64_t value_head, int first) {
        head = value_head;
        own = first + Ops::own_column();
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
    HEADRACE_DEVICE std::int64_t entering_row(std::int64_t n) const {
        std::int64_t slot = 0;
        if (args.num_accepted_tokens.given)
            slot = load_integer(args.num_accepted_tokens, n * args.num_accepted_tokens.stride[0]) - 1;
        if (args.per_token_rows > 0 && (slot < 0 || slot >= args.per_token_rows)) return checked_row(no_row);
        return row_of(n, slot);
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
    HEADRACE_DEVICE void find(std::int64_t row, std::int64_t token) {
        const auto at = [&](const Strided& tensor, std::int64_t of_head, int column) {
            return address_of(tensor, offset_of(tensor, row, token, of_head, column));
        };
        const std::int64_t key_head = quotient(head, args.group);
        place = {at(args.q, key_head, Ops::row()),
                 at(args.k, key_head, Ops::row()),
                 at(args.p, key_head, Ops::row()),
                 at(args.g, head, args.channel_gate ? Ops::row() : 0),
                 at(args.v, head, own),
                 at(args.gv, head, own),
                 at(args.beta, head, args.elementwise_beta ? own : 0),
                 at(args.o, head, own)};
    }
    template <class Pointer>
    HEADRACE_DEVICE void advance(Pointer& at, const Strided& tensor) const {
        at += bytes_of(tensor.dtype, args.reverse ? -tensor.stride[1] : tensor.stride[1]);
    }
    HEADRACE_DEVICE void load(Token& to) {
        const int keys = args.K - Ops::row(), value = own < args.V ? 1 : 0;
        const auto next = [&](auto& run, const char*& at, const Strided& tensor, int count) {
            run.load(at, tensor.dtype, tensor.stride[3], count);
            advance(at, tensor);
        };
        next(to.q, place.q, args.q, keys);
        next(to.k, place.k, args.k, keys);
        if (undecayed_error()) next(to.p, place.p, args.p, keys);
        if (args.g.given) next(to.g, place.g, args.g, args.channel_gate ? keys : 1);
        next(to.v, place.v, args.v, value);
        if (args.gv.given) next(to.gv, place.gv, args.gv, value);
        if (delta && args.beta.given) next(to.beta, place.beta, args.beta, args.elementwise_beta ? value : 1);
    }
    HEADRACE_DEVICE static T number(const Number& of, const Strided& tensor) {
        T value[1];
        of.values(value, tensor.dtype);
        return value[0];
    }

    // The output of the lane's own column.
    HEADRACE_DEVICE T forward(const Token& now) {
        T q[rows], k[rows], e[rows] = {}, decay[rows], whole[rows], part[rows], decayed_q[rows], decayed_e[rows];
        now.q.values(q, args.q.dtype);
        now.k.values(k, args.k.dtype);
        if (undecayed_error()) now.p.values(e, args.p.dtype);
        if (args.l2norm) {
            normalise(q);
            normalise(k);
            if (undecayed_error()) normalise(e);
        }
        decays(now, decay, whole, part);
        T q_dot_k = 0;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            if (!undecayed_error()) e[i] = k[i];
            q_dot_k = fma(q[i], k[i], q_dot_k);
        }
        const ExpParts<T> of_value =
            exp_parts(ops.value_decays && own < args.V ? accepted(args, number(now.gv, args.gv)) : T(0));
        const T v = number(now.v, args.v), value_decay = of_value.whole + of_value.part,
                beta = delta ? beta_of(now) : T(0);
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
    HEADRACE_DEVICE static void normalise(T (&x)[rows]) {
        T squares = 0;
#pragma unroll
        for (int i = 0; i < rows; ++i) squares = fma(x[i], x[i], squares);
        const T inverse_norm = 1 / sqrt(Ops::sum_over_rows(squares) + T(1e-6));
#pragma unroll
        for (int i = 0; i < rows; ++i) x[i] *= inverse_norm;
    }
    HEADRACE_DEVICE void decays(const Token& now, T (&decay)[rows], T (&whole)[rows], T (&part)[rows]) const {
        T g[rows] = {}, bias[rows] = {};
        if (args.g.given) now.g.values(g, args.g.dtype);
        if (args.dt_bias.given && args.gate_formula != GateFormula::log_decay) load_bias(bias);
        bool refused = false;
        const auto checked = [&](T of) {
            const bool fine = acceptable(args, of);
            refused = refused || !fine;
            return fine ? of : not_a_number<T>();
        };
        const auto parts_of = [&](int i) {
            T sum = 0;
            if (args.g.given) sum = checked(gate_value(g[i] + bias[i], gate));
            if (args.g_gamma.given) sum += checked(gate.gamma);
            return exp_parts(sum);
        };
        const auto set = [&](int i, const ExpParts<T>& parts) {
            whole[i] = parts.whole, part[i] = parts.part, decay[i] = parts.whole + parts.part;
        };
        if (args.channel_gate) {
#pragma unroll
            for (int i = 0; i < rows; ++i) set(i, Ops::row() + i < args.K ? parts_of(i) : ExpParts<T>{1, 0});
        } else {
            const ExpParts<T> parts = parts_of(0);
#pragma unroll
            for (int i = 0; i < rows; ++i) set(i, parts);
        }
        if (refused) atomicOr(args.refused, refused_gate);
    }
    HEADRACE_DEVICE void load_bias(T (&bias)[rows]) const {
        const Strided& of = args.dt_bias;
        const int first = args.bias_per_channel ? Ops::row() : 0;
        Keys run;
        run.load(address_of(of, head * of.stride[0] + first * of.stride[1]), of.dtype,
                 args.bias_per_channel ? of.stride[1] : 0, args.bias_per_channel ? args.K - first : rows);
        run.values(bias, of.dtype);
    }
    HEADRACE_DEVICE T beta_of(const Token& now) const {
        if (!args.beta.given) return 1;
        if (args.elementwise_beta && own >= args.V) return 0;
        return accepted_beta(args, number(now.beta, args.beta)).value;
    }
    // By the first lane of each column.
    // Of a token whose state came from that row.
    HEADRACE_DEVICE void store_output(T o, std::int64_t row) {
        if (lane() >= Ops::warp_columns || own >= args.V || !args.o.given) return;
        store_element<T>(place.o, args.o.dtype, 0, row >= 0 ? o : row == padding ? T(0) : not_a_number<T>());
        advance(place.o, args.o);
    }
};

}  // namespace headrace::cuda
