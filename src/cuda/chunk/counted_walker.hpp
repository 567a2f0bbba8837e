// counted_walker: what a block of PrepareKernel does at a chunk, and one of WalkerKernel at a whole chunk and beside
// its chunks, counted on the host.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/tile_counter.hpp"

namespace headrace::cuda {

inline double bytes_of(const Strided& tensor, double count) {
    return tensor.given ? count * static_cast<double>(size_of(tensor.dtype)) : 0.0;
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

// Of what was prepared of a chunk, what blocks of its other values read at the same time, on the mean of all.
inline double share_of_others(const KernelArgs& args) {
    return args.V > args.value_columns ? 1 - args.value_columns / static_cast<double>(args.V) : 0;
}

// Whether scores are kept as high and low (tiles/formats.hpp).
inline bool splits_scores(const KernelArgs& args) { return args.q.dtype == DType::f16; }

// Products of warps on tensor cores, which groups of warps do together where a GPU has those. Waits are those of one
// warp, where nothing else is in flight: sums of eight tiles hide each other's products and the operands that follow.
struct WarpProducts {
    static constexpr double flop_of_product = 2 * 16 * 8 * 16, bytes_of_operand = 512, bytes_of_pairs = 128;

    TileCounter& counter;
    double warps;

    // Of each warp: products of 16 x 8 x 16, and right operands loaded for them, or, without products, others.
    void add(double products, double operands, double waits) {
        counter.work.tensor_flop += warps * products * flop_of_product;
        counter.work.tile_bytes += warps * operands * bytes_of_operand;
        if (products > 0) counter.work.group_bytes += warps * operands * bytes_of_operand;
        counter.work.tile_waits += waits;
    }
    // Accesses of each warp to pairs or numbers of lanes.
    void access(double count, double waits) {
        counter.work.tile_bytes += warps * count * bytes_of_pairs;
        counter.work.tile_waits += waits;
    }
};

// What WalkerOps and AdditiveOps have in common: warps that own 16 values each.
struct CountedWarpOps {
    using T = float;
    struct Rows {};
    struct Decayed {};
    struct State {};
    struct Tile {
        bool given = false;
        explicit operator bool() const { return given; }
    };

    static constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0;
    static constexpr double lower = 8 + 6 + 4 + 2;  // products of [16,64] and a lower triangular [64,64]

    WarpProducts products;

    State right_state(State) const { return {}; }
    template <class Inputs>
    Decayed reads(const Inputs&) const {
        return {};
    }
    template <class Inputs>
    Decayed erases(const Inputs&) const {
        return {};
    }
    Decayed to_end(Rows) const { return {}; }

  protected:
    // `extra`: the share of chunks with another 8 bits of the left operand.
    void read_state(int K, double extra) {
        products.add((1 + extra) * tiles * K / 16, tiles / 2 * K / 16, 2);
        products.access(tiles, 0);
    }
    void write_state(int K, double extra) {
        products.access(tiles, 0);
        products.add((1 + extra) * steps * K / 8, steps * K / 16, 1.0 + K / 64);
        products.counter.fma(products.warps * 2 * K / 8 * 4);
    }
};

// The primitives of WalkerOps, one by one, of all warps of a block. `split`: splits_scores; `exact`: the share of
// chunks with the products that DeltaExactness adds; what it decides from the numbers of a chunk is not known here.
template <int K>
struct CountedWalkerOps : CountedWarpOps {
    using Inputs = algorithms::ChunkInputs<CountedWalkerOps>;
    bool split;
    double exact;
    bool leaves;  // whether others compute the outputs

    void add_read(Tile, Tile, Decayed, State) {
        read_state(K, exact);
        products.add(0, steps, 0);  // v
    }
    void solve(Tile, Tile) {
        products.add(split ? 3 * lower : (1 + 2 * exact) * lower, split ? lower : (1 + exact) * lower / 2, 2);
    }
    void scale_value_rows(Tile, Tile, const float*) {}
    // By others where they fetch, which then take left operands: what they wait for holds up none that walks.
    void read_and_score(Tile, Decayed, State, Tile, Tile) {
        const double waits = products.counter.work.tile_waits;
        read_state(K, 0);
        products.add((split ? 3 : 2) * lower, split ? lower : lower / 2, split ? 2 : 1);
        products.access(2 * tiles, 0);
        if (!leaves) return;
        products.counter.work.tile_waits = waits;
        products.add(0, 2 * (K / 16.0 + 2 * steps), 0);
        products.counter.work.barriers += 3 * products.warps / (products.warps + fetching_threads(K) / warp_lanes);
    }
    void decay_and_write(State, State, Decayed, Tile) { write_state(K, exact); }
};

// What a chunk finds prepared: `matrices` lower triangular ones, factors, decay, numbers, exactness.
inline double prepared_bytes(double matrices) {
    constexpr double lower_pieces = 16 * (2 + 4 + 6 + 8);
    return matrices * lower_pieces * 16 + 4 * (4 * tensor_chunk + 2 + 4 + 2);
}

// Follows WalkerKernel::run: `values` of v are read, and outputs stored where they are wanted.
template <int K>
KernelWork walk_chunk_work(const KernelArgs& args, double values, bool outputs, double exact) {
    using Ops = CountedWalkerOps<K>;
    const double C = tensor_chunk, columns = (args.segments.groups > 1 ? 2.0 : 1.0) * args.value_columns;
    const bool leaves = fetching_threads(K) > 0 && args.value_columns <= tensor_values;
    TileCounter counter;
    Ops ops{{{counter, columns / 16}}, splits_scores(args), exact, leaves};
    const double key_rows = (outputs ? 2 : 1) + (args.undecayed_error ? 1 : 0);
    counter.work.input_bytes = key_rows * C * args.K * 2 + bytes_of(args.v, C * values);
    const bool split = splits_scores(args);
    const double matrices = (outputs ? 2 : 1) * (split ? 2 : 1) + (split ? 0 : exact);
    counter.work.saved_bytes = prepared_bytes(matrices);
    counter.work.again_bytes = prepared_bytes(matrices) * share_of_others(args);
    counter.work.tile_bytes = key_rows * C * K * 2 + columns * C * 2 + prepared_bytes(matrices);
    if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
    counter.barrier();
    if (!split) counter.work.barriers += block_warps / (columns / 16 + fetching_threads(K) / warp_lanes);
    ops.products.access(5, 2);  // what tells exactness, and the decay
    const typename Ops::Tile given{true};
    const algorithms::ForwardTiles<Ops> tiles{given, given, given, given, given};
    const algorithms::ChunkInputs<Ops> in{{}, {}, {}, given, nullptr, 1.0f, args.undecayed_error};
    algorithms::chunk_states<true>(ops, in, tiles, {}, {}, {outputs});
    if (outputs) {
        counter.work.output_bytes = bytes_of(args.o, C * values);
        ops.products.add(0, 4, leaves ? 0 : 1);
    }
    return counter.work;
}

template <int K>
BlockWork tensor_walk_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double values = args.V / quotient_up(args.V, args.value_columns);  // on the mean of the blocks
    KernelWork block = tensor_state_work(args, values);
    block.barriers = args.stages == 1 ? 0 : 1;  // nothing is read when the first chunk arrives
    if (args.segments.tokens > 0) block.saved_bytes = 4 * args.K * values;
    return {block, walk_chunk_work<K>(args, values, args.o.given, 0)};
}

// On the mean of the blocks of values, and of those of transitions, which read none.
template <int K>
BlockWork tensor_walk_states_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double blocks = static_cast<double>(args.segments.blocks), groups = args.segments.groups > 1 ? 2 : 1,
                 transitions = quotient_up(args.K, args.value_columns) / (blocks * groups);
    KernelWork block;
    block.saved_bytes = groups * 4 * args.K * values_of_block(args, args.value_columns);
    block.memory_waits = 1;
    block.barriers = 1;
    return {block, walk_chunk_work<K>(args, args.V / blocks, false, transitions)};
}

// Of a segment: a thread has places of [K, columns].
inline BlockWork join_work(const KernelArgs& args, int columns) {
    const double places = args.K * columns;
    KernelWork block, step;
    block.input_bytes = bytes_of(args.initial_state, places);
    block.memory_waits = 1;
    step.saved_bytes = 2 * 4 * places;
    return {block, step};
}
// Of TransitionJoin at a segment: three products of tf32, which have half the depth of those of bf16 and half their
// rate, of each piece of a warp's rows, of which it splits all numbers, as that of the state that it writes.
template <int K>
BlockWork transition_join_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double warps = join_threads(true, K) / double{warp_lanes}, pieces = K / 8, split = 3, sums = 12;
    const double transition = 4 * args.K * quotient_up(args.K, 4) * 4;
    BlockWork work = join_work(args, transition_columns);
    KernelWork& step = work.step;
    step.saved_bytes += transition, step.again_bytes = transition * (1 - 1 / quotient_up(args.V, transition_columns));
    step.tensor_flop = warps * 3 * pieces * WarpProducts::flop_of_product;
    step.fma_flop = warps * (split * 4 * pieces + split * 4 + sums) * 2 * warp_lanes;
    step.tile_bytes = warps * 128 * (2 * pieces * 2 + 2 * 4);
    step.tile_waits = 1;
    step.barriers = 1;
    return work;
}

// Of the blocks of a launch of sweeps the shares that walk back, and on with values; the others leave transitions.
struct SweepShares {
    double back, on, transitions;
    explicit SweepShares(const KernelArgs& args) {
        const double values = quotient_up(args.V, args.value_columns),
                     blocks = static_cast<double>(args.segments.blocks);
        if (blocks == 0) {
            back = args.swept.states != nullptr ? 0.5 : 1, on = 1 - back, transitions = 0;
        } else {
            back = values / blocks, on = args.segments.states != nullptr ? back : 0, transitions = 1 - back - on;
        }
    }
};
// What such a launch does, of one that walks back, one that walks on with values, and what their chunks take; of what
// blocks leave or find at the ends of segments a state in fp32 each.
inline BlockWork sweeps_work(const KernelArgs& args, const KernelWork& back, const KernelWork& on, double values) {
    const SweepShares share(args);
    const auto state_bytes = [&](const Strided& tensor) { return bytes_of(tensor, args.K * values); };
    KernelWork block, of_transition = on;
    block.memory_waits = 2;
    if (args.segments.tokens > 0) {
        block.saved_bytes = 4 * args.K * (values * (share.back + share.on) + 2 * args.K * share.transitions);
    } else {
        block.input_bytes = share.back * state_bytes(args.d_final_state) + share.on * state_bytes(args.initial_state);
        block.output_bytes = share.back * state_bytes(args.d_initial_state);
    }
    of_transition.input_bytes -= tensor_chunk * values * 2;
    KernelWork step = back * share.back;
    step += on * share.on;
    if (args.delta) step += of_transition * share.transitions;  // else a few decays
    return {block, step};
}

// UnitLowerBlocks of a chunk and value head: four blocks of n, substitution of their rows' lower and upper halves by a
// warp each, 2 x 2 and 12 products of blocks, of two of high and low by 16 x 8 each.
struct CountedInverse {
    static constexpr double operand = 4, block = 2 * operand, of_substitution = (36 + 10) * 4 + 2 * 2 * block,
                            of_joins = 2 * (2 * block + block) + 2 * 4 * block + (block + 2 * block + 2 * block),
                            products = (4 + 12) * 2 * 3, accesses = 4 * 4 + of_substitution + of_joins,
                            waits = 15 + 3 + 5;
};

// Follows PrepareKernel::run: a chunk of some value heads of a key head, on the mean.
template <int K>
BlockWork tensor_prepare_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double blocks = 10;  // of 16 x 16, on and below the diagonal
    const double C = tensor_chunk, heads = args.group / quotient_up(args.group, prepared_heads),
                 key_rows = args.undecayed_error ? 3 : 2;
    TileCounter counter;
    KernelWork& work = counter.work;
    WarpProducts products{counter, block_warps};
    work.input_bytes = key_rows * C * args.K * 2 + heads * (bytes_of(args.log_decays, C) + bytes_of(args.beta, C));
    work.memory_waits = 2;
    work.tile_bytes = key_rows * C * K * 2;
    counter.barrier();
    // dots, two turns of 32 rows; energies
    const double rows = (args.undecayed_error ? 4 : 0) + (args.l2norm ? 1 : 0),
                 dots = (args.undecayed_error ? 3 : 0) + (args.l2norm ? 1 : 0);
    if (dots > 0) products.access(2 * (4 * rows * K / 32 + 2 * dots + dots), 2 * 4);
    products.access(2 * 5 + 1, 4);
    work.tensor_flop += K / 16 * 4 * 2 * WarpProducts::flop_of_product;
    work.tile_bytes += K / 16 * 4 * WarpProducts::bytes_of_operand;
    // products of rows, of ten blocks, up to three one after another; the first of a row loads it
    work.tensor_flop += blocks * 4 * K / 16 * WarpProducts::flop_of_product;
    work.tile_bytes += (blocks + 2 * 5) * K / 16 * WarpProducts::bytes_of_operand;
    work.tile_waits += 3 * (K / 32.0 + 1);
    work.tile_bytes += 128 * (args.undecayed_error ? 0 : 4 * 2);  // squares of rows of k
    counter.barrier();
    if (args.l2norm) {
        work.tile_bytes += 128 * (blocks * 8 + 2 * (args.undecayed_error ? 8 : 3));
        counter.barrier();
    }
    // decays, factors and numbers, a value head for each warp; scores, and the inverse
    const bool of_backward = args.prepared.of_backward, of_f16 = args.q.dtype == DType::f16;
    const double erasing = args.undecayed_error ? 2 : 1, factors = of_backward ? 3 : of_f16 ? 1 : 2,
                 of_decays = 2 * 12 + 4 + 8 + 18 + 4 + 3 * (of_backward ? 3 : 2) + 4 + 5 + 2 * erasing,
                 of_overlap = of_f16 ? block_warps * 2 : 4 + 4 * block_warps + 6 * block_warps,
                 of_scores = 6 * (2 * erasing + 2 * factors) + 4 * (2 * erasing + 2 * 4 + 2) + of_overlap;
    work.tile_bytes += heads * 128 * (of_decays + of_scores + CountedInverse::accesses);
    counter.barrier();
    work.tile_waits += 40 + heads * (4 + CountedInverse::waits);
    work.tensor_flop += heads * CountedInverse::products * WarpProducts::flop_of_product;
    work.barriers += heads * 3.5;  // the last one of half of the warps
    const int matrices = of_backward || of_f16 ? 4 : 3;
    work.saved_bytes = heads * prepared_bytes(matrices);
    return {{}, work};
}

}  // namespace headrace::cuda
