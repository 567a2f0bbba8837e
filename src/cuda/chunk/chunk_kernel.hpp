// ChunkKernel: a thread block walks the chunks of one sequence and head, loads tiles, runs the algorithm pages, stores
// results.
#pragma once

#include "cuda/chunk/chunk_ops.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

enum class Use { forward, backward };

template <class GateType, bool delta, class OpsType = ChunkOps<GateType>>
struct ChunkKernel {
    using T = typename GateType::T;
    using Ops = OpsType;
    using Tile = cuda::Tile<T>;

    const KernelArgs& args;
    int key_columns, value_columns;
    TokenTiles<T, delta> tokens;
    Ops ops;
    algorithms::ChunkInputs<Ops> in;
    algorithms::ForwardTiles<Ops> forward_tiles{};
    algorithms::BackwardTiles<Ops> backward_tiles{};
    Tile S, adjoints, o, d_o, gate_gradient, d_q_sum, d_k_sum, d_e_sum;

    // Takes all memory of the block from the arena; the states last, which are the first to leave shared memory.
    __host__ __device__ ChunkKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(use == Use::forward ? args.value_columns : args.V, 16)),
          tokens(args, arena, args.chunk, value_columns, use == Use::backward) {
        const int C = args.chunk;
        ops.undecayed_error = args.undecayed_error;
        ops.carve(arena, C, key_columns, value_columns, use == Use::backward, args.gate_gradient);
        in = {{tokens.q},          {tokens.k}, {tokens.e}, tokens.v, tokens.beta, static_cast<T>(args.scale),
              args.undecayed_error};
        o = d_o = arena.tile<T>(C, value_columns);
        forward_tiles.P = backward_tiles.P = arena.tile<T>(C, C);
        if (delta) {
            forward_tiles.l = backward_tiles.l = arena.tile<T>(C, C);
            forward_tiles.solver = backward_tiles.solver = use == Use::forward ? forward_tiles.l : arena.tile<T>(C, C);
            forward_tiles.residual = backward_tiles.residual = arena.tile<T>(C, value_columns);
            forward_tiles.d = backward_tiles.d = arena.tile<T>(C, value_columns);
        }
        if (use == Use::backward) carve_backward(arena);
        S = arena.tile<T>(key_columns, value_columns);
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
            tokens.load_keys(range, head / args.group);
            tokens.load_head(range, head, first, count);
            ops.start_chunk(range.rows, tokens.log_decay);
            algorithms::chunk_forward<delta>(ops, in, forward_tiles, S, S, o);
            store_tokens(args.o, o, range, head, first, count);
        }
        store_state(args.final_state, S, n, head, args.K, first, count);
    }

    // ---- backward: sequence n, all value heads of one query/key head ----
    __host__ __device__ algorithms::Wanted wanted() const {
        const bool keys_wanted = args.d_q.given || args.d_k.given || args.d_p.given;
        return {.adjoint = true,
                .queries = delta ? keys_wanted : args.d_q.given,
                .keys = delta ? keys_wanted : args.d_k.given,
                .gate = args.gate_gradient,
                .erase_scores = true};
    }
    HEADRACE_DEVICE void backward(std::int64_t n, std::int64_t key_head) {
        const TokenRange sequence = sequence_of(args, n);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            clear_parameter_sums(args, n, head);
            load_state(S, args.initial_state, n, head, args.K, 0, args.V);
            HEADRACE_ROLLED
            for (std::int64_t chunk = 0; chunk < chunks(sequence); ++chunk)
                save_state(sequence, n, key_head, head, chunk);
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

  private:
    __host__ __device__ void carve_backward(Arena& arena) {
        const int C = args.chunk;
        auto& t = backward_tiles;
        t.d_P = arena.tile<T>(C, C);
        t.y = arena.tile<T>(C, value_columns);
        t.d_q = arena.tile<T>(C, key_columns);
        t.d_k = arena.tile<T>(C, key_columns);
        t.d_beta = arena.take<T>(C);
        if (delta) {
            t.d_l = arena.tile<T>(C, C);
            t.z = arena.tile<T>(C, value_columns);
            t.d_e = arena.tile<T>(C, key_columns);
        }
        gate_gradient = args.channel_gate ? arena.tile<T>(C, key_columns) : arena.tile<T>(1, C);
        const bool grouped = args.group > 1;
        d_q_sum = grouped ? arena.tile<T>(C, key_columns) : t.d_q;
        d_k_sum = grouped ? arena.tile<T>(C, key_columns) : t.d_k;
        d_e_sum = grouped && delta ? arena.tile<T>(C, key_columns) : t.d_e;
    }
    HEADRACE_DEVICE Tile adjoint(int member) const { return adjoints.from(member * key_columns, 0); }
    HEADRACE_DEVICE std::int64_t chunks(const TokenRange& s) const {
        return (s.end - s.begin + args.chunk - 1) / args.chunk;
    }
    HEADRACE_DEVICE ChunkRange range_of(const TokenRange& s, std::int64_t chunk) const {
        const std::int64_t first = chunk * args.chunk, left = s.end - s.begin - first;
        const int length = static_cast<int>(left < args.chunk ? left : args.chunk);
        return {s.row, s.begin, s.end, first, length, round_up(length, 16), args.reverse};
    }

    HEADRACE_DEVICE Strided saved(char* data, std::int64_t place, int rows, DType dtype) const {
        const std::int64_t elements = static_cast<std::int64_t>(rows) * value_columns;
        return {data + place * elements *
                           (dtype == DType::f64   ? 8
                            : dtype == DType::f32 ? 4
                                                  : 2),
                {0, 0, value_columns, 1},
                dtype,
                true};
    }
    HEADRACE_DEVICE Strided saved_state(std::int64_t place) const {
        return saved(args.saved_states, place, key_columns, args.state_dtype);
    }
    HEADRACE_DEVICE Strided saved_residual(std::int64_t place) const {
        return saved(args.saved_residuals, place, args.chunk, sizeof(T) == 8 ? DType::f64 : DType::f32);
    }
    // Saves what enters the chunk (and the delta rule's residuals), and takes S to its end.
    HEADRACE_DEVICE void save_state(const TokenRange& sequence, std::int64_t n, std::int64_t key_head,
                                    std::int64_t head, std::int64_t chunk) {
        const ChunkRange range = range_of(sequence, chunk);
        const std::int64_t place = saved_place(args, sequence, n, head, chunk, args.chunk);
        store_state(saved_state(place), S, 0, 0, key_columns, 0, value_columns);
        tokens.load_keys(range, key_head, false);
        tokens.load_head(range, head, 0, args.V);
        ops.start_chunk(range.rows, tokens.log_decay);
        algorithms::chunk_forward<delta>(ops, in, forward_tiles, S, S, Tile{});
        if (delta) store_state(saved_residual(place), forward_tiles.residual, 0, 0, range.rows, 0, value_columns);
    }

    HEADRACE_DEVICE void chunk_gradients(const TokenRange& sequence, std::int64_t n, std::int64_t key_head,
                                         std::int64_t chunk) {
        const ChunkRange range = range_of(sequence, chunk);
        const algorithms::Wanted wanted = this->wanted();
        tokens.load_keys(range, key_head);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member,
                               place = saved_place(args, sequence, n, head, chunk, args.chunk);
            tokens.load_head(range, head, 0, args.V);
            ops.start_chunk(range.rows, tokens.log_decay);
            load_tokens(d_o, args.d_o, range, head, 0, args.V);
            load_state(S, saved_state(place), 0, 0, key_columns, 0, value_columns);
            if (delta) load_rows(backward_tiles.residual, saved_residual(place), range.rows);
            algorithms::chunk_gradients<delta>(ops, in, backward_tiles, d_o, S, adjoint(member), wanted);
            algorithms::chunk_adjoint<delta>(ops, in, backward_tiles, d_o, adjoint(member));
            store_values(range, head);
            if (wanted.gate) {
                ops.gate.finish_gradient(gate_gradient, args.undecayed_error);
                tokens.store_gate_gradient(gate_gradient, n, head, range);
            }
            gather(member, wanted, range);
        }
        store_keys(range, key_head, wanted);
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
    HEADRACE_DEVICE void gather(int member, algorithms::Wanted wanted, const ChunkRange& range) {
        const auto& t = backward_tiles;
        if (args.group == 1) return;
        const auto combine = [&](Tile sum, Tile part) {
            for_each(sum, range.rows, key_columns,
                     [&](int i, int c) { return member == 0 ? part.at(i, c) : sum.at(i, c) + part.at(i, c); });
        };
        if (wanted.queries) combine(d_q_sum, t.d_q);
        if (wanted.keys) combine(d_k_sum, t.d_k);
        if (delta && wanted.keys) combine(d_e_sum, t.d_e);
    }
    HEADRACE_DEVICE void store_keys(const ChunkRange& range, std::int64_t key_head, algorithms::Wanted wanted) {
        if (delta && wanted.keys && !args.undecayed_error) {
            for_each(d_k_sum, range.rows, key_columns,
                     [&](int i, int c) { return d_k_sum.at(i, c) + d_e_sum.at(i, c); });
        }
        if (wanted.queries) tokens.store_d_q(d_q_sum, range, key_head);
        if (wanted.keys) tokens.store_d_k(d_k_sum, range, key_head);
        if (wanted.keys && delta) tokens.store_d_p(d_e_sum, range, key_head);
    }
};

}  // namespace headrace::cuda
