// counted_channel: what blocks of the kernels of channel gates do at a whole chunk and beside their chunks, counted on
// the host.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

inline constexpr double channel_rows_bytes(int K) { return 2.0 * tensor_chunk * K; }
inline constexpr double lower_matrix_bytes = 16 * (2 + 4 + 6 + 8) * 16;

// The primitives of ChannelWalkOps, of chunks that need no more than 8 bits of their rows.
template <int K, bool delta>
struct CountedChannelWalkOps {
    using T = float;
    struct Rows {};
    struct State {};
    struct Tile {
        bool given = false;
        explicit operator bool() const { return given; }
    };
    using Inputs = algorithms::ChunkInputs<CountedChannelWalkOps>;

    static constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0;
    static constexpr double lower = 8 + 6 + 4 + 2;  // products of [16,64] and a lower triangular [64,64]

    WarpProducts products;
    bool leaves;  // whether others compute the outputs

    State right_state(State) const { return {}; }
    Rows reads(const Inputs&) const { return {}; }
    Rows erases(const Inputs&) const { return {}; }
    Rows to_end(Rows) const { return {}; }
    void add_read(Tile, Tile, Rows, State) {
        read_state();
        products.add(0, steps, 0);  // v
    }
    void solve(Tile, Tile) { products.add(3 * lower, lower, 2); }
    void scale_value_rows(Tile, Tile, const float*) { products.access(tiles, 0); }
    // Of the delta rule by others, which take left operands: what they wait for holds up none that walks.
    void read_and_score(Tile, Rows, State, Tile, Tile) {
        const double waits = products.counter.work.tile_waits;
        read_state();
        products.add((delta ? 2 : 1) * lower, lower / 2, 1);
        products.add(0, delta ? 0 : steps, 0);
        products.access(2 * tiles, 0);
        if (!leaves) return;
        products.counter.work.tile_waits = waits;
        products.add(0, 2 * (K / 16.0 + 2 * steps), 0);
        products.counter.work.barriers += 3 * products.warps / (products.warps + block_warps);
    }
    void decay_and_write(State, State, Rows, Tile) {
        products.access(2 * K / 8.0, 0);  // decays
        products.add(steps * K / 8, steps * K / 16, 1.0 + K / 64);
        products.add(0, delta ? 0 : steps * K / 64, 0);
        products.counter.fma(products.warps * 2 * K / 8 * 4);
    }

  private:
    void read_state() { products.add(tiles * K / 16, tiles / 2 * K / 16, 2); }
};

// Follows ChannelPrepare::run: slices of 16 channels, of 16 tokens a warp.
template <int K, bool delta>
BlockWork channel_prepare_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double C = tensor_chunk, slices = K / 16.0, kinds = delta ? 2 : 1, warps = block_warps, pairs = 6;
    TileCounter counter;
    KernelWork& work = counter.work;
    const bool exact = args.prepared.of_backward;
    // queries and keys; those that are weighed first once more, from caches, keys of the delta rule from shared memory
    const double passes = 2 + (args.l2norm ? delta ? 1 : 2 : 0);
    work.input_bytes = passes * C * args.K * 2 + bytes_of(args.log_decays, C * args.K) + bytes_of(args.beta, C);
    work.memory_waits = delta || args.l2norm ? 2 : 1;
    // a slice: the warps' own tokens, then pairs of warps, each for tokens x and 15 - x; products of tf32 have half the
    // depth of those of bf16 and half their rate
    work.tensor_flop = slices * (exact ? 3 : 1) * 2 * 2 * kinds * (warps + pairs) * WarpProducts::flop_of_product;
    // shuffles of each warp, for decays and sums over tokens; rows' places and keys; keys left, read by later warps;
    // totals
    const double shuffles = 32 + (delta ? 11 : 4), places = delta ? 14 : 10, totals = 14;
    work.tile_bytes = 128 * slices * (warps * (shuffles + places + totals) + (3 + pairs) * 8);
    work.tile_waits = slices * (3 + 2 + 3 + 4);
    // decays, roundings into high and low: multiplications and differences, as many slots as multiply-adds
    const double of_slice = delta ? (exact ? 1062 : 634) : (exact ? 720 : 628),
                 beside = delta ? (exact ? 1381 : 1231) : (exact ? 328 : 248);
    work.fma_flop = 64 * (slices * of_slice + beside);
    for (int i = 0; i < static_cast<int>(slices) + 3; ++i) counter.barrier();
    work.tile_bytes += 128 * (delta ? 620 : 360);  // scores, element by element, and the matrix that leaves
    const double matrices = (delta ? 3 : 1) + (exact ? 1 : 0);
    work.saved_bytes = (delta ? 3 : 2) * channel_rows_bytes(K) + matrices * lower_matrix_bytes + 4 * (4 * C + 2 * K) +
                       (delta ? 4 * (K + 4) : 0);
    if (!delta) return {{}, work};
    // the inverse, of n in shared memory: six blocks of it
    work.tile_bytes += 128 * (CountedInverse::accesses + 6 * 8);
    work.tile_waits += CountedInverse::waits + 1;
    work.tensor_flop += CountedInverse::products * WarpProducts::flop_of_product;
    for (int i = 0; i < 3; ++i) counter.barrier();
    return {{}, work};
}

// Of four warps, each at a chunk of its head; what it reads arrives meanwhile.
template <int K>
BlockWork channel_estimate_work(const KernelArgs&, std::size_t /*shared_limit*/) {
    KernelWork block, step;
    block.memory_waits = 1;
    step.saved_bytes = block_warps * (12.0 * K + 16);
    step.tile_waits = 5;
    step.tile_bytes = block_warps * 5 * 128;
    step.fma_flop = block_warps * 2.0 * K;
    return {block, step};
}

// Of chunks that need nothing.
template <int K>
BlockWork channel_prepare_low_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork step;
    step.saved_bytes = 8.0 * args.prepared.looked_at;
    step.memory_waits = 1;
    return {{}, step};
}

// Follows ChannelWalk::run: `values` of v are read, and outputs stored where they are wanted.
template <int K, bool delta>
KernelWork channel_walk_chunk_work(const KernelArgs& args, double values) {
    using Ops = CountedChannelWalkOps<K, delta>;
    const double C = tensor_chunk, outputs = args.o.given ? 1 : 0;
    TileCounter counter;
    Ops ops{{counter, args.value_columns / 16.0}, delta && args.value_columns <= tensor_values};
    const double rows = (delta ? 2 : 1) + outputs, matrices = (delta ? 2 : 0) + outputs;
    counter.work.saved_bytes =
        rows * channel_rows_bytes(K) + matrices * lower_matrix_bytes + 8 * K + (delta ? 4 * C + 16 : 0);
    counter.work.again_bytes = counter.work.saved_bytes * share_of_others(args);
    counter.work.input_bytes = bytes_of(args.v, C * values);
    counter.work.tile_bytes = counter.work.saved_bytes + C * args.value_columns * 2;
    if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
    counter.barrier();
    const typename Ops::Tile given{true};
    const algorithms::ForwardTiles<Ops> tiles{given, given, given, given, given};
    const algorithms::ChunkInputs<Ops> in{{}, {}, {}, given, nullptr, 1.0f, false};
    algorithms::chunk_states<delta>(ops, in, tiles, {}, {}, {outputs > 0});
    if (outputs > 0) {
        if (args.added.sums != nullptr) {
            counter.work.saved_bytes += 4 * C * values;
        } else {
            counter.work.output_bytes = bytes_of(args.o, C * values);
            ops.products.add(0, 4, 1);
        }
    }
    return counter.work;
}
template <int K, bool delta>
BlockWork channel_walk_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double values = values_of_block(args, args.value_columns);
    KernelWork block = tensor_state_work(args, values);
    block.barriers = 1;
    if (args.segments.tokens > 0) block.saved_bytes = 4 * args.K * values;
    return {block, channel_walk_chunk_work<K, delta>(args, values)};
}

// On the mean of the blocks of a segment and head: of the additive rule one multiplies decays, in double; of the delta
// rule some have no values, but channels of its transition.
template <int K, bool delta>
BlockWork channel_states_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const auto blocks = static_cast<double>(args.segments.blocks);
    const double values = args.V / blocks, columns = delta ? values + args.K / blocks : values;
    KernelWork block;
    block.saved_bytes = 4 * args.K * columns + (delta ? 0 : 8 * args.K / blocks);
    block.memory_waits = 1;
    block.barriers = 1;
    KernelWork step = channel_walk_chunk_work<K, delta>(args, values);
    step.tile_bytes += delta ? 0 : 8 * K;
    return {block, step};
}

BlockWork channel_join_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    BlockWork work = join_work(args, decay_columns);
    work.step.saved_bytes += 8 * args.K;
    work.step.memory_waits = 1;
    return work;
}

// Follows ChannelSweep::advance and retreat, of which a launch with saved states has as many blocks each; of chunks
// that need no more than 8 bits of their rows.
template <int K, bool delta>
BlockWork channel_sweeps_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0, lower = 8 + 6 + 4 + 2;
    const double C = tensor_chunk, values = values_of_block(args, args.value_columns),
                 warps = args.value_columns / 16.0;
    const bool saves = args.swept.states != nullptr;
    // Rows [C,K] and lower triangular matrices that arrive.
    const auto copied = [&](TileCounter& counter, double rows, double matrices) {
        const double arrived =
            rows * channel_rows_bytes(K) + matrices * lower_matrix_bytes + 8 * K + (delta ? 4 * C + 16 : 0);
        counter.work.input_bytes = C * values * 2;
        counter.work.again_bytes = arrived * share_of_others(args);
        counter.work.saved_bytes = arrived + (saves ? values * (K + (delta ? 64 : 0)) * 2 : 0);
        counter.work.tile_bytes = arrived + C * values * 2;
        counter.barrier();
        if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
    };
    // Of the state and rows; of a state, and what joins it of so many products for each of its tiles.
    const auto read = [&](WarpProducts& products) { products.add(2 * tiles * K / 16, tiles / 2 * K / 16, 2); };
    const auto write = [&](WarpProducts& products, double count, double operands, double left) {
        products.access(2 * K / 8.0, 0);  // decays
        products.add(count * steps * K / 8, operands, 1.0 + K / 64);
        products.add(0, left, 0);
        products.counter.fma(products.warps * 2 * K / 8 * 4);
    };
    constexpr double rows_operands = steps * K / 16, left_operands = steps * K / 64;
    TileCounter back, on;
    copied(back, delta ? 3 : 2, delta ? 4 : 2);
    const bool in_rows = args.d_v.given && args.added.sums == nullptr;
    if (in_rows) {
        back.work.output_bytes = bytes_of(args.d_v, C * values);
    } else if (args.d_v.given) {
        back.work.saved_bytes += 4 * C * values;
    }
    WarpProducts products{back, warps};
    read(products);
    products.add(2 * lower, lower, 2);  // d_o^T P
    products.add(0, 2 * steps, 0);
    if (delta) products.add(3 * lower, lower, 2);   // solve
    write(products, delta ? 3 : 1, (delta ? 2 : 1) * rows_operands, left_operands);
    products.access((delta ? 2 * tiles : 0) + (in_rows ? 2 * tiles : 0), 0);
    products.add(0, in_rows ? steps : 0, 1);
    copied(on, delta ? 2 : 1, delta ? 2 : 0);
    WarpProducts forwards{on, warps};
    if (delta) {
        read(forwards);
        forwards.add(3 * lower, lower, 2);
        forwards.add(0, steps, 0);
        forwards.access(2 * tiles, 0);
    }
    write(forwards, delta ? 2 : 1, rows_operands, delta ? 0 : left_operands);
    return sweeps_work(args, back.work, on.work, values);
}

}  // namespace headrace::cuda
