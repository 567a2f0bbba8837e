// counted_backward: what a block of SweepKernel does at a whole chunk and beside its chunks, and one of GradientKernel
// at a chunk, counted on the host. What keys that overlap add is not known here.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

// Follows SweepKernel::advance and retreat, of which a launch with saved states has as many blocks each.
template <int K>
BlockWork tensor_sweeps_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double tiles = tensor_chunk / 8.0, steps = tensor_chunk / 16.0, lower = 8 + 6 + 4 + 2;
    const double C = tensor_chunk, values = values_of_block(args, args.value_columns),
                 warps = args.value_columns / 16.0, of_erases = args.undecayed_error ? 1 : 0;
    const bool saves = args.swept.states != nullptr;
    const auto copied = [&](TileCounter& counter, double rows, double matrices) {
        counter.work.input_bytes = rows * C * args.K * 2 + C * values * 2;
        counter.work.saved_bytes = prepared_bytes(matrices) + (saves ? values * (K + 64) * 2 : 0);
        counter.work.tile_bytes = rows * C * K * 2 + C * 64 * 2 + prepared_bytes(matrices);
        counter.barrier();
        if (args.stages == 1) counter.work.memory_waits = 1, counter.barrier();
    };
    TileCounter back, on;
    copied(back, 2 + of_erases, 4);
    back.work.output_bytes = bytes_of(args.d_v, C * values);
    WarpProducts products{back, warps};
    const bool beside = fetching_threads(K) > 0;              // others leave d_o^T P and what q reads
    products.add(2 * tiles * K / 16, tiles / 2 * K / 16, 2);  // read
    products.add(2 * lower, lower + 2 * steps, beside ? 0 : 2);
    products.add(3 * lower, lower, 2);  // solve
    const double writes = 2 * steps * K / 8, operands = steps * K / 16 + steps * K / 64 / 2, waits = 1 + K / 128.0;
    products.add(writes, operands, waits);
    products.add(writes, operands, beside ? 0 : waits);
    if (beside) {
        products.add(0, 2 * tiles * (1 + K / 64), 2);
        back.work.barriers += 4 * warps / (warps + fetching_threads(K) / warp_lanes);
    }
    products.access(4 * tiles + 2 * steps * K / 64 + (args.d_v.given ? 2 * tiles : 0), 0);
    products.add(0, args.d_v.given ? steps : 0, 1);
    back.fma(warps * 2 * K / 8 * 4);
    copied(on, 1 + of_erases, 2);
    WarpProducts forwards{on, warps};
    forwards.add(2 * tiles * K / 16, tiles / 2 * K / 16, 2);
    forwards.add(3 * lower, lower + steps, 2);
    forwards.add(2 * steps * K / 8, steps * K / 16, 1.0 + K / 64);
    forwards.access(4 * tiles, 0);
    on.fma(warps * 2 * K / 8 * 4);
    return sweeps_work(args, back.work, on.work, values);
}

// Follows GradientKernel::run: all value heads of a key head.
template <int K, bool comba>
BlockWork tensor_gradients_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double warps = 8, on_diagonal = 6, tiles = K / 32.0, operand = 512, pair = 128, kept = 8 * 512;
    const double C = tensor_chunk, blocks = quotient_up(args.V, tensor_values), rows = comba ? 3 : 2;
    TileCounter head, chunk;
    const auto multiply = [](TileCounter& counter, double products, double operands, double waits) {
        counter.work.tensor_flop += products * WarpProducts::flop_of_product;
        counter.work.tile_bytes += operands * operand;
        counter.work.tile_waits += waits;
    };
    const auto score = [&](TileCounter& counter) {
        if (args.gate_gradient) multiply(counter, on_diagonal * K / 16 * 8, on_diagonal * K / 16 * 5, K / 16.0);
    };
    // of 64 values: with the states, which d_o and y share but of comba; with their gradients; d_P and d_l
    multiply(head, blocks * warps * 4 * 4 * tiles, blocks * warps * 4 * (4 + tiles / 2), blocks * (comba ? 8 : 4));
    if (comba) head.work.tile_bytes += blocks * warps * 4 * (2 + tiles / 2) * operand;
    multiply(head, blocks * warps * 4 * 2 * tiles, blocks * warps * 4 * (2 + tiles / 2), blocks * 4);
    multiply(head, blocks * on_diagonal * 4 * 8, blocks * on_diagonal * 4, 0);
    head.work.tile_bytes += blocks * (warps * 3 * (4 * tiles + 4) * pair + 2 * 64 * K * 2 + 3 * 64 * 64 * 2);
    if (args.gate_gradient) multiply(head, blocks * K / 2, blocks * K / 2, blocks * 2);  // with each other
    head.work.saved_bytes = args.V * (K + 64.0) * 2 * 2;
    head.work.input_bytes = C * args.V * 2 + bytes_of(args.log_decays, C) + bytes_of(args.beta, C);
    for (double i = 0; i < blocks; ++i) {
        head.barrier();
        if (args.stages == 1) head.barrier(), head.work.memory_waits += 1;
    }
    // behind them
    if (comba) score(head);
    head.work.tile_bytes += (12 * 2 + 10 + on_diagonal * (4 + 24 + 4)) * pair;
    head.work.tile_bytes += on_diagonal * kept * (2 - 1.0 / args.group);  // weights, which the first head only stores
    head.work.tile_waits += 20;
    for (int i = 0; i < 2 + (args.d_beta.given ? 1 : 0); ++i) head.barrier();
    head.work.output_bytes = bytes_of(args.d_beta, C) + bytes_of(args.d_log_decays, C);
    if (args.gate_gradient) {
        head.work.tile_bytes += comba ? 0 : on_diagonal * kept;
        head.work.tile_bytes += warps * (comba ? 2 * 50 + 33 : 50 + 25) * pair + 40 * pair;
        head.work.tile_waits += 40;
        for (int i = 0; i < (comba ? 6 : 3); ++i) head.barrier();
    }
    // of the keys
    chunk.work = head.work * args.group;
    chunk.work.input_bytes += rows * C * args.K * 2;
    chunk.work.memory_waits += 2;
    chunk.work.barriers += 4;
    chunk.work.tile_bytes += rows * C * K * 2 * 2;
    if (!comba) score(chunk);
    chunk.work.tile_bytes += on_diagonal * ((comba || !args.gate_gradient ? 1 : 2) * kept + 16 * pair);
    multiply(chunk, warps * 24 * tiles, warps * 3 * (1.5 * tiles + 8), 6);
    const Strided* const stored[] = {&args.d_q, &args.d_k, &args.d_p};
    for (const Strided* tensor : stored) {
        if (!tensor->given) continue;
        chunk.work.output_bytes += bytes_of(*tensor, C * args.K);
        chunk.work.tile_bytes += warps * (args.l2norm ? 3 : 2) * 4 * tiles * pair + C * args.K * 2;
        for (int i = 0; i < (args.l2norm ? 3 : 2); ++i) chunk.barrier();
    }
    return {{}, chunk.work};
}

}  // namespace headrace::cuda
