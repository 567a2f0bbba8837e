// CountedOps: the primitives that the chunk pages ask for, counted on the host: what ChunkOps would do of them.
#pragma once

#include "cuda/chunk/chunk_ops.hpp"
#include "cuda/tiles/tile_counter.hpp"

namespace headrace::cuda {

// The functions of this name hide those of ChunkOps, one by one, whose text they follow.
template <class GateType>
struct CountedOps : ChunkOps<GateType> {
    using Plain = ChunkOps<GateType>;
    using T = typename GateType::T;
    using Tile = cuda::Tile<T>;
    using State = Tile;
    struct Rows {
        Tile rows;
        const T* norm = nullptr;
    };
    struct Decayed {
        Tile rows;
    };
    using Inputs = algorithms::ChunkInputs<CountedOps>;
    using Leave = TileCounter::Leave;
    static constexpr bool per_channel = GateType::per_channel;
    // Of an element of decayed rows: its number and its decay, which one gate for all channels has once for a row where
    // rows are read, and for four of them, of doubles for two tiles, where they are written.
    static constexpr double read_loads = per_channel ? 2 : 1, write_loads = per_channel      ? 2
                                                                            : sizeof(T) == 8 ? 1.5
                                                                                             : 1.25;

    // The gate's own part.
    struct Gate {
        CountedOps& ops;
        __host__ __device__ Tile carve_gradient(Arena& arena, int chunk, Tile P, Tile l) const {
            return static_cast<Plain&>(ops).gate.carve_gradient(arena, chunk, P, l);
        }
        void start_gradient(Rows q, Tile d_q, Rows k, Tile d_k) const {
            if constexpr (per_channel) {
                const GateType& gate = ops.plain_gate();
                ops.counter.each_element(ops.rows, ops.K, q.rows, d_q, k.rows, d_k, gate.gradient_start,
                                         gate.gradient_end, gate.gradient_inside);
            } else {
                ops.counter.each_row_sum(ops.rows, ops.K, q.rows, d_q);
                ops.counter.each_row_sum(ops.rows, ops.K, k.rows, d_k);
            }
        }
        void add_from_start(Rows x, Tile d_x) const {
            if constexpr (per_channel) {
                const Tile sum = ops.plain_gate().gradient_start;
                ops.counter.each_element(ops.rows, ops.K, x.rows, d_x, sum, sum);
            } else {
                ops.counter.each_row_sum(ops.rows, ops.K, x.rows, d_x);
            }
        }
        void add_from_start_before(Rows x, Tile d_x) const { add_from_start(x, d_x); }
    };

    TileCounter counter;
    Gate gate{*this};
    int value_parts = wide;
    int state_parts() const { return sizeof(T) == 8 ? wide : value_parts; }

    CountedOps() = default;
    CountedOps(const CountedOps&) = delete;
    CountedOps& operator=(const CountedOps&) = delete;

    const GateType& plain_gate() const { return Plain::gate; }
    using Plain::K;
    using Plain::rows;
    using Plain::V;

    void start_chunk(int padded_rows, Tile log_decay) {
        rows = padded_rows;
        const GateType& g = plain_gate();
        if constexpr (per_channel) {
            Plain::gate.decay = log_decay;
            const double warps = TileCounter::parts(K);
            counter.access(log_decay, 3.0 * rows * warps);
            counter.access(g.start, rows * warps);
            counter.access(g.end, rows * warps);
            counter.wait(3.0 * rows * quotient_up(K, counter.threads()), log_decay);
            counter.each_element(rows, K, log_decay, log_decay);
            counter.barrier();
            counter.barrier();
            if (GateType::lifts) counter.each_element(rows, K, g.lift, g.start);
        } else {
            counter.each(rows, 2);
            counter.each(rows + 1, 2.0 * rows);
        }
    }

    State right_state(State S) const { return S; }
    State left_state(State S) const { return S; }
    void scores(Tile P, Tile l, const Inputs& in) {
        if constexpr (per_channel) {
            channel_scores(P, l, in);
        } else {
            scalar_scores(P, in.q.rows, in.k.rows);
            scalar_scores(l, in.e.rows, in.k.rows);
        }
    }
    void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l, const Inputs& in,
                         bool gate_wanted) {
        if constexpr (per_channel) {
            channel_scores_backward(d_q, d_k, d_e, d_P, d_l, in, gate_wanted);
        } else {
            const GateType& g = plain_gate();
            const double visits = rows * TileCounter::parts(rows);
            const auto of_scores = [&](Tile gradient, Tile score, Tile pairs) {
                if (gate_wanted) counter.access(pairs, visits);
                if (gradient.data == nullptr) return;
                counter.access(gradient, (gate_wanted ? 3 : 2) * visits);
                counter.access(g.decay, visits);
                if (gate_wanted) counter.access(score, visits);
            };
            of_scores(d_P, P, g.pairs);
            of_scores(d_l, l, g.pairs_before);
            counter.each_element(rows, rows);
            add_products(d_q, d_P, in.k.rows, Part::a_lower);
            if (d_l.data != nullptr) add_products(d_e, d_l, in.k.rows, Part::a_lower);
            add_products(d_k, d_P, in.q.rows, Part::a_upper);
            if (d_l.data != nullptr) add_products(d_k, d_l, in.e.rows, Part::a_upper);
        }
    }

    void scale_value_rows(Tile dst, Tile a, const T* factors) { scaled(dst, a, factors, V); }
    void scale_rows(Tile dst, Tile a, const T* factors, T) { scaled(dst, a, factors, rows); }
    void scale_columns(Tile dst, Tile a, const T* factors, T) { scaled(dst, a, factors, rows); }
    void negate_scores(Tile x) { counter.each_element(rows, rows, x, x); }
    void value_row_dots(T*, Tile a, Tile b) { counter.each_row_sum(rows, V, a, b); }
    void add_through(State S, State D) {
        counter.each_row_sum(K, V, S, D);
        counter.each(K, 2);
    }

    Decayed reads(const Inputs& in) const { return {in.q.rows}; }
    Decayed erases(const Inputs& in) const { return {in.e.rows}; }
    Decayed from_start(Rows x, T) const { return {x.rows}; }
    Decayed erase_from_start(Rows x, T) const { return {x.rows}; }
    Decayed to_end(Rows x) const { return {x.rows}; }
    void assign(Tile dst, Decayed x) { counter.each_element(rows, K, dst, x.rows, weights()); }

    void add_read(Tile dst, Tile a, Decayed x, State S) {
        counter.access(a, rows * TileCounter::parts(V));
        read(dst, x, S);
    }
    void read_and_score(Tile dst, Decayed x, State S, Tile P, Tile b) {
        read(dst, x, S);
        counter.multiply(value_parts, dst, Leave::add, P, 1, b, Reach::row, rows, V, rows, Part::a_lower);
    }
    void read_and_score_transposed(Tile dst, Decayed x, State S, Tile P, Tile b) {
        read(dst, x, S);
        counter.multiply(value_parts, dst, Leave::add, P, 1, b, Reach::row, rows, V, rows, Part::a_upper);
    }
    void read_keys(Tile dst, Tile a, State S) {
        counter.multiply(wide, dst, Leave::store, a, 1, S, Reach::column, rows, K, V, Part::full);
    }
    void decay_and_write(State next, State S, Decayed x, Tile b) { write(next, S, x, b, rows); }
    void decay_and_write(State next, State S, Decayed x, Tile b, Decayed, Tile) { write(next, S, x, b, 2 * rows); }
    void outer_lower(Tile dst, Tile a, Tile b) {
        counter.multiply(few_columns, dst, Leave::store, a, 1, b, Reach::column, rows, rows, V, Part::lower_sums);
    }
    void solve(Tile x, Tile n) { counter.solve(x, n, rows, V); }
    void solve_transposed(Tile x, Tile n) { counter.solve(x, n, rows, V); }

    void finish_gradient(Tile gradient) {
        const GateType& g = plain_gate();
        if constexpr (per_channel) {
            const double warps = TileCounter::parts(K);
            counter.access(g.gradient_start, rows * warps);
            counter.access(g.gradient_inside, rows * warps);
            counter.access(g.gradient_end, rows * warps);
            counter.access(gradient, 3.0 * rows * warps);
            counter.wait(2.0 * rows * quotient_up(K, counter.threads()), gradient, g.gradient_start);
            counter.barrier();
        } else {
            const double terms = rows * (rows - 1) / 2.0 * TileCounter::parts(rows);  // at most, of the longest lane
            counter.access(g.pairs, terms);
            counter.each_row_sum(rows, rows, g.pairs);
            counter.wait(terms / counter.warps, g.pairs);
        }
    }

  private:
    Tile weights() const {
        if constexpr (per_channel) return plain_gate().start;
        return {};
    }
    void scaled(Tile dst, Tile a, const T* factors, int columns) {
        counter.access(factors, rows * TileCounter::parts(columns), Reach::one);
        counter.each_element(rows, columns, dst, a);
    }
    void read(Tile dst, Decayed x, State S) {
        counter.multiply(value_parts, dst, Leave::store, x.rows, read_loads, S, Reach::row, rows, V, K, Part::full);
    }
    void write(State next, State S, Decayed x, Tile b, int depth) {
        counter.access(S, K * TileCounter::parts(V));
        counter.fma(2 * K * TileCounter::parts(V));
        if (sizeof(T) == 8) counter.access(plain_gate().through, K * V / 32.0);
        counter.multiply(state_parts(), next, Leave::store, x.rows, write_loads, b, Reach::row, K, V, depth,
                         Part::full);
    }
    void add_products(Tile dst, Tile scores, Tile x, Part part) {
        if (dst.data != nullptr) counter.multiply(wide, dst, Leave::add, scores, 1, x, Reach::row, rows, K, rows, part);
    }

    void scalar_scores(Tile dst, Tile x, Tile keys) {
        if (dst.data == nullptr) return;
        counter.access(plain_gate().decay, rows * TileCounter::parts(rows));
        counter.multiply(few_columns, dst, Leave::store, x, 1, keys, Reach::column, rows, rows, K, Part::lower_sums);
    }
    // In double products of matrices, as long as decays can be lifted. Else a warp has a key, its lanes the channels;
    // tokens before the key take a turn of the loop without work.
    void channel_scores(Tile P, Tile l, const Inputs& in) {
        const bool read = P.data != nullptr, erase = l.data != nullptr;
        if (!read && !erase) return;
        if constexpr (GateType::lifts) {
            const auto multiply = [&](bool wanted, Tile dst, Tile x) {
                if (wanted)
                    counter.multiply(few_columns, dst, Leave::store, x, 2, in.k.rows, Reach::column, rows, rows, K,
                                     Part::lower_sums, 2);
            };
            multiply(read, P, in.q.rows);
            multiply(erase, l, in.e.rows);
            counter.access(reinterpret_cast<const int*>(plain_gate().lifted), counter.warps * TileCounter::parts(K));
            counter.shuffle(5.0 * counter.warps);
            return;
        }
        const double reads = rows * (rows + 1) / 2.0, erasures = rows * (rows - 1) / 2.0, warps = TileCounter::parts(K);
        counter.access(in.k.rows, rows * warps);
        counter.access(plain_gate().decay, erasures * warps);
        if (read) counter.access(in.q.rows, reads * warps), counter.fma(reads * warps);
        if (erase) counter.access(in.e.rows, erasures * warps), counter.fma(erasures * warps);
        counter.wait(static_cast<double>(rows) * rows / counter.warps, plain_gate().decay, in.q.rows);
        counter.template sums_of_warp<T>(static_cast<double>(rows) * rows);
        if (read && erase) counter.shuffle(5.0 * rows * rows);
        counter.access(P, static_cast<double>(rows) * rows, Reach::one);
        counter.access(l, static_cast<double>(rows) * rows, Reach::one);
        counter.barrier();
    }
    // A thread has a channel.
    void channel_scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, const Inputs& in, bool gate_wanted) {
        const GateType& g = plain_gate();
        const double pairs = rows * (rows - 1) / 2.0, warps = TileCounter::parts(K);
        const bool erase = d_l.data != nullptr;
        counter.access(in.k.rows, rows * warps);
        counter.access(g.decay, pairs * warps);
        counter.access(in.q.rows, (pairs + rows) * warps);
        counter.access(d_P, (pairs + rows) * warps, Reach::one);
        counter.access(d_q, 2 * (pairs + rows) * warps);
        counter.access(d_k, 2.0 * rows * warps);
        counter.fma((pairs + rows) * warps * (d_q.data != nullptr ? 1 : 0));
        if (erase) {
            counter.access(d_l, pairs * warps, Reach::one);
            counter.access(in.e.rows, pairs * warps);
            counter.access(d_e, 2 * pairs * warps);
            counter.fma(2 * pairs * warps);
        }
        if (gate_wanted) {
            counter.access(g.terms, 2 * pairs * warps);
            counter.access(g.gradient_inside, 2 * pairs * warps);
        }
        counter.wait((gate_wanted ? 2 : 1) * pairs * quotient_up(K, counter.threads()), d_q, in.q.rows);
        counter.barrier();
    }
};

}  // namespace headrace::cuda
