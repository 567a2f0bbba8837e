// RecurrentKernel: a warp walks the tokens of one sequence, head and a few values with the state in registers; the next
// token's numbers arrive meanwhile.
#pragma once

#include "cuda/recurrent/token_columns.hpp"

namespace headrace::cuda {

template <class T, bool delta, int key_channels>
struct RecurrentKernel : TokenColumns<T, delta, key_channels> {
    using Base = TokenColumns<T, delta, key_channels>;
    using Base::args, Base::gate, Base::head, Base::own, Base::undecayed_error, Base::padding, Base::no_row;
    using typename Base::Keys, typename Base::Number, typename Base::Ops, typename Base::Rows;
    static constexpr int rows = Base::rows;

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

    Place place;

    using Base::Base;

    // Sequence n, the warp's value head and values, of which `first` is one.
    HEADRACE_DEVICE void forward(std::int64_t n, int first) {
        gate = gate_parameters<T>(args, head);
        const TokenRange sequence = sequence_of(args, n);
        const std::int64_t from = entering_row(n), length = sequence.end - sequence.begin;
        this->load_state(from, first);
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
                this->store_output(place.o, o, slots && from >= 0 && this->row_of(n, t - 1) == no_row ? no_row : from);
                advance_place(place.o, args.o);
            }
            if (leaves && from >= 0) this->store_state(this->row_of(n, slots ? t - 1 : 0), first);
            ptx::sync_warp();  // lanes that stored wait here for the others, not at the next shuffle
        }
    }

  private:
    HEADRACE_DEVICE std::int64_t entering_row(std::int64_t n) const {
        std::int64_t slot = 0;
        if (args.num_accepted_tokens.given)
            slot = load_integer(args.num_accepted_tokens, n * args.num_accepted_tokens.stride[0]) - 1;
        if (args.per_token_rows > 0 && (slot < 0 || slot >= args.per_token_rows)) return this->checked_row(no_row);
        return this->row_of(n, slot);
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
    HEADRACE_DEVICE void advance_place(Pointer& at, const Strided& tensor) const {
        at += bytes_of(tensor.dtype, args.reverse ? -tensor.stride[1] : tensor.stride[1]);
    }
    HEADRACE_DEVICE void load(Token& to) {
        const int keys = args.K - Ops::row(), value = own < args.V ? 1 : 0;
        const auto next = [&](auto& run, const char*& at, const Strided& tensor, int count) {
            run.load(at, tensor.dtype, tensor.stride[3], count);
            advance_place(at, tensor);
        };
        next(to.q, place.q, args.q, keys);
        next(to.k, place.k, args.k, keys);
        if (undecayed_error()) next(to.p, place.p, args.p, keys);
        if (args.g.given) next(to.g, place.g, args.g, args.channel_gate ? keys : 1);
        next(to.v, place.v, args.v, value);
        if (args.gv.given) next(to.gv, place.gv, args.gv, value);
        if (delta && args.beta.given) next(to.beta, place.beta, args.beta, args.elementwise_beta ? value : 1);
    }
    // The output of the lane's own column.
    HEADRACE_DEVICE T forward(const Token& now) {
        Rows q, k, e = {}, whole, part;
        now.q.values(q, args.q.dtype);
        now.k.values(k, args.k.dtype);
        if (undecayed_error()) now.p.values(e, args.p.dtype);
        if (args.l2norm) {
            Base::normalise(q);
            Base::normalise(k);
            if (undecayed_error()) Base::normalise(e);
        }
        if (!undecayed_error()) {
#pragma unroll
            for (int i = 0; i < rows; ++i) e[i] = k[i];
        }
        decays(now, whole, part);
        return this->advance(q, k, e, whole, part, now.v, now.gv, now.beta);
    }
    HEADRACE_DEVICE void decays(const Token& now, Rows& whole, Rows& part) const {
        T g[rows] = {}, bias[rows] = {};
        if (args.g.given) now.g.values(g, args.g.dtype);
        if (this->has_bias()) load_bias(bias);
        bool refused = false;
        const auto parts_of = [&](int i) { return this->decay_of(g[i] + bias[i], refused); };
        const auto set = [&](int i, const ExpParts<T>& parts) { whole[i] = parts.whole, part[i] = parts.part; };
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
    HEADRACE_DEVICE void load_bias(Rows& bias) const {
        const Strided& of = args.dt_bias;
        const int first = args.bias_per_channel ? Ops::row() : 0;
        Keys run;
        run.load(address_of(of, head * of.stride[0] + first * of.stride[1]), of.dtype,
                 args.bias_per_channel ? of.stride[1] : 0, args.bias_per_channel ? args.K - first : rows);
        run.values(bias, of.dtype);
    }
};

}  // namespace headrace::cuda
