// recurrent: one token of either rule, forward and adjoint: the operators on vectors and one state; two at once.
#pragma once

#include "core/types.hpp"

namespace headrace::algorithms {

// One token; every pointer is a row vector. decay = e^{g} per key channel and value_decay = e^{gv} per value channel
// (or null), each also as whole + part, whole 0 or 1 (a sum with both rounds once); beta per value channel. Comba's
// error is taken before the decay.
template <class T>
struct Token {
    const T *q, *k, *e;                  // [K]
    T q_dot_k;
    const T *decay, *decay_whole, *decay_part;        // [K]
    const T *v, *beta;                   // [V]
    const T *value_decay, *value_whole, *value_part;  // [V]
    T scale;
    bool undecayed_error;
};

template <class T>
struct TokenSpare {
    T *decayed_q, *decayed_e;            // [K]
    T *read, *error, *d;                 // [V]
};

// S' = Diag(decay) S Diag(value_decay)     error = v - S'^T e (Comba: S^T e)     d = beta error (additive: d = v)
// to <- S' + k d^T                         o = scale (S'^T q + (q.k) d)
// `to` may be S; no data in S: zero. Columns of the state do not meet: a few at a time are read (by the delta rule
// twice, the second time from the nearest cache) and written.
template <bool delta, class Ops, class T>
HEADRACE_PAGE void token_forward(Ops& ops, T* o, typename Ops::Tile S, typename Ops::Tile to, const Token<T>& token,
                                 const TokenSpare<T>& spare) {
    ops.multiply_keys(spare.decayed_q, token.q, token.decay);
    const T* e = token.e;
    if (delta && !token.undecayed_error) {
        ops.multiply_keys(spare.decayed_e, token.e, token.decay);
        e = spare.decayed_e;
    }
    ops.for_columns(S, to, [&](const auto& columns) __attribute__((always_inline)) {
        const auto value_decay = columns.values(token.value_decay);
        auto d = columns.values(token.v);
        auto read = d;
        if constexpr (delta) {
            auto [of_q, of_e] = columns.read_two(spare.decayed_q, e);
            if (!token.undecayed_error) of_e = of_e * value_decay;
            d = columns.values(token.beta) * (d - of_e);
            read = of_q;
            columns.write(token, d);
        } else {
            read = columns.read_and_write(spare.decayed_q, token, d);
        }
        columns.store_values(o, token.scale * fma(token.q_dot_k, d, read * value_decay));
    });
}

// Two tokens of a run, against a state that is kept as S~ with S = Diag(L) S~: decays multiply numbers per key channel
// (L, in double) instead of the state. Rows of keys have them built in; `absent` second tokens are rows of zeros.
template <class T>
struct TokenPair {
    const T *q[2], *e[2];     // [K] read S~: q L, e L with the decays up to and with their own token (Comba's e: before it)
    const T* k[2];            // [K] written to S~: k / L, the first decayed by the second token
    const T* kept;            // [K] that S~ is multiplied with first, where L has moved far from 1; or null
    T e_k, q_k[3];            // e2.k1, q1.k1, q2.k1, q2.k2, decayed in between
    const T *v[2], *beta[2];  // [V]
    T* o[2];                  // [V]
    T scale;
};

// d1 = beta1 (v1 - S^T e1)     d2 = beta2 (v2 - S^T e2 - (e2.k1) d1)     (additive: d = v)
// o1 = scale (S^T q1 + (q1.k1) d1)     o2 = scale (S^T q2 + (q2.k1) d1 + (q2.k2) d2)
// S~ <- kept S~ + k1 d1^T + k2 d2^T
//
// for all pairs, on a few columns of the state: while a pair is written, the next one reads. The last is left to
// `columns`.
template <bool delta, class Columns, class T>
HEADRACE_PAGE void pairs_forward(const Columns& columns, const TokenPair<T>* pairs, int count) {
    auto read = columns.template read_first<delta>(pairs[0]);
    for (int p = 0; p < count; ++p) {
        const TokenPair<T>& pair = pairs[p];
        auto d1 = columns.values(pair.v[0]), d2 = columns.values(pair.v[1]);
        if constexpr (delta) {
            d1 = columns.values(pair.beta[0]) * (d1 - read.e1);
            d2 = columns.values(pair.beta[1]) * (d2 - fma(pair.e_k, d1, read.e2));
        }
        columns.store_values(pair.o[0], pair.scale * fma(pair.q_k[0], d1, read.q1));
        columns.store_values(pair.o[1], pair.scale * fma(pair.q_k[2], d2, fma(pair.q_k[1], d1, read.q2)));
        if (p + 1 < count) {
            read = columns.template write_and_read<delta>(p, pair, d1, d2, pairs[p + 1]);
        } else {
            columns.leave(p, pair, d1, d2);
        }
    }
}

template <class T>
struct TokenGradients {
    T *d_q, *d_k, *d_e, *d_decay;        // [K]; d_decay is that of the log decay
    T *d_v, *d_beta, *d_value_decay;     // [V]; d_value_decay is that of gv
};

// With S = S_before, S' decayed, d and error as forward; D is the gradient of the state after the token and becomes
// that of the state before it:
//     d_q = scale (S' d_o + (d.d_o) k)      d_k = D d + scale (d.d_o) q      y = D^T k + scale (q.k) d_o
//     D += scale q d_o^T      z = beta y = d_v      d_beta = y error
//     e against S': d_e = -S' z, D' = D - e z^T; D <- decayed D'      against S: d_e = -S z, D <- decayed D - e z^T
//     d_decay = rowsum(D' * S')      d_value_decay = colsum(D' * S')
// The sum and the decay of D are one rounding: a decay of less than half a unit in the last place, rounded alone, would
// be lost every time. A token's own part is written out, by inner products in double: with one token and no states,
// everything rests on it.
template <bool delta, class Ops, class T>
HEADRACE_PAGE void token_backward(Ops& ops, const TokenGradients<T>& gradients, typename Ops::Tile D, typename Ops::Tile S_before,
                    const Token<T>& token, const T* d_o, const TokenSpare<T>& spare) {
    if constexpr (delta) {
        if (token.undecayed_error) {
            ops.read(spare.error, S_before, token.e);
        } else {
            ops.multiply_keys(spare.decayed_e, token.e, token.decay);
            ops.read(spare.error, S_before, spare.decayed_e);
            ops.multiply_values(spare.error, spare.error, token.value_decay);
        }
        ops.error_values(spare.error, token.v);
        ops.multiply_values(spare.d, spare.error, token.beta);
    } else {
        ops.copy_values(spare.d, token.v);
    }
    const T own = token.scale * static_cast<T>(ops.dot_values(spare.d, d_o));
    ops.multiply_values(spare.read, d_o, token.value_decay);
    ops.rows_times(gradients.d_q, token.scale, S_before, spare.read);
    ops.combine_keys(gradients.d_q, token.decay, own, token.k);
    ops.rows_times(gradients.d_k, T(1), D, spare.d);
    ops.combine_keys(gradients.d_k, nullptr, own, token.q);
    T* y = spare.read;
    ops.read(y, D, token.k);
    ops.combine(y, T(1), y, token.scale * token.q_dot_k, d_o);
    ops.copy_values(gradients.d_v, y);
    if constexpr (delta) {
        ops.multiply_values(gradients.d_beta, y, spare.error);
        ops.multiply_values(gradients.d_v, y, token.beta);
    }
    const T* z = gradients.d_v;
    const bool error_after_decay = delta && !token.undecayed_error;
    ops.decay_and_write_adjoint(D, S_before, token, d_o, error_after_decay ? z : nullptr, gradients);
    if (delta && token.undecayed_error) {
        ops.rows_times(gradients.d_e, T(-1), S_before, z);
        ops.add_outer(D, T(-1), token.e, z);
    }
}

}  // namespace headrace::algorithms
