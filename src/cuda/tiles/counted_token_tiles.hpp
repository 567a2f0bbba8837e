// CountedTokenTiles: the loads and stores of TokenTiles, counted on the host.
#pragma once

#include "cuda/tiles/tile_counter.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// Of `rows` tokens. What a head has once (gamma, A_log, bias) is not counted.
template <class T, bool delta, Gates gates = Gates::either>
struct CountedTokenTiles {
    using Tile = cuda::Tile<T>;

    const TokenTiles<T, delta, gates>& tokens;
    const KernelArgs& args;
    TileCounter& counter;
    int rows;

    void load_rows(const Strided& tensor, Tile tile) {
        counter.load_tokens(&KernelWork::input_bytes, tensor, tile, rows, args.K);
        if (!args.l2norm) return;
        counter.each_row_sum(rows, tokens.key_columns, tile);
        counter.each_element(rows, tokens.key_columns, tile, tile);
    }
    void load_queries() { load_rows(args.q, tokens.q); }
    void load_keys(bool queries = true) {
        if (queries) load_queries();
        load_rows(args.k, tokens.k);
        if (args.undecayed_error) load_rows(args.p, tokens.e);
    }
    void load_head(int values) {
        counter.load_tokens(&KernelWork::input_bytes, args.v, tokens.v, rows, values);
        load_gates();
    }
    void load_gates() {
        if (args.channel_gate) {
            counter.load_tokens(&KernelWork::input_bytes, args.g, tokens.log_decay, rows, args.K);
            counter.each_element(rows, args.K, tokens.log_decay, tokens.log_decay);
        } else {
            numbers(&KernelWork::input_bytes, args.g, 1);
        }
        if (delta && !args.elementwise_beta) numbers(&KernelWork::input_bytes, args.beta, 1);
    }
    void store_gate_gradient(Tile gradient) {
        const bool formula = args.g.given && args.gate_formula != GateFormula::log_decay;
        const int columns = args.channel_gate ? args.K : 1;
        const auto sums = [&] {
            if (args.channel_gate) counter.each_element(rows, columns, gradient);
            counter.barrier();
        };
        if (args.d_gamma != nullptr) sums();
        if (formula) {  // the gradient of the formula reads g again, the sum of the rate once more
            for (int pass = args.d_rate != nullptr ? 0 : 1; pass < 2; ++pass)
                counter.load(&KernelWork::input_bytes, args.g, gradient, rows, columns);
            if (args.d_bias != nullptr) sums();
        }
        if (args.channel_gate) {
            counter.store(&KernelWork::output_bytes, args.d_g, gradient, rows, columns);
        } else {
            numbers(&KernelWork::output_bytes, args.d_g, 0);
        }
    }
    // A row of d and of y = x r for each token of d_q, d_k or d_p.
    void store_rows(const Strided& tensor, Tile d, Tile y) {
        if (!tensor.given) return;
        if (args.l2norm) {
            counter.each_row_sum(rows, tokens.key_columns, d, y);
            counter.each_element(rows, tokens.key_columns, d, d, y);
        }
        counter.store(&KernelWork::output_bytes, tensor, d, rows, args.K);
    }
    // One number per token.
    void numbers(double KernelWork::*bytes, const Strided& tensor, double waits) {
        counter.each(rows, 1);
        if (!tensor.given) return;
        counter.work.*bytes += rows * static_cast<double>(size_of(tensor.dtype));
        counter.work.memory_waits += waits;
    }
};

}  // namespace headrace::cuda
