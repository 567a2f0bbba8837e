// ChunkKernel: walks the chunks of one sequence and head, loads tiles, runs the algorithm pages, stores results.
#pragma once

#include "cpu/chunk_ops.hpp"
#include "cpu/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Where the states of chunks are kept between the sweeps of a backward: chunk c of head j of the group at
// index first + c * per_chunk + j.
struct SavedSlot {
    char* states;
    char* adjoints;
    void* residuals;
    std::int64_t first, per_chunk;
    std::int64_t index(std::int64_t chunk, std::int64_t member) const { return first + chunk * per_chunk + member; }
};

enum class Pass { all, adjoint, gradients, queries, keys };

template <class A, class GateType, bool delta>
struct ChunkKernel {
    using T = typename A::real;
    using Ops = ChunkOps<A, std::conditional_t<delta && A::pack == 2, F32, A>, GateType>;
    using Tile = cpu::Tile<T>;

    const KernelArgs& args;
    int key_columns, value_columns;
    TokenTiles<T> tokens;
    Ops ops;
    algorithms::ChunkInputs<Ops> in;
    algorithms::ForwardTiles<Ops> forward_tiles;
    algorithms::BackwardTiles<Ops> backward_tiles;
    Tile S, o, d_o, gate_gradient, d_q_sum, d_k_sum, d_e_sum, saved_state, saved_adjoint;
    T* adjoint_states = nullptr;  // [group] tiles of [K,V]

    enum Use { forward_only, with_backward, sweeps_only };  // sweeps_only: two_sweeps, which restores no state

    // Takes all scratch memory from the arena: `use` decides how much.
    ChunkKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(use == forward_only ? args.value_columns : args.V, 16)),
          tokens(args, arena, args.chunk, value_columns, GateType::per_channel ? Norm::in_rows : Norm::apart) {
        const int C = args.chunk;
        ops.undecayed_error = args.undecayed_error;
        ops.carve(arena, C, key_columns, value_columns, use != forward_only, delta, use == forward_only ? 1 : use == sweeps_only ? 2 : 3);
        const auto keys = [&] { return arena.tile<T>(C, key_columns); };
        const auto value_tile = [&] { return arena.tile<T>(C, value_columns); };
        const auto square = [&] { return arena.tile<T>(C, C); };
        in = {{tokens.q, tokens.q_norm}, {tokens.k, tokens.k_norm}, {tokens.e, tokens.e_norm}, tokens.v, tokens.beta,
              static_cast<T>(args.scale), args.undecayed_error};
        S = use == sweeps_only ? Tile{nullptr, round_up(args.V, 16) + 16} : arena.tile<T>(key_columns, value_columns);
        o = value_tile();
        forward_tiles.P = square();
        if (delta) {
            forward_tiles.l = square();
            if (use == forward_only) forward_tiles.residual = value_tile();  // a backward saves them
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
            t.l = forward_tiles.l;
            t.solver = square();
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
        saved_state = S;
        if (use == with_backward) saved_adjoint = arena.tile<T>(key_columns, value_columns);
        adjoint_states = arena.take<T>(static_cast<std::size_t>(args.group * state_elements()));
    }

    std::int64_t state_elements() const { return static_cast<std::int64_t>(key_columns) * S.row; }
    Tile adjoint_state(std::int64_t member) const { return {adjoint_states + member * state_elements(), S.row}; }
    std::int64_t chunks(std::int64_t n) const {
        const TokenRange& s = args.sequences[n];
        return (s.end - s.begin + args.chunk - 1) / args.chunk;
    }
    ChunkRange range_of(std::int64_t n, std::int64_t chunk) const {
        const TokenRange& s = args.sequences[n];
        const std::int64_t first = chunk * args.chunk, left = s.end - s.begin - first;
        const int length = static_cast<int>(left < args.chunk ? left : args.chunk);
        return {s.row, s.begin, s.end, first, length, round_up(length, 16), args.reverse};
    }

    void load_chunk(const ChunkRange& range, std::int64_t head, int first_value, int values) {
        ops.start_chunk(range.rows);
        tokens.load_head(range, head, first_value, values);
        ops.gate.prepare(tokens.log_decay, range.length, range.rows);
    }

    // Names the rows that are loaded next, key rows only for key_head >= 0.
    void prefetch(std::int64_t n, std::int64_t chunk, std::int64_t head, std::int64_t key_head, int first, int count,
                  bool with_q, bool with_d_o) {
        // At least two products with a state, one of C rows and one of K.
        ops.next_chunk.start((ops.rows + key_columns) / row_block * (value_columns / (column_block * lanes<T>)));
        if (chunk < 0 || chunk >= chunks(n)) return;
        const ChunkRange range = range_of(n, chunk);
        if (key_head >= 0) {
            if (with_q) ops.next_chunk.add(args.q, range, key_head, args.K);
            ops.next_chunk.add(args.k, range, key_head, args.K);
            if (args.undecayed_error) ops.next_chunk.add(args.p, range, key_head, args.K);
        }
        if (GateType::per_channel) ops.next_chunk.add(args.g, range, head, args.K);
        if (first == 0) ops.next_chunk.add(args.v, range, head, count);
        if (with_d_o) ops.next_chunk.add(args.d_o, range, head, args.V);
    }

    // ---- forward: all chunks of sequence n and value head `head`, values [first, first + count) ----
    void forward(std::int64_t n, std::int64_t head, int first, int count) {
        ops.V = value_columns = round_up(count, 16);
        load_state(S, args.initial_state, n, head, args.K, first, count);
        for (std::int64_t chunk = 0; chunk < chunks(n); ++chunk) {
            const ChunkRange range = range_of(n, chunk);
            tokens.load_keys(range, head / args.group);
            load_chunk(range, head, first, count);
            prefetch(n, chunk + 1, head, head / args.group, first, count, true, false);
            algorithms::chunk_forward<delta>(ops, in, forward_tiles, S, S, o);
            store_tokens(args.o, o, range, head, first, count);
        }
        store_state(args.final_state, S, n, head, args.K, first, count);
    }

    // ---- backward ----
    // Runs the states forwards and saves what enters each chunk (and the delta rule's residuals). Where saved states have
    // the tile's type, each is computed in its place.
    void save_states(std::int64_t n, std::int64_t head, const SavedSlot& slot) {
        const std::int64_t member = head % args.group;
        const auto place = [&](std::int64_t chunk) { return saved_in_place() ? saved_tile(slot.states, slot.index(chunk, member)) : S; };
        if (chunks(n) > 0) load_state(place(0), args.initial_state, n, head, args.K, 0, args.V);
        for (std::int64_t chunk = 0; chunk < chunks(n); ++chunk) {
            const std::int64_t index = slot.index(chunk, member);
            if (!saved_in_place()) save(slot.states, index, S);
            const bool last = chunk + 1 == chunks(n);
            if (last && !delta) break;
            const ChunkRange range = range_of(n, chunk);
            tokens.load_keys(range, head / args.group, false);
            load_chunk(range, head, 0, args.V);
            prefetch(n, chunk + 1, head, head / args.group, 0, args.V, false, false);
            if (delta) forward_tiles.residual = residual_tile(slot, index);
            algorithms::chunk_forward<delta>(ops, in, forward_tiles, place(chunk), last ? S : place(chunk + 1), Tile{});
        }
    }
    bool saved_in_place() const { return size_of(args.state_dtype) == sizeof(T); }
    Tile saved_tile(char* base, std::int64_t index) const {
        return {reinterpret_cast<T*>(base) + index * key_columns * value_columns, value_columns};
    }
    Tile residual_tile(const SavedSlot& slot, std::int64_t index) const {
        T* data = reinterpret_cast<T*>(slot.residuals) + index * args.chunk * value_columns;
        return {data, value_columns};
    }
    void save(char* base, std::int64_t index, Tile state) const {
        const std::int64_t row_bytes = value_columns * static_cast<std::int64_t>(size_of(args.state_dtype));
        char* target = base + index * key_columns * row_bytes;
        for (int c = 0; c < key_columns; ++c) store_row<T>(target + c * row_bytes, args.state_dtype, 1, state.at(c), value_columns);
    }
    // The saved state in place, or widened into `state`.
    Tile restore(Tile state, char* base, std::int64_t index) const {
        const std::int64_t row_bytes = value_columns * static_cast<std::int64_t>(size_of(args.state_dtype));
        if (saved_in_place()) return saved_tile(base, index);
        const char* source = base + index * key_columns * row_bytes;
        for (int c = 0; c < key_columns; ++c) {
            load_row<T>(state.at(c), source + c * row_bytes, args.state_dtype, 1, value_columns, value_columns);
        }
        return state;
    }

    // One query/key head with its group of value heads; partial sums of the gate parameters go to [n, head].
    void begin_heads(std::int64_t n, std::int64_t key_head) {
        for (std::int64_t member = 0; member < args.group; ++member) {
            load_state(adjoint_state(member), args.d_final_state, n, key_head * args.group + member, args.K, 0, args.V);
        }
    }
    void end_heads(std::int64_t n, std::int64_t key_head) {
        for (std::int64_t member = 0; member < args.group; ++member) {
            store_state(args.d_initial_state, adjoint_state(member), n, key_head * args.group + member, args.K, 0, args.V);
        }
    }

    void one_pass(std::int64_t n, std::int64_t key_head, const SavedSlot& slot) {
        for (std::int64_t member = 0; member < args.group; ++member) save_states(n, key_head * args.group + member, slot);
        begin_heads(n, key_head);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) chunk_gradients(n, key_head, chunk, slot, Pass::all);
        end_heads(n, key_head);
    }
    void adjoint_pass(std::int64_t n, std::int64_t key_head, const SavedSlot& slot) {
        begin_heads(n, key_head);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) {
            for (std::int64_t member = 0; member < args.group; ++member) {
                save(slot.adjoints, slot.index(chunk, member), adjoint_state(member));
            }
            chunk_gradients(n, key_head, chunk, slot, Pass::adjoint);
        }
        end_heads(n, key_head);
    }
    // Additive rule: d_q in a sweep forwards, then d_k, d_v in a sweep backwards; no state is ever saved.
    void two_sweeps(std::int64_t n, std::int64_t key_head) {
        if (args.d_q.given) {
            for (std::int64_t member = 0; member < args.group; ++member) {
                load_state(adjoint_state(member), args.initial_state, n, key_head * args.group + member, args.K, 0, args.V);
            }
            for (std::int64_t chunk = 0; chunk < chunks(n); ++chunk) {
                chunk_gradients(n, key_head, chunk, SavedSlot{}, Pass::queries);
            }
        }
        begin_heads(n, key_head);
        for (std::int64_t chunk = chunks(n) - 1; chunk >= 0; --chunk) {
            chunk_gradients(n, key_head, chunk, SavedSlot{}, Pass::keys);
        }
        end_heads(n, key_head);
    }

    void chunk_gradients(std::int64_t n, std::int64_t key_head, std::int64_t chunk, const SavedSlot& slot, Pass pass) {
        const ChunkRange range = range_of(n, chunk);
        const bool rest = pass == Pass::all || pass == Pass::gradients;
        const bool keys_wanted = args.d_q.given || args.d_k.given || args.d_p.given;
        const algorithms::Wanted wanted{.adjoint = pass == Pass::all || pass == Pass::adjoint || pass == Pass::keys,
                                        .queries = (rest && (delta ? keys_wanted : args.d_q.given)) || pass == Pass::queries,
                                        .keys = (rest && (delta ? keys_wanted : args.d_k.given)) ||
                                                (pass == Pass::keys && args.d_k.given),
                                        .gate = rest && args.gate_gradient};
        for (std::int64_t member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            if (member == 0) tokens.load_keys(range, key_head);
            load_chunk(range, head, 0, args.V);
            load_tokens(d_o, args.d_o, range, head, 0, args.V);
            const Tile D = adjoint_tile(slot, chunk, member, pass);
            const Tile state = entering_state(slot, chunk, member, pass, wanted);
            if (delta) backward_tiles.residual = residual_tile(slot, slot.index(chunk, member));
            const bool same_chunk = member + 1 < args.group;
            const std::int64_t next = same_chunk ? chunk : pass == Pass::queries ? chunk + 1 : chunk - 1;
            prefetch(n, next, same_chunk ? head + 1 : key_head * args.group, same_chunk ? -1 : key_head, 0, args.V, true, true);
            algorithms::chunk_backward<delta>(ops, in, backward_tiles, d_o, state, D, wanted);
            if (pass == Pass::queries) advance_state(state);
            if (wanted.adjoint) store_values(range, head);
            if (wanted.gate) {
                ops.gate.finish_gradient(gate_gradient, args.undecayed_error);
                tokens.store_gate_gradient(gate_gradient, n, head, range);
            }
            gather(member, wanted, range);
        }
        store_keys(range, key_head, wanted);
    }
    Tile adjoint_tile(const SavedSlot& slot, std::int64_t chunk, std::int64_t member, Pass pass) {
        if (pass != Pass::gradients) return adjoint_state(member);
        return restore(saved_adjoint, slot.adjoints, slot.index(chunk, member));
    }
    Tile entering_state(const SavedSlot& slot, std::int64_t chunk, std::int64_t member, Pass pass, algorithms::Wanted wanted) {
        if (pass == Pass::queries) return adjoint_state(member);
        if (wanted.queries || wanted.gate) return restore(saved_state, slot.states, slot.index(chunk, member));
        return Tile{};
    }
    void advance_state(Tile state) {
        ops.decay_and_write(state, state, ops.to_end(in.k), in.v);
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
