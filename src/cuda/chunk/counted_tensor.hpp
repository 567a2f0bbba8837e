// counted_tensor: what a block of TensorKernel does at a whole chunk and beside its chunks, and one of DecayJoin at
// a segment, counted on the host.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/tile_counter.hpp"

namespace headrace::cuda {

// The primitives of TensorOps, one by one, of all eight warps.
template <int K>
struct CountedTensorOps {
    using T = float;
    struct Rows {};
    struct Decayed {};
    struct State {};
    struct Tile {
        bool given = false;
        explicit operator bool() const { return given; }
    };
    using Inputs = algorithms::ChunkInputs<CountedTensorOps>;

    static constexpr double warps = 8, steps_of_keys = K / 16, steps_of_tokens = tensor_chunk / 16.0,
                            state_tiles = K == 128 ? 8 : 4, tiles = 4, flop_of_product = 2 * 16 * 8 * 16,
                            bytes_of_operand = 512;
    // Sums of 16 rows reach to the diagonal: 1 to 4 steps of 16 tokens, for two warps each.
    static constexpr double lower_steps = 2 * (1 + 2 + 3 + 4);

    TileCounter& counter;

    // Of all warps, and of the longest: steps of 16 of the depth, each of which waits for its products, and every
    // second for operands.
    void products(double steps, double longest, double columns) {
        counter.work.tensor_flop += steps * columns * flop_of_product;
        counter.work.tile_bytes += steps * (1 + columns / 2) * bytes_of_operand;
        counter.work.tile_waits += 1.5 * longest;
    }
    // Pairs of the sums of all warps: `accesses` each of them.
    void pairs(double columns, double accesses) {
        counter.work.tile_bytes += warps * columns * 2 * accesses * 128;
        counter.work.tile_waits += 2;
    }

    State right_state(State) {
        pairs(state_tiles, 1);
        counter.barrier();
        return {};
    }
    void scores(Tile P, Tile, const Inputs&) {
        if (P) {
            products(6 * steps_of_keys, steps_of_keys, tiles);  // two warps lie above the diagonal
            pairs(tiles, 6);
        }
        counter.barrier();
    }
    Decayed reads(const Inputs&) const { return {}; }
    Decayed to_end(Rows) const { return {}; }
    void read_and_score(Tile, Decayed, State, Tile, Tile) {
        read_state();
        products(lower_steps, steps_of_tokens, tiles);
        pairs(tiles, 3);
        counter.barrier();
    }
    void decay_and_write(State, State, Decayed, Tile) {
        pairs(tiles, 4);
        counter.barrier();
        products(warps * steps_of_tokens, steps_of_tokens, state_tiles);
        counter.fma(2 * warps * state_tiles * 4);
    }

  private:
    void read_state() { products(warps * steps_of_keys, steps_of_keys, tiles); }
};

inline double bytes_of(const Strided& tensor, double count) {
    return tensor.given ? count * static_cast<double>(size_of(tensor.dtype)) : 0.0;
}

// Follows TensorKernel::run: `values` of v are read, and outputs stored where they are wanted.
template <int K>
KernelWork tensor_chunk_work(const KernelArgs& args, double values, bool outputs) {
    using Ops = CountedTensorOps<K>;
    const double C = tensor_chunk;
    TileCounter counter;
    Ops ops{counter};
    counter.work.input_bytes = bytes_of(args.q, C * args.K) + bytes_of(args.k, C * args.K) +
                               bytes_of(args.v, C * values) + bytes_of(args.g, C);
    if (args.stages == 1) counter.work.memory_waits = 1;
    counter.work.tile_bytes += C * (2 * K + tensor_values) * 2;  // as copies write them
    for (int i = 0; i < 3; ++i) counter.barrier();               // the copies, the numbers of tokens, the decays
    if (args.l2norm) {
        counter.work.tile_bytes += 2 * C * (K / 64.0 * 2 + 5) * 128;
        counter.work.tile_waits += 2 * C / Ops::warps * 6;
    }
    counter.work.tile_waits += 20;  // one warp sums the decays
    const typename Ops::Tile given{true}, o{outputs};
    const algorithms::ForwardTiles<Ops> tiles{given, given, given, given, given};
    const algorithms::ChunkInputs<Ops> in{{}, {}, {}, given, nullptr, 1.0f, false};
    algorithms::chunk_forward<false>(ops, in, tiles, {}, {}, o);
    if (outputs) {
        counter.work.output_bytes = bytes_of(args.o, C * values);
        counter.work.tile_bytes += C * values * 2;
    }
    return counter.work;
}

// Of a state of so many values: the one that enters and the one that leaves; rows of the first chunk are waited for,
// those of others arrive meanwhile.
inline KernelWork tensor_state_work(const KernelArgs& args, double values) {
    KernelWork work;
    work.input_bytes = bytes_of(args.initial_state, args.K * values);
    work.output_bytes = bytes_of(args.final_state, args.K * values);
    work.memory_waits = 2;
    work.barriers = args.final_state.given ? 4 : 2;
    return work;
}

inline double values_of_block(const KernelArgs& args, int columns = tensor_values) {
    return args.V < columns ? args.V : columns;
}

template <int K>
BlockWork tensor_forward_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double values = values_of_block(args);
    KernelWork block = tensor_state_work(args, values);
    if (args.segments.tokens > 0) block.saved_bytes = 4 * args.K * values;
    const bool terms = args.gate_walk.terms != GateTerms::none;
    KernelWork step = tensor_chunk_work<K>(args, values, args.o.given || terms);
    if (terms) {  // rows of the output's partner, and a state that one walk leaves to the other
        step.input_bytes += tensor_chunk * values * 2;
        const double of_element = args.gate_walk.state_dtype == DType::bf16 ? 2 : 4;
        step.saved_bytes += of_element * K * tensor_values + 3 * 4 * tensor_chunk;
    }
    return {block, step};
}

template <int K>
BlockWork tensor_states_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork block;
    block.saved_bytes = 4 * args.K * values_of_block(args);
    block.memory_waits = 1;
    block.barriers = 4;
    const double blocks = static_cast<double>(args.segments.blocks);
    return {block, tensor_chunk_work<K>(args, args.V / blocks, false)};
}

// Of a chunk, whose terms one warp adds up.
BlockWork tensor_gate_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double value_blocks = quotient_up(args.K, tensor_values);
    KernelWork step;
    step.saved_bytes = value_blocks * (3 * tensor_chunk + 1) * 4;
    step.memory_waits = 2 * value_blocks;
    step.tile_waits = 20;
    step.barriers = 4;
    step.output_bytes = args.d_g.given ? tensor_chunk * static_cast<double>(size_of(args.d_g.dtype)) : 0;
    return {{}, step};
}

// Of a segment: a thread has places of [K, join_columns].
inline BlockWork join_work(const KernelArgs& args) {
    const double places = args.K * join_columns;
    KernelWork block, step;
    block.input_bytes = bytes_of(args.initial_state, places);
    block.memory_waits = 1;
    step.saved_bytes = 2 * 4 * places;
    return {block, step};
}
BlockWork decay_join_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    BlockWork work = join_work(args);
    work.step.saved_bytes += 8;
    work.step.memory_waits = 1;
    return work;
}

}  // namespace headrace::cuda
