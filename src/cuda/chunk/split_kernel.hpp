// SplitKernel: a backward in two launches: sweeps that save the states between chunks and their gradients, side by
// side, then all gradients, chunk by chunk in any order.
#pragma once

#include "algorithms/summary.hpp"
#include "cuda/chunk/chunk_kernel.hpp"
#include "cuda/chunk/saved_states.hpp"

namespace headrace::cuda {

template <class GateType, bool delta, class Ops>
struct SplitKernel {
    using T = typename GateType::T;

    const KernelArgs& args;
    ChunkKernel<GateType, delta, Ops> chunk;
    // Of the delta rule gradients of states are saved in f32 at least (split_implementations.cpp).
    using States = SavedStates<true>;
    using Adjoints = SavedStates<!delta>;
    States states;
    Adjoints adjoints;

    // Takes all memory of the block from the arena.
    __host__ __device__ SplitKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : args(arguments), chunk(args, arena, use) {
        states = saved<States>(arena, args.saved_states, args.state_factors, args.state_dtype, use);
        adjoints = saved<Adjoints>(arena, args.saved_adjoints, args.adjoint_factors, args.adjoint_dtype, use);
    }

    // ---- sequence n, one value head, values [first, first + args.value_columns) ----
    // Saves what enters each chunk, and the delta rule's residuals.
    HEADRACE_DEVICE void sweep_states(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        const int count = enter(first);
        load_state(chunk.S, args.initial_state, n, head, args.K, first, count);
        const std::int64_t chunks = chunk.chunks(sequence);
        HEADRACE_ROLLED
        for (std::int64_t c = 0; c < chunks; ++c) {
            const std::int64_t place = saved_place(args, sequence, n, head, c, args.chunk);
            states.save(place, chunk.S, first, chunk.ops.V);
            if (delta || c + 1 < chunks) chunk.advance(chunk.range_of(sequence, c), place, head, first, count);
        }
    }
    // Saves the gradient of what leaves each chunk, where the gradients want it, and stores that of the initial state.
    HEADRACE_DEVICE void sweep_adjoints(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        const int count = enter(first);
        load_state(chunk.S, args.d_final_state, n, head, args.K, first, count);
        HEADRACE_ROLLED
        for (std::int64_t c = chunk.chunks(sequence) - 1; c >= 0; --c) {
            if (adjoints.data != nullptr)
                adjoints.save(saved_place(args, sequence, n, head, c, args.chunk), chunk.S, first, chunk.ops.V);
            if (c > 0 || args.d_initial_state.given) retreat(chunk.range_of(sequence, c), head, first, count);
        }
        store_state(args.d_initial_state, chunk.S, n, head, args.K, first, count);
    }

    // ---- part `row` of all sequences, all value heads of one query/key head ----
    HEADRACE_DEVICE void gradients(std::int64_t row, std::int64_t key_head) {
        const PartAt at = part_at(args, row, args.chunk);
        const TokenRange sequence = sequence_of(args, at.n);
        const std::int64_t first_head = key_head * args.group;
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) clear_parameter_sums(args, row, first_head + member);
        if (at.part >= chunk.chunks(sequence)) return;
        const ChunkRange range = chunk.range_of(sequence, at.part);
        chunk.tokens.load_keys(range, key_head);
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            const std::int64_t head = first_head + member, place = row * args.HV + head;
            chunk.head_gradients(range, head, place, states.restore(place), adjoints.restore(place), row);
            chunk.gather(member, range);
        }
        chunk.store_keys(range, key_head);
    }

  private:
    template <class Saved>
    __host__ __device__ Saved saved(Arena& arena, char* data, float* factors, DType dtype, Use use) const {
        Saved saved{
            data, factors, dtype, chunk.key_columns, round_up(args.V, 16), round_up(args.value_columns, 16), {}, {}};
        if (dtype == DType::f16 && use == Use::sweeps) saved.largest_of_warps = arena.take<double>(Saved::warps);
        if (dtype != DType::f64 && use == Use::gradients) saved.widened = arena.tile<double>(saved.rows, saved.columns);
        return saved;
    }
    // The number of values.
    HEADRACE_DEVICE int enter(int first) {
        const int count = args.V - first < args.value_columns ? args.V - first : args.value_columns;
        chunk.ops.V = round_up(count, 16);
        return count;
    }
    // S, the gradient of the state that leaves the chunk, becomes that of the one that enters it.
    HEADRACE_DEVICE void retreat(const ChunkRange& range, std::int64_t head, int first, int count) {
        const std::int64_t key_head = quotient(head, args.group);
        delta ? chunk.tokens.load_keys(range, key_head) : chunk.tokens.load_queries(range, key_head);
        chunk.tokens.load_gates(range, head);
        chunk.ops.start_chunk(range.rows, chunk.tokens.log_decay);
        using Tokens = decltype(chunk.tokens);
        load_tokens<Tokens::template met<false>, Tokens::template value_rows<true>>(chunk.d_o, args.d_o, range, head,
                                                                                     first, count);
        algorithms::chunk_written<delta>(chunk.ops, chunk.in, chunk.backward_tiles, chunk.d_o, chunk.S);
        algorithms::chunk_adjoint<delta>(chunk.ops, chunk.in, chunk.backward_tiles, chunk.d_o, chunk.S);
    }
};

}  // namespace headrace::cuda
