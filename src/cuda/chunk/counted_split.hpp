// counted_split: what a block of SplitKernel does at a whole chunk and beside its chunks, counted on the host.
#pragma once

#include "algorithms/summary.hpp"
#include "cuda/chunk/counted_walk.hpp"
#include "cuda/chunk/split_kernel.hpp"

namespace headrace::cuda {

// Follows SplitKernel's functions of the same names.
template <class GateType, bool delta>
struct CountedSplit {
    using Walk = CountedWalk<GateType, delta>;
    using Tile = typename Walk::Tile;

    const KernelArgs& args;
    Walk walk;
    char* spill;

    CountedSplit(const KernelArgs& arguments, Arena arena, Use use)
        : args(arguments), walk(args, arena, use), spill(arena.spill) {}

    // The mean of the blocks that sweep states and of those that sweep their gradients, where there are both.
    BlockWork sweeps() {
        const int values = args.value_columns;
        const double share = args.saved_states != nullptr ? 0.5 : 1;
        walk.load(&KernelWork::input_bytes, args.d_final_state, walk.kernel.S, args.K, values);
        walk.counter.store(&KernelWork::output_bytes, args.d_initial_state, walk.kernel.S, args.K, values);
        KernelWork block = walk.taken() * share;
        save(args.saved_adjoints, args.adjoint_dtype);
        retreat(values);
        KernelWork step = walk.taken() * share;
        if (args.saved_states == nullptr) return {block, step};
        walk.load(&KernelWork::input_bytes, args.initial_state, walk.kernel.S, args.K, values);
        block += walk.taken() * share;
        save(args.saved_states, args.state_dtype);
        walk.advance(values);
        step += walk.taken() * share;
        return {block, step};
    }

    BlockWork gradients() {
        walk.counter.barrier();  // clear_parameter_sums
        const Tile S = restore(args.state_dtype), D = restore(args.adjoint_dtype);
        walk.head_gradients(S, D);
        walk.gather();
        KernelWork step = walk.taken() * args.group;
        walk.load_and_store_keys();
        step += walk.taken();
        return {{}, step};
    }

  private:
    void save(const char* data, DType dtype) {
        if (data == nullptr) return;
        if (dtype == DType::f16)
            walk.counter.each_row_sum(walk.kernel.key_columns, walk.kernel.value_columns, walk.kernel.S);
        walk.counter.store(&KernelWork::saved_bytes, {nullptr, {}, dtype, true}, walk.kernel.S, walk.kernel.key_columns,
                           walk.kernel.value_columns);
    }
    void retreat(int values) {
        auto& kernel = walk.kernel;
        delta ? walk.tokens.load_keys() : walk.tokens.load_queries();
        walk.tokens.load_gates();
        kernel.ops.start_chunk(args.chunk, kernel.tokens.log_decay);
        walk.counter.load_tokens(&KernelWork::input_bytes, args.d_o, kernel.d_o, args.chunk, values);
        algorithms::chunk_written<delta>(kernel.ops, kernel.in, kernel.backward_tiles, kernel.d_o, kernel.S);
        algorithms::chunk_adjoint<delta>(kernel.ops, kernel.in, kernel.backward_tiles, kernel.d_o, kernel.S);
    }
    // The state where it was saved, or widened into a tile, which is taken to lie in the workspace too.
    Tile restore(DType dtype) {
        const auto& kernel = walk.kernel;
        const Tile tile{reinterpret_cast<double*>(spill), kernel.value_columns};
        if (dtype != DType::f64)
            walk.load(&KernelWork::saved_bytes, {nullptr, {}, dtype, true}, tile, kernel.key_columns,
                      kernel.value_columns);
        return tile;
    }
};

template <bool delta, bool channel_gate, Use use>
BlockWork split_work(const KernelArgs& args, std::size_t shared_limit) {
    using Gate = std::conditional_t<channel_gate, ChannelGate<double>, ScalarGate<double>>;
    Arena measured{nullptr, nullptr, shared_limit};
    SplitKernel<Gate, delta, ChunkOps<Gate>>(args, measured, use);
    const CountedMemory memory(measured);
    CountedSplit<Gate, delta> split(args, memory.arena, use);
    return use == Use::sweeps ? split.sweeps() : split.gradients();
}

}  // namespace headrace::cuda
