// ChunkOps: the primitives that the chunk pages of algorithms/ ask for, on a CPU.
#pragma once

#include <type_traits>

#include "algorithms/chunk_backward.hpp"
#include "cpu/channel_gate.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/rows.hpp"
#include "cpu/scalar_gate.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A: arithmetic of all products but those of Small: an output's product with its read scores, and under channel gates the
// erase scores and an output's read scores. The delta rule keeps these in fp32 where A is bf16 (docs/decisions/003).
template <class A, class Small, class GateType>
struct ChunkOps {
    using T = typename A::real;
    using Tile = cpu::Tile<T>;
    using Rows = KeyRows<T>;
    using Decayed = DecayedRows<T>;
    using Inputs = algorithms::ChunkInputs<ChunkOps>;
    // A state that is only read: a tile, or where A multiplies pairs of bf16, rows of them.
    struct SavedState {
        Tile tile{};
        const std::uint16_t* halves = nullptr;  // [K,V]
    };

    GateType gate;
    Packer<A> packer;          // operands that several products of a chunk share
    Packer<A> passing;         // those of one product
    Packer<A> states;          // one state
    Packer<Small> small;       // of one product
    Prefetcher next_chunk;
    Tile inverse;            // [16,16]
    Tile weighted_values;    // [C,V] spare
    Tile weighted_keys;      // [C,K] spare
    Tile keys_transposed;    // [K,C], backward only
    T* state_dots = nullptr; // [K], backward only
    int rows = 0, K = 0, V = 0;
    bool undecayed_error = false;
    bool coarse_scores = false;  // a gradient's read scores are products of A; an output's are nearer to its bound

    // delta: whether a chunk has the products of the delta rule too; gate_gradient: whether that may be wanted.
    void carve(Arena& arena, int chunk, int key_columns, int value_columns, bool backward, bool delta, bool gate_gradient) {
        K = key_columns;
        V = value_columns;
        coarse_scores = backward && !std::is_same_v<A, Small>;
        gate.carve(arena, chunk, K, gate_gradient);
        inverse = arena.tile<T>(16, 16);
        weighted_values = arena.tile<T>(chunk, V);
        if (GateType::per_channel) weighted_keys = arena.tile<T>(chunk, K);
        if (backward) {
            keys_transposed = arena.tile<T>(K, chunk);
            state_dots = arena.take<T>(static_cast<std::size_t>(K));
        }
        constexpr bool packs_all = A::pack == 2;  // else only transposed right operands
        carve_packer(arena, packer, chunk, packs_all ? (backward ? (delta ? 11 : 7) : 4) : backward ? 3 : 0);
        carve_packer(arena, passing, chunk, packs_all ? 4 : 1);
        if (packs_all) states.carve(arena, static_cast<std::size_t>((K + 16) * (V + 16)));
        carve_packer(arena, small, chunk, packs_all ? 3 : 1);
    }
    void start_chunk(int padded_rows) {
        rows = padded_rows;
        packer.reset();
    }

    // Valid until the next of either.
    Right<A> right_state(Tile S) {
        states.reset();
        return states.right(S, K, V);
    }
    Left<A> left_state(SavedState S) {
        if constexpr (A::pack == 2) {
            if (S.halves != nullptr) return {reinterpret_cast<const std::uint32_t*>(S.halves), V / 2, 1};
        }
        states.reset();
        return states.left(S.tile, K, V);
    }
    void scores(Tile P, Tile l, const Inputs& in) {
        if (P || l) gate.scores(P, l, score_rows(in), packer, passing, small, coarse_scores);
    }
    void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l, const Inputs& in, bool gate_wanted) {
        gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, score_rows(in), gate_wanted, passing);
    }

    void scale_value_rows(Tile dst, Tile a, const T* factors) { cpu::scale_rows(dst, a, factors, T(1), rows, V); }
    void scale_rows(Tile dst, Tile a, const T* factors, T factor) { cpu::scale_rows(dst, a, factors, factor, rows, rows); }
    void scale_columns(Tile x, const T* factors, T factor) {
        for_each(x, rows, rows, [&](int i, int j) { return load<T>(x.at(i) + j) * load<T>(factors + j) * factor; });
    }
    void negate_scores(Tile x) {
        for_each(x, rows, rows, [&](int i, int j) { return -load<T>(x.at(i) + j); });
    }
    void value_row_dots(T* dst, Tile a, Tile b) {
        for (int i = 0; i < rows; ++i) dst[i] = cpu::row_dot(a, b, i, V);
    }
    void add_through(SavedState S, Tile D) {
        for (int c = 0; c < K; ++c) state_dots[c] = row_dot(S, D, c);
        gate.add_through(state_dots);
    }

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

    // dst[C,V] = x[C,K] S;  dst = a + x S, a may be dst;  dst[C,K] = a[C,V] S^T
    void read(Tile dst, Decayed x, Right<A> state) { read(dst, x, state, {}); }
    void add_read(Tile dst, Tile a, Decayed x, Right<A> state) {
        Start<T> start{Start<T>::add};
        start.source = a.data;
        start.source_row = a.row;
        read(dst, x, state, start);
    }
    // as (S a^T)^T: rows of values are fewer to transpose than a state.
    void read_keys(Tile dst, Tile a, Left<A> state) {
        matmul<A>(keys_transposed.data, keys_transposed.row, state, packer.right_transposed_once(a, rows, V), K, rows, V, Part::full,
                  {}, prefetch());
        transpose_into<T>(dst.data, dst.row, keys_transposed.data, keys_transposed.row, K, rows);
    }
    // next = decayed S + x^T b (+ y^T z), next may be S; x, y [C,K], b, z [C,V]
    void decay_and_write(Tile next, Tile S, Decayed x, Tile b) {
        passing.reset();
        write(next, x, b, decayed(S), Alone<A>{});
    }
    void decay_and_write(Tile next, Tile S, Decayed x, Tile b, Decayed y, Tile z) {
        if constexpr (A::pack == 2) {
            passing.reset();
            write(next, x, b, decayed(S), Joined<A>{written_keys(y), written_values(y, z), rows / A::pack});
        } else {  // the operands of two fp32 products exceed the first cache
            decay_and_write(next, S, x, b);
            write(next, y, z, {Start<T>::add}, Alone<A>{});
        }
    }
    // dst += P b, P lower; dst = P^T b; dst = lower part of a b^T, a and b [C,V]
    void add_lower(Tile dst, Tile P, Tile b) {
        if constexpr (std::is_same_v<A, Small>) {
            passing.reset();
            matmul<A>(dst.data, dst.row, passing.left(P, rows, rows), packer.right_once(b, rows, V), rows, V, rows, Part::a_lower,
                      {Start<T>::add});
        } else {  // an output stands closer to its bound than a gradient
            small.reset();
            matmul<Small>(dst.data, dst.row, small.left(P, rows, rows), small.right(b, rows, V), rows, V, rows, Part::a_lower,
                          {Start<T>::add});
        }
    }
    void transposed_upper(Tile dst, Tile P, Tile b) {
        passing.reset();
        matmul<A>(dst.data, dst.row, passing.left_transposed(P, rows, rows), packer.right_once(b, rows, V), rows, V, rows,
                  Part::a_upper);
    }
    void outer_lower(Tile dst, Tile a, Tile b) {
        matmul<A>(dst.data, dst.row, packer.left_once(a, rows, V), packer.right_transposed_once(b, rows, V), rows, rows, V,
                  Part::dst_lower);
    }
    void solve(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, rows, V, Side::lower); }
    void solve_transposed(Tile x, Tile n) { solve_unit_lower<Unrounded>(x, n, inverse, rows, V, Side::transposed); }

  private:
    // Room for so many operands of up to C x K, C x V or C x C; an assertion in the packer watches the counts.
    template <class Arithmetic>
    void carve_packer(Arena& arena, Packer<Arithmetic>& target, int chunk, int operands) const {
        const long C = chunk, wider = K > V ? K : V, longer = wider > C ? wider : C;
        const long wide = C * (longer / Arithmetic::pack + 32), tall = longer / Arithmetic::pack * (C + 16);
        target.carve(arena, static_cast<std::size_t>(operands * (wide > tall ? wide : tall)));
    }
    T row_dot(SavedState S, Tile D, int c) const {
        if (S.halves == nullptr) return cpu::row_dot(S.tile, D, c, V);
        if constexpr (A::pack == 2) {
            reg<T> total = {};
            for (int j = 0; j < V; j += lanes<T>) total = fma(load_bf16(S.halves + c * V + j), load<T>(D.at(c) + j), total);
            return sum<T>(total);
        }
        return 0;
    }
    void read(Tile dst, Decayed x, Right<A> state, Start<T> start) {
        start.factor = x.factor;
        passing.reset();
        const Left<A> left = x.weights ? passing.left(x.rows, x.weights, x.scale, weighted_keys, rows, K)
                                       : packer.left_once(x.rows, rows, K);
        matmul<A>(dst.data, dst.row, left, state, rows, V, K, Part::full, start, prefetch());
    }
    Start<T> decayed(Tile S) const {
        Start<T> start = gate.decay_state();
        start.source = S.data;
        start.source_row = S.row;
        return start;
    }
    template <class Other>
    void write(Tile S, Decayed x, Tile b, Start<T> start, const Other& other) {
        matmul<A>(S.data, S.row, written_keys(x), written_values(x, b), K, V, rows, Part::full, start, prefetch(), other);
    }
    // The operands of x^T b
    Left<A> written_keys(Decayed x) {
        if (!x.weights) return passing.left_transposed(x.rows, rows, K);
        return passing.left_transposed(x.rows, x.weights, x.scale, weighted_keys, rows, K);
    }
    Right<A> written_values(Decayed x, Tile b) {
        if (x.factor == nullptr) return packer.right_once(b, rows, V);
        return passing.right(b, x.factor, weighted_values, rows, V);
    }
    auto prefetch() {
        return [this] { next_chunk.next(); };
    }
    ScoreRows<T> score_rows(const Inputs& in) const { return {in.q, in.k, in.e, in.scale, in.undecayed_error}; }

    using Unrounded = std::conditional_t<sizeof(T) == 8, F64, F32>;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
