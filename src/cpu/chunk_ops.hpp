// ChunkOps: the primitives that the chunk pages of algorithms/ ask for, on a CPU.
#pragma once

#include <type_traits>

#include "algorithms/chunk_backward.hpp"
#include "cpu/channel_gate.hpp"
#include "cpu/scalar_gate.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class A, class GateType>
struct ChunkOps {
    using T = typename A::real;
    using Tile = cpu::Tile<T>;
    using Inputs = algorithms::ChunkInputs<ChunkOps>;

    GateType gate;
    Packer<A> packer;
    Tile inverse, spare;  // [16,16], [16,V]
    int rows = 0, K = 0, V = 0;

    void carve(Arena& arena, int chunk, int key_columns, int value_columns) {
        K = key_columns;
        V = value_columns;
        gate.carve(arena, chunk, K);
        inverse = arena.tile<T>(16, 16);
        spare = arena.tile<T>(16, V);
        const auto state = static_cast<std::size_t>(K + 32) * static_cast<std::size_t>(V + 32);
        const auto rows_of = static_cast<std::size_t>(chunk + 32) * static_cast<std::size_t>((K > V ? K : V) + chunk + 32);
        packer.carve(arena, 3 * state + 16 * rows_of);
    }

    Right<A> right_state(Tile S) { return packer.right(S, K, V); }
    Right<A> right_state_transposed(Tile S) { return packer.right_transposed(S, K, V); }
    void scores(Tile P, Tile l, const Inputs& in) {
        gate.scores(P, l, in.q, in.e, in.k, in.scale, in.undecayed_error, packer);
    }
    void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l, const Inputs& in, bool gate_wanted) {
        gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, in.q, in.e, in.k, in.scale, in.undecayed_error, gate_wanted,
                             packer);
    }
    void scale_start(Tile dst, Tile a, T factor) { gate.scale_start(dst, a, factor); }
    void scale_before(Tile dst, Tile a, T factor) {
        undecayed_error ? gate.scale_before(dst, a, factor) : gate.scale_start(dst, a, factor);
    }
    void scale_end(Tile dst, Tile a) { gate.scale_end(dst, a); }
    bool undecayed_error = false;

    void copy_values(Tile dst, Tile a) { copy(dst, a, rows, V); }
    void scale_value_rows(Tile dst, Tile a, const T* factors) { cpu::scale_rows(dst, a, factors, T(1), rows, V); }
    void scale_rows(Tile dst, Tile a, const T* factors, T factor) { cpu::scale_rows(dst, a, factors, factor, rows, rows); }
    void scale_columns(Tile x, const T* factors, T factor) {
        for_each(x, rows, rows, [&](int i, int j) { return load<T>(x.at(i) + j) * load<T>(factors + j) * factor; });
    }
    void negate_scores(Tile x) {
        for_each(x, rows, rows, [&](int i, int j) { return -load<T>(x.at(i) + j); });
    }
    void value_row_dots(T* dst, Tile a, Tile b) {
        for (int i = 0; i < rows; ++i) dst[i] = row_dot(a, b, i, V);
    }
    void add_through(Tile S, Tile D) { gate.add_through(S, D, V); }

    // dst[C,V] = a[C,K] S;  dst += a S;  dst[C,K] = a[C,V] S^T
    void read(Tile dst, Tile a, Right<A> state) {
        matmul<A>(dst.data, dst.row, packer.left(a, rows, K), state, rows, V, K);
    }
    void add_read(Tile dst, Tile a, Right<A> state) {
        matmul<A>(dst.data, dst.row, packer.left(a, rows, K), state, rows, V, K, Part::full, {Start<T>::add});
    }
    void read_keys(Tile dst, Tile a, Right<A> state_transposed) {
        matmul<A>(dst.data, dst.row, packer.left(a, rows, V), state_transposed, rows, K, V);
    }
    // S <- decayed S + a^T b;  S += a^T b, a [C,K], b [C,V]
    void decay_and_write(Tile S, Tile a, Tile b) { write(S, a, b, gate.decay_state()); }
    void write(Tile S, Tile a, Tile b) { write(S, a, b, {Start<T>::add}); }
    void write(Tile S, Tile a, Tile b, Start<T> start) {
        matmul<A>(S.data, S.row, packer.left_transposed(a, rows, K), packer.right(b, rows, V), K, V, rows, Part::full, start);
    }
    // dst += P b, P lower; dst = P^T b; dst = lower part of a b^T, a and b [C,V]
    void add_lower(Tile dst, Tile P, Tile b) {
        matmul<A>(dst.data, dst.row, packer.left(P, rows, rows), packer.right(b, rows, V), rows, V, rows, Part::a_lower,
                  {Start<T>::add});
    }
    void transposed_upper(Tile dst, Tile P, Tile b) {
        matmul<A>(dst.data, dst.row, packer.left_transposed(P, rows, rows), packer.right(b, rows, V), rows, V, rows,
                  Part::a_upper);
    }
    void outer_lower(Tile dst, Tile a, Tile b) {
        matmul<A>(dst.data, dst.row, packer.left(a, rows, V), packer.right_transposed(b, rows, V), rows, rows, V,
                  Part::dst_lower);
    }
    void solve(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, spare, rows, V, Side::lower); }
    void solve_transposed(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, spare, rows, V, Side::transposed); }

  private:
    using Unrounded = std::conditional_t<sizeof(T) == 8, F64, F32>;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
