// counted_walker: what a block of PrepareKernel does at a chunk, and one of WalkerKernel at a whole chunk and beside
// its chunks, counted on the host.
#pragma once

#include "cuda/chunk/counted_tensor.hpp"

namespace headrace::cuda {

// Products of warps on tensor cores. Waits are those of one warp, where nothing else is in flight: sums of eight tiles
// hide each other's products and the operands that follow.
struct WarpProducts {
    static constexpr double flop_of_product = 2 * 16 * 8 * 16, bytes_of_operand = 512, bytes_of_pairs = 128;

    TileCounter& counter;
    double warps;

    // Of each warp: products of 16 x 8 x 16, and operands loaded for them.
    void add(double products, double operands, double waits) {
        counter.work.tensor_flop += warps * products * flop_of_product;
        counter.work.tile_bytes += warps * operands * bytes_of_operand;
        counter.work.tile_waits += waits;
    }
    // Accesses of each warp to pairs or numbers of lanes.
    void access(double count, double waits) {
        counter.work.tile_bytes += warps * count * bytes_of_pairs;
        counter.work.tile_waits += waits;
    }
};

// The primitives of WalkerOps, one by one, of all warps of a block. `exact`: the share of chunks with the products that
// DeltaExactness adds; what it decides from the numbers of a chunk is not known here.
template <int K>
struct CountedWalkerOps {
    using T = float;
    struct Rows {};
    struct Decayed {};
    struct State {};
    struct Tile {
        bool given = false;
        explicit operator bool() const { return given; }
    };
    using Inputs = algorithms::ChunkInputs<CountedWalkerOps>;

    static constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0;
    static constexpr double lower = 8 + 6 + 4 + 2;  // products of [16,64] and a lower triangular [64,64]

    WarpProducts products;
    double exact;

    State right_state(State) const { return {}; }
    Decayed reads(const Inputs&) const { return {}; }
    Decayed erases(const Inputs&) const { return {}; }
    Decayed to_end(Rows) const { return {}; }
    void add_read(Tile, Tile, Decayed, State) {
        read_state();
        products.add(0, steps, 0);  // v
    }
    void solve(Tile, Tile) { products.add(3 * lower, lower, 2); }
    void scale_value_rows(Tile, Tile, const float*) { products.access(tiles, 0); }
    void read_and_score(Tile, Decayed, State, Tile, Tile) {
        read_state();
        products.add(2 * lower, lower / 2, 1);
        products.access(2 * tiles, 0);
    }
    void decay_and_write(State, State, Decayed, Tile) {
        products.access(tiles, 0);
        products.add((1 + exact) * steps * K / 8, steps * K / 16, 1.0 + K / 64);
        products.counter.fma(products.warps * 2 * K / 8 * 4);
    }

  private:
    void read_state() {
        products.add((1 + exact) * tiles * K / 16, tiles / 2 * K / 16, 2);
        products.access(tiles, 0);
    }
};

// What a chunk finds prepared: `matrices` lower triangular ones, factors, decay, numbers.
inline double prepared_bytes(double matrices) {
    constexpr double lower_pieces = 16 * (2 + 4 + 6 + 8);
    return matrices * lower_pieces * 16 + 4 * (4 * tensor_chunk + 2 + 4);
}

// Follows WalkerKernel::run: `values` of v are read, and outputs stored where they are wanted.
template <int K>
KernelWork walk_chunk_work(const KernelArgs& args, double values, bool outputs, double exact) {
    using Ops = CountedWalkerOps<K>;
    const double C = tensor_chunk, columns = args.value_columns;
    TileCounter counter;
    Ops ops{{counter, columns / 16}, exact};
    const double key_rows = (outputs ? 2 : 1) + (args.undecayed_error ? 1 : 0);
    counter.work.input_bytes = key_rows * C * args.K * 2 + bytes_of(args.v, C * values);
    counter.work.saved_bytes = prepared_bytes(outputs ? 3 : 2);
    counter.work.tile_bytes = key_rows * C * K * 2 + C * 64 * 2 + prepared_bytes(outputs ? 3 : 2);
    if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
    counter.barrier();
    ops.products.access(5, 2);  // what tells exactness, and the decay
    const typename Ops::Tile given{true};
    const algorithms::ForwardTiles<Ops> tiles{given, given, given, given, given};
    const algorithms::ChunkInputs<Ops> in{{}, {}, {}, given, nullptr, 1.0f, args.undecayed_error};
    algorithms::chunk_states<true>(ops, in, tiles, {}, {}, {outputs});
    if (outputs) {
        counter.work.output_bytes = bytes_of(args.o, C * values);
        ops.products.add(0, 4, 1);
    }
    return counter.work;
}

template <int K>
BlockWork tensor_walk_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double values = values_of_block(args, args.value_columns);
    KernelWork block = tensor_state_work(args, values);
    block.barriers = 0;
    double exact = 0;  // all segments but the first of a sequence
    if (args.segments.tokens > 0) {
        block.saved_bytes = 4 * args.K * values;
        exact = 1 - static_cast<double>(args.N) / static_cast<double>(args.segments.slots);
    }
    return {block, walk_chunk_work<K>(args, values, args.o.given, exact)};
}

// On the mean of the blocks of values, and of those of transitions, which read none.
template <int K>
BlockWork tensor_walk_states_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork block;
    block.saved_bytes = 4 * args.K * values_of_block(args, args.value_columns);
    block.memory_waits = 1;
    const double blocks = static_cast<double>(args.segments.blocks);
    return {block, walk_chunk_work<K>(args, args.V / blocks, false, 1)};
}

// Follows PrepareKernel::run.
template <int K>
BlockWork tensor_prepare_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double C = tensor_chunk, key_rows = args.undecayed_error ? 3 : 2;
    TileCounter counter;
    KernelWork& work = counter.work;
    WarpProducts products{counter, block_warps};
    work.input_bytes = key_rows * C * args.K * 2 + bytes_of(args.g, C) + bytes_of(args.beta, C);
    work.memory_waits = 2;
    work.tile_bytes = key_rows * C * K * 2;
    // decays: sums of doubles, exponentials
    work.tile_bytes += 128 * (2 * 5 + 2 + 10 + 2);
    work.tile_waits += 12;
    counter.barrier();
    // norms and energies, two turns of 32 rows
    const double dots = (args.undecayed_error ? 3 : 1) + (args.l2norm ? 1 : 0);
    const double loads = (args.undecayed_error ? 2 : 1) + (args.l2norm ? 1 : 0);
    products.access(2 * (4 * loads * K / 32 + 2 * dots + 6), 2 * 4);
    products.access(K / 4.0 + 2, 6);
    counter.barrier();
    // factors; numbers, by one warp
    work.tile_bytes += 2 * 128 * 9 + 128 * (30 + 4.0 * K / 32);
    work.tile_waits += 2;
    // scores of ten blocks, three one after another
    work.tensor_flop += 10 * 4 * K / 16.0 * WarpProducts::flop_of_product;
    work.tile_bytes += 10 * (3 * K / 16.0 * 512 + 2 * 8 * 7 * 128.0);
    work.tile_waits += 3 * (K / 32.0 + 3);
    counter.barrier(), counter.barrier();
    work.tile_bytes += 10 * 8 * 2 * 128;
    // the inverse: substitution; 3 x 4 and 7 x 8 and 4 products of fp32 tiles (join_16, join_32)
    work.tile_bytes += 4 * (15 * 8 + 16) * 128;
    work.tile_waits += 15 + 2 * 3 + 3 * 3;
    constexpr double of_16 = 3 * 3, of_32 = 3 * (4 * 1.5 + 2 * 1.5);
    work.tensor_flop += 4 * (of_16 + 2 * of_32) * WarpProducts::flop_of_product;
    for (int i = 0; i < 3; ++i) counter.barrier();
    work.tile_bytes += 4 * 3 * 2 * 512;
    work.tile_waits += 3;
    work.saved_bytes = prepared_bytes(3);
    return {{}, work};
}

}  // namespace headrace::cuda
