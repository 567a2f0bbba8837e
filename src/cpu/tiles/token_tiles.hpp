// TokenTiles: the inputs of a few tokens of one head as tiles, with l2norm, gate and beta preparation and its adjoint.
#pragma once

#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Where l2norm goes: into the rows as they are loaded, or kept apart as one factor per row.
enum class Norm { in_rows, apart };

template <class T>
struct TokenTiles {
    using Tile = cpu::Tile<T>;

    const KernelArgs& args;
    const bool channel;  // log_decay is [C,K], else [1,C]
    Tile q, k, e, v, log_decay, raw_gate, bias;
    T *beta, *beta_slope, *q_inverse_norm, *k_inverse_norm, *e_inverse_norm, *k_factor, *e_factor;
    const T *q_norm, *k_norm, *e_norm;  // factors kept apart, or null
    int key_columns;

    TokenTiles(const KernelArgs& arguments, Arena& arena, int C, int value_columns, Norm norm)
        : args(arguments), channel(arguments.channel_gate), key_columns(round_up(arguments.K, 16)) {
        const auto column = [&] { return arena.take<T>(static_cast<std::size_t>(round_up(C, 16))); };
        q = arena.tile<T>(C, key_columns);
        k = arena.tile<T>(C, key_columns);
        e = args.undecayed_error ? arena.tile<T>(C, key_columns) : k;
        v = arena.tile<T>(C, value_columns);
        log_decay = channel ? arena.tile<T>(C, key_columns) : arena.tile<T>(1, C);
        raw_gate = channel ? arena.tile<T>(C, key_columns) : arena.tile<T>(1, C);
        bias = arena.tile<T>(1, key_columns > C ? key_columns : C);
        for (T** vector : {&beta, &beta_slope, &q_inverse_norm, &k_inverse_norm, &e_inverse_norm, &k_factor, &e_factor}) *vector = column();
        const bool apart = args.l2norm && norm == Norm::apart;
        q_norm = apart ? q_inverse_norm : nullptr;
        k_norm = apart ? k_factor : nullptr;
        e_norm = !apart ? nullptr : args.undecayed_error ? e_factor : k_factor;
    }

    // Without queries, q keeps what it held.
    void load_keys(const ChunkRange& range, std::int64_t key_head, bool queries = true) {
        if (queries) load_tokens(q, args.q, range, key_head, 0, args.K);
        load_tokens(k, args.k, range, key_head, 0, args.K);
        if (args.undecayed_error) load_tokens(e, args.p, range, key_head, 0, args.K);
        if (!args.l2norm) return;
        const auto normalise = [&](Tile rows, T* inverse_norm) {
            inverse_norms(inverse_norm, rows, range.rows, key_columns);
            if (q_norm == nullptr) scale_rows(rows, rows, inverse_norm, T(1), range.rows, key_columns);
        };
        if (queries) normalise(q, q_inverse_norm);
        normalise(k, k_inverse_norm);
        if (args.undecayed_error) normalise(e, e_inverse_norm);
        for (int i = 0; i < range.rows && k_norm != nullptr; ++i) {
            k_factor[i] = k_inverse_norm[i];
            if (args.undecayed_error) e_factor[i] = e_inverse_norm[i];
        }
    }

    // After load_head, norms apart: the keys of tokens that reflect whole become unit rows by norms in double. The
    // rounding of one factor would make |k|^2 wrong, and every reflection along that key add as much.
    void normalise_reflecting_keys(const ChunkRange& range) {
        if (k_norm == nullptr || sizeof(T) == 8 || !args.delta) return;
        for (int i = 0; i < range.length; ++i) {
            if (!args.elementwise_beta && !(beta[i] > T(reflects_whole))) continue;
            normalise_in_double(k.at(i), k_inverse_norm + i, k_factor + i);
            if (args.undecayed_error) normalise_in_double(e.at(i), e_inverse_norm + i, e_factor + i);
        }
    }

    // v, beta and the total log decays of a value head.
    void load_head(const ChunkRange& range, std::int64_t head, int first_value, int values) {
        load_tokens(v, args.v, range, head, first_value, values);
        load_gate(range, head);
        if (!args.delta || args.elementwise_beta) return;
        if (args.beta.given) {
            load_numbers(beta, args.beta, range, head);
            apply_beta_formula(beta, beta_slope, args.beta_formula, round_up(range.rows, 16));
        } else {
            for (int i = 0; i < range.rows; ++i) beta[i] = 1;
        }
    }

    // gradient, shaped as log_decay, is that of the total log decays; becomes that of g. Sums of the head's parameters
    // are added at [n, head].
    void store_gate_gradient(Tile gradient, std::int64_t n, std::int64_t head, const ChunkRange& range) {
        const int gate_rows = channel ? range.length : 1, gate_columns = channel ? args.K : range.length;
        const std::int64_t sum_index = n * args.HV + head;
        const GateParameters<T> gate = parameters(head);
        const bool prepared = args.g.given && args.gate_formula != GateFormula::log_decay;
        if (prepared) load_raw_gate(raw_gate, range, head);
        for (int i = 0; i < gate_rows; ++i) {
            T* row = gradient.at(i);
            if (args.d_gamma != nullptr) args.d_gamma[sum_index] += total(row, gate_columns);
            if (!prepared) continue;
            double rate_terms = 0;
            gate_formula_backward(row, raw_gate.at(i), gate, gate_columns, &rate_terms);
            if (args.d_rate != nullptr) args.d_rate[sum_index] += rate_terms;
            if (args.d_bias == nullptr) continue;
            if (args.bias_per_channel) {
                for (int c = 0; c < gate_columns; ++c) args.d_bias[sum_index * args.K + c] += static_cast<double>(row[c]);
            } else {
                args.d_bias[sum_index] += total(row, gate_columns);
            }
        }
        if (!args.d_g.given) return;
        if (channel) {
            store_tokens(args.d_g, gradient, range, head, 0, args.K);
        } else {
            store_numbers(args.d_g, gradient.data, range, head);
        }
    }

    // Gradients of the rows that the operator used, to those that the caller gave.
    void store_d_q(Tile d, const ChunkRange& range, std::int64_t head) { store_key_rows(args.d_q, d, {q, q_norm}, q_inverse_norm, range, head); }
    void store_d_k(Tile d, const ChunkRange& range, std::int64_t head) { store_key_rows(args.d_k, d, {k, k_norm}, k_inverse_norm, range, head); }
    void store_d_p(Tile d, const ChunkRange& range, std::int64_t head) { store_key_rows(args.d_p, d, {e, e_norm}, e_inverse_norm, range, head); }

  private:
    void normalise_in_double(T* row, T* inverse_norm, T* factor) const {
        if (*factor == 1) return;
        reg<double> squares = {};
        for (int c = 0; c < key_columns; c += lanes<double>) squares = fma(widen(row + c), widen(row + c), squares);
        const double norm = 1 / __builtin_sqrt(sum<double>(squares) + 1e-6);
        for (int c = 0; c < key_columns; c += lanes<double>) store_narrow<T>(row + c, widen(row + c) * norm);
        *inverse_norm = static_cast<T>(norm);
        *factor = 1;
    }
    GateParameters<T> parameters(std::int64_t head) {
        for (int j = 0; j < bias.row && args.gate_formula != GateFormula::log_decay; ++j) {
            const bool inside = !args.bias_per_channel || j < args.K;
            bias.data[j] = args.dt_bias == nullptr || !inside
                               ? T(0)
                               : static_cast<T>(args.dt_bias[args.bias_per_channel ? head * args.K + j : head]);
        }
        return {args.gate_formula, args.gate_rate != nullptr ? static_cast<T>(args.gate_rate[head]) : T(0),
                static_cast<T>(args.lower_bound), args.gamma != nullptr ? static_cast<T>(args.gamma[head]) : T(0), bias.data};
    }
    void load_raw_gate(Tile dst, const ChunkRange& range, std::int64_t head) {
        if (channel) {
            load_tokens(dst, args.g, range, head, 0, args.K);
        } else {
            load_numbers(dst.data, args.g, range, head);
        }
    }
    void load_gate(const ChunkRange& range, std::int64_t head) {
        const int gate_rows = channel ? range.rows : 1, gate_columns = channel ? key_columns : round_up(range.rows, 16);
        const GateParameters<T> gate = parameters(head);
        if (args.g.given) {
            load_raw_gate(log_decay, range, head);
            for (int i = 0; i < gate_rows; ++i) apply_gate_formula(log_decay.at(i), gate, gate_columns);
            check_gate(gate_rows, gate_columns);
        } else {
            fill(log_decay, T(0), gate_rows, gate_columns);
        }
        if (args.gamma == nullptr) return;
        for_each(log_decay, gate_rows, gate_columns,
                 [&](int i, int j) { return load<T>(log_decay.at(i) + j) + broadcast<T>(gate.gamma); });
    }
    // Checked here, where the values are at hand; the caller looks for the first bad one only if there is any.
    void check_gate(int gate_rows, int gate_columns) const {
        typename vec<T>::integer bad = {};
        for (int i = 0; i < gate_rows; ++i) {
            for (int j = 0; j < gate_columns; j += lanes<T>) {
                const reg<T> g = load<T>(log_decay.at(i) + j);
                bad |= args.positive_gates ? g != g : ~(g <= reg<T>{});
            }
        }
        for (int lane = 0; lane < lanes<T>; ++lane) {
            if (bad[lane] != 0) __atomic_store_n(args.gate_refused, 1, __ATOMIC_RELAXED);
        }
    }
    static double total(const T* values, int count) {
        double sum = 0;
        for (int i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
        return sum;
    }
    void store_key_rows(const Strided& tensor, Tile gradient, KeyRows<T> rows, const T* inverse_norm, const ChunkRange& range,
                        std::int64_t head) {
        if (!tensor.given) return;
        if (args.l2norm) normalise_rows_backward(gradient, rows, inverse_norm, range.rows, key_columns);
        store_tokens(tensor, gradient, range, head, 0, args.K);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
