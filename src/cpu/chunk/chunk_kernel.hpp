// ChunkKernel: walks the chunks of one sequence and a few heads, loads tiles, runs the algorithm pages, stores results.
// over 400 lines: its walks share the tiles that the constructor carves.
#pragma once

#include <optional>

#include "cpu/chunk/chunk_ops.hpp"
#include "cpu/chunk/saved_states.hpp"
#include "cpu/chunk/wide_chunk.hpp"
#include "cpu/tiles/reflections.hpp"
#include "cpu/tiles/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A chunk of a query/key head.
struct ChunkOf {
    std::int64_t chunk, key_head;
};

enum class Pass { all, adjoint, gradients, queries, keys };

template <class A, class GateType, bool delta>
struct ChunkKernel;
// In double, and with the same gate in double. A name for it, as no kernel holds one of its own type.
template <class GateType>
struct WideChunkOf {
    using WideGate = std::conditional_t<GateType::per_channel, ChannelGate<F64>, ScalarGate<F64>>;
    using type = WideChunk<ChunkKernel<F64, WideGate, true>>;
};

template <class A, class GateType, bool delta>
struct ChunkKernel {
    using T = typename A::real;
    using Ops = ChunkOps<A, std::conditional_t<delta && A::pack == 2, F32, A>, GateType>;
    using Tile = cpu::Tile<T>;
    using State = typename Ops::State;
    using Unit = typename A::unit;
    static constexpr bool may_widen = delta && std::is_same_v<A, F32>;
    struct Nothing {};
    using Widened = typename std::conditional_t<may_widen, WideChunkOf<GateType>, std::type_identity<Nothing>>::type;

    const KernelArgs& args;
    int key_columns, value_columns;
    TokenTiles<T> tokens;
    Ops ops;
    algorithms::ChunkInputs<Ops> in;
    algorithms::ForwardTiles<Ops> forward_tiles;
    algorithms::BackwardTiles<Ops> backward_tiles;
    struct States {  // of the heads of the task, one after the other
        T* tiles = nullptr;                      // [K,V] each
        Unit *right = nullptr, *left = nullptr;  // [K/2,V] and [K,V/2] each, where products round
        T* roundings = nullptr;                  // StateRoundings' estimate of each, where products round
    };
    States states, adjoints;
    Reflections<T>* reflections = nullptr;  // of each head of a forward, where it may end early
    Tile spare_state{};                     // for what a chunk leaves that only its first outputs are wanted of
    long state_row = 0;
    Tile o, d_o, gate_gradient, d_q_sum, d_k_sum, d_e_sum, saved_adjoint;
    StateKeeper<T> keeper{};
    std::optional<Widened> wide;  // where args.widens

    enum Use { forward_only, with_backward, sweeps_only };  // sweeps_only: two_sweeps, which restores no state

    // Takes all scratch memory from the arena: `use` decides how much.
    ChunkKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(use == forward_only ? args.value_columns : args.V, 16)),
          tokens(args, arena, args.chunk, value_columns, GateType::per_channel ? Norm::in_rows : Norm::apart) {
        carve(arena, use);
        if constexpr (may_widen) {
            if (args.widens) wide.emplace(args, arena, use != forward_only);  // last: see forward_layout
        }
    }
    void carve(Arena& arena, Use use) {
        const int C = args.chunk;
        ops.undecayed_error = args.undecayed_error;
        ops.carve(arena, C, key_columns, value_columns, use != forward_only, delta, use == with_backward);
        const auto keys = [&] { return arena.tile<T>(C, key_columns); };
        const auto value_tile = [&] { return arena.tile<T>(C, value_columns); };
        const auto square = [&] { return arena.tile<T>(C, C); };
        in = {{tokens.q, tokens.q_norm}, {tokens.k, tokens.k_norm}, {tokens.e, tokens.e_norm}, tokens.v, tokens.beta,
              static_cast<T>(args.scale), args.undecayed_error};
        state_row = round_up(value_columns, 16) + 16;
        const std::int64_t task_heads = use == forward_only ? args.walk : heads();
        if (use != sweeps_only) states = carve_states(arena, task_heads, false);
        if (use == forward_only && args.ends_early) {
            reflections = arena.take<Reflections<T>>(static_cast<std::size_t>(task_heads));
            spare_state = arena.tile<T>(key_columns, value_columns);
        }
        o = value_tile();
        forward_tiles.P = square();
        if (delta) {
            forward_tiles.solver = square();
            forward_tiles.l = forward_tiles.solver;
            if (use == forward_only) forward_tiles.residual = value_tile();  // a backward saves it
            forward_tiles.d = value_tile();
        }
        if (use == forward_only) return;
        auto& t = backward_tiles;
        t.P = forward_tiles.P;
        t.d_P = square();
        t.y = value_tile();
        t.d_q = keys();
        t.d_k = keys();
        t.d_beta = arena.take<T>(static_cast<std::size_t>(C));
        if (delta) {
            t.solver = forward_tiles.solver;
            if (!saves_scores()) t.l = square();
            t.d_l = square();
            t.d = forward_tiles.d;
            t.z = value_tile();
            t.d_e = keys();
        }
        d_o = o;
        gate_gradient = arena.tile<T>(GateType::per_channel ? C : 1, GateType::per_channel ? key_columns : C);
        const bool grouped = args.group > 1;
        d_q_sum = grouped ? keys() : t.d_q;
        d_k_sum = grouped ? keys() : t.d_k;
        d_e_sum = grouped && delta ? keys() : t.d_e;
        if (use == with_backward) saved_adjoint = arena.tile<T>(key_columns, value_columns);
        keeper = {key_columns, value_columns, arena.tile<T>(1, value_columns)};
        adjoints = carve_states(arena, heads(), use == with_backward);
    }

    std::int64_t state_elements() const { return static_cast<std::int64_t>(key_columns) * state_row; }
    States carve_states(Arena& arena, std::int64_t count, bool with_left) const {
        const auto elements = static_cast<std::size_t>(count * state_elements());
        States all{arena.take<T>(elements)};
        if (A::pack == 2) all.right = arena.take<Unit>(elements / A::pack);
        if (A::pack == 2 && with_left) all.left = arena.take<Unit>(elements / A::pack);
        if (Ops::mixed) all.roundings = arena.take<T>(static_cast<std::size_t>(count * args.roundings));
        return all;
    }
    State state_of(const States& all, std::int64_t j) const {
        const std::int64_t first = j * state_elements(), packed = first / A::pack;
        return {{all.tiles + first, state_row},
                {all.right == nullptr ? nullptr : all.right + packed, state_row,
                 all.left == nullptr ? nullptr : all.left + packed, state_row / A::pack}};
    }
    State walking_state(std::int64_t j) const { return state_of(states, j); }
    State adjoint_state(std::int64_t j) const { return state_of(adjoints, j); }
    void enter_state(State state, const Strided& tensor, std::int64_t n, std::int64_t head, int first, int count) {
        load_state(state.tile, tensor, n, head, args.K, first, count);
        ops.renew(state);
    }
    std::int64_t chunks(std::int64_t n) const {
        const TokenRange& s = args.sequences[n];
        return (s.end - s.begin + args.chunk - 1) / args.chunk;
    }
    ChunkRange range_of(std::int64_t n, std::int64_t chunk) const { return range_of(n, chunk * args.chunk, args.chunk); }
    ChunkRange range_of(std::int64_t n, std::int64_t first, int most) const {
        const TokenRange& s = args.sequences[n];
        const std::int64_t left = s.end - s.begin - first;
        const int length = static_cast<int>(left < most ? left : most);
        return {s.row, s.begin, s.end, first, length, round_up(length, 16), args.reverse};
    }

    T* roundings_of(const States& all, std::int64_t j) const {
        return all.roundings == nullptr ? nullptr : all.roundings + j * args.roundings;
    }
    // Of `count` value heads from `head` on.
    void enter_roundings(const States& all, const Strided& numbers, std::int64_t n, std::int64_t head, std::int64_t count) const {
        for (std::int64_t j = 0; all.roundings != nullptr && j < count; ++j) {
            load_roundings(roundings_of(all, j), numbers, n, head + j, args.roundings);
        }
    }
    void leave_roundings(const States& all, const Strided& numbers, std::int64_t n, std::int64_t head, std::int64_t count) const {
        for (std::int64_t j = 0; numbers.given && j < count; ++j) {
            store_roundings(numbers, roundings_of(all, j), n, head + j, args.roundings);
        }
    }
    void load_chunk(const ChunkRange& range, std::int64_t head, int first_value, int values, T* estimate, bool scores = true) {
        tokens.load_head(range, head, first_value, values);
        ops.start_chunk(range.length, range.rows, tokens.log_decay, in, estimate, scores);
    }

    // Names the rows that are loaded next, key rows only for key_head >= 0.
    void prefetch(std::int64_t n, std::int64_t chunk, std::int64_t head, std::int64_t key_head, bool with_q, bool with_d_o) {
        prefetch(n, chunk * args.chunk, args.chunk, head, key_head, 0, args.V, with_q, with_d_o);
    }
    void prefetch(std::int64_t n, std::int64_t first_token, int most, std::int64_t head, std::int64_t key_head, int first, int count,
                  bool with_q, bool with_d_o) {
        // At least two products with a state, one of C rows and one of K.
        ops.next_chunk.start((ops.rows + key_columns) / row_block * (value_columns / (column_block * lanes<T>)));
        if (first_token < 0 || first_token >= args.sequences[n].end - args.sequences[n].begin) return;
        const ChunkRange range = range_of(n, first_token, most);
        if (key_head >= 0) {
            if (with_q) ops.next_chunk.add(args.q, range, key_head, args.K);
            ops.next_chunk.add(args.k, range, key_head, args.K);
            if (args.undecayed_error) ops.next_chunk.add(args.p, range, key_head, args.K);
        }
        if (GateType::per_channel) ops.next_chunk.add(args.g, range, head, args.K);
        if (first == 0) ops.next_chunk.add(args.v, range, head, count);
        if (with_d_o) ops.next_chunk.add(args.d_o, range, head, args.V);
    }

    // ---- forward: all chunks of sequence n and value heads [head, head + args.walk), values [first, first + count)
    // ----
    void forward(std::int64_t n, std::int64_t head, int first, int count, Unfinished* rest) {
        ops.V = value_columns = round_up(count, 16);
        const std::int64_t heads = args.walk;
        for (std::int64_t j = 0; j < heads; ++j) {
            enter_state(walking_state(j), args.initial_state, n, head + j, first, count);
            if (args.ends_early) rest[j] = reflections[j].begin(args, n, head + j, walking_state(j).tile);
        }
        const auto ended = [&](std::int64_t j) { return args.ends_early && rest[j].state != nullptr; };
        enter_roundings(states, args.initial_roundings, n, head, heads);
        for (std::int64_t chunk = 0; chunk < chunks(n); ++chunk) {
            const ChunkRange range = range_of(n, chunk);
            bool keys_loaded = false;
            for (std::int64_t j = 0; j < heads; ++j) {
                if (starts_group(head + j)) keys_loaded = false;
                if (ended(j)) continue;
                if (!keys_loaded) tokens.load_keys(range, (head + j) / args.group);
                keys_loaded = true;
                load_chunk(range, head + j, first, count, roundings_of(states, j));
                prefetch_next_head(n, range.first, args.chunk, head, j, heads, first, count, true);
                const State state = walking_state(j);
                const int done = args.ends_early ? reflections[j].count(tokens, range.length) : range.length;
                const bool stays = done == range.length, last = chunk + 1 == chunks(n);
                advance(range, head + j, first, count, state, stays ? state : State{spare_state}, o);
                store_tokens(args.o, o, range, head + j, first, count);
                if (!stays) {
                    rest[j] = reflections[j].leave_before(range, done, state.tile);
                } else if (args.ends_early && !last && reflections[j].must_leave(range)) {
                    rest[j] = left_at(range, state.tile);
                }
            }
        }
        if (first == 0 && !args.ends_early) leave_roundings(states, args.final_roundings, n, head, heads);
        for (std::int64_t j = 0; j < heads && first == 0 && args.ends_early; ++j) reflections[j].end(args, n, head + j);
        for (std::int64_t j = 0; j < heads; ++j) {
            if (!ended(j)) store_state(args.final_state, walking_state(j).tile, n, head + j, args.K, first, count);
        }
    }
    // The chunk in the tiles, from state to state.
    void advance(const ChunkRange& range, std::int64_t head, int first, int count, State entering, State next, Tile outputs) {
        auto tiles = forward_tiles;
        if (!outputs) tiles.P = {};
        algorithms::chunk_scores<delta>(ops, in, tiles);
        if constexpr (may_widen) {
            if (wide && wide->cancels(tokens, tiles.solver, range)) {
                // The choice follows from later tokens, outputs must not: they are those of fp32 either way. A forward
                // that has outputs has the spare state, too.
                if (outputs) algorithms::chunk_states<delta>(ops, in, tiles, entering, State{spare_state}, outputs);
                return wide->forward(range, head, first, count, entering.tile, next.tile, tiles.residual);
            }
        }
        algorithms::chunk_states<delta>(ops, in, tiles, entering, next, outputs);
    }
    bool starts_group(std::int64_t head) const { return head % args.group == 0; }
    // What a walk reads after head + j of this chunk: the next head, or the first of the next chunk.
    void prefetch_next_head(std::int64_t n, std::int64_t first_token, int most, std::int64_t head, std::int64_t j, std::int64_t heads,
                            int first, int count, bool with_q) {
        const bool same_chunk = j + 1 < heads;
        const std::int64_t next = same_chunk ? head + j + 1 : head;
        const std::int64_t key_head = same_chunk && !starts_group(next) ? -1 : next / args.group;
        prefetch(n, same_chunk ? first_token : first_token + most, most, next, key_head, first, count, with_q, false);
    }

    // ---- backward ----
    // Runs the states of `heads` value heads forwards and saves what enters each chunk (and the delta rule's
    // residuals and erase scores). Where saved states have the tile's type, each is computed in its place; where they
    // are operands, they are left there.
    void save_states(std::int64_t n, std::int64_t head, std::int64_t heads, const SavedSlot& slot) {
        const auto place = [&](std::int64_t chunk, std::int64_t j) {
            const std::int64_t index = slot.index(chunk, j);
            State state = walking_state(j);
            if (keeper.in_place(slot.states)) state = {keeper.tile(slot.states, index)};
            if (saved_as_operand()) state.packed.left = saved_operand(slot.states, index);
            if (saved_as_operand()) state.packed.left_row = value_columns / A::pack;
            return state;
        };
        enter_roundings(states, args.initial_roundings, n, head, heads);
        for (std::int64_t j = 0; j < heads && chunks(n) > 0; ++j) {
            enter_state(place(0, j), args.initial_state, n, head + j, 0, args.V);
        }
        const std::int64_t tokens_in_all = args.sequences[n].end - args.sequences[n].begin;
        for (std::int64_t first = 0; first < tokens_in_all; first += args.state_chunk) {
            const std::int64_t chunk = first / args.chunk, done = first + args.state_chunk;
            const bool begins = first % args.chunk == 0, ends = done % args.chunk == 0, last = done >= tokens_in_all;
            const ChunkRange range = range_of(n, first, args.state_chunk);
            for (std::int64_t j = 0; j < heads; ++j) {
                const std::int64_t index = slot.index(chunk, j);
                if (begins && !keeper.in_place(slot.states) && !saved_as_operand()) keeper.save(slot.states, index, walking_state(j).tile);
                if (last && !delta) continue;
                if (j == 0 || starts_group(head + j)) tokens.load_keys(range, (head + j) / args.group, false);
                load_chunk(range, head + j, 0, args.V, roundings_of(states, j), delta);
                prefetch_next_head(n, first, args.state_chunk, head, j, heads, 0, args.V, false);
                if (delta) take_residuals(forward_tiles, slot, index, static_cast<int>(first % args.chunk));
                const State entering = begins ? place(chunk, j) : walking_state(j);
                const State next = ends && !last ? place(chunk + 1, j) : walking_state(j);
                advance(range, head + j, 0, args.V, entering, next, Tile{});
            }
        }
    }
    // Whether l is saved: states advance by the chunks of which it is needed.
    bool saves_scores() const { return args.state_chunk == args.chunk; }
    bool saved_as_operand() const { return A::pack == 2 && args.state_dtype == DType::bf16; }
    Unit* saved_operand(SavedStates saved, std::int64_t index) const {
        return reinterpret_cast<Unit*>(saved.data) + index * key_columns * value_columns / A::pack;
    }
    Tile saved_residuals(const SavedSlot& slot, std::int64_t index) const {
        const long row = value_columns + (saves_scores() ? args.chunk : 0);
        return {reinterpret_cast<T*>(slot.residuals) + index * args.chunk * row, row};
    }
    void take_residuals(auto& tiles, const SavedSlot& slot, std::int64_t index, int first) const {
        tiles.residual = saved_residuals(slot, index).from(first, 0);
        if (saves_scores()) tiles.l = tiles.residual.from(0, value_columns);
    }

    // The value heads of args.walk query/key heads from key_head on; partial sums of the gate parameters go to [n,
    // head].
    std::int64_t heads() const { return args.walk * args.group; }
    void begin_heads(std::int64_t n, std::int64_t key_head, const Strided& entering) {
        for (std::int64_t j = 0; j < heads(); ++j) {
            enter_state(adjoint_state(j), entering, n, key_head * args.group + j, 0, args.V);
        }
        enter_roundings(adjoints, args.d_final_roundings, n, key_head * args.group, heads());
    }
    void end_heads(std::int64_t n, std::int64_t key_head) {
        leave_roundings(adjoints, args.d_initial_roundings, n, key_head * args.group, heads());
        for (std::int64_t j = 0; j < heads(); ++j) {
            store_state(args.d_initial_state, adjoint_state(j).tile, n, key_head * args.group + j, args.K, 0, args.V);
        }
    }
    // All heads of a chunk, then those of the chunk `step` further on.
    void walk(std::int64_t n, std::int64_t key_head, std::int64_t chunk, std::int64_t step, const SavedSlot& slot, Pass pass) {
        for (std::int64_t w = 0; w < args.walk; ++w) {
            const ChunkOf next = w + 1 < args.walk ? ChunkOf{chunk, key_head + w + 1} : ChunkOf{chunk + step, key_head};
            chunk_gradients(n, {chunk, key_head + w}, next, w * args.group, slot, pass);
        }
    }

    void one_pass(std::int64_t n, std::int64_t key_head, const SavedSlot& slot) {
        save_states(n, key_head * args.group, heads(), slot);
        begin_heads(n, key_head, args.d_final_state);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) walk(n, key_head, chunk, -1, slot, Pass::all);
        end_heads(n, key_head);
    }
    void adjoint_pass(std::int64_t n, std::int64_t key_head, const SavedSlot& slot) {
        begin_heads(n, key_head, args.d_final_state);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) {
            for (std::int64_t j = 0; j < heads(); ++j) keeper.save(slot.adjoints, slot.index(chunk, j), adjoint_state(j).tile);
            walk(n, key_head, chunk, -1, slot, Pass::adjoint);
        }
        end_heads(n, key_head);
    }
    // Additive rule: d_q in a sweep forwards, d_k and d_v in a sweep backwards; no state is ever saved.
    void sweep_queries(std::int64_t n, std::int64_t key_head) {
        begin_heads(n, key_head, args.initial_state);
        for (std::int64_t chunk = 0; chunk < chunks(n); ++chunk) walk(n, key_head, chunk, 1, SavedSlot{}, Pass::queries);
    }
    void sweep_keys(std::int64_t n, std::int64_t key_head) {
        begin_heads(n, key_head, args.d_final_state);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) walk(n, key_head, chunk, -1, SavedSlot{}, Pass::keys);
        end_heads(n, key_head);
    }

    // Of a final state's gradient, which may outweigh all others, strong gates leave comba's d_p the last token's
    // product of two rows of values: no sum that averages the roundings of bf16 (docs/decisions/003). Where a piece
    // ends and its sequence goes on, what is known of the roundings is not all zeros.
    bool rests_on_one_pair(std::int64_t n, std::int64_t head, std::int64_t chunk) const {
        if (!delta || !args.undecayed_error || !args.d_final_state.given || chunk + 1 < chunks(n)) return false;
        const Strided& known = args.d_final_roundings;
        bool ends = true;
        for (int i = 0; known.given && i < args.roundings; ++i) {
            ends = ends && load_element(element_at(known, n, head, i), known.dtype, 0) == 0;
        }
        return ends;
    }

    // The value heads of one query/key head, the first of which is head `first` of the task; then `next` is prefetched.
    void chunk_gradients(std::int64_t n, ChunkOf here, ChunkOf next, std::int64_t first, const SavedSlot& slot, Pass pass) {
        const ChunkRange range = range_of(n, here.chunk);
        const bool rest = pass == Pass::all || pass == Pass::gradients;
        const bool keys_wanted = args.d_q.given || args.d_k.given || args.d_p.given;
        const algorithms::Wanted wanted{.adjoint = pass == Pass::all || pass == Pass::adjoint || pass == Pass::keys,
                                        .queries = (rest && (delta ? keys_wanted : args.d_q.given)) || pass == Pass::queries,
                                        .keys = (rest && (delta ? keys_wanted : args.d_k.given)) ||
                                                (pass == Pass::keys && args.d_k.given),
                                        .gate = rest && args.gate_gradient,
                                        .erase_scores = !saves_scores()};
        tokens.load_keys(range, here.key_head);
        for (std::int64_t member = 0; member < args.group; ++member) {
            const std::int64_t head = here.key_head * args.group + member, j = first + member;
            T* const estimate = wanted.adjoint ? roundings_of(adjoints, j) : nullptr;
            load_chunk(range, head, 0, args.V, estimate);
            if (Ops::mixed && estimate != nullptr && StateRoundings<T>::refined(estimate, key_columns)) ops.refine();
            if (Ops::mixed && rests_on_one_pair(n, head, here.chunk)) ops.refine();
            load_tokens(d_o, args.d_o, range, head, 0, args.V);
            const std::int64_t saved = slot.index(here.chunk, j);
            const State D = pass == Pass::gradients ? State{keeper.restore(saved_adjoint, slot.adjoints, saved)} : adjoint_state(j);
            const State state = entering_state(slot, saved, j, pass, wanted);
            if (delta) take_residuals(backward_tiles, slot, saved, 0);
            if (member + 1 < args.group) {
                prefetch(n, here.chunk, head + 1, -1, false, true);
            } else {
                prefetch(n, next.chunk, next.key_head * args.group, next.key_head, true, true);
            }
            if (member + 1 < args.group || next.chunk == here.chunk) {
                prefetch_saved(n, slot, here.chunk, j + 1, pass);
            } else {
                prefetch_saved(n, slot, next.chunk, 0, pass);
            }
            algorithms::chunk_gradients<delta>(ops, in, backward_tiles, d_o, state, D, wanted);
            if constexpr (Ops::mixed) {
                const bool must_refine = ops.must_refine(in, backward_tiles, d_o, D, wanted.queries || wanted.gate);
                if (must_refine && !ops.fine) {
                    ops.refine();
                    algorithms::chunk_gradients<delta>(ops, in, backward_tiles, d_o, entering_state(slot, saved, j, pass, wanted), D,
                                                       wanted);
                }
                if (estimate != nullptr) StateRoundings<T>::refined(estimate, key_columns) = must_refine;
            }
            bool widened = false;
            if constexpr (may_widen) {
                widened = wide && wide->cancels(tokens, backward_tiles.solver, range);
                if (widened) {
                    const Tile entered = keeper.restore(walking_state(0).tile, slot.states, saved);
                    wide->backward(range, head, entered, D.tile, backward_tiles, gate_gradient, wanted);
                }
            }
            if (wanted.adjoint && !widened) algorithms::chunk_adjoint<delta>(ops, in, backward_tiles, d_o, D);
            if (pass == Pass::queries) advance_state(state.tile);
            if (wanted.adjoint) store_values(range, head);
            if (wanted.gate) {
                if (!widened) ops.gate.finish_gradient(gate_gradient, args.undecayed_error);
                tokens.store_gate_gradient(gate_gradient, n, head, range);
            }
            gather(member, wanted, range);
        }
        store_keys(range, here.key_head, wanted);
    }
    // The state that entered value head j's chunk, its residual and erase scores.
    void prefetch_saved(std::int64_t n, const SavedSlot& slot, std::int64_t chunk, std::int64_t j, Pass pass) {
        if (pass == Pass::queries || pass == Pass::keys || chunk < 0 || chunk >= chunks(n)) return;
        const std::int64_t index = slot.index(chunk, j);
        const std::int64_t row_bytes = value_columns * static_cast<std::int64_t>(size_of(args.state_dtype));
        ops.next_chunk.add(slot.states.data + index * key_columns * row_bytes, key_columns, row_bytes);
        if (!delta) return;
        const Tile residuals = saved_residuals(slot, index);
        ops.next_chunk.add(reinterpret_cast<const char*>(residuals.data), args.chunk, residuals.row * sizeof(T));
    }
    State entering_state(const SavedSlot& slot, std::int64_t index, std::int64_t j, Pass pass, algorithms::Wanted wanted) {
        if (pass == Pass::queries) return {adjoint_state(j).tile};
        if (!wanted.queries && !wanted.gate) return {};
        if (saved_as_operand() && !ops.fine) return {{}, {nullptr, 0, saved_operand(slot.states, index), value_columns / A::pack}};
        return {keeper.restore(walking_state(0).tile, slot.states, index)};
    }
    void advance_state(Tile state) {
        ops.decay_and_write({state}, {state}, ops.to_end(in.k), in.v);
    }
    void store_values(const ChunkRange& range, std::int64_t head) {
        store_tokens(args.d_v, delta ? backward_tiles.z : backward_tiles.y, range, head, 0, args.V);
        if (delta && args.d_beta.given) {
            for (int i = 0; i < range.length; ++i) backward_tiles.d_beta[i] *= tokens.beta_slope[i];
            store_numbers(args.d_beta, backward_tiles.d_beta, range, head);
        }
    }
    // Adds this value head's d_q, d_k, d_e to the group's.
    void gather(std::int64_t member, algorithms::Wanted wanted, const ChunkRange& range) {
        const auto& t = backward_tiles;
        if (args.group == 1) return;
        const auto combine = [&](Tile sum_tile, Tile part) {
            member == 0 ? copy(sum_tile, part, range.rows, key_columns) : add(sum_tile, part, range.rows, key_columns);
        };
        if (wanted.queries) combine(d_q_sum, t.d_q);
        if (wanted.keys) combine(d_k_sum, t.d_k);
        if (delta && wanted.keys) combine(d_e_sum, t.d_e);
    }
    void store_keys(const ChunkRange& range, std::int64_t key_head, algorithms::Wanted wanted) {
        if (delta && wanted.keys && !args.undecayed_error) add(d_k_sum, d_e_sum, range.rows, key_columns);
        if (wanted.queries) tokens.store_d_q(d_q_sum, range, key_head);
        if (wanted.keys) tokens.store_d_k(d_k_sum, range, key_head);
        if (wanted.keys && delta) tokens.store_d_p(d_e_sum, range, key_head);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
