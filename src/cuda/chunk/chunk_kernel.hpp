// ChunkKernel: a thread block walks the chunks of one sequence and head, loads tiles, runs the algorithm pages, stores
// results. Its parts are those of the split backward (split_kernel.hpp) too.
#pragma once

#include "cuda/chunk/chunk_ops.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// What a block does: walk a forward or a backward, or of a backward that is split, one of the sweeps, or the gradients
// of a chunk.
enum class Use { forward, backward, sweeps, gradients };

template <class GateType, bool delta, class OpsType = ChunkOps<GateType>>
struct ChunkKernel {
    using T = typename GateType::T;
    using Ops = OpsType;
    using Tile = cuda::Tile<T>;
    static constexpr Gates gates = GateType::per_channel ? Gates::of_channels : Gates::of_tokens;

    const KernelArgs& args;
    int key_columns, value_columns;
    Tile S;  // of a sweep
    TokenTiles<T, delta, gates> tokens;
    Ops ops;
    algorithms::ChunkInputs<Ops> in;
    algorithms::ForwardTiles<Ops> forward_tiles{};
    algorithms::BackwardTiles<Ops> backward_tiles{};
    Tile adjoints, o, d_o, gate_gradient, d_q_sum, d_k_sum, d_e_sum;

    // Takes all memory of the block from the arena; the states of a walk last, which are the first to leave shared
    // memory.
    __host__ __device__ ChunkKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(has_all_values(use) ? args.V : args.value_columns, 16)),
          S(use == Use::sweeps ? arena.tile<T>(key_columns, value_columns) : Tile{}),
          tokens(args, arena, args.chunk, row_columns(use), has_all_values(use)) {
        const int C = args.chunk;
        const bool gradients = has_all_values(use);
        ops.undecayed_error = tokens.undecayed_error();
        ops.carve(arena, C, key_columns, value_columns, gradients);
        in = {{tokens.q},
              {tokens.k},
              {tokens.e},
              tokens.v,
              tokens.beta,
              static_cast<T>(args.scale),
              tokens.undecayed_error()};
        // Tiles take the place of others that nobody reads any more: the delta rule's residuals that of the values that
        // they are made of, and outputs that of the residuals.
        const bool in_place = use == Use::sweeps || (delta && use == Use::forward);
        o = d_o = in_place ? tokens.v : arena.tile<T>(C, row_columns(use));
        if (delta || use != Use::sweeps) forward_tiles.P = backward_tiles.P = arena.tile<T>(C, C);
        if (delta) {
            forward_tiles.l = backward_tiles.l = arena.tile<T>(C, C);
            forward_tiles.solver = backward_tiles.solver = gradients ? arena.tile<T>(C, C) : forward_tiles.l;
            forward_tiles.residual = use == Use::sweeps ? arena.tile<T>(C, value_columns) : tokens.v;
            forward_tiles.d = backward_tiles.d = arena.tile<T>(C, value_columns);
            backward_tiles.residual = forward_tiles.residual;
            if (use == Use::sweeps) backward_tiles.y = forward_tiles.residual, backward_tiles.z = forward_tiles.d;
        }
        if (gradients) carve_gradients(arena, use);
        if (use == Use::forward || use == Use::backward) S = arena.tile<T>(key_columns, value_columns);
        if (use == Use::backward) adjoints = arena.tile<T>(args.group * key_columns, value_columns);
    }

    // ---- forward: sequence n, one value head, values [first, first + args.value_columns) ----
    HEADRACE_DEVICE void forward(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        const int count = args.V - first < args.value_columns ? args.V - first : args.value_columns;
        ops.V = round_up(count, 16);
        load_state(S, args.initial_state, n, head, args.K, first, count);
        HEADRACE_ROLLED
        for (std::int64_t chunk = 0; chunk < chunks(sequence); ++chunk) {
            const ChunkRange range = range_of(sequence, chunk);
            tokens.template load_keys<true>(range, quotient(head, args.group));
            tokens.template load_head<true>(range, head, first, count);
            ops.start_chunk(range.rows, tokens.log_decay);
            algorithms::chunk_forward<delta>(ops, in, forward_tiles, S, S, o);
            store_tokens(args.o, o, range, head, first, count);
        }
        store_state(args.final_state, S, n, head, args.K, first, count);
    }

    // ---- backward: sequence n, all value heads of one query/key head ----
    HEADRACE_DEVICE void backward(std::int64_t n, std::int64_t key_head) {
        const TokenRange sequence = sequence_of(args, n);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            clear_parameter_sums(args, n, head);
            load_state(S, args.initial_state, n, head, args.K, 0, args.V);
            HEADRACE_ROLLED
            for (std::int64_t chunk = 0; chunk < chunks(sequence); ++chunk) {
                const std::int64_t place = saved_place(args, sequence, n, head, chunk, args.chunk);
                store_state(saved_state(place), S, 0, 0, key_columns, 0, value_columns);
                advance(range_of(sequence, chunk), place, head, 0, args.V);
            }
            load_state(adjoint(member), args.d_final_state, n, head, args.K, 0, args.V);
        }
        HEADRACE_ROLLED
        for (std::int64_t chunk = chunks(sequence) - 1; chunk >= 0; --chunk)
            chunk_gradients(sequence, n, key_head, chunk);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            store_state(args.d_initial_state, adjoint(member), n, key_head * args.group + member, args.K, 0, args.V);
        }
    }

    // ---- what the split backward does too ----
    __host__ __device__ static bool has_all_values(Use use) { return use == Use::backward || use == Use::gradients; }
    // Of rows of values, or where gradients of keys take their place the wider of both.
    __host__ __device__ int row_columns(Use use) const {
        return delta && has_all_values(use) && key_columns > value_columns ? key_columns : value_columns;
    }
    // In the order of chunk_gradients: d_q is begun behind the last use of the residuals, d_e behind that of y, d_l
    // behind the solver's, and d_k, but where the adjoint of a walk's state wants it, behind that of d_o.
    __host__ __device__ void carve_gradients(Arena& arena, Use use) {
        const int C = args.chunk;
        auto& t = backward_tiles;
        t.d_P = arena.tile<T>(C, C);
        t.y = arena.tile<T>(C, row_columns(use));
        t.d_q = delta ? t.residual : arena.tile<T>(C, key_columns);
        t.d_k = delta && use == Use::gradients ? d_o : arena.tile<T>(C, key_columns);
        t.d_beta = arena.take<T>(C);
        if (delta) {
            t.d_l = t.solver;
            t.z = arena.tile<T>(C, value_columns);
            t.d_e = t.y;
        }
        gate_gradient = ops.gate.carve_gradient(arena, C, t.P, t.l);
        const bool grouped = args.group > 1;
        d_q_sum = grouped ? arena.tile<T>(C, key_columns) : t.d_q;
        d_k_sum = grouped ? arena.tile<T>(C, key_columns) : t.d_k;
        d_e_sum = grouped && delta ? arena.tile<T>(C, key_columns) : t.d_e;
    }
    HEADRACE_DEVICE Tile adjoint(int member) const { return adjoints.from(member * key_columns, 0); }
    HEADRACE_DEVICE std::int64_t chunks(const TokenRange& s) const { return parts_of(s.end - s.begin, args.chunk); }
    HEADRACE_DEVICE ChunkRange range_of(const TokenRange& s, std::int64_t chunk) const {
        const std::int64_t first = chunk * args.chunk, left = s.end - s.begin - first;
        const int length = static_cast<int>(left < args.chunk ? left : args.chunk);
        return {s.row, s.begin, s.end, first, length, round_up(length, 16), args.reverse};
    }

    // In the type of tiles.
    HEADRACE_DEVICE Strided saved(char* data, std::int64_t place, int rows) const {
        const std::int64_t columns = round_up(args.V, 16), elements = rows * columns;
        return {data + place * elements * static_cast<std::int64_t>(sizeof(T)),
                {0, 0, columns, 1},
                sizeof(T) == 8 ? DType::f64 : DType::f32,
                true};
    }
    HEADRACE_DEVICE Strided saved_state(std::int64_t place) const {
        return saved(args.saved_states, place, key_columns);
    }
    HEADRACE_DEVICE Strided saved_residual(std::int64_t place) const {
        return saved(args.saved_residuals, place, args.chunk);
    }
    // Takes values [first, first + count) of S to the chunk's end, and saves the delta rule's residuals.
    HEADRACE_DEVICE void advance(const ChunkRange& range, std::int64_t place, std::int64_t head, int first, int count) {
        tokens.load_keys(range, quotient(head, args.group), false);
        tokens.load_head(range, head, first, count);
        ops.start_chunk(range.rows, tokens.log_decay);
        algorithms::chunk_forward<delta>(ops, in, forward_tiles, S, S, Tile{});
        if (delta) store_state(saved_residual(place), forward_tiles.residual, 0, 0, range.rows, first, ops.V);
    }

    HEADRACE_DEVICE void chunk_gradients(const TokenRange& sequence, std::int64_t n, std::int64_t key_head,
                                         std::int64_t chunk) {
        const ChunkRange range = range_of(sequence, chunk);
        tokens.load_keys(range, key_head);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member,
                               place = saved_place(args, sequence, n, head, chunk, args.chunk);
            load_state(S, saved_state(place), 0, 0, key_columns, 0, value_columns);
            head_gradients(range, head, place, S, adjoint(member), n);
            algorithms::chunk_adjoint<delta>(ops, in, backward_tiles, d_o, adjoint(member));
            gather(member, range);
        }
        store_keys(range, key_head);
    }
    __host__ __device__ algorithms::Wanted wanted() const {
        const bool keys = args.d_q.given || args.d_k.given || args.d_p.given;
        return {.adjoint = true,
                .queries = delta ? keys : args.d_q.given,
                .keys = delta ? keys : args.d_k.given,
                .gate = args.gate_gradient,
                .erase_scores = true};
    }
    // All gradients of a value head in a chunk whose keys are loaded, from the state S that enters it and the gradient
    // D of the one that leaves it: stores those of values and gates, adds those of the gate's parameters to sum number
    // `sum` of the head, leaves d_q, d_k and d_e.
    HEADRACE_DEVICE void head_gradients(const ChunkRange& range, std::int64_t head, std::int64_t place, Tile S, Tile D,
                                        std::int64_t sum) {
        delta ? tokens.load_gates(range, head) : tokens.load_head(range, head, 0, args.V);
        ops.start_chunk(range.rows, tokens.log_decay);
        load_tokens<decltype(tokens)::template met<false>, decltype(tokens)::key_rows>(d_o, args.d_o, range, head, 0,
                                                                                       args.V);
        if (delta) load_rows(backward_tiles.residual, saved_residual(place), range.rows);
        algorithms::chunk_gradients<delta>(ops, in, backward_tiles, d_o, S, D, wanted());
        store_values(range, head);
        if (!args.gate_gradient) return;
        ops.gate.finish_gradient(gate_gradient, tokens.undecayed_error());
        tokens.store_gate_gradient(gate_gradient, sum, head, range);
    }
    HEADRACE_DEVICE void load_rows(Tile dst, const Strided& tensor, int rows) const {
        for_each(dst, rows, value_columns,
                 [&](int i, int j) { return reinterpret_cast<const T*>(tensor.data)[i * value_columns + j]; });
    }
    HEADRACE_DEVICE void store_values(const ChunkRange& range, std::int64_t head) {
        store_tokens(args.d_v, delta ? backward_tiles.z : backward_tiles.y, range, head, 0, args.V);
        if (!delta || !args.d_beta.given) return;
        each(range.rows, [&](int i) { backward_tiles.d_beta[i] *= tokens.beta_slope[i]; });
        ptx::sync_block();
        store_numbers(args.d_beta, backward_tiles.d_beta, range, head);
    }
    // Adds this value head's d_q, d_k, d_e to the group's.
    HEADRACE_DEVICE void gather(int member, const ChunkRange& range) {
        const auto& t = backward_tiles;
        const algorithms::Wanted wanted = this->wanted();
        if (args.group == 1) return;
        const auto combine = [&](Tile sum, Tile part) {
            for_each(sum, range.rows, key_columns,
                     [&](int i, int c) { return member == 0 ? part.at(i, c) : sum.at(i, c) + part.at(i, c); });
        };
        if (wanted.queries) combine(d_q_sum, t.d_q);
        if (wanted.keys) combine(d_k_sum, t.d_k);
        if (delta && wanted.keys) combine(d_e_sum, t.d_e);
    }
    HEADRACE_DEVICE void store_keys(const ChunkRange& range, std::int64_t key_head) {
        const algorithms::Wanted wanted = this->wanted();
        if (delta && wanted.keys && !tokens.undecayed_error()) {
            for_each(d_k_sum, range.rows, key_columns,
                     [&](int i, int c) { return d_k_sum.at(i, c) + d_e_sum.at(i, c); });
        }
        if (wanted.queries) tokens.store_d_q(d_q_sum, range, key_head);
        if (wanted.keys) tokens.store_d_k(d_k_sum, range, key_head);
        if (wanted.keys && tokens.undecayed_error()) tokens.store_d_p(d_e_sum, range, key_head);
    }
};

}  // namespace headrace::cuda
