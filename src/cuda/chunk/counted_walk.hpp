// counted_walk: what a block of ChunkKernel does at a whole chunk and beside its chunks, counted on the host.
#pragma once

#include <type_traits>

#include "cuda/chunk/chunk_kernel.hpp"
#include "cuda/chunk/counted_ops.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/counted_token_tiles.hpp"

namespace headrace::cuda {

// Follows ChunkKernel's functions of the same names; the pages are those that it runs.
template <class GateType, bool delta>
struct CountedWalk {
    using Kernel = ChunkKernel<GateType, delta, CountedOps<GateType>>;
    using Tile = typename Kernel::Tile;

    const KernelArgs& args;
    Kernel kernel;
    TileCounter& counter;
    CountedTokenTiles<typename Kernel::T, delta, Kernel::gates> tokens;

    CountedWalk(const KernelArgs& arguments, Arena arena, Use use)
        : args(arguments),
          kernel(args, arena, use),
          counter(kernel.ops.counter),
          tokens{kernel.tokens, args, counter, args.chunk} {
        counter.spill = arena.spill;
        counter.warps = chunk_threads(sizeof(typename Kernel::T) == 8) / warp_lanes;
        kernel.ops.value_parts = Kernel::has_all_values(use) ? wide : few_values;
    }

    BlockWork forward() {
        const int values = args.value_columns;
        load(&KernelWork::input_bytes, args.initial_state, kernel.S, args.K, values);
        counter.store(&KernelWork::output_bytes, args.final_state, kernel.S, args.K, values);
        const KernelWork block = taken();
        tokens.load_keys();
        tokens.load_head(values);
        kernel.ops.start_chunk(args.chunk, kernel.tokens.log_decay);
        algorithms::chunk_forward<delta>(kernel.ops, kernel.in, kernel.forward_tiles, kernel.S, kernel.S, kernel.o);
        counter.store(&KernelWork::output_bytes, args.o, kernel.o, args.chunk, values);
        return {block, taken()};
    }

    BlockWork backward() {
        load(&KernelWork::input_bytes, args.initial_state, kernel.S, args.K, args.V);
        load(&KernelWork::input_bytes, args.d_final_state, kernel.adjoints, args.K, args.V);
        counter.store(&KernelWork::output_bytes, args.d_initial_state, kernel.adjoints, args.K, args.V);
        counter.barrier();  // clear_parameter_sums
        const KernelWork block = taken() * args.group;
        save_state();
        KernelWork step = taken() * args.group;
        step += chunk_gradients();
        return {block, step};
    }

    // ---- what the split backward does too ----
    KernelWork taken() {
        const KernelWork work = counter.work;
        counter.work = {};
        return work;
    }
    void load(double KernelWork::*bytes, const Strided& tensor, Tile tile, int rows, int columns) {
        counter.load(bytes, tensor, tile, rows, columns);
    }
    Strided saved_state() const { return {nullptr, {}, args.state_dtype, true}; }
    Strided saved_residual() const {
        return {nullptr, {}, sizeof(typename Kernel::T) == 8 ? DType::f64 : DType::f32, true};
    }

    void save_state() {
        counter.store(&KernelWork::saved_bytes, saved_state(), kernel.S, kernel.key_columns, kernel.value_columns);
        advance(args.V);
    }
    void advance(int values) {
        tokens.load_keys(false);
        tokens.load_head(values);
        kernel.ops.start_chunk(args.chunk, kernel.tokens.log_decay);
        algorithms::chunk_forward<delta>(kernel.ops, kernel.in, kernel.forward_tiles, kernel.S, kernel.S, Tile{});
        if (delta)
            counter.store(&KernelWork::saved_bytes, saved_residual(), kernel.forward_tiles.residual, args.chunk,
                          kernel.value_columns);
    }
    KernelWork chunk_gradients() {
        load(&KernelWork::saved_bytes, saved_state(), kernel.S, kernel.key_columns, kernel.value_columns);
        head_gradients(kernel.S, kernel.adjoints);
        algorithms::chunk_adjoint<delta>(kernel.ops, kernel.in, kernel.backward_tiles, kernel.d_o, kernel.adjoints);
        gather();
        KernelWork work = taken() * args.group;
        load_and_store_keys();
        return work += taken();
    }
    void head_gradients(Tile S, Tile D) {
        const auto& t = kernel.backward_tiles;
        delta ? tokens.load_gates() : tokens.load_head(args.V);
        kernel.ops.start_chunk(args.chunk, kernel.tokens.log_decay);
        counter.load_tokens(&KernelWork::input_bytes, args.d_o, kernel.d_o, args.chunk, args.V);
        if (delta) load(&KernelWork::saved_bytes, saved_residual(), t.residual, args.chunk, kernel.value_columns);
        algorithms::chunk_gradients<delta>(kernel.ops, kernel.in, t, kernel.d_o, S, D, kernel.wanted());
        counter.store(&KernelWork::output_bytes, args.d_v, delta ? t.z : t.y, args.chunk, args.V);
        if (delta && args.d_beta.given) {
            counter.each(args.chunk, 3);
            tokens.numbers(&KernelWork::output_bytes, args.d_beta, 0);
        }
        if (!args.gate_gradient) return;
        kernel.ops.finish_gradient(kernel.gate_gradient);
        tokens.store_gate_gradient(kernel.gate_gradient);
    }
    void gather() {
        const algorithms::Wanted wanted = kernel.wanted();
        const auto& t = kernel.backward_tiles;
        const auto combine = [&](bool is_wanted, Tile sum, Tile part) {
            if (args.group > 1 && is_wanted) counter.each_element(args.chunk, kernel.key_columns, sum, sum, part);
        };
        combine(wanted.queries, kernel.d_q_sum, t.d_q);
        combine(wanted.keys, kernel.d_k_sum, t.d_k);
        combine(delta && wanted.keys, kernel.d_e_sum, t.d_e);
    }
    void load_and_store_keys() {
        const algorithms::Wanted wanted = kernel.wanted();
        tokens.load_keys();
        if (delta && wanted.keys && !args.undecayed_error)
            counter.each_element(args.chunk, kernel.key_columns, kernel.d_k_sum, kernel.d_k_sum, kernel.d_e_sum);
        if (wanted.queries) tokens.store_rows(args.d_q, kernel.d_q_sum, kernel.tokens.q);
        if (wanted.keys) tokens.store_rows(args.d_k, kernel.d_k_sum, kernel.tokens.k);
        if (wanted.keys && delta) tokens.store_rows(args.d_p, kernel.d_e_sum, kernel.tokens.e);
    }
};

template <class T, bool delta, bool channel_gate, Use use>
BlockWork walk_work(const KernelArgs& args, std::size_t shared_limit) {
    using Gate = std::conditional_t<channel_gate, ChannelGate<T>, ScalarGate<T>>;
    Arena measured{nullptr, nullptr, shared_limit};
    ChunkKernel<Gate, delta>(args, measured, use);
    const CountedMemory memory(measured);
    CountedWalk<Gate, delta> walk(args, memory.arena, use);
    return use == Use::forward ? walk.forward() : walk.backward();
}

}  // namespace headrace::cuda
