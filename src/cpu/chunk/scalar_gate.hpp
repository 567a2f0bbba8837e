// ScalarGate: one decay per token (step gate, head gate, their sum, or none) inside a chunk.
#pragma once

#include "cpu/tiles/packer.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class A>
struct ScalarGate {
    using T = typename A::real;
    static constexpr bool per_channel = false;

    int rows = 0, length = 0, columns = 0;  // padded rows, true rows, key columns
    Tile<T> decay;                          // [C,C] e^{G_i - G_j}, zero above the diagonal
    T *start = nullptr, *before = nullptr;  // [C] e^{G_i}; the same without the token's own gate
    T* end = nullptr;                       // [C] e^{G_L - G_i}
    T *through_decay = nullptr, *whole = nullptr, *part = nullptr;  // [K] e^{G_L} of every key row of the state, see store_decay
    // gradient terms by the tokens they span: from the chunk's start to i, to i - 1, from j to the end, and all
    T *from_start = nullptr, *from_start_before = nullptr, *to_end = nullptr;
    T through = 0;
    T *factors = nullptr, *other_factors = nullptr;  // [C] of the last rows that were weighed, and of those before
    double *gate = nullptr, *since = nullptr;  // [C] e^{g_i}; e^{G_m - G_i} while row m is prepared
    Tile<T> weighted;             // [C,C] spare
    Tile<T> pairs, pairs_before;  // [C,C] by (i, j): gates j < m <= i; gates j < m < i

    void carve(Arena& arena, int chunk, int key_columns, bool gradient) {
        columns = key_columns;
        decay = arena.tile<T>(chunk, chunk);
        weighted = arena.tile<T>(chunk, chunk);
        if (gradient) {
            pairs = arena.tile<T>(chunk, chunk);
            pairs_before = arena.tile<T>(chunk, chunk);
        }
        for (T** vector : {&start, &before, &end, &from_start, &from_start_before, &to_end, &factors}) {
            *vector = arena.take<T>(static_cast<std::size_t>(chunk));
        }
        for (double** vector : {&gate, &since}) *vector = arena.take<double>(static_cast<std::size_t>(chunk));
        for (T** vector : {&through_decay, &whole, &part}) *vector = arena.take<T>(static_cast<std::size_t>(key_columns));
        other_factors = arena.take<T>(static_cast<std::size_t>(chunk));
    }

    // From log_decay [1,C]. Decays are products of e^{g}, each begun at its own row, so a huge gate spoils nothing
    // behind it, and in double, because roundings of a constant gate would all point one way.
    void prepare(Tile<T> log_decay, int true_rows, int padded_rows, bool /*scores*/) {
        constexpr int n = lanes<double>;
        length = true_rows;
        rows = padded_rows;
        const reg<double> one = broadcast<double>(1);
        for (int i = 0; i < rows; i += n) {
            store<double>(gate + i, exp<double>(widen(log_decay.data + i)));
            store<double>(since + i, one);
        }
        for (int i = length; i < rows; ++i) gate[i] = 1;
        double since_start = 1;
        for (int i = 0; i < rows; ++i) {
            before[i] = static_cast<T>(since_start);
            since_start *= gate[i];
            start[i] = static_cast<T>(since_start);
            for (int j = 0; j < rows; j += n) {
                if (j > i || i >= length) {
                    store_narrow<T>(decay.at(i) + j, reg<double>{});
                    continue;
                }
                const reg<double> earlier = keep_below<double>(broadcast<double>(gate[i]), j, i), itself = one - keep_below<double>(one, j, i);
                const reg<double> product = load<double>(since + j) * (earlier + itself);
                store<double>(since + j, product);
                store_narrow<T>(decay.at(i) + j, keep_below<double>(product, j, i + 1));
            }
        }
        for (int i = 0; i < rows; i += n) store_narrow<T>(end + i, load<double>(since + i));
        for (int c = 0; c < columns; c += n) store_decay(through_decay + c, whole + c, part + c, broadcast<double>(since_start));
    }

    void prepare_starts(Tile<T> log_decay, int true_rows, int padded_rows) { prepare(log_decay, true_rows, padded_rows, false); }

    // e^{G_L - G_i} of the channels from c on
    reg<T> decay_to_end(int i, int /*c*/) const { return broadcast<T>(end[i]); }
    reg<T> decay_of(int i, int /*c*/) const { return broadcast<T>(static_cast<T>(gate[i])); }
    Start<T> decay_state() const { return {Start<T>::decayed, through_decay, whole, part}; }
    // Whether a state that decays by no more than `least_decay` keeps what bf16 rounds of a write: only if tokens
    // reflect it.
    bool keeps(T least_decay, bool reflects) const { return reflects && through_decay[0] >= least_decay; }

    // factor * x e^{G}, factor * x e^{G - g} or x e^{G_L - G} of key rows, as rows and what is left to multiply them
    // by. Rows stay as they came: in bf16 they are exact, the factors are applied to fp32 sums. Only the last two stay
    // valid.
    DecayedRows<T> from_chunk_start(KeyRows<T> x, T factor) { return weigh(x, start, factor); }
    DecayedRows<T> from_chunk_start_before(KeyRows<T> x, T factor) { return weigh(x, before, factor); }
    DecayedRows<T> to_chunk_end(KeyRows<T> x) { return weigh(x, end, T(1)); }
    // scale q e^G; -e e^{Ge}
    DecayedRows<T> reads(const ScoreRows<T>& in) { return from_chunk_start(in.q, in.scale); }
    DecayedRows<T> erases(const ScoreRows<T>& in) {
        return in.undecayed_error ? from_chunk_start_before(in.e, -1) : from_chunk_start(in.e, -1);
    }

    // The decay between rows i and j of the erase scores: own gate of row i included or not.
    const T* erase_decay(int i, bool exclusive) const { return decay.at(exclusive ? i - 1 : i); }

    // P[i,j] = scale q_i.k_j e^{G_i - G_j}, j <= i; l[i,j] = e_i.k_j e^{Ge_i - G_j}, j < i. An empty tile is not
    // wanted. Rows are exact in A, so the products are as well.
    template <class Small>
    void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, Packer<A>& packer, Packer<A>& passing, Packer<Small>&, bool) const {
        passing.reset();
        const Right<A> k_transposed = passing.right_transposed(in.k.rows, rows, columns);
        if (P) {
            matmul<A>(P.data, P.row, packer.left_once(in.q.rows, rows, columns), k_transposed, rows, rows, columns, Part::dst_lower);
            apply_decay(P, in.scale);
            apply_norms(P, in.q.norm, in.k.norm);
        }
        if (l) {
            matmul<A>(l.data, l.row, packer.left_once(in.e.rows, rows, columns), k_transposed, rows, rows, columns, Part::dst_lower);
            apply_erase_decay(l, in.undecayed_error);
            apply_norms(l, in.e.norm, in.k.norm);
        }
    }

    // From the gradients of the scores (d_l may be empty): adds to d_q, d_k, d_e and to the gate's pairs.
    template <class Any>
    void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T> P, Tile<T> l,
                         const ScoreRows<T>& in, bool gate_wanted, Packer<Any>& passing) {
        if (gate_wanted) {
            multiply(pairs, d_P, P, T(1), rows, rows);
            if (d_l) multiply(pairs_before, d_l, l, T(1), rows, rows);
            if (d_l && !in.undecayed_error) add(pairs, pairs_before, rows, rows);
        }
        passing.reset();
        apply_decay(d_P, in.scale);
        if (d_l) apply_erase_decay(d_l, in.undecayed_error);
        if (d_q || d_e) {
            const Right<Any> keys = passing.right(in.k.rows, rows, columns);
            if (d_q) add_rows(d_q, with_norms(d_P, nullptr, in.k.norm), keys, passing);
            if (d_e && d_l) add_rows(d_e, with_norms(d_l, nullptr, in.k.norm), keys, passing);
        }
        if (d_k) {
            add_columns(d_k, with_norms(d_P, in.q.norm, nullptr), in.q.rows, passing);
            if (d_l) add_columns(d_k, with_norms(d_l, in.e.norm, nullptr), in.e.rows, passing);
        }
    }

    // ---- gradient of the log decays ----
    // Begins with the terms from the chunk's start of q, and to its end of k.
    void start_gradient(KeyRows<T> q, Tile<T> d_q, KeyRows<T> k, Tile<T> d_k) {
        for (int i = 0; i < rows; ++i) from_start[i] = from_start_before[i] = to_end[i] = 0;
        add_dots(from_start, q, d_q);
        add_dots(to_end, k, d_k);
        through = 0;
        fill(pairs_before, T(0), rows, rows);
        fill(pairs, T(0), rows, rows);
    }
    void add_from_start(KeyRows<T> x, Tile<T> d_x) { add_dots(from_start, x, d_x); }
    void add_from_start_before(KeyRows<T> x, Tile<T> d_x) { add_dots(from_start_before, x, d_x); }
    // e^{G_L} <S, D>, from the inner products of their rows
    void add_through(const T* state_dots) {
        T total = 0;
        for (int c = 0; c < columns; ++c) total += state_dots[c];
        through += total * through_decay[0];
    }
    // gradient [1,C]: entry m is the sum of all terms whose span contains gate m
    void finish_gradient(Tile<T> gradient, bool exclusive) {
        T suffix = 0, prefix = 0;
        for (int m = rows - 1; m >= 0; --m) {
            gradient.data[m] = suffix + from_start[m];
            suffix += from_start[m] + from_start_before[m];
        }
        for (int m = 0; m < rows; ++m) {
            gradient.data[m] += prefix + through;
            prefix += to_end[m];
        }
        add_spans(gradient, pairs, 0);
        if (exclusive) add_spans(gradient, pairs_before, 1);
    }

  private:
    DecayedRows<T> weigh(KeyRows<T> x, const T* decays, T factor) {
        T* const unused = other_factors;
        other_factors = factors;
        factors = unused;
        for (int i = 0; i < rows; ++i) factors[i] = factor * decays[i] * (x.norm != nullptr ? x.norm[i] : T(1));
        return {x.rows, factors, {}, T(1)};
    }
    void add_dots(T* sums, KeyRows<T> x, Tile<T> d_x) const {
        for (int i = 0; i < rows; ++i) sums[i] += row_dot(x.rows, d_x, i, columns) * (x.norm != nullptr ? x.norm[i] : T(1));
    }
    // x[i,j] *= row_norm[i] column_norm[j]; null: 1
    void apply_norms(Tile<T> x, const T* row_norm, const T* column_norm) const {
        if (row_norm != nullptr) scale_rows(x, x, row_norm, T(1), rows, rows);
        if (column_norm != nullptr) scale_columns(x, x, column_norm, rows, rows);
    }
    Tile<T> with_norms(Tile<T> x, const T* row_norm, const T* column_norm) const {
        if (row_norm == nullptr && column_norm == nullptr) return x;
        copy(weighted, x, rows, rows);
        apply_norms(weighted, row_norm, column_norm);
        return weighted;
    }
    template <class Any>
    void add_rows(Tile<T> dst, Tile<T> weights, Right<Any> keys, Packer<Any>& passing) const {
        matmul<Any>(dst.data, dst.row, passing.left(weights, rows, rows), keys, rows, columns, rows, Part::a_lower,
                  {Start<T>::add});
    }
    template <class Any>
    void add_columns(Tile<T> dst, Tile<T> weights, Tile<T> x, Packer<Any>& passing) const {
        passing.reset();
        matmul<Any>(dst.data, dst.row, passing.left_transposed(weights, rows, rows), passing.right(x, rows, columns), rows, columns,
                  rows, Part::a_upper, {Start<T>::add});
    }
    void apply_decay(Tile<T> x, T factor) const { multiply(x, x, decay, factor, rows, rows); }

    // Strictly lower: row i of the (shifted) decays with the diagonal removed.
    void apply_erase_decay(Tile<T> x, bool exclusive) const {
        for (int i = 0; i < rows; ++i) {
            for (int j = 0; j < rows; j += lanes<T>) {
                const reg<T> decays = i > 0 && j < i ? load<T>(erase_decay(i, exclusive) + j) : reg<T>{};
                store<T>(x.at(i) + j, keep_below<T>(load<T>(x.at(i) + j) * decays, j, i));
            }
        }
    }

    // gradient[m] += sum_{j < m <= i - shift} terms[i,j]: column sums from the last row up, then along the row.
    void add_spans(Tile<T> gradient, Tile<T> terms, int shift) {
        T* column_sums = from_start;  // no longer needed
        for (int j = 0; j < rows; ++j) column_sums[j] = 0;
        for (int m = rows - 1; m > 0; --m) {
            const int i = m + shift;
            if (i < rows) {
                for (int j = 0; j < rows; j += lanes<T>) {
                    store<T>(column_sums + j, load<T>(column_sums + j) + load<T>(terms.at(i) + j));
                }
            }
            reg<T> total = {};
            for (int j = 0; j < m; j += lanes<T>) {
                total += keep_below<T>(load<T>(column_sums + j), j, m);
            }
            gradient.data[m] += sum<T>(total);
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
