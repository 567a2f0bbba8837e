// counted_backward: what a block of SweepKernel does at a whole chunk and beside its chunks, and one of GradientKernel
// at a chunk, counted on the host. What keys that overlap add is not known here.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

// Follows SweepKernel::advance and retreat, of which a launch with saved states has as many blocks each: with 16 bits
// on one side of products where blocks leave what follows of segments, else with 8, as the numbers of chunks are not
// known.
template <int K>
BlockWork tensor_sweeps_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0, lower = 8 + 6 + 4 + 2;
    const double C = tensor_chunk, values = values_of_block(args, args.value_columns),
                 warps = args.value_columns / 16.0, of_erases = args.undecayed_error ? 1 : 0;
    const bool saves = args.swept.states != nullptr, leaves = args.segments.blocks > 0;
    const double halves = leaves ? 2 : 1, of_solve = leaves ? 3 : 1;
    const auto copied = [&](TileCounter& counter, double rows, double matrices) {
        counter.work.input_bytes = rows * C * args.K * 2 + C * values * 2;
        counter.work.saved_bytes = prepared_bytes(matrices) + (saves ? values * (K + 64) * 2 : 0);
        counter.work.again_bytes = prepared_bytes(matrices) * share_of_others(args);
        counter.work.tile_bytes = rows * C * K * 2 + C * 64 * 2 + prepared_bytes(matrices);
        counter.barrier();
        if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
        if (!leaves) counter.work.barriers += block_warps / (warps + fetching_threads(K) / warp_lanes);
    };
    TileCounter back, on;
    copied(back, 2 + of_erases, 2 * halves);
    back.work.output_bytes = bytes_of(args.d_v, C * values);
    WarpProducts products{back, warps};
    const bool beside = fetching_threads(K) > 0;              // others leave d_o^T P and what q reads
    products.add(halves * tiles * K / 16, tiles / 2 * K / 16, 2);  // read
    products.add(halves * lower, halves * lower / 2, beside ? 0 : 2);
    products.add(0, 2 * steps, 0);
    products.add(of_solve * lower, halves * lower / 2, 2);  // solve
    const double writes = halves * steps * K / 8, operands = steps * K / 16, waits = 1 + K / 128.0;
    products.add(writes, operands, waits);
    products.add(writes, operands, beside ? 0 : waits);
    products.add(0, steps * K / 64, 0);
    if (beside) {
        products.add(0, 2 * tiles * (1 + K / 64), 2);
        back.work.barriers += 4 * warps / (warps + fetching_threads(K) / warp_lanes);
    }
    products.access(4 * tiles + 2 * steps * K / 64 + (args.d_v.given ? 2 * tiles : 0), 0);
    products.add(0, args.d_v.given ? steps : 0, 1);
    back.fma(warps * 2 * K / 8 * 4);
    copied(on, 1 + of_erases, halves);
    WarpProducts forwards{on, warps};
    forwards.add(halves * tiles * K / 16, tiles / 2 * K / 16, 2);
    forwards.add(of_solve * lower, halves * lower / 2, 2);
    forwards.add(0, steps, 0);
    forwards.add(halves * steps * K / 8, steps * K / 16, 1.0 + K / 64);
    forwards.access(4 * tiles, 0);
    on.fma(warps * 2 * K / 8 * 4);
    return sweeps_work(args, back.work, on.work, values);
}

// Follows GradientKernel::run: all value heads of a key head, for each part of K channels.
template <int K, bool comba>
BlockWork tensor_gradients_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double warps = 8, parts = K > 128 ? K / 128 : 1, tiles = K / 16.0, operand = 512, pair = 128,
                     pair_blocks = 9;
    const double C = tensor_chunk, blocks = quotient_up(args.V, tensor_values), rows = comba ? 3 : 2,
                 turns = quotient_up(args.V, args.stages * tensor_values);
    TileCounter head, chunk;
    // By all warps, of so many steps and tiles of columns.
    const auto multiply = [](TileCounter& counter, double steps, double columns) {
        counter.work.tensor_flop += warps * steps * columns * WarpProducts::flop_of_product;
        counter.work.tile_bytes += warps * steps * (1 + columns / 2) * operand;
        counter.work.tile_waits += steps;
    };
    const auto access = [](TileCounter& counter, double pairs) { counter.work.tile_bytes += warps * pairs * pair; };
    // of 64 values: d_o S^T, y S^T and r D^T, which are added to all heads' once a turn, and d_o r^T or y r^T
    for (int i = 0; i < 3; ++i) {
        multiply(head, blocks * 4, tiles);
        head.work.tile_bytes += warps * turns * tiles / 2 * operand;
        access(head, turns * 2);
    }
    multiply(head, parts * blocks * 4, 8);
    if (args.gate_gradient) {  // S and D with each other
        head.work.tensor_flop += blocks * K / 2 * WarpProducts::flop_of_product;
        head.work.tile_bytes += blocks * K / 2 * operand;
        head.work.tile_waits += blocks * 2;
    }
    head.work.tile_bytes += blocks * (2 * 64 * K * 2 + parts * 3 * 64 * 64 * 2);
    head.work.saved_bytes = args.V * (K + parts * 64) * 2 * 2;
    head.work.input_bytes = parts * (C * args.V * 2 + bytes_of(args.log_decays, C) + bytes_of(args.beta, C));
    for (double i = 0; i < 4 * parts * turns; ++i) head.barrier();
    if (args.stages == 1) head.work.memory_waits += parts * turns;  // what is asked for has little time to arrive
    // behind them
    if (comba) multiply(head, K / 16.0, 8);
    // weights, which the first head only stores
    access(head, parts * (2 * 3 + pair_blocks * (2 + 4 + 2 * (2 - 1.0 / args.group))));
    head.work.tile_bytes += parts * 20 * pair;
    head.work.tile_waits += parts * 20;
    for (int i = 0; i < 2 * parts; ++i) head.barrier();
    head.work.output_bytes = bytes_of(args.d_beta, C) + parts * bytes_of(args.d_log_decays, C);
    if (args.gate_gradient) {
        access(head, parts * ((comba ? 0 : pair_blocks * 2) + 4 * pair_blocks + 16 + 6 * rows));  // of neighbours
        head.work.tile_bytes += parts * 40 * pair;
        head.work.tile_waits += parts * 30;
    }
    // of the keys
    chunk.work = head.work * args.group;
    // With l2norm parts are read once more for the norms, and but for the last for what waits in fp32 for their sums.
    const bool waits = parts > 1 && args.l2norm;
    const double times = waits ? 3 - 1 / parts : 1;
    chunk.work.input_bytes += times * rows * C * args.K * 2;
    chunk.work.saved_bytes += waits ? 2 * rows * C * (K - 128) * 4 : 0;
    chunk.work.memory_waits += 2 * times * parts;
    chunk.work.barriers += parts == 1 ? 5 : 6 * parts - 1 + (waits ? 7 * parts - 3 + parts * rows * 2 : 0);
    chunk.work.tile_bytes += (1 + times) * rows * C * K * 2;
    if (!comba && args.gate_gradient) {
        multiply(chunk, K / 16.0, 8);
        access(chunk, parts * pair_blocks * 2);
    }
    access(chunk, parts * (pair_blocks * 2 + 16));
    for (int i = 0; i < 4; ++i) multiply(chunk, 4, tiles);
    const Strided* const stored[] = {&args.d_q, &args.d_k, &args.d_p};
    for (const Strided* tensor : stored) {
        if (!tensor->given) continue;
        chunk.work.output_bytes += bytes_of(*tensor, C * args.K);
        chunk.work.tile_bytes += warps * (args.l2norm ? 2 : 0) * tiles / 2 * operand + C * args.K * 2;
        access(chunk, 2 * tiles + (args.l2norm ? 10 * parts : 0));
        for (int i = 0; i < (args.l2norm && parts == 1 ? 3 : 2 * parts); ++i) chunk.barrier();
    }
    return {{}, chunk.work};
}

}  // namespace headrace::cuda
