// chunk_backward: the adjoint of one chunk of either rule, from the gradient of the state leaving it to all others.
#pragma once

#include "algorithms/chunk.hpp"

namespace headrace::algorithms {

// What to compute. `adjoint`: d_v, d_beta and the gradient of the entering state. The rest needs the entering state S.
// `erase_scores`: l, which is not the forward's yet.
struct Wanted {
    bool adjoint, queries, keys, gate, erase_scores;
};

template <class Ops>
struct BackwardTiles {
    typename Ops::Tile P, l, solver;              // [C,C] scores; -diag(beta) l
    typename Ops::Tile d_P, d_l;                  // [C,C]
    typename Ops::Tile residual, d, y, z;         // [C,V] as forward; gradient of d; gradient of v (z = beta y)
    typename Ops::Tile d_q, d_k, d_e;             // [C,K]; d_e is separate from d_k also where e = k
    typename Ops::T* d_beta;                      // [C]
};

// D is the gradient of the state leaving the chunk and becomes that of the state entering it (only with `adjoint`):
//     y = (I + diag(beta) l)^-T (P^T d_o + (k e^{G_L - G}) D)      z = d_v = beta y      d_beta_i = y_i.residual_i
//     d_P = tril(d_o d^T)     d_l = -strict_tril(z d^T)
//     d_q = scale e^G (d_o S^T)    d_k = e^{G_L - G} (d D^T)    d_e = -e^{Ge} (z S^T)    each plus its
//     part of the scores
//     D <- e^{G_L} D + scale (q e^G)^T d_o - (e e^{Ge})^T z
//
// A gate's gradient collects every term whose span contains it: from the chunk's start (d_q, d_e), to its end (d_k),
// between two tokens (scores), and right through (S with D). Additive rule: d = v, y = z = d_v, no l. `residual` must
// hold the forward's, and `l` unless it is wanted. The gate's accumulators are left for Gate::finish_gradient. All but
// D's new value, which chunk_adjoint makes of it.
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_gradients(Ops& ops, const ChunkInputs<Ops>& in, const BackwardTiles<Ops>& t, typename Ops::Tile d_o,
                    typename Ops::State S, typename Ops::State D, Wanted wanted) {
    using Tile = typename Ops::Tile;
    const bool scores_wanted = wanted.queries || wanted.keys || wanted.gate;
    const bool y_wanted = wanted.adjoint || (delta && scores_wanted);
    ops.scores(y_wanted || wanted.gate ? t.P : Tile{}, delta && wanted.erase_scores ? t.l : Tile{}, in);

    Tile d = in.v, z = t.y;
    if constexpr (delta) {
        ops.scale_value_rows(t.d, t.residual, in.beta);
        d = t.d;
        z = t.z;
    }
    if (y_wanted) ops.read_and_score_transposed(t.y, ops.to_end(in.k), ops.right_state(D), t.P, d_o);
    if constexpr (delta) {
        ops.scale_rows(t.solver, t.l, in.beta, -1);
        ops.solve_transposed(t.y, t.solver);
        ops.scale_value_rows(t.z, t.y, in.beta);
        ops.value_row_dots(t.d_beta, t.y, t.residual);
    }
    if (scores_wanted) {
        ops.outer_lower(t.d_P, d_o, d);
        if constexpr (delta) ops.outer_lower(t.d_l, z, d);
        if constexpr (delta) ops.negate_scores(t.d_l);
        if (wanted.queries || wanted.gate) {
            const auto state = ops.left_state(S);
            ops.read_keys(t.d_q, d_o, state);
            ops.assign(t.d_q, ops.from_start({t.d_q, nullptr}, in.scale));
            if constexpr (delta) {
                ops.read_keys(t.d_e, z, state);
                ops.assign(t.d_e, ops.erase_from_start({t.d_e, nullptr}, -1));
            }
        }
        if (wanted.keys || wanted.gate) {
            ops.read_keys(t.d_k, d, ops.left_state(D));
            ops.assign(t.d_k, ops.to_end({t.d_k, nullptr}));
        }
        if (wanted.gate) {
            ops.gate.start_gradient(in.q, t.d_q, in.k, t.d_k);
            if constexpr (delta) {
                in.undecayed_error ? ops.gate.add_from_start_before(in.e, t.d_e) : ops.gate.add_from_start(in.e, t.d_e);
            }
            ops.add_through(S, D);
        }
        ops.scores_backward(wanted.queries || wanted.gate ? t.d_q : Tile{}, wanted.keys || wanted.gate ? t.d_k : Tile{},
                            delta ? t.d_e : Tile{}, t.d_P, delta ? t.d_l : Tile{}, t.P, t.l, in, wanted.gate);
    }
}

// D becomes the gradient of the entering state.
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_adjoint(Ops& ops, const ChunkInputs<Ops>& in, const BackwardTiles<Ops>& t,
                                 typename Ops::Tile d_o, typename Ops::State D) {
    if constexpr (delta) {
        ops.decay_and_write(D, D, ops.reads(in), d_o, ops.erases(in), t.z);
    } else {
        ops.decay_and_write(D, D, ops.reads(in), d_o);
    }
}

}  // namespace headrace::algorithms
