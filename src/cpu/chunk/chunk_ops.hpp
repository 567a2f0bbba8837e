// ChunkOps: the primitives that the chunk pages of algorithms/ ask for, on a CPU.
#pragma once

#include <algorithm>
#include <type_traits>

#include "algorithms/chunk_backward.hpp"
#include "cpu/chunk/channel_gate.hpp"
#include "cpu/chunk/gradient_roundings.hpp"
#include "cpu/chunk/scalar_gate.hpp"
#include "cpu/chunk/state_roundings.hpp"
#include "cpu/chunk/write_roundings.hpp"
#include "cpu/tiles/prefetch.hpp"
#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A: arithmetic of all products but those of Small: an output's product with its read scores, under channel gates the
// erase scores and an output's read scores, and what the numbers of a chunk ask for (fine_write, fine_read, fine). The
// delta rule keeps these in fp32 where A is bf16 (docs/decisions/003).
template <class A, class Small, class GateType>
struct ChunkOps {
    using T = typename A::real;
    using Tile = cpu::Tile<T>;
    using Rows = KeyRows<T>;
    using Decayed = DecayedRows<T>;
    using Inputs = algorithms::ChunkInputs<ChunkOps>;
    // A state: its tile, and where A multiplies pairs of bf16, operands that decay_and_write renews with it. A saved
    // one may have no tile.
    struct State {
        Tile tile{};
        Copies<A> packed{};
    };

    // What a read multiplies: the state in A, and as it is for reads in Small.
    template <class Packed>
    struct Operand {
        Packed rounded{};
        Tile tile{};
    };
    using RightState = Operand<Right<A>>;
    using LeftState = Operand<Left<A>>;

    static constexpr bool mixed = !std::is_same_v<A, Small>;

    GateType gate;
    Packer<A> packer;          // operands that several products of a chunk share
    Packer<A> passing;         // those of one product
    Packer<A> states;          // one state
    Packer<Small> small;       // of one product
    StateRoundings<T> roundings;
    GradientRoundings<T> gradient_roundings;
    WriteRoundings<T> write_roundings;
    Prefetcher next_chunk;
    Tile inverse;                         // [16,16]
    Tile weighted_values, other_values;   // [C,V] spare
    Tile weighted_keys, keys_rest;        // [C,K] spare
    Tile keys_transposed;                 // [K,C], backward only
    T* state_dots = nullptr;              // [K], backward only
    int rows = 0, K = 0, V = 0;
    bool undecayed_error = false;
    bool always_fine_read = false, always_fine_write = false;  // in every chunk
    bool coarse_scores = false;  // a gradient's read scores are products of A; an output's are nearer to its bound
    bool fine = false;           // all products of this chunk's gradients are products of Small
    bool fine_read = false;      // reads that this chunk's write follows from are products of Small
    bool overlaps = false;       // what this chunk's write rounds may be more than what is left of it
    bool fine_write = false;     // this chunk's write into the state is a product of Small

    // delta: whether a chunk has the products of the delta rule too; gate_gradient: whether that may be wanted.
    void carve(Arena& arena, int chunk, int key_columns, int value_columns, bool backward, bool delta, bool gate_gradient) {
        K = key_columns;
        V = value_columns;
        if (mixed) roundings.carve(arena, chunk, K);
        if (mixed) write_roundings.carve(arena, chunk, V);
        if (mixed && backward) gradient_roundings.carve(arena, chunk, K);
        coarse_scores = backward && mixed;
        gate.carve(arena, chunk, K, gate_gradient);
        inverse = arena.tile<T>(16, 16);
        weighted_values = arena.tile<T>(chunk, V);
        if (mixed || (backward && delta)) other_values = arena.tile<T>(chunk, V);
        if (mixed && GateType::per_channel) keys_rest = arena.tile<T>(chunk, K);
        if (GateType::per_channel) weighted_keys = arena.tile<T>(chunk, K);
        if (backward) {
            keys_transposed = arena.tile<T>(K, chunk);
            state_dots = arena.take<T>(static_cast<std::size_t>(K));
        }
        constexpr bool packs_all = A::pack == 2;  // else only transposed right operands
        carve_packer(arena, packer, chunk, packs_all ? (backward ? (delta ? 11 : 7) : 4) : backward ? 3 : 0);
        carve_packer(arena, passing, chunk, packs_all ? 4 : 1);
        if (packs_all) states.carve(arena, static_cast<std::size_t>(std::max(K * (V / 2 + 16), K / 2 * (V + 16))));  // left, right
        carve_packer(arena, small, chunk, packs_all ? 3 : 1);
    }
    // scores: whether those are wanted, or only what the state needs. estimate: StateRoundings' of the state that the
    // chunk reads and writes, or null where it writes none.
    void start_chunk(int length, int padded_rows, Tile log_decay, const Inputs& in, T* estimate, bool scores) {
        rows = padded_rows;
        packer.reset();
        gate.prepare(log_decay, length, rows, scores);
        fine = fine_read = fine_write = overlaps = false;
        if (mixed && estimate != nullptr) {
            roundings.begin_chunk(estimate, gate, in.beta, in.k, in.e, length, rows);
            fine_read = roundings.fine || always_fine_read;
            // A state that hardly forgets (e^{-0.008} by a token) keeps the roundings of many writes: those of decayed
            // keys, and where a token reflects it instead of erasing, any.
            fine_write = fine_read || always_fine_write || gate.keeps(static_cast<T>(__builtin_exp(-0.008 * rows)), roundings.reflects);
            overlaps = !fine_write;  // scores() has a closer look
        }
    }

    // The same where nothing but reads() and a decaying state is asked for.
    void start_adjoint_chunk(int length, int padded_rows, Tile log_decay) {
        rows = padded_rows;
        packer.reset();
        gate.prepare_starts(log_decay, length, rows);
    }

    // After a tile was filled by others.
    void renew(State S) {
        if constexpr (A::pack == 2) Packer<A>::copy(S.packed, S.tile, K, V);
    }
    // Valid until the next of either.
    RightState right_state(State S) {
        if (S.packed.right != nullptr) return {{S.packed.right, S.packed.right_row}, S.tile};
        states.reset();
        return {states.right(S.tile, K, V), S.tile};
    }
    LeftState left_state(State S) {
        if (mixed && fine) return {{}, S.tile};
        if (S.packed.left != nullptr) return {{S.packed.left, S.packed.left_row, 1}, S.tile};
        states.reset();
        return {states.left(S.tile, K, V), S.tile};
    }
    void scores(Tile P, Tile l, const Inputs& in) {
        if (P || l) gate.scores(P, l, score_rows(in), packer, passing, small, coarse_scores && !fine);
        if (mixed && overlaps && l) {
            const T least = GateType::per_channel ? StateRoundings<T>::least_overlap_by_channel(rows, K)
                                                  : StateRoundings<T>::least_overlap;
            overlaps = roundings.overlap(l, gate.length, rows, least);
        }
    }
    void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l, const Inputs& in, bool gate_wanted) {
        if (mixed && fine) {
            gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, score_rows(in), gate_wanted, small);
        } else {
            gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, score_rows(in), gate_wanted, passing);
        }
    }

    // From here on this chunk's products are of Small. Until then: whether its gradients are small against what A
    // rounds.
    void refine() { fine = fine_read = fine_write = true; }
    template <class Tiles>
    bool must_refine(const Inputs& in, const Tiles& t, Tile d_o, State D, bool keys_wanted) const {
        if (t.l && gradient_roundings.reflect(in.k, in.e, in.beta, t.l, rows)) return true;
        return gradient_roundings.exceed(gate, in.k, D.tile, t.P, t.d, d_o, t.y, t.z, keys_wanted ? t.d_q : Tile{},
                                         keys_wanted && undecayed_error ? t.d_e : Tile{}, in.scale, rows, V);
    }

    void scale_value_rows(Tile dst, Tile a, const T* factors) { cpu::scale_rows(dst, a, factors, T(1), rows, V); }
    void scale_rows(Tile dst, Tile a, const T* factors, T factor) { cpu::scale_rows(dst, a, factors, factor, rows, rows); }
    void scale_columns(Tile dst, Tile a, const T* factors, T factor) {
        for_each(dst, rows, rows, [&](int i, int j) { return load<T>(a.at(i) + j) * load<T>(factors + j) * factor; });
    }
    void negate_scores(Tile x) {
        for_each(x, rows, rows, [&](int i, int j) { return -load<T>(x.at(i) + j); });
    }
    void value_row_dots(T* dst, Tile a, Tile b) {
        for (int i = 0; i < rows; ++i) dst[i] = cpu::row_dot(a, b, i, V);
    }
    void add_through(State S, State D) {
        for (int c = 0; c < K; ++c) state_dots[c] = row_dot(S, D.tile, c);
        gate.add_through(state_dots);
    }

    // scale q and -e, decayed from the chunk's start (Comba's erase rows: without the token's own gate).
    Decayed reads(const Inputs& in) { return gate.reads(score_rows(in)); }
    Decayed erases(const Inputs& in) { return gate.erases(score_rows(in)); }
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

    // dst[C,V] = a + x[C,K] S;  dst = x S + P b or P^T b, P lower;  dst[C,K] = a[C,V] S^T
    void add_read(Tile dst, Tile a, Decayed x, const RightState& state) {
        Start<T> start{Start<T>::add};
        start.source = a.data;
        start.source_row = a.row;
        if constexpr (mixed) {
            if (fine_read) return read_in_small(dst, x, state.tile, start, Alone{});
        }
        passing.reset();
        read(passing, packer, dst, x, state.rounded, start, Alone{});
    }
    void read_and_score(Tile dst, Decayed x, const RightState& state, Tile P, Tile b) {
        passing.reset();
        if constexpr (!mixed) {
            read(passing, packer, dst, x, state.rounded, {},
                 Joined<A>{passing.left(P, rows, rows), packer.right_once(b, rows, V), rows / A::pack, Part::a_lower});
        } else {  // an output stands closer to its bound than a gradient
            small.reset();
            read(passing, packer, dst, x, state.rounded, {},
                 Joined<Small>{small.left(P, rows, rows), small.right(b, rows, V), rows / Small::pack, Part::a_lower});
        }
    }
    void read_and_score_transposed(Tile dst, Decayed x, const RightState& state, Tile P, Tile b) {
        if constexpr (mixed) {
            if (fine_read) {
                return read_in_small(dst, x, state.tile, {},
                                     Joined<Small>{small.left_transposed(P, rows, rows), small.right(b, rows, V), rows, Part::a_upper});
            }
        }
        passing.reset();
        read(passing, packer, dst, x, state.rounded, {},
             Joined<A>{passing.left_transposed(P, rows, rows), packer.right_once(b, rows, V), rows / A::pack, Part::a_upper});
    }
    // as (S a^T)^T: rows of values are fewer to transpose than a state.
    void read_keys(Tile dst, Tile a, const LeftState& state) {
        if (mixed && fine) {
            small.reset();
            matmul<Small>(keys_transposed.data, keys_transposed.row, Left<Small>{reinterpret_cast<const typename Small::unit*>(state.tile.data), state.tile.row, 1},
                          small.right_transposed(a, rows, V), K, rows, V, Part::full, {}, prefetch());
        } else {
            matmul<A>(keys_transposed.data, keys_transposed.row, state.rounded, packer.right_transposed_once(a, rows, V), K, rows, V,
                      Part::full, {}, prefetch());
        }
        transpose_into<T>(dst.data, dst.row, keys_transposed.data, keys_transposed.row, K, rows);
    }
    // next = decayed S + x^T b (+ y^T z), next may be S; x, y [C,K], b, z [C,V]
    void decay_and_write(State next, State S, Decayed x, Tile b) {
        if constexpr (mixed) {
            if (fine_write) {
                small.reset();
                matmul<Small>(next.tile.data, next.tile.row, written_keys(small, x), written_values(small, small, x, b, weighted_values),
                              K, V, rows, Part::full, decayed(S.tile), prefetch());
                return renew(next);
            }
        }
        passing.reset();
        write(next, x, b, decayed(S.tile), Alone{});
        if constexpr (mixed) {
            if (overlaps) add_rest(next, x, b);
        }
    }
    void decay_and_write(State next, State S, Decayed x, Tile b, Decayed y, Tile z) {
        if constexpr (mixed) {
            if (fine_read) {
                small.reset();
                matmul<Small>(next.tile.data, next.tile.row, written_keys(small, x), written_values(small, small, x, b, weighted_values),
                              K, V, rows, Part::full, decayed(S.tile), prefetch(),
                              Joined<Small>{written_keys(small, y), written_values(small, small, y, z, other_values), rows});
                return renew(next);
            }
        }
        passing.reset();
        write(next, x, b, decayed(S.tile), Joined<A>{written_keys(passing, y), written_values(packer, passing, y, z, other_values), rows / A::pack});
    }
    // dst = lower part of a b^T, a and b [C,V]
    void outer_lower(Tile dst, Tile a, Tile b) {
        if (mixed && fine) {
            small.reset();
            return matmul<Small>(dst.data, dst.row, small.left(a, rows, V), small.right_transposed(b, rows, V), rows, rows, V, Part::dst_lower);
        }
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
    T row_dot(State S, Tile D, int c) const {
        if (S.tile) return cpu::row_dot(S.tile, D, c, V);
        if constexpr (A::pack == 2) {
            const auto* halves = reinterpret_cast<const std::uint16_t*>(S.packed.left + c * S.packed.left_row);
            reg<T> total = {};
            for (int j = 0; j < V; j += lanes<T>) total = fma(load_bf16(halves + j), load<T>(D.at(c) + j), total);
            return sum<T>(total);
        }
        return 0;
    }
    template <class Any, class Other>
    void read(Packer<Any>& own, Packer<Any>& shared, Tile dst, Decayed x, Right<Any> state, Start<T> start, const Other& other) {
        start.factor = x.factor;
        const Left<Any> left = x.weights ? own.left(x.rows, x.weights, x.scale, weighted_keys, rows, K)
                                         : shared.left_once(x.rows, rows, K);
        matmul<Any>(dst.data, dst.row, left, state, rows, V, K, Part::full, start, prefetch(), other);
    }
    template <class Other>
    void read_in_small(Tile dst, Decayed x, Tile state, Start<T> start, const Other& other) {
        read(small, small, dst, x, Right<Small>{state.data, state.row}, start, other);
    }
    Start<T> decayed(Tile S) const {
        Start<T> start = gate.decay_state();
        start.source = S.data;
        start.source_row = S.row;
        return start;
    }
    template <class Other>
    void write(State S, Decayed x, Tile b, Start<T> start, const Other& other) {
        matmul<A>(S.tile.data, S.tile.row, written_keys(passing, x), written_values(packer, passing, x, b, weighted_values), K, V, rows,
                  Part::full, start, prefetch(), other, S.packed);
    }
    // Adds to the columns of `next` of which x^T b leaves little what A rounded of the product's operands.
    void add_rest(State next, Decayed x, Tile b) {
        if (!write_roundings.weigh(x, b, roundings.key_energies(), next.tile, rows, K, V)) return;
        small.reset();
        const Left<Small> keys = written_keys(small, x);
        if (x.weights) {
            for_each(keys_rest, rows, K, [&](int i, int c) {
                const reg<T> key = load<T>(weighted_keys.at(i) + c);
                return key - rounded_to_bf16(key);
            });
        }
        constexpr int block = WriteRoundings<T>::block;
        for (int j = 0; j < V; j += block) {
            if (!write_roundings.exceed(j)) continue;
            const Tile values = other_values.from(0, j), values_rest = weighted_values.from(0, j);
            for_each(values, rows, block, [&](int i, int k) {
                const T factor = x.factor != nullptr ? x.factor[i] : T(1);
                const reg<T> value = load<T>(b.at(i) + j + k) * factor, rounded = rounded_to_bf16(value);
                store<T>(values_rest.at(i) + k, value - rounded);
                return rounded;
            });
            Joined<Small> keys_part{};
            if (x.weights) keys_part = {small.left_transposed(keys_rest, rows, K), small.right(values, rows, block), rows};
            matmul<Small>(next.tile.data + j, next.tile.row, keys, small.right(values_rest, rows, block), K, block, rows, Part::full,
                          {Start<T>::add}, NoWork{}, keys_part);
        }
        renew(next);
    }
    // The operands of x^T b; `shared` packs those that other products share.
    template <class Any>
    Left<Any> written_keys(Packer<Any>& own, Decayed x) const {
        if (!x.weights) return own.left_transposed(x.rows, rows, K);
        return own.left_transposed(x.rows, x.weights, x.scale, weighted_keys, rows, K);
    }
    template <class Any>
    Right<Any> written_values(Packer<Any>& shared, Packer<Any>& own, Decayed x, Tile b, Tile spare) const {
        if (x.factor == nullptr) return shared.right_once(b, rows, V);
        return own.right(b, x.factor, spare, rows, V);
    }
    auto prefetch() {
        return [this] { next_chunk.next(); };
    }
    ScoreRows<T> score_rows(const Inputs& in) const { return {in.q, in.k, in.e, in.scale, in.undecayed_error}; }

    using Unrounded = std::conditional_t<sizeof(T) == 8, F64, F32>;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
