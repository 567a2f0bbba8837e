// counted_tokens: what a block of RecurrentKernel, StepKernel and AdjointKernel does at a token, or at a segment of
// them, counted on the host.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/adjoint_kernel.hpp"
#include "cuda/recurrent/state_columns.hpp"
#include "cuda/tiles/counted_token_tiles.hpp"

namespace headrace::cuda {

// ---- forward and step: the state lies in registers, a warp has a few columns ----

// alone: of StepKernel, whose warps prepare keys and decays together.
template <class T, bool delta, bool alone>
BlockWork work_of_columns(const KernelArgs& args) {
    const StateShape shape = state_shape<T>(args.K);
    const double values = std::min(args.V, block_warps * shape.warp_columns()),
                 warps = quotient_up(values, shape.warp_columns()), steps_over_rows = shape.column_lanes == 2 ? 4 : 5;
    const auto bytes_of = [](const Strided& tensor) {
        return tensor.given ? static_cast<double>(size_of(tensor.dtype)) : 0.0;
    };
    const auto state = [&](const Strided& tensor) { return bytes_of(tensor) * args.K * values; };
    TileCounter counter;
    const auto shuffles = [&](double count, double waits) {
        counter.shuffle(count * warps * sizeof(T) / 4);
        counter.work.tile_waits += waits;
    };
    KernelWork block;
    block.input_bytes = state(args.initial_state);
    block.output_bytes = state(args.final_state);
    block.memory_waits = 2;  // the state and the first token; others arrive meanwhile

    const double keys = bytes_of(args.q) + bytes_of(args.k) + bytes_of(args.p),
                 prepared = alone ? 1 : warps;  // by so many of them
    counter.work.input_bytes += prepared * (keys * args.K + bytes_of(args.g) * (args.channel_gate ? args.K : 1)) +
                                (bytes_of(args.v) + bytes_of(args.gv)) * values +
                                bytes_of(args.beta) * (args.elementwise_beta ? values : warps);
    counter.work.output_bytes += bytes_of(args.o) * values;
    if (args.per_token_rows > 0) counter.work.output_bytes += state(args.final_state);
    // norms and q.k, then of all columns S^T q (and S^T e), and d to the lanes that write it
    const double vectors = args.undecayed_error ? 3 : 2, norms = !args.l2norm ? 0 : alone ? vectors / warps : vectors;
    shuffles((norms + 1) * steps_over_rows, (norms + 1) * steps_over_rows);
    if (alone) {  // rows that were prepared: q, k, what erases, both parts of decays
        counter.work.tile_bytes += sizeof(T) * ((vectors + 2) * args.K + 5 * warps * shape.rows * warp_lanes);
        counter.work.tile_waits += 2;
        counter.barrier();
    }
    const double reads = delta ? 2 : 1, of_columns = steps_over_rows + (shape.columns == 4 ? 1 : 0);
    shuffles(reads * of_columns, steps_over_rows);
    shuffles(shape.columns * (args.gv.given ? 3 : 1), 1);
    const double write_products = args.gv.given ? 4 : 2;  // the decay has two parts
    counter.fma(warps * shape.rows * (shape.columns * (reads + write_products) + norms + 1));
    constexpr double of_decay = 11;  // exp and expm1, both
    const double gates = !args.channel_gate ? 1 : alone ? quotient_up(args.K, warp_lanes) : shape.rows;
    counter.fma(of_decay * (prepared * gates + (args.gv.given ? warps : 0)));
    return {block, counter.work};
}
template <class T, bool delta>
BlockWork recurrent_forward_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    return work_of_columns<T, delta, false>(args);
}
template <class T, bool delta>
BlockWork recurrent_step_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    return work_of_columns<T, delta, true>(args);
}

// ---- backward: states in memory, a thread for each column ----

// The primitives of TileOps, one by one.
template <class T>
struct CountedTokenOps {
    using Tile = cuda::Tile<T>;
    TileCounter& counter;
    int keys, values;

    // A column of every thread.
    struct Column {
        CountedTokenOps& ops;
        Tile from, to;
        struct Two {
            T a, b;
        };
        double warps() const { return TileCounter::parts(ops.values); }
        void rows(Tile tile, double accesses, double vectors, double products) const {
            const double count = ops.keys * warps();
            ops.counter.access(tile, accesses * count);
            ops.counter.work.tile_bytes += 128 * vectors * count;
            ops.counter.fma(products * count);
            ops.counter.wait(ops.keys * quotient_up(ops.values, block_threads), tile);
        }
        T values(const T*) const {
            ops.counter.work.tile_bytes += 128 * warps();
            return 0;
        }
        void store_values(T*, T) const { values(nullptr); }
        Two read_two(const T*, const T*) const {
            rows(from, 2, 2, 2);
            return {0, 0};
        }
        void write(const algorithms::Token<T>&, T) const { rows(to, 2, decay_vectors + 1, 2); }
        T read_and_write(const T*, const algorithms::Token<T>& token, T d) const {
            rows(from, 1, 1, 1);
            write(token, d);
            return 0;
        }
    };
    static constexpr double decay_vectors = 2;  // its whole and its part

    void each(double count, double accesses) { counter.each(count, accesses); }
    void multiply_keys(T*, const T*, const T*) { each(keys, 3); }
    void multiply_values(T*, const T*, const T* b) { each(values, b == nullptr ? 2 : 3); }
    void copy_values(T*, const T*) { each(values, 2); }
    void error_values(T*, const T*) { each(values, 3); }
    double dot_keys(const T*, const T*) { return dot(keys); }
    double dot_values(const T*, const T*) { return dot(values); }
    void combine_keys(T*, const T* decay, T, const T*) { each(keys, decay == nullptr ? 3 : 4); }
    void combine(T*, T, const T*, T, const T*) { each(values, 3); }
    void read(T*, Tile S, const T*) {
        Column{*this, S, S}.rows(S, 1, 1, 1);
        counter.barrier();
    }
    template <class Body>
    void for_columns(Tile from, Tile to, const Body& body) {
        body(Column{*this, from, to});
        counter.barrier();
    }
    void add_outer(Tile S, T, const T*, const T*) {
        counter.fma(keys * TileCounter::parts(values));
        counter.each_element(keys, values, S, S);
    }
    void rows_times(T*, T, Tile S, const T*) {
        counter.each_row_sum(keys, values, S);
        counter.fma(keys * TileCounter::parts(values));
    }
    void decay_and_write_adjoint(Tile D, Tile S, const algorithms::Token<T>&, const T*, const T* z,
                                 const algorithms::TokenGradients<T>&) {
        // what is written takes a product more where z is given; a decay has two
        const double visits = keys * TileCounter::parts(values), written = z == nullptr ? 0 : 1;
        Column{*this, S, S}.rows(S, 1, decay_vectors + 2 + written, 3 + written);
        counter.access(D, visits);
        counter.each_row_sum(keys, values, S, D);
        counter.fma((3 + written) * visits);
        if (z != nullptr) {
            counter.each_row_sum(keys, values, S);
            counter.fma(3 * visits);
        }
        counter.each_element(keys, values, D, D);
        counter.fma((4 + written) * visits);
    }

  private:
    double dot(double count) {
        each(count, 2);
        counter.template sums_of_warp<double>(block_warps);
        counter.barrier();
        return 0;
    }
};

// Follows AdjointKernel's functions of the same names, at a whole segment.
template <class T, bool delta>
struct CountedAdjoint {
    using Tile = cuda::Tile<T>;
    using Kernel = AdjointKernel<T, delta>;
    static constexpr int segment = recurrent_segment;

    const KernelArgs& args;
    Kernel kernel;
    TileCounter counter;
    CountedTokenTiles<T, delta> tokens;
    CountedTokenOps<T> ops;
    const Strided saved;

    CountedAdjoint(const KernelArgs& arguments, Arena arena)
        : args(arguments),
          kernel(args, arena),
          tokens{kernel.tokens, args, counter, segment},
          ops{counter, kernel.key_columns, kernel.value_columns},
          saved{nullptr, {}, args.state_dtype, true} {
        counter.spill = arena.spill;
    }

    BlockWork backward() {
        counter.load(&KernelWork::input_bytes, args.initial_state, kernel.S, args.K, args.V);
        counter.load(&KernelWork::input_bytes, args.d_final_state, kernel.adjoints, args.K, args.V);
        counter.store(&KernelWork::output_bytes, args.d_initial_state, kernel.adjoints, args.K, args.V);
        const KernelWork block = taken() * args.group;
        counter.store(&KernelWork::saved_bytes, saved, kernel.S, kernel.key_columns, kernel.value_columns);
        replay(Tile{});
        counter.load(&KernelWork::saved_bytes, saved, kernel.S, kernel.key_columns, kernel.value_columns);
        replay(kernel.history);
        gradients();
        KernelWork step = taken() * args.group;
        if (delta && !args.undecayed_error)
            counter.each_element(segment, kernel.key_columns, kernel.d_k_sum, kernel.d_k_sum, kernel.d_e_sum);
        tokens.store_rows(args.d_q, kernel.d_q_sum, kernel.tokens.q);
        tokens.store_rows(args.d_k, kernel.d_k_sum, kernel.tokens.k);
        if (delta) tokens.store_rows(args.d_p, kernel.d_e_sum, kernel.tokens.e);
        step += taken();
        return {block, step};
    }

  private:
    KernelWork taken() {
        const KernelWork work = counter.work;
        counter.work = {};
        return work;
    }
    algorithms::Token<T> token() {
        ops.dot_keys(nullptr, nullptr);
        algorithms::Token<T> token{};
        token.undecayed_error = args.undecayed_error;
        return token;
    }
    void load_head() {
        tokens.load_head(args.V);
        counter.each_element(segment, kernel.key_columns, kernel.decay, kernel.decay_whole, kernel.decay_part);
        counter.load(&KernelWork::input_bytes, args.gv, kernel.value_decay, segment, args.V);
        counter.each_element(segment, kernel.value_columns, kernel.value_whole, kernel.value_part, kernel.value_beta,
                             kernel.value_slope);
        if (delta && args.elementwise_beta)
            counter.load(&KernelWork::input_bytes, args.beta, kernel.value_beta, segment, args.V);
    }
    void replay(Tile states) {
        tokens.load_keys();
        load_head();
        for (int i = 0; i < segment; ++i) {
            if (states.data != nullptr)
                counter.each_element(kernel.key_columns, kernel.value_columns, states, kernel.S);
            algorithms::token_forward<delta>(ops, static_cast<T*>(nullptr), kernel.S, kernel.S, token(), kernel.spare);
        }
    }
    void gradients() {
        counter.load(&KernelWork::input_bytes, args.d_o, kernel.d_o, segment, args.V);
        algorithms::TokenGradients<T> of_token{};
        of_token.d_v = kernel.d_v.data;  // the page hands it on
        for (int i = 0; i < segment; ++i) {
            algorithms::token_backward<delta>(ops, of_token, kernel.adjoints, kernel.history, token(),
                                              static_cast<const T*>(nullptr), kernel.spare);
        }
        counter.store(&KernelWork::output_bytes, args.d_v, kernel.d_v, segment, args.V);
        counter.store(&KernelWork::output_bytes, args.d_gv, kernel.d_value_decay, segment, args.V);
        if (delta && args.d_beta.given) {
            counter.each_element(segment, kernel.value_columns, kernel.d_beta, kernel.d_beta, kernel.value_slope);
            if (args.elementwise_beta) {
                counter.store(&KernelWork::output_bytes, args.d_beta, kernel.d_beta, segment, args.V);
            } else {
                counter.each_row_sum(segment, args.V, kernel.d_beta);
                tokens.numbers(&KernelWork::output_bytes, args.d_beta, 0);
            }
        }
        if (args.gate_gradient) {
            if (!args.channel_gate) counter.each_row_sum(segment, args.K, kernel.d_decay);
            tokens.store_gate_gradient(kernel.gate_gradient);
        }
        counter.each_element(segment, kernel.key_columns, kernel.d_q_sum, kernel.d_q_sum, kernel.d_q);
        counter.each_element(segment, kernel.key_columns, kernel.d_k_sum, kernel.d_k_sum, kernel.d_k);
        if (delta) counter.each_element(segment, kernel.key_columns, kernel.d_e_sum, kernel.d_e_sum, kernel.d_e);
    }
};

template <class T, bool delta>
BlockWork recurrent_backward_work(const KernelArgs& args, std::size_t shared_limit) {
    Arena measured{nullptr, nullptr, shared_limit};
    AdjointKernel<T, delta>(args, measured);
    const CountedMemory memory(measured);
    return CountedAdjoint<T, delta>(args, memory.arena).backward();
}

}  // namespace headrace::cuda
