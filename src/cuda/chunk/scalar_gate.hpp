// ScalarGate: one decay per token (step gate, head gate, their sum, or none) inside a chunk.
#pragma once

#include "cuda/tiles/rows.hpp"
#include "cuda/tiles/tile_products.hpp"

namespace headrace::cuda {

// What the scores of a chunk are made of.
template <class T>
struct ScoreRows {
    Tile<T> q, k, e;
    T scale;
    bool undecayed_error;
};

template <class T_>
struct ScalarGate {
    using T = T_;
    static constexpr bool per_channel = false, lifts = false;

    // rows(i,c) * factor * decays[i]
    struct Decayed {
        Tile<T> rows;
        const T* decays;
        T factor;
        HEADRACE_DEVICE T at(int i, int c) const { return rows.at(i, c) * (factor * decays[i]); }
    };

    int rows = 0, columns = 0;  // padded rows, key columns
    Tile<T> decay;              // [C,C] e^{G_i - G_j}, zero above the diagonal
    T *start, *before;          // [C] e^{G_i}; the same without the token's own gate
    T* end;                     // [C] e^{G_L - G_i}
    double *gate, *through;     // [C] e^{g_i}; [1] e^{G_L}
    // gradient terms by the tokens they span: from the chunk's start to i, to i - 1, from j to the end; and [1] all
    T *from_start, *from_start_before, *to_end, *all;
    Tile<T> pairs, pairs_before;  // [C,C] by (i, j): gates j < m <= i; gates j < m < i

    __host__ __device__ void carve(Arena& arena, int chunk, int key_columns) {
        columns = key_columns;
        decay = arena.tile<T>(chunk, chunk);
        for (T** vector : {&start, &before, &end}) *vector = arena.take<T>(chunk);
        gate = arena.take<double>(chunk);
        through = arena.take<double>(1);
    }
    // Returns the tile of the log decays' gradient. Pairs take the place of the scores whose gradients they come from.
    __host__ __device__ Tile<T> carve_gradient(Arena& arena, int chunk, Tile<T> P, Tile<T> l) {
        pairs = P, pairs_before = l;
        for (T** vector : {&from_start, &from_start_before, &to_end}) *vector = arena.take<T>(chunk);
        all = arena.take<T>(1);
        return arena.tile<T>(1, chunk);
    }

    // From log_decay [1,C], zero behind the chunk's length. Decays are products of e^{g}, each begun at its own row, so
    // a huge gate spoils nothing behind it, and in double, because roundings of a constant gate would all point one
    // way.
    HEADRACE_DEVICE void prepare(Tile<T> log_decay, int padded_rows) {
        rows = padded_rows;
        each(rows, [&](int i) { gate[i] = exp(static_cast<double>(log_decay.at(0, i))); });
        ptx::sync_block();
        each(rows + 1, [&](int j) { j < rows ? decay_from(j) : decay_from_start(); });
        ptx::sync_block();
    }

    HEADRACE_DEVICE SplitDecay<T> decay_of_state(int /*c*/) const { return split_decay<T>(*through); }

    // factor * x e^{G}, factor * x e^{G - g} or x e^{G_L - G}
    HEADRACE_DEVICE Decayed from_chunk_start(Tile<T> x, T factor) const { return {x, start, factor}; }
    HEADRACE_DEVICE Decayed from_chunk_start_before(Tile<T> x, T factor) const { return {x, before, factor}; }
    HEADRACE_DEVICE Decayed to_chunk_end(Tile<T> x) const { return {x, end, T(1)}; }

    // P[i,j] = scale q_i.k_j e^{G_i - G_j}, j <= i; l[i,j] = e_i.k_j e^{Ge_i - G_j}, j < i; zeros elsewhere. An empty
    // tile is not wanted.
    HEADRACE_DEVICE void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in) const {
        const auto keys = [&](int c, int j) { return in.k.at(j, c); };
        if (P) {
            multiply<T, few_columns>(
                [&](int i, int c) { return in.q.at(i, c); }, keys, rows, rows, columns, Part::lower_sums,
                [&](int i, int j, T sum) { P.at(i, j) = j <= i ? sum * decay.at(i, j) * in.scale : T(0); });
        }
        if (l) {
            multiply<T, few_columns>(
                [&](int i, int c) { return in.e.at(i, c); }, keys, rows, rows, columns, Part::lower_sums,
                [&](int i, int j, T sum) { l.at(i, j) = j < i ? sum * erase_decay(i, j, in) : T(0); });
        }
    }

    // From the gradients of the scores (d_l may be empty): adds to d_q, d_k, d_e and to the gate's pairs. d_P and d_l
    // are lost.
    HEADRACE_DEVICE void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T> P,
                                         Tile<T> l, const ScoreRows<T>& in, bool gate_wanted) const {
        each_element(rows, rows, [&](int i, int j) {
            if (gate_wanted) {
                const T of_erase = d_l && j < i ? d_l.at(i, j) * l.at(i, j) : T(0);
                const T of_read = j <= i ? d_P.at(i, j) * P.at(i, j) : T(0);
                pairs.at(i, j) = in.undecayed_error ? of_read : of_read + of_erase;
                if (d_l) pairs_before.at(i, j) = of_erase;
            }
            d_P.at(i, j) = j <= i ? d_P.at(i, j) * decay.at(i, j) * in.scale : T(0);
            if (d_l) d_l.at(i, j) = j < i ? d_l.at(i, j) * erase_decay(i, j, in) : T(0);
        });
        ptx::sync_block();
        if (d_q) add_rows(d_q, d_P, in.k);
        if (d_e && d_l) add_rows(d_e, d_l, in.k);
        if (d_k) add_columns(d_k, d_P, in.q);
        if (d_k && d_l) add_columns(d_k, d_l, in.e);
    }

    // ---- gradient of the log decays ----
    // Begins with the terms from the chunk's start of q, and to its end of k.
    HEADRACE_DEVICE void start_gradient(Tile<T> q, Tile<T> d_q, Tile<T> k, Tile<T> d_k) const {
        each(rows, [&](int i) { from_start_before[i] = 0; });
        dots(from_start, q, d_q, false);
        dots(to_end, k, d_k, false);
    }
    HEADRACE_DEVICE void add_from_start(Tile<T> x, Tile<T> d_x) const { dots(from_start, x, d_x, true); }
    HEADRACE_DEVICE void add_from_start_before(Tile<T> x, Tile<T> d_x) const { dots(from_start_before, x, d_x, true); }
    // e^{G_L} <S, D>, from the inner products of their rows
    HEADRACE_DEVICE void add_through(const T* state_dots) const {
        if (warp() == 0) {
            T sum = 0;
            HEADRACE_ROLLED
            for (int c = lane(); c < columns; c += warp_lanes) sum += state_dots[c];
            sum = sum_of_warp(sum);
            if (lane() == 0) *all = sum * static_cast<T>(*through);
        }
        ptx::sync_block();
    }
    // gradient [1,C]: entry m is the sum of all terms whose span contains gate m
    HEADRACE_DEVICE void finish_gradient(Tile<T> gradient, bool exclusive) const {
        each_row_sum(
            rows, rows,
            [&](int m, int i) {
                T sum = i >= m ? from_start[i] : to_end[i];
                if (i > m) sum += from_start_before[i];
                HEADRACE_ROLLED
                for (int j = 0; j < m && i >= m; ++j) sum += pairs.at(i, j);
                HEADRACE_ROLLED
                for (int j = 0; j < m && i > m && exclusive; ++j) sum += pairs_before.at(i, j);
                return sum;
            },
            [&](int m, T sum) { gradient.at(0, m) = sum + *all; });
    }

  private:
    HEADRACE_DEVICE void decay_from(int j) const {
        double since = 1;
        HEADRACE_ROLLED
        for (int i = 0; i < rows; ++i) {
            if (i > j) since *= gate[i];
            decay.at(i, j) = i < j ? T(0) : static_cast<T>(since);
        }
        end[j] = static_cast<T>(since);
    }
    HEADRACE_DEVICE void decay_from_start() const {
        double since = 1;
        HEADRACE_ROLLED
        for (int i = 0; i < rows; ++i) {
            before[i] = static_cast<T>(since);
            since *= gate[i];
            start[i] = static_cast<T>(since);
        }
        *through = since;
    }
    // The decay between the tokens of an erase score, j < i: the own gate of token i included or not.
    HEADRACE_DEVICE T erase_decay(int i, int j, const ScoreRows<T>& in) const {
        return decay.at(in.undecayed_error ? i - 1 : i, j);
    }

    HEADRACE_DEVICE void dots(T* sums, Tile<T> x, Tile<T> d_x, bool add) const {
        each_row_sum(
            rows, columns, [&](int i, int c) { return x.at(i, c) * d_x.at(i, c); },
            [&](int i, T sum) { sums[i] = add ? sums[i] + sum : sum; });
    }
    HEADRACE_DEVICE void add_rows(Tile<T> dst, Tile<T> weights, Tile<T> keys) const {
        multiply<T, wide>([&](int i, int j) { return weights.at(i, j); }, [&](int j, int c) { return keys.at(j, c); },
                          rows, columns, rows, Part::a_lower, [&](int i, int c, T sum) { dst.at(i, c) += sum; });
    }
    HEADRACE_DEVICE void add_columns(Tile<T> dst, Tile<T> weights, Tile<T> x) const {
        multiply<T, wide>([&](int j, int i) { return weights.at(i, j); }, [&](int i, int c) { return x.at(i, c); },
                          rows, columns, rows, Part::a_upper, [&](int j, int c, T sum) { dst.at(j, c) += sum; });
    }
};

}  // namespace headrace::cuda
