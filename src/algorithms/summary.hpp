// summary: the adjoint of one chunk or token by itself: from the gradient of the leaving state to the entering one's.
#pragma once

#include "algorithms/chunk_backward.hpp"
#include "algorithms/recurrent.hpp"

namespace headrace::algorithms {

// Of chunk_backward what D needs: neither the state nor the residuals. For the additive rule that is nothing but q and
// d_o.
//     P, l as forward      y = (I + diag(beta) l)^-T (P^T d_o + (k e^{G_L - G}) D)      z = beta y
template <bool delta, class Ops>
HEADRACE_PAGE void chunk_written(Ops& ops, const ChunkInputs<Ops>& in, const BackwardTiles<Ops>& t, typename Ops::Tile d_o,
                   typename Ops::State D) {
    if constexpr (delta) {
        const auto state = ops.right_state(D);
        ops.scores(t.P, t.l, in);
        ops.read_and_score_transposed(t.y, ops.to_end(in.k), state, t.P, d_o);
        ops.scale_rows(t.solver, t.l, in.beta, -1);
        ops.solve_transposed(t.y, t.solver);
        ops.scale_value_rows(t.z, t.y, in.beta);
    }
}

// The same of a token, as token_backward:
//     y = D^T k + scale (q.k) d_o      z = beta y      D <- decay (D + scale q d_o^T - e z^T), or e z^T taken away
//     undecayed
template <bool delta, class Ops, class T>
HEADRACE_PAGE void token_adjoint(Ops& ops, typename Ops::Tile D, const Token<T>& token, const T* d_o, const TokenSpare<T>& spare) {
    T* z = nullptr;
    if constexpr (delta) {
        z = spare.read;
        ops.read(z, D, token.k);
        ops.combine(z, T(1), z, token.scale * token.q_dot_k, d_o);
        ops.multiply_values(z, z, token.beta);
    }
    const bool error_after_decay = delta && !token.undecayed_error;
    ops.write_and_decay(D, token, d_o, error_after_decay ? z : nullptr);
    if (delta && token.undecayed_error) ops.add_outer(D, T(-1), token.e, z);
}

}  // namespace headrace::algorithms
