// counted_additive: what a block of AdditiveKernel does at a whole chunk and beside its chunks, one of DecayJoin at a
// segment, and one of GateTermsKernel at a chunk, counted on the host.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

// How often a walk that leaves terms of a gate's gradient multiplies outputs by their partners' rows.
inline double passes_of(GateTerms terms) {
    return terms == GateTerms::none ? 0 : terms == GateTerms::of_queries ? 1 : 2;
}

// The primitives of AdditiveOps, one by one, of the four warps with values.
template <int K>
struct CountedAdditiveOps : CountedWarpOps {
    using Inputs = algorithms::ChunkInputs<CountedAdditiveOps>;
    bool split, diagonal_apart;  // split: splits_scores
    double passes;               // passes_of

    void read_and_score(Tile, Decayed, State, Tile, Tile) {
        read_state(K, 0);
        products.add(split ? 3 * lower : lower, split ? lower : lower / 2, split ? 2 : 1);
        if (diagonal_apart) products.access(tiles, 0);
        constexpr double shuffles = 8 + 4 + 2;
        products.add(0, passes * steps, passes), products.access(passes * (shuffles + 2), 3 * passes);
        products.access(2 * tiles, 0);
    }
    void decay_and_write(State, State, Decayed, Tile) {
        products.add(0, steps, 1);  // rows of values, once for all that is made of them
        write_state(K, 0);
    }
};

// Decays and scores of a chunk, by the other four warps while these walk the one before it: nobody waits for them.
template <int K>
void count_scores(TileCounter& counter, const KernelArgs& args, bool outputs) {
    constexpr double blocks = 10, on_diagonal = 4, left_operands = 4;  // of 16 x 16, on and below the diagonal
    KernelWork& work = counter.work;
    const double norms = args.l2norm ? 1 : 0, rows = outputs ? 2 : 1;
    const bool known = args.key_gradient.row_norms != nullptr;              // norms that another walk left
    work.barriers += 0.5;                                                   // of half of the warps
    work.tile_bytes += 128 * (12 + 4 + 4 + 5 + 2 * 2 + 1 + 2 * norms * 2);  // sums of decays; what is left of them
    work.tile_bytes += known ? 128 * 4 : norms * 8 * 128 * (rows * (K / 32.0 * 4 + 2) + 2);
    if (!outputs) return;
    work.tensor_flop += blocks * 2 * K / 16 * WarpProducts::flop_of_product;
    work.tile_bytes += (blocks + left_operands) * K / 16 * WarpProducts::bytes_of_operand;
    const double of_scores = splits_scores(args) ? 8 : 4;
    work.tile_bytes += 128 * (blocks * (1 + of_scores + 6 * norms) + (blocks - on_diagonal) * 4 + on_diagonal * 12);
}

// Follows AdditiveKernel::run: `values` of v are read, and outputs stored where they are wanted.
template <int K>
KernelWork additive_chunk_work(const KernelArgs& args, double values, bool outputs) {
    using Ops = CountedAdditiveOps<K>;
    const double C = tensor_chunk, rows = outputs ? 2 : 1;
    const double passes = outputs ? passes_of(args.gate_walk.terms) : 0;
    TileCounter counter;
    KernelWork& work = counter.work;
    Ops ops{{{counter, block_warps}}, splits_scores(args), args.key_gradient.walk, passes};
    work.input_bytes = rows * C * args.K * 2 + bytes_of(args.v, C * values) + bytes_of(args.log_decays, C);
    work.tile_bytes = rows * C * K * 2 + C * tensor_values * 2;  // as copies write them
    counter.barrier();
    if (args.stages == 1) work.memory_waits = 1, work.tile_waits = 40, work.barriers += 2;  // scores before the walk
    const typename Ops::Tile given{true};
    const algorithms::ForwardTiles<Ops> tiles{given, given, given, given, given};
    const algorithms::ChunkInputs<Ops> in{{}, {}, {}, given, nullptr, 1.0f, false};
    algorithms::chunk_states<false>(ops, in, tiles, {}, {}, {outputs});
    // The model shares products among all warps alike; these have more than the mean, each a fifth of a wait.
    const double own = work.tensor_flop / block_warps;
    count_scores<K>(counter, args, outputs);
    const double beyond = own - work.tensor_flop / (2 * block_warps);
    ops.products.access(2, 2 + 0.2 * beyond / WarpProducts::flop_of_product);  // the chunk's decay
    if (!outputs) return work;
    const KeyGradient& keys = args.key_gradient;
    if (keys.row_norms != nullptr) work.saved_bytes += 4 * 2 * C;
    if (keys.left_q_norms != nullptr) work.saved_bytes += 4 * 2 * C / args.group / quotient_up(args.V, tensor_values);
    if (args.added.sums != nullptr) {
        work.saved_bytes += 4 * added_outputs;
    } else if (args.o.given) {
        ops.products.add(0, 4, 1);
        work.output_bytes = bytes_of(args.o, C * values);
    }
    if (passes == 0) return work;
    // Rows of the output's partner, and a state that one walk leaves to the other.
    const double of_element = args.gate_walk.state_dtype == DType::bf16 ? 2 : 4;
    work.input_bytes += C * values * 2;
    work.saved_bytes += of_element * K * tensor_values + 4 * C * passes;
    work.tile_bytes += C * tensor_values * 2 + 2 * passes * block_warps * 128;
    return work;
}

// Beside its chunks: the state, the rows of the first chunk, and its scores, which nothing hides.
inline KernelWork additive_block_work(const KernelArgs& args, double values) {
    KernelWork work = tensor_state_work(args, values);
    work.memory_waits = args.stages == 1 ? 2 : 3;
    work.tile_waits = args.stages == 1 ? 0 : 40;
    work.barriers = args.stages == 1 ? 4 : 3;
    if (args.gate_walk.terms != GateTerms::none) ++work.barriers;
    return work;
}

template <int K>
BlockWork tensor_forward_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double values = values_of_block(args);
    const bool terms = args.gate_walk.terms != GateTerms::none;
    KernelWork block = additive_block_work(args, values);
    if (args.segments.tokens > 0) block.saved_bytes = 4 * args.K * values;
    return {block, additive_chunk_work<K>(args, values, args.o.given || terms)};
}

template <int K>
BlockWork tensor_states_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork block = additive_block_work(args, 0);
    block.saved_bytes = 4 * args.K * values_of_block(args);
    const double blocks = static_cast<double>(args.segments.blocks);
    return {block, additive_chunk_work<K>(args, args.V / blocks, false)};
}

// Of a chunk, whose terms one warp adds up, or of the gradients of its log decays.
BlockWork tensor_gate_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double value_blocks = args.gate_walk.blocks;
    KernelWork step;
    const bool added_up = args.d_log_decays.given;
    step.saved_bytes = added_up ? tensor_chunk * 4 : value_blocks * (3 * tensor_chunk + 1) * 4;
    step.memory_waits = added_up ? 1 : 2 * value_blocks;
    step.tile_waits = added_up ? 0 : 20;
    step.barriers = 4;
    step.output_bytes = args.d_g.given ? tensor_chunk * static_cast<double>(size_of(args.d_g.dtype)) : 0;
    return {{}, step};
}

// Of a chunk and head, and up to K columns.
template <int K>
BlockWork tensor_add_outputs_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double C = tensor_chunk, blocks = K / tensor_values, shuffles = 8 + 4 + 2;
    TileCounter counter;
    KernelWork& step = counter.work;
    WarpProducts products{counter, blocks * block_warps};
    const double summands = static_cast<double>(args.added.parts) * args.group,
                 of_block = args.V / static_cast<double>(quotient_up(args.V, K));
    step.saved_bytes = blocks * summands * 4 * added_outputs;
    step.output_bytes = bytes_of(args.o, C * of_block);
    step.memory_waits = summands;
    products.access(2 * C / 8, 1);  // through the patch
    products.add(0, C / 16, 1);
    if (!args.l2norm) return {{}, step};
    step.input_bytes = C * args.V * 2;
    step.saved_bytes += 4 * C;
    step.barriers = 3;
    step.tile_bytes += C * K * 2 + 128 * 2 * (blocks * block_warps + 3);
    products.add(0, 2 * C / 16, 2);
    products.access(shuffles + 1 + C / 8, 6);
    counter.fma(products.warps * (2 + 4) * C / 8);
    return {{}, step};
}

BlockWork decay_join_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    BlockWork work = join_work(args, decay_columns);
    work.step.saved_bytes += 8;
    work.step.memory_waits = 1;
    return work;
}

}  // namespace headrace::cuda
