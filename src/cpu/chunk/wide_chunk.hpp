// WideChunk: one chunk of the delta rule in double, between states in fp32.
#pragma once

#include <algorithm>

#include "algorithms/chunk_backward.hpp"
#include "cpu/tiles/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class To, class From>
void convert(Tile<To> dst, Tile<From> a, int rows, int columns) {
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; j += lanes<double>) {
            if constexpr (sizeof(To) == 8) {
                store<double>(dst.at(i) + j, widen(a.at(i) + j));
            } else {
                store_narrow<To>(dst.at(i) + j, load<double>(a.at(i) + j));
            }
        }
    }
}

// Keys of few directions make what a chunk adds up far larger than the sum: tokens that erase more than they find leave
// states and gradients of alternating sign, of which scores that are rounded once, solves and the sums over pairs of
// tokens keep rounding errors that grow with the square of the chunk. Chunks that say so of themselves are computed in
// double, from the same states, so that they still depend on no other chunk.
//
// Kernel: the ChunkKernel in double of the same gate.
template <class Kernel>
struct WideChunk {
    using State = typename Kernel::State;
    using Wide = cpu::Tile<double>;
    using Narrow = cpu::Tile<float>;
    // Of tokens with beta k.e above 1: they reflect what they find.
    static constexpr int fewest_reflections = 4;
    // Mean square of beta l over the chunk's pairs, of unit keys along D directions beta^2 / D; without reflections it
    // takes a long chunk, and one direction.
    static constexpr float most_overlap = 0.2F, most_overlap_of_writes = 0.6F;
    static constexpr int long_chunk = 33;

    // A forward computes so many value channels at once, to keep its scratch memory small.
    static constexpr int forward_columns = 32;

    KernelArgs args;  // of one value head at a time, which saves nothing
    const std::int64_t group;
    Kernel kernel;
    int columns;  // value channels at once
    State state;
    Wide residual;
    float* k_e;  // [C]

    WideChunk(const KernelArgs& arguments, Arena& arena, bool backward)
        : args(of_one_head(arguments)),
          group(arguments.group),
          kernel(args, arena, backward ? Kernel::with_backward : Kernel::forward_only),
          columns(kernel.value_columns),
          state(kernel.walking_state(0)) {
        if (backward) kernel.forward_tiles.residual = arena.tile<double>(args.chunk, columns);
        residual = kernel.backward_tiles.residual = kernel.forward_tiles.residual;
        k_e = arena.take<float>(static_cast<std::size_t>(args.chunk));
    }

    // Whether the chunk's sums are small beside their terms; n: l times the betas of its rows or columns, either sign.
    bool cancels(const TokenTiles<float>& tokens, Narrow n, const ChunkRange& range) const {
        const bool reflect = some_reflect(tokens, range);
        if (!reflect && range.length < long_chunk) return false;
        float squares = 0;
        for (int i = 0; i < range.length; ++i) {
            for (int j = 0; j < i; ++j) squares += n.at(i)[j] * n.at(i)[j];
        }
        const auto pairs = static_cast<float>(range.length * (range.length - 1) / 2);
        return squares > (reflect ? most_overlap : most_overlap_of_writes) * pairs;
    }

    // The state that leaves the chunk and the residual, of `values` value channels from `first` on. next may be the
    // entering state.
    void forward(const ChunkRange& range, std::int64_t head, int first, int values, Narrow entering, Narrow next,
                 Narrow narrow_residual) {
        for (int j = 0; j < values; j += columns) {
            run_forward(range, head, first + j, std::min(columns, values - j), entering.from(0, j), state);
            convert(next.from(0, j), state.tile, kernel.key_columns, kernel.value_columns);
            convert(narrow_residual.from(0, j), residual, range.rows, kernel.value_columns);
        }
    }
    // What chunk_gradients and chunk_adjoint make of the same chunk, from the entering state and D, and the gradients of
    // the log decays.
    template <class Tiles>
    void backward(const ChunkRange& range, std::int64_t head, Narrow entering, Narrow D, const Tiles& to, Narrow gate_gradient,
                  algorithms::Wanted wanted) {
        const int rows = range.rows, K = kernel.key_columns, V = kernel.value_columns;
        auto& own = kernel.backward_tiles;
        const State adjoint = kernel.adjoint_state(0);
        run_forward(range, head, 0, args.V, entering, State{kernel.saved_adjoint});
        convert(adjoint.tile, D, K, V);
        load_tokens(kernel.d_o, args.d_o, range, head, 0, args.V);
        wanted.erase_scores = true;
        algorithms::chunk_gradients<true>(kernel.ops, kernel.in, own, kernel.d_o, state, adjoint, wanted);
        if (wanted.adjoint) {
            algorithms::chunk_adjoint<true>(kernel.ops, kernel.in, own, kernel.d_o, adjoint);
            convert(D, adjoint.tile, K, V);
            convert(to.z, own.z, rows, V);
            for (int i = 0; i < range.length; ++i) to.d_beta[i] = static_cast<float>(own.d_beta[i]);
        }
        if (wanted.queries) convert(to.d_q, own.d_q, rows, K);
        if (wanted.keys) convert(to.d_k, own.d_k, rows, K);
        if (wanted.queries || wanted.keys) convert(to.d_e, own.d_e, rows, K);
        if (!wanted.gate) return;
        kernel.ops.gate.finish_gradient(kernel.gate_gradient, args.undecayed_error);
        convert(gate_gradient, kernel.gate_gradient, args.channel_gate ? rows : 1, args.channel_gate ? K : rows);
    }

  private:
    static KernelArgs of_one_head(KernelArgs args) {
        args.group = args.walk = 1;
        args.state_chunk = 0;
        args.ends_early = false;
        args.value_columns = std::min(args.value_columns, forward_columns);
        return args;
    }
    bool some_reflect(const TokenTiles<float>& tokens, const ChunkRange& range) const {
        const bool unit_keys = args.l2norm && !args.undecayed_error, apart = tokens.k_norm != nullptr;
        if (!unit_keys) row_dots(k_e, tokens.k, tokens.e, range.rows, tokens.key_columns);
        int count = 0;
        for (int i = 0; i < range.length; ++i) {
            const float norms = apart ? tokens.k_norm[i] * tokens.e_norm[i] : 1.0F;
            count += tokens.beta[i] * (unit_keys ? 1.0F : k_e[i] * norms) > 1 ? 1 : 0;
        }
        return count >= fewest_reflections;
    }
    // From the entering state, which `state` keeps unless it is `leaving`. Leaves the residual.
    void run_forward(const ChunkRange& range, std::int64_t head, int first, int values, Narrow entering, State leaving) {
        kernel.ops.V = kernel.value_columns = round_up(values, 16);
        convert(state.tile, entering, kernel.key_columns, kernel.value_columns);
        kernel.tokens.load_keys(range, head / group);
        kernel.tokens.load_head(range, head, first, values);
        kernel.ops.start_chunk(range.length, range.rows, kernel.tokens.log_decay, kernel.in, nullptr, true);
        algorithms::chunk_forward<true>(kernel.ops, kernel.in, kernel.forward_tiles, state, leaving, Wide{});
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
