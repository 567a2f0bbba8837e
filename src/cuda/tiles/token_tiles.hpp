// TokenTiles: the inputs of a few tokens of one head as tiles, with l2norm, gate and beta preparation and its adjoint.
#pragma once

#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// Parts (chunks, segments) of so many tokens of the sequences before sequence n: an upper bound that needs no lengths.
HEADRACE_DEVICE std::int64_t parts_before(const KernelArgs& args, const TokenRange& s, std::int64_t n, int tokens) {
    return args.cu_seqlens.given ? whole_parts(s.begin, tokens) + n : n * parts_of(args.T, tokens);
}
HEADRACE_DEVICE std::int64_t parts_before_ragged(const KernelArgs& args, std::int64_t n, int tokens) {
    return whole_parts(load_integer(args.cu_seqlens, n * args.cu_seqlens.stride[0]), tokens) + n;
}
// Where such a part of sequence n and a head is saved.
HEADRACE_DEVICE std::int64_t saved_place(const KernelArgs& args, const TokenRange& s, std::int64_t n, std::int64_t head,
                                         std::int64_t part, int tokens) {
    return (parts_before(args, s, n, tokens) + part) * args.HV + head;
}

// The part (chunk, segment) at a place: a row of args.HV parts, one of each head. Rows that no part of a sequence has
// lie past the end of one.
struct PartAt {
    std::int64_t n, part;
};
HEADRACE_DEVICE PartAt part_at(const KernelArgs& args, std::int64_t row, int tokens) {
    if (!args.cu_seqlens.given) {
        const Task at = task_of(row, parts_of(args.T, tokens));
        return {at.place, at.head};
    }
    std::int64_t n = 0, end = args.N;  // row n belongs to a sequence in [n, end)
    HEADRACE_ROLLED
    while (end - n > 1) {
        const std::int64_t middle = (n + end) / 2;
        (parts_before_ragged(args, middle, tokens) <= row ? n : end) = middle;
    }
    return {n, row - parts_before_ragged(args, n, tokens)};
}

// Of the sums of a head's parameters, one per sequence or chunk, those of number n.
HEADRACE_DEVICE void clear_parameter_sums(const KernelArgs& args, std::int64_t n, std::int64_t head) {
    const std::int64_t sum = n * args.HV + head;
    const int biases = args.bias_per_channel ? args.K : 1;
    each(biases, [&](int c) {
        if (c == 0 && args.d_gamma != nullptr) args.d_gamma[sum] = 0;
        if (c == 0 && args.d_rate != nullptr) args.d_rate[sum] = 0;
        if (args.d_bias != nullptr) args.d_bias[sum * biases + c] = 0;
    });
    ptx::sync_block();
}

// What a kernel was compiled for: one gate for all channels of a token, one for each, or what its arguments say.
enum class Gates { of_tokens, of_channels, either };

template <class T, bool delta, Gates gates = Gates::either>
struct TokenTiles {
    using Tile = cuda::Tile<T>;
    // Of f32 are computed in fp32 gradients of the additive rule alone, in double those in chunks and forwards; of 16
    // bits in double gradients in chunks.
    template <bool forward>
    static constexpr Met met = sizeof(T) == 4           ? (forward || delta ? Met::of_16_bits : Met::both)
                               : forward                ? Met::f32
                               : gates != Gates::either ? Met::both
                               : delta                  ? Met::f32
                                                        : Met::neither;
    // Rows that a thread asks for at once: no more than it has of a chunk's keys, in double of 16 tokens under channel
    // gates, or of 64 values, in double of a forward's 32.
    static constexpr int key_rows = sizeof(T) == 8 && gates == Gates::of_channels ? 2 : 4;
    template <bool forward>
    static constexpr int value_rows = sizeof(T) == 8 && forward ? 1 : 2;

    const KernelArgs& args;
    Tile q, k, e, v, log_decay;  // log_decay [C,K] of a channel gate, else [1,C]
    T *beta, *beta_slope, *q_inverse_norm, *k_inverse_norm, *e_inverse_norm;
    double* sums;  // [K] of the gate's parameters, backward only
    int key_columns;

    __host__ __device__ TokenTiles(const KernelArgs& arguments, Arena& arena, int C, int value_columns, bool backward)
        : args(arguments), sums(nullptr), key_columns(round_up(arguments.K, 16)) {
        q = arena.tile<T>(C, key_columns);
        k = arena.tile<T>(C, key_columns);
        e = undecayed_error() ? arena.tile<T>(C, key_columns) : k;
        v = arena.tile<T>(C, value_columns);
        log_decay = channel_gate() ? arena.tile<T>(C, key_columns) : arena.tile<T>(1, C);
        for (T** vector : {&beta, &beta_slope, &q_inverse_norm, &k_inverse_norm, &e_inverse_norm})
            *vector = arena.take<T>(C);
        if (backward) sums = arena.take<double>(key_columns);
    }

    // Known to the compiler where the kernel's type says it.
    __host__ __device__ bool channel_gate() const {
        return gates == Gates::either ? args.channel_gate : gates == Gates::of_channels;
    }
    __host__ __device__ bool undecayed_error() const {
        return delta && gates != Gates::of_channels && args.undecayed_error;  // no operator has both (operators.hpp)
    }

    template <bool forward = false>
    HEADRACE_DEVICE void load_queries(const ChunkRange& range, std::int64_t key_head) {
        load_tokens<met<forward>, key_rows>(q, args.q, range, key_head, 0, args.K);
        if (args.l2norm) normalise(q, q_inverse_norm, range.rows);
    }
    // Without queries, q keeps what it held.
    template <bool forward = false>
    HEADRACE_DEVICE void load_keys(const ChunkRange& range, std::int64_t key_head, bool queries = true) {
        if (queries) load_queries<forward>(range, key_head);
        load_tokens<met<forward>, key_rows>(k, args.k, range, key_head, 0, args.K);
        if (undecayed_error()) load_tokens<met<forward>, key_rows>(e, args.p, range, key_head, 0, args.K);
        if (!args.l2norm) return;
        normalise(k, k_inverse_norm, range.rows);
        if (undecayed_error()) normalise(e, e_inverse_norm, range.rows);
    }

    // v, beta and the total log decays of a value head.
    template <bool forward = false>
    HEADRACE_DEVICE void load_head(const ChunkRange& range, std::int64_t head, int first_value, int values) {
        load_tokens<met<forward>, value_rows<forward>>(v, args.v, range, head, first_value, values);
        load_gates<forward>(range, head);
    }
    // The same without v.
    template <bool forward = false>
    HEADRACE_DEVICE void load_gates(const ChunkRange& range, std::int64_t head) {
        load_gate<forward>(range, head);
        if (delta && !args.elementwise_beta) load_beta(range, head);
    }

    // gradient, shaped as log_decay, is that of the total log decays; becomes that of g. Sums of the head's parameters
    // are added at [n, head].
    HEADRACE_DEVICE void store_gate_gradient(Tile gradient, std::int64_t n, std::int64_t head,
                                             const ChunkRange& range) {
        const GateParameters<T> gate = gate_parameters<T>(args, head);
        const std::int64_t sum = n * args.HV + head;
        add_sums(gradient, range, args.d_gamma, sum, [&](int, int, T d) { return static_cast<double>(d); });
        if (args.g.given && args.gate_formula != GateFormula::log_decay) {
            add_sums(gradient, range, args.d_rate, sum, [&](int i, int c, T d) {
                return static_cast<double>(
                    gate_gradient(d, pre_activation<T>(args, range.row, range.token(i), head, c), gate).rate_term);
            });
            each_gate(range.length, [&](int i, int c) {
                T& d = gate_at(gradient, i, c);
                d = gate_gradient(d, pre_activation<T>(args, range.row, range.token(i), head, c), gate).d_x;
            });
            ptx::sync_block();
            add_bias_sums(gradient, range, sum);
        }
        if (!args.d_g.given) return;
        if (channel_gate()) {
            store_tokens(args.d_g, gradient, range, head, 0, args.K);
        } else {
            store_numbers(args.d_g, gradient.data, range, head);
        }
    }

    // Gradients of the rows that the operator used, to those that the caller gave.
    HEADRACE_DEVICE void store_d_q(Tile d, const ChunkRange& range, std::int64_t head) {
        store_rows(args.d_q, d, q, q_inverse_norm, range, head);
    }
    HEADRACE_DEVICE void store_d_k(Tile d, const ChunkRange& range, std::int64_t head) {
        store_rows(args.d_k, d, k, k_inverse_norm, range, head);
    }
    HEADRACE_DEVICE void store_d_p(Tile d, const ChunkRange& range, std::int64_t head) {
        store_rows(args.d_p, d, e, e_inverse_norm, range, head);
    }

  private:
    HEADRACE_DEVICE void normalise(Tile x, T* inverse_norm, int rows) {
        inverse_norms(inverse_norm, x, rows, key_columns);
        for_each(x, rows, key_columns, [&](int i, int c) { return x.at(i, c) * inverse_norm[i]; });
    }
    // f(i, c) for the gates of `rows` tokens; c is 0 where one gate serves all channels.
    template <class F>
    HEADRACE_DEVICE void each_gate(int rows, F f) const {
        if (channel_gate()) {
            each_element(rows, key_columns, f);
        } else {
            each(rows, [&](int i) { f(i, 0); });
        }
    }
    HEADRACE_DEVICE T& gate_at(Tile tile, int i, int c) const { return channel_gate() ? tile.at(i, c) : tile.at(0, i); }
    template <bool forward>
    HEADRACE_DEVICE void load_gate(const ChunkRange& range, std::int64_t head) {
        const GateParameters<T> gate = gate_parameters<T>(args, head);
        const auto total = [&](T g, int c) {
            T value = 0;
            if (args.g.given) value = accepted(args, gate_value(with_bias(args, g, head, c), gate));
            return args.g_gamma.given ? value + accepted(args, gate.gamma) : value;
        };
        if (channel_gate()) {
            load_tokens<sizeof(T) == 4 ? Met::both : met<forward>, key_rows>(log_decay, args.g, range, head, 0, args.K);
            each_element(range.length, args.K,
                         [&](int i, int c) { log_decay.at(i, c) = total(log_decay.at(i, c), c); });
        } else {
            each(range.rows, [&](int i) {
                const bool given = args.g.given && i < range.length;
                const T g = given ? load_element<T>(args.g.data, args.g.dtype,
                                                    offset_of(args.g, range.row, range.token(i), head))
                                  : T(0);
                log_decay.at(0, i) = i < range.length ? total(g, 0) : T(0);
            });
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE void load_beta(const ChunkRange& range, std::int64_t head) {
        each(range.rows, [&](int i) {
            const Beta<T> loaded =
                i < range.length ? beta_value<T>(args, range.row, range.token(i), head, 0) : Beta<T>{0, 1};
            beta[i] = loaded.value;
            beta_slope[i] = loaded.slope;
        });
        ptx::sync_block();
    }
    // target[sum] += the sum of term(i, c, gradient) over the chunk's gates, in double
    template <class Term>
    HEADRACE_DEVICE void add_sums(Tile gradient, const ChunkRange& range, double* target, std::int64_t sum, Term term) {
        if (target == nullptr) return;
        if (channel_gate()) channel_sums(gradient, range, term);
        if (warp() == 0) {
            double total = 0;
            const int count = channel_gate() ? args.K : range.length;
            HEADRACE_ROLLED
            for (int n = lane(); n < count; n += warp_lanes)
                total += channel_gate() ? sums[n] : term(n, 0, gradient.at(0, n));
            total = sum_of_warp(total);
            if (lane() == 0) target[sum] += total;
        }
        ptx::sync_block();
    }
    // sums[c] = sum of term(i, c, gradient) over the chunk's tokens
    template <class Term>
    HEADRACE_DEVICE void channel_sums(Tile gradient, const ChunkRange& range, Term term) {
        each(args.K, [&](int c) {
            double total = 0;
            HEADRACE_ROLLED
            for (int i = 0; i < range.length; ++i) total += term(i, c, gradient.at(i, c));
            sums[c] = total;
        });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void add_bias_sums(Tile gradient, const ChunkRange& range, std::int64_t sum) {
        if (args.d_bias == nullptr) return;
        const auto itself = [](int, int, T d) { return static_cast<double>(d); };
        if (!channel_gate() || !args.bias_per_channel) return add_sums(gradient, range, args.d_bias, sum, itself);
        channel_sums(gradient, range, itself);
        each(args.K, [&](int c) { args.d_bias[sum * args.K + c] += sums[c]; });
        ptx::sync_block();
    }
    // With y = x r the normalised rows: d <- r (d - y (y . d))
    HEADRACE_DEVICE void store_rows(const Strided& tensor, Tile d, Tile y, T* inverse_norm, const ChunkRange& range,
                                    std::int64_t head) {
        if (!tensor.given) return;
        if (args.l2norm) {
            HEADRACE_ROLLED
            for (int i = warp(); i < range.rows; i += warps()) {
                T along = 0;
                HEADRACE_ROLLED
                for (int c = lane(); c < key_columns; c += warp_lanes) along = fma(y.at(i, c), d.at(i, c), along);
                along = sum_of_warp(along);
                HEADRACE_ROLLED
                for (int c = lane(); c < key_columns; c += warp_lanes) {
                    d.at(i, c) = inverse_norm[i] * fma(-along, y.at(i, c), d.at(i, c));
                }
            }
            ptx::sync_block();
        }
        store_tokens(tensor, d, range, head, 0, args.K);
    }
};

}  // namespace headrace::cuda
