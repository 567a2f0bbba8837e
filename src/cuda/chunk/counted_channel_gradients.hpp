// counted_channel_gradients: what blocks of ChannelGradient and ChannelKeySums do at a chunk, counted on the host. What
// keys that overlap add is not known here.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

// Follows ChannelKeyRows: rows that are read; norms and what is stored.
template <int K>
void count_key_rows(TileCounter& counter, const KernelArgs& args) {
    constexpr double C = tensor_chunk, warps = K / 16.0, numbers = C / warp_lanes;
    const auto access = [&](double count) { counter.work.tile_bytes += count * 128; };
    counter.work.input_bytes += 2 * C * args.K * 2;
    counter.work.tile_bytes += 2 * C * K * 2;
    access(2 * numbers / 2);
    if (args.l2norm) counter.work.tile_bytes += 2 * C * K * 2, access(2 * warps * 2);
}
template <int K>
void count_key_gradients(TileCounter& counter, const KernelArgs& args) {
    constexpr double C = tensor_chunk, warps = K / 16.0, groups = 4, numbers = C / warp_lanes;
    const auto access = [&](double count) { counter.work.tile_bytes += count * 128; };
    const Strided* const stored[] = {&args.d_q, &args.d_k};
    for (const Strided* tensor : stored) {
        if (!tensor->given) continue;
        counter.work.output_bytes += bytes_of(*tensor, C * args.K);
        counter.work.tile_bytes += C * args.K * 2;
        counter.barrier();
        if (!args.l2norm) continue;
        access(warps * (2 * groups * 4 + 16 * 4 + 8) + numbers * (warps + 2));
        counter.barrier(), counter.barrier();
    }
}

// Follows ChannelGradient::run: a value head.
template <int K, bool delta>
BlockWork channel_gradients_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    // Blocks of 16 x 16 on and below the diagonal, and below it.
    constexpr double C = tensor_chunk, warps = K / 16.0, kinds = delta ? 2 : 1, rows = delta ? 3 : 2, groups = 4,
                     lower = 10, below = 6, numbers = C / warp_lanes, gates = C * (K + 4) * 4;
    const double blocks = quotient_up(args.V, tensor_values);
    TileCounter head;
    const auto operands = [&](double products, double loaded, double waits) {  // of all warps
        head.work.tensor_flop += products * WarpProducts::flop_of_product;
        head.work.tile_bytes += loaded * WarpProducts::bytes_of_operand;
        head.work.tile_waits += waits;
    };
    const auto access = [](TileCounter& counter, double count) { counter.work.tile_bytes += count * 128; };
    // of 64 values: pairs, borders
    operands(blocks * 4 * lower * 2 * kinds, blocks * 4 * (warps * kinds + lower), blocks * 4);
    operands(blocks * warps * 4 * (2 + groups * 2 * rows), blocks * warps * 4 * (2 + groups * rows), blocks * 8);
    head.work.group_bytes += blocks * warps * 4 * groups * rows * WarpProducts::bytes_of_operand;
    head.work.tile_bytes += blocks * 2 * C * (2 * K + rows * C);
    head.work.saved_bytes = args.V * (K + (delta ? C : 0)) * 2 * 2;
    head.work.input_bytes =
        (delta ? 1 : 2) * C * args.V * 2 + bytes_of(args.log_decays, C * args.K) + (delta ? bytes_of(args.beta, C) : 0);
    // factors, decays; W and L
    access(head, numbers * (delta ? 7 : 5));
    head.work.tile_bytes += 3 * gates;
    access(head, 2 * lower * (1 + 2 * kinds) + 4 * below * kinds + 8 * (delta ? 6 : 2));
    // borders, pairs inside groups of 16 tokens, pairs across
    operands(warps * (6 * groups - 2), warps * 2 * groups, 8);
    access(head, warps * (groups * (12 + 8 + 8 + 2 * (rows + 1)) + 12 * 4 + 2));
    operands(warps * groups * (8 * kinds + 6), warps * groups * (2 + kinds), 3 * groups);
    access(head, warps * groups * (8 + 8));
    operands(warps * (4 * below * kinds + 12), warps * (2 * below * kinds + 3 * (2 + kinds)), 16);
    access(head, warps * (9 * 8 + 12));
    for (int i = 0; i < 3; ++i) head.barrier();
    if (delta && args.d_beta.given) access(head, numbers), head.barrier();
    if (args.gate_gradient) {
        access(head, warps * 32);
        head.work.tile_bytes += gates;
        head.work.output_bytes += bytes_of(args.d_g, C * args.K);
        head.barrier();
    }
    head.work.output_bytes += delta ? bytes_of(args.d_beta, C) : 0;
    // products with decays, roundings and sums: as many slots as multiply-adds, with those that address operands
    head.fma(warps * ((delta ? 4000 : 3300) + blocks * 440 + 1700));
    for (int i = 0; i < blocks + (args.stages == 1 ? blocks - 1 : 0) + 1; ++i) head.barrier();
    head.work.memory_waits += args.stages == 1 ? blocks : 1;
    count_key_rows<K>(head, args);
    if (args.group == 1) {
        count_key_gradients<K>(head, args);
    } else {
        head.work.saved_bytes += 2 * C * K * 4;
    }
    return {{}, head.work};
}

// Of chunks whose keys do not overlap: their blocks look and leave.
template <int K>
BlockWork channel_gradients_low_work(const KernelArgs&, std::size_t /*shared_limit*/) {
    TileCounter look;
    look.work.saved_bytes = 4;
    look.work.memory_waits = 1;
    look.barrier();
    return {{}, look.work};
}

// Follows ChannelKeySums::run.
template <int K>
BlockWork channel_key_sums_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    constexpr double C = tensor_chunk;
    TileCounter sums;
    count_key_rows<K>(sums, args);
    sums.work.saved_bytes += args.group * 2 * C * K * 4;
    sums.work.memory_waits += 1.0 + args.group;
    sums.barrier(), sums.barrier(), sums.barrier();
    count_key_gradients<K>(sums, args);
    return {{}, sums.work};
}

}  // namespace headrace::cuda
