// AdjointKernel: the backward token by token, a thread block for a sequence and a key head with its value heads. It
// keeps a state every few tokens and computes those between again.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/recurrent_kernel.hpp"
#include "cuda/recurrent/token_ops.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

template <class T, bool delta>
struct AdjointKernel {
    using Tile = cuda::Tile<T>;
    static constexpr int segment = recurrent_segment;

    const KernelArgs& args;
    int key_columns, value_columns;
    TokenTiles<T, delta> tokens;
    TileOps<T> ops;
    Tile o, d_o, value_decay, value_whole, value_part, value_beta, value_slope, decay, decay_whole, decay_part;
    Tile d_q, d_k, d_e, d_decay, d_q_sum, d_k_sum, d_e_sum, d_v, d_beta, d_value_decay, gate_gradient;
    algorithms::TokenSpare<T> spare;
    T* totals;                  // [segment]
    Tile S, history, adjoints;  // [K,V]; [segment * K, V] states before each token; [group * K, V]

    __host__ __device__ AdjointKernel(const KernelArgs& arguments, Arena& arena)
        : args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(args.V, 16)),
          tokens(args, arena, segment, value_columns, true) {
        ops.keys = key_columns;
        ops.values = value_columns;
        ops.dots = arena.take<double>(block_warps);
        for (Tile* tile :
             {&o, &value_decay, &value_whole, &value_part, &value_beta, &value_slope, &d_v, &d_beta, &d_value_decay}) {
            *tile = arena.tile<T>(segment, value_columns);
        }
        d_o = o;
        for (Tile* tile :
             {&decay, &decay_whole, &decay_part, &d_q, &d_k, &d_e, &d_decay, &d_q_sum, &d_k_sum, &d_e_sum}) {
            *tile = arena.tile<T>(segment, key_columns);
        }
        gate_gradient = args.channel_gate ? d_decay : arena.tile<T>(1, segment);
        for (T** row : {&spare.decayed_q, &spare.decayed_e}) *row = arena.take<T>(key_columns);
        for (T** row : {&spare.read, &spare.error, &spare.d}) *row = arena.take<T>(value_columns);
        totals = arena.take<T>(segment);
        S = arena.tile<T>(key_columns, value_columns);
        adjoints = arena.tile<T>(args.group * key_columns, value_columns);
        history = arena.tile<T>(segment * key_columns, value_columns);
    }

    HEADRACE_DEVICE void backward(std::int64_t n, std::int64_t key_head) {
        const TokenRange sequence = sequence_of(args, n);
        const std::int64_t segments = (sequence.end - sequence.begin + segment - 1) / segment;
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            clear_parameter_sums(args, n, head);
            load_state(S, args.initial_state, n, head, args.K, 0, args.V);
            HEADRACE_ROLLED
            for (std::int64_t part = 0; part < segments; ++part) {
                store_state(saved(sequence, n, head, part), S, 0, 0, key_columns, 0, value_columns);
                if (part + 1 < segments) replay(range_of(sequence, part), head, Tile{});
            }
            load_state(adjoint(member), args.d_final_state, n, head, args.K, 0, args.V);
        }
        HEADRACE_ROLLED
        for (std::int64_t part = segments - 1; part >= 0; --part) segment_gradients(sequence, n, key_head, part);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            store_state(args.d_initial_state, adjoint(member), n, key_head * args.group + member, args.K, 0, args.V);
        }
    }

  private:
    HEADRACE_DEVICE Tile adjoint(int member) const { return adjoints.from(member * key_columns, 0); }
    HEADRACE_DEVICE ChunkRange range_of(const TokenRange& s, std::int64_t part) const {
        const std::int64_t first = part * segment, left = s.end - s.begin - first;
        const int length = static_cast<int>(left < segment ? left : segment);
        return {s.row, s.begin, s.end, first, length, segment, args.reverse};
    }
    HEADRACE_DEVICE Strided saved(const TokenRange& s, std::int64_t n, std::int64_t head, std::int64_t part) const {
        const std::int64_t place = saved_place(args, s, n, head, part, segment);
        const std::int64_t bytes =
            static_cast<std::int64_t>(key_columns) * value_columns * static_cast<std::int64_t>(sizeof(T));
        return {args.saved_states + place * bytes,
                {0, 0, value_columns, 1},
                sizeof(T) == 8 ? DType::f64 : DType::f32,
                true};
    }

    HEADRACE_DEVICE void load_head(const ChunkRange& range, std::int64_t head) {
        tokens.load_head(range, head, 0, args.V);
        each_element(segment, key_columns, [&](int i, int c) {
            const ExpParts<T> parts =
                exp_parts(args.channel_gate ? tokens.log_decay.at(i, c) : tokens.log_decay.at(0, i));
            store_parts(decay, decay_whole, decay_part, i, c, parts);
        });
        each_element(segment, value_columns, [&](int i, int j) {
            const bool inside = i < range.length && j < args.V;
            T g = 0;
            if (args.gv.given && inside)
                g = accepted(args, load_element<T>(args.gv.data, args.gv.dtype,
                                                   offset_of(args.gv, range.row, range.token(i), head, j)));
            store_parts(value_decay, value_whole, value_part, i, j, exp_parts(g));
            Beta<T> beta{0, 0};
            if (delta && inside)
                beta = beta_value<T>(args, range.row, range.token(i), head, args.elementwise_beta ? j : 0);
            value_beta.at(i, j) = beta.value;
            value_slope.at(i, j) = beta.slope;
        });
        ptx::sync_block();
    }
    HEADRACE_DEVICE static void store_parts(Tile all, Tile whole, Tile part, int i, int c, const ExpParts<T>& parts) {
        whole.at(i, c) = parts.whole;
        part.at(i, c) = parts.part;
        all.at(i, c) = parts.whole + parts.part;
    }
    HEADRACE_DEVICE algorithms::Token<T> token(int i) const {
        const T *q = &tokens.q.at(i, 0), *k = &tokens.k.at(i, 0);
        const bool gv = args.gv.given;
        return {q,
                k,
                &tokens.e.at(i, 0),
                static_cast<T>(ops.dot_keys(q, k)),
                &decay.at(i, 0),
                &decay_whole.at(i, 0),
                &decay_part.at(i, 0),
                &tokens.v.at(i, 0),
                &value_beta.at(i, 0),
                gv ? &value_decay.at(i, 0) : nullptr,
                gv ? &value_whole.at(i, 0) : nullptr,
                gv ? &value_part.at(i, 0) : nullptr,
                static_cast<T>(args.scale),
                tokens.undecayed_error()};
    }
    // Takes S over the range; keeps the state before every token in `states` unless empty.
    HEADRACE_DEVICE void replay(const ChunkRange& range, std::int64_t head, Tile states) {
        tokens.load_keys(range, quotient(head, args.group));
        load_head(range, head);
        HEADRACE_ROLLED
        for (int i = 0; i < range.length; ++i) {
            if (states) {
                const Tile before = states.from(i * key_columns, 0);
                for_each(before, key_columns, value_columns, [&](int c, int j) { return S.at(c, j); });
            }
            algorithms::token_forward<delta>(ops, &o.at(i, 0), S, S, token(i), spare);
        }
    }
    HEADRACE_DEVICE void segment_gradients(const TokenRange& sequence, std::int64_t n, std::int64_t key_head,
                                           std::int64_t part) {
        const ChunkRange range = range_of(sequence, part);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            load_state(S, saved(sequence, n, head, part), 0, 0, key_columns, 0, value_columns);
            replay(range, head, history);
            load_tokens<decltype(tokens)::template met<false>, decltype(tokens)::key_rows>(d_o, args.d_o, range, head,
                                                                                           0, args.V);
            HEADRACE_ROLLED
            for (int i = range.length - 1; i >= 0; --i) {
                const algorithms::TokenGradients<T> gradients{&d_q.at(i, 0),          &d_k.at(i, 0), &d_e.at(i, 0),
                                                              &d_decay.at(i, 0),      &d_v.at(i, 0), &d_beta.at(i, 0),
                                                              &d_value_decay.at(i, 0)};
                algorithms::token_backward<delta>(ops, gradients, adjoint(member), history.from(i * key_columns, 0),
                                                  token(i), &d_o.at(i, 0), spare);
            }
            store_head_gradients(n, head, range);
            gather(member, range);
        }
        if (delta && !args.undecayed_error) {
            for_each(d_k_sum, range.length, key_columns,
                     [&](int i, int c) { return d_k_sum.at(i, c) + d_e_sum.at(i, c); });
        }
        tokens.store_d_q(d_q_sum, range, key_head);
        tokens.store_d_k(d_k_sum, range, key_head);
        if (tokens.undecayed_error()) tokens.store_d_p(d_e_sum, range, key_head);
    }
    HEADRACE_DEVICE void gather(int member, const ChunkRange& range) const {
        const auto combine = [&](Tile sum, Tile part) {
            for_each(sum, segment, key_columns, [&](int i, int c) {
                const T own = i < range.length ? part.at(i, c) : T(0);
                return member == 0 ? own : sum.at(i, c) + own;
            });
        };
        combine(d_q_sum, d_q);
        combine(d_k_sum, d_k);
        if (delta) combine(d_e_sum, d_e);
    }
    HEADRACE_DEVICE void store_head_gradients(std::int64_t n, std::int64_t head, const ChunkRange& range) {
        store_tokens(args.d_v, d_v, range, head, 0, args.V);
        store_tokens(args.d_gv, d_value_decay, range, head, 0, args.V);
        if (delta && args.d_beta.given) store_beta_gradient(head, range);
        if (!args.gate_gradient) return;
        if (!args.channel_gate) row_totals(&gate_gradient.at(0, 0), d_decay, range, args.K);
        tokens.store_gate_gradient(gate_gradient, n, head, range);
    }
    HEADRACE_DEVICE void store_beta_gradient(std::int64_t head, const ChunkRange& range) {
        for_each(d_beta, range.length, value_columns,
                 [&](int i, int j) { return d_beta.at(i, j) * value_slope.at(i, j); });
        if (args.elementwise_beta) return store_tokens(args.d_beta, d_beta, range, head, 0, args.V);
        row_totals(totals, d_beta, range, args.V);
        store_numbers(args.d_beta, totals, range, head);
    }
    // In double: with one token and one head, such a sum is all of a gradient, and it may cancel.
    HEADRACE_DEVICE void row_totals(T* dst, Tile terms, const ChunkRange& range, int count) const {
        each_row_sum(
            range.length, count, [&](int i, int j) { return static_cast<double>(terms.at(i, j)); },
            [&](int i, double sum) { dst[i] = static_cast<T>(sum); });
    }
};

}  // namespace headrace::cuda
