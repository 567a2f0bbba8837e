// StepKernel: one token of a sequence and a head by the warps of a block, which have a few values each: they prepare
// its keys and decays for all of them together while the state arrives.
#pragma once

#include "cuda/recurrent/token_columns.hpp"

namespace headrace::cuda {

// Bits are those of RecurrentKernel: sums over keys are of the same lanes.
template <class T, bool delta, int key_channels>
struct StepKernel : TokenColumns<T, delta, key_channels> {
    using Base = TokenColumns<T, delta, key_channels>;
    using Base::args, Base::gate, Base::head, Base::own, Base::undecayed_error;
    using typename Base::Keys, typename Base::Number, typename Base::Ops, typename Base::Rows;
    static constexpr int rows = Base::rows;

    // Row vectors of keys, p where it is given, and of both parts of decays. In shared memory.
    struct Shared {
        T q[key_channels], k[key_channels], p[key_channels], whole[key_channels], part[key_channels];
    };
    Shared& shared;

    HEADRACE_DEVICE StepKernel(const KernelArgs& arguments, Shared& memory, int value_head, int first)
        : Base(arguments, value_head, first), shared(memory) {}

    // Row n of the tensors, with a state for each sequence; warps from whose `first` on there are no values only help.
    HEADRACE_DEVICE void step(int n, int first) {
        // All that arrives is asked for before the first of it is waited for.
        const std::int64_t key_head = quotient(head, args.group);
        const int value = own < args.V ? 1 : 0;
        const Strided& of_keys = warp() == 0 ? args.q : warp() == 1 ? args.k : args.p;
        const bool has_keys = warp() < (undecayed_error() ? 3 : 2);
        Keys keys{};
        if (has_keys)
            keys.load(address_of(of_keys, offset_of(of_keys, n, 0, key_head, Ops::row())), of_keys.dtype,
                      of_keys.stride[3], args.K - Ops::row());
        Number gates[gates_of_thread] = {}, v, gv{}, beta{};
        const auto load = [&](Number& to, const Strided& tensor, int column, int count) {
            to.load(address_of(tensor, offset_of(tensor, n, 0, head, column)), tensor.dtype, 1, count);
        };
        if (args.g.given && args.channel_gate) {
            each_channel([&](int which, int c) { load(gates[which], args.g, c, c < args.K ? 1 : 0); });
        } else if (args.g.given && has_gate()) {
            load(gates[0], args.g, 0, 1);
        }
        load(v, args.v, own, value);
        if (args.gv.given) load(gv, args.gv, own, value);
        if (delta && args.beta.given)
            load(beta, args.beta, args.elementwise_beta ? own : 0, args.elementwise_beta ? value : 1);
        const std::int64_t row = this->row_of(n, 0);
        this->load_state(row, first);
        gate = gate_parameters<T>(args, head);
        prepare_gates(gates);
        if (has_keys) prepare(keys, of_keys.dtype, warp() == 0 ? shared.q : warp() == 1 ? shared.k : shared.p);
        ptx::sync_block();
        if (first >= args.V) return;
        Rows q, k, e, whole, part;
        take(q, shared.q), take(k, shared.k), take(e, undecayed_error() ? shared.p : shared.k);
        take(whole, shared.whole), take(part, shared.part);
        const T o = this->advance(q, k, e, whole, part, v, gv, beta);
        this->store_output(address_of(args.o, offset_of(args.o, n, 0, head, own)), o, row);
        this->store_state(row, first);
    }

  private:
    static constexpr int gates_of_thread = (key_channels + block_threads - 1) / block_threads;
    // f(which of the thread's, channel)
    template <class F>
    HEADRACE_DEVICE void each_channel(F f) const {
#pragma unroll
        for (int which = 0; which < gates_of_thread; ++which) {
            const int c = which * block_threads + static_cast<int>(threadIdx.x);
            if (c < key_channels) f(which, c);
        }
    }
    // Of a gate that all channels share: whether this warp prepares it.
    HEADRACE_DEVICE static bool has_gate() { return warp() == block_warps - 1; }
    HEADRACE_DEVICE void prepare_gates(const Number (&gates)[gates_of_thread]) const {
        bool refused = false;
        const auto decay = [&](const Number& given, int c) {
            T g = args.g.given ? Base::number(given, args.g) : T(0);
            if (this->has_bias()) g = with_bias(args, g, head, c);
            return this->decay_of(g, refused);
        };
        if (args.channel_gate) {
            each_channel([&](int which, int c) {
                const ExpParts<T> parts = c < args.K ? decay(gates[which], c) : ExpParts<T>{1, 0};
                shared.whole[c] = parts.whole, shared.part[c] = parts.part;
            });
        } else if (has_gate()) {
            const ExpParts<T> parts = decay(gates[0], 0);
#pragma unroll
            for (int c = lane(); c < key_channels; c += warp_lanes)
                shared.whole[c] = parts.whole, shared.part[c] = parts.part;
        }
        if (refused) atomicOr(args.refused, refused_gate);
    }
    HEADRACE_DEVICE void prepare(const Keys& keys, DType dtype, T* to) const {
        Rows x;
        keys.values(x, dtype);
        if (args.l2norm) Base::normalise(x);
        if (Ops::column() != 0) return;  // of lanes that share rows
        auto* const pieces = reinterpret_cast<typename Base::Piece*>(to + Ops::row());
#pragma unroll
        for (int i = 0; i < rows; i += Base::columns) {
            typename Base::Piece piece;
#pragma unroll
            for (int j = 0; j < Base::columns; ++j) piece.values[j] = x[i + j];
            pieces[i / Base::columns] = piece;
        }
    }
    HEADRACE_DEVICE static void take(Rows& x, const T* from) {
        const auto* const pieces = reinterpret_cast<const typename Base::Piece*>(from + Ops::row());
#pragma unroll
        for (int i = 0; i < rows; i += Base::columns) {
            const typename Base::Piece piece = pieces[i / Base::columns];
#pragma unroll
            for (int j = 0; j < Base::columns; ++j) x[i + j] = piece.values[j];
        }
    }
};

}  // namespace headrace::cuda
