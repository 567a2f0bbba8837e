// chunk: one chunk of either rule, forward: from the state S entering it to its outputs and the state leaving it.
#pragma once

#include "core/types.hpp"

namespace headrace::algorithms {

// What a chunk reads. Rows past the chunk's length are zero; the gate holds the decays e^{G}.
template <class Ops>
struct ChunkInputs {
    typename Ops::Rows q, k, e;   // [C,K]; e is the erase key of the delta rule: k, or Comba's p
    typename Ops::Tile v;         // [C,V]
    const typename Ops::T* beta;  // [C]
    typename Ops::T scale;        // of the read-out
    bool undecayed_error;         // Comba: the error is taken before the token's own gate
};

template <class Ops>
struct ForwardTiles {
    typename Ops::Tile P, l, solver;  // [C,C] read scores; erase scores; -l diag(beta), may be l
    typename Ops::Tile residual, d;   // [C,V] v - S'^T e of each token; what is written, d = beta * residual
};

// With G_i the sum of the chunk's log decays up to token i (Ge_i: without token i for Comba):
//     P_ij = scale q_i.k_j e^{G_i - G_j}, j <= i        l_ij = e_i.k_j e^{Ge_i - G_j}, j < i
// which no state enters. An empty P is not computed. Of the delta rule also solver = -l diag(beta).
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_scores(Ops& ops, const ChunkInputs<Ops>& in, const ForwardTiles<Ops>& tiles) {
    using Tile = typename Ops::Tile;
    ops.scores(tiles.P, delta ? tiles.l : Tile{}, in);
    if constexpr (delta) ops.scale_columns(tiles.solver, tiles.l, in.beta, -1);
}

//     residual = (I + l diag(beta))^-1 (v - (e e^{Ge}) S)     d = beta residual      (additive rule: d = v)
//     o = scale (q e^G) S + P d                               next = e^{G_L} S + (k e^{G_L - G})^T d
// of the scores. `next` may be S. An empty o is not computed. The delta rule leaves `residual`.
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_states(Ops& ops, const ChunkInputs<Ops>& in, const ForwardTiles<Ops>& tiles,
                                typename Ops::State S, typename Ops::State next, typename Ops::Tile o) {
    decltype(ops.right_state(S)) state{};
    if (delta || o) state = ops.right_state(S);
    typename Ops::Tile d = in.v;
    if constexpr (delta) {
        ops.add_read(tiles.residual, in.v, ops.erases(in), state);
        ops.solve(tiles.residual, tiles.solver);
        ops.scale_value_rows(tiles.d, tiles.residual, in.beta);
        d = tiles.d;
    }
    if (o) ops.read_and_score(o, ops.reads(in), state, tiles.P, d);
    ops.decay_and_write(next, S, ops.to_end(in.k), d);
}

// The chunk. The delta rule leaves `residual`, and l where `solver` is another tile.
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_forward(Ops& ops, const ChunkInputs<Ops>& in, ForwardTiles<Ops> tiles, typename Ops::State S,
                                 typename Ops::State next, typename Ops::Tile o) {
    if (!o) tiles.P = {};
    chunk_scores<delta>(ops, in, tiles);
    chunk_states<delta>(ops, in, tiles, S, next, o);
}

}  // namespace headrace::algorithms
