// ChunkOps: the primitives that the chunk pages of algorithms/ ask for, on a CPU.
#pragma once

#include <type_traits>

#include "algorithms/chunk_backward.hpp"
#include "cpu/channel_gate.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/scalar_gate.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A: arithmetic of products with the state and of a scalar gate's scores, whose rows enter bf16 exactly. Small: of the
// other products within the chunk; the delta rule keeps them in fp32 where A is bf16, because its errors feed back.
template <class A, class Small, class GateType>
struct ChunkOps {
    using T = typename A::real;
    using Tile = cpu::Tile<T>;
    using Rows = KeyRows<T>;
    using Decayed = DecayedRows<T>;
    using Inputs = algorithms::ChunkInputs<ChunkOps>;

    GateType gate;
    Packer<A> packer;
    Packer<Small> small;
    Prefetcher next_chunk;
    Tile inverse, spare;     // [16,16], [16,V]
    Tile weighted_values;    // [C,V] spare
    Tile weighted_keys;      // [C,K] spare
    Tile keys_transposed;    // [K,C], backward only
    int rows = 0, K = 0, V = 0;
    bool undecayed_error = false;

    // states: how many states a chunk packs at most; delta: whether it has the products of the delta rule too;
    // gate_gradient: whether that may be wanted.
    void carve(Arena& arena, int chunk, int key_columns, int value_columns, bool backward, bool delta, int states,
               bool gate_gradient) {
        K = key_columns;
        V = value_columns;
        gate.carve(arena, chunk, K, gate_gradient);
        inverse = arena.tile<T>(16, 16);
        spare = arena.tile<T>(16, V);
        weighted_values = arena.tile<T>(chunk, V);
        if (GateType::per_channel) weighted_keys = arena.tile<T>(chunk, K);
        if (backward) keys_transposed = arena.tile<T>(K, chunk);
        carve_packer(arena, packer, chunk, backward, states, backward ? (delta ? 17 : 11) : (delta ? 8 : 6));
        carve_packer(arena, small, chunk, backward, 0, backward ? 5 : 2);
    }
    void start_chunk(int padded_rows) {
        rows = padded_rows;
        packer.reset();
        small.reset();
    }

    Right<A> right_state(Tile S) { return packer.right(S, K, V); }
    Left<A> left_state(Tile S) { return packer.left(S, K, V); }
    void scores(Tile P, Tile l, const Inputs& in) {
        if (P || l) gate.scores(P, l, score_rows(in), packer, small);
    }
    void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l, const Inputs& in, bool gate_wanted) {
        gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, score_rows(in), gate_wanted, packer);
    }

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

    // Rows decayed from the chunk's start (Comba's erase rows: without the token's own gate), or to its end.
    Decayed from_start(Rows x, T factor) { return gate.from_chunk_start(x, factor); }
    Decayed erase_from_start(Rows x, T factor) {
        return undecayed_error ? gate.from_chunk_start_before(x, factor) : gate.from_chunk_start(x, factor);
    }
    Decayed to_end(Rows x) { return gate.to_chunk_end(x); }
    // dst = x
    void assign(Tile dst, Decayed x) {
        if (x.weights) {
            multiply(dst, x.rows, x.weights, x.scale, rows, K);
        } else {
            cpu::scale_rows(dst, x.rows, x.factor, T(1), rows, K);
        }
    }

    // dst[C,V] = x[C,K] S;  dst += x S;  dst[C,K] = a[C,V] S^T
    void read(Tile dst, Decayed x, Right<A> state) { read(dst, x, state, Start<T>::zero); }
    void add_read(Tile dst, Decayed x, Right<A> state) { read(dst, x, state, Start<T>::add); }
    // as (S a^T)^T: rows of values are fewer to transpose than a state.
    void read_keys(Tile dst, Tile a, Left<A> state) {
        matmul<A>(keys_transposed.data, keys_transposed.row, state, packer.right_transposed(a, rows, V), K, rows, V, Part::full,
                  {}, prefetch());
        transpose_into<T>(dst.data, dst.row, keys_transposed.data, keys_transposed.row, K, rows);
    }
    // next = decayed S + x^T b, next may be S;  S += x^T b; x [C,K], b [C,V]
    void decay_and_write(Tile next, Tile S, Decayed x, Tile b) {
        Start<T> start = gate.decay_state();
        start.source = S.data;
        start.source_row = S.row;
        write(next, x, b, start);
    }
    void write(Tile S, Decayed x, Tile b) { write(S, x, b, {Start<T>::add}); }
    // dst += P b, P lower; dst = P^T b; dst = lower part of a b^T, a and b [C,V]
    void add_lower(Tile dst, Tile P, Tile b) {
        matmul<Small>(dst.data, dst.row, small.left(P, rows, rows), small.right(b, rows, V), rows, V, rows, Part::a_lower,
                      {Start<T>::add});
    }
    void transposed_upper(Tile dst, Tile P, Tile b) {
        matmul<Small>(dst.data, dst.row, small.left_transposed(P, rows, rows), small.right(b, rows, V), rows, V, rows,
                      Part::a_upper);
    }
    void outer_lower(Tile dst, Tile a, Tile b) {
        matmul<Small>(dst.data, dst.row, small.left(a, rows, V), small.right_transposed(b, rows, V), rows, rows, V,
                      Part::dst_lower);
    }
    void solve(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, spare, rows, V, Side::lower); }
    void solve_transposed(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, spare, rows, V, Side::transposed); }

  private:
    // Room for the operands that one chunk packs. F32 and F64 pack only transposed ones: the keys and the values of the
    // backward. Bf16 packs all: `states` states and `operands` of C rows; an assertion in the packer watches the counts.
    template <class Arithmetic>
    void carve_packer(Arena& arena, Packer<Arithmetic>& target, int chunk, bool backward, int states, int operands) const {
        const auto product = [](long a, long b) { return static_cast<std::size_t>(a * b); };
        const long C = chunk, wider = K > V ? K : V, longer = wider > C ? wider : C;
        if constexpr (Arithmetic::pack == 1) {
            const std::size_t keys = product(K, C + 16);
            const std::size_t values = backward ? product(V, C + 16) : 0;
            target.carve(arena, (states > 0 || GateType::per_channel ? keys : 0) + 3 * values);
        } else {
            const std::size_t wide = product(C, longer / 2 + 16), tall = product(longer / 2, C + 16);
            const std::size_t passing = product(C, longer / 2 + 32);  // while an operand is transposed
            const std::size_t state = product(K, V) / 2 + product(16, wider);
            target.carve(arena, static_cast<std::size_t>(states) * state + passing +
                                    static_cast<std::size_t>(operands) * (wide > tall ? wide : tall));
        }
    }
    void read(Tile dst, Decayed x, Right<A> state, typename Start<T>::Kind kind) {
        Start<T> start{kind};
        start.factor = x.factor;
        const Left<A> left = x.weights ? packer.left(x.rows, x.weights, x.scale, weighted_keys, rows, K)
                                       : packer.left_of_input(x.rows, rows, K);
        matmul<A>(dst.data, dst.row, left, state, rows, V, K, Part::full, start, prefetch());
    }
    void write(Tile S, Decayed x, Tile b, Start<T> start) {
        const Left<A> left = x.weights ? packer.left_transposed(x.rows, x.weights, x.scale, weighted_keys, rows, K)
                                       : packer.left_transposed(x.rows, rows, K);
        const Right<A> right = x.factor != nullptr ? packer.right(b, x.factor, weighted_values, rows, V) : packer.right(b, rows, V);
        matmul<A>(S.data, S.row, left, right, K, V, rows, Part::full, start, prefetch());
    }
    auto prefetch() {
        return [this] { next_chunk.next(); };
    }
    ScoreRows<T> score_rows(const Inputs& in) const { return {in.q, in.k, in.e, in.scale, in.undecayed_error}; }

    using Unrounded = std::conditional_t<sizeof(T) == 8, F64, F32>;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
