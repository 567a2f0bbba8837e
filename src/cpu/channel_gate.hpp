// ChannelGate: one decay per token and key channel inside a chunk; the decay sits inside the contraction of the scores.
#pragma once

#include "cpu/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Scores between blocks of 16 rows meet at an anchor, the first row of the later block: both factors decay, so both
// are <= 1, and nothing depends on later gates. Inside a block, keys are decayed token by token. All decays are products
// of e^{g}, never quotients or differences: hard resets and huge gates need no special case.
template <class A>
struct ChannelGate {
    using T = typename A::real;
    static constexpr bool per_channel = true;

    int rows = 0, length = 0, columns = 0;
    Tile<T> decay;            // [C,K] e^{g}
    Tile<T> start, end;       // [C,K] e^{G_i}; e^{G_L - G_i}
    T *high = nullptr, *low = nullptr;  // [K] e^{G_L} and its rounding error
    Tile<T> to_anchor;        // [C,K] e^{G_a - G_j} for the rows before anchor a
    Tile<T> keys, queries, erases;  // [C,K], [16,K], [16,K] decayed to the anchor
    Tile<T> product, decayed; // [C,K] spare
    Tile<T> gradient_start, gradient_end, gradient_inside;  // [C,K] terms from the chunk's start, to its end, inside
    T* through = nullptr;     // [K]

    void carve(Arena& arena, int chunk, int key_columns, bool gradient) {
        columns = key_columns;
        for (Tile<T>* tile : {&decay, &start, &end, &to_anchor, &keys, &product, &decayed}) *tile = arena.tile<T>(chunk, columns);
        for (Tile<T>* tile : {&gradient_start, &gradient_end, &gradient_inside}) {
            if (gradient) *tile = arena.tile<T>(chunk, columns);
        }
        queries = arena.tile<T>(16, key_columns);
        erases = arena.tile<T>(16, key_columns);
        for (T** vector : {&high, &low, &through}) *vector = arena.take<T>(static_cast<std::size_t>(key_columns));
    }

    void prepare(Tile<T> log_decay, int true_rows, int padded_rows) {
        length = true_rows;
        rows = padded_rows;
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> product_so_far = broadcast<T>(1);
            for (int i = 0; i < rows; ++i) {
                const reg<T> g = i < length ? load<T>(log_decay.at(i) + c) : reg<T>{};
                const reg<T> a = exp<T>(g);
                product_so_far *= a;
                store<T>(decay.at(i) + c, a);
                store<T>(start.at(i) + c, product_so_far);
            }
            product_so_far = broadcast<T>(1);
            for (int i = rows - 1; i >= 0; --i) {
                store<T>(end.at(i) + c, product_so_far);
                product_so_far *= load<T>(decay.at(i) + c);
            }
        }
        // in double: roundings of a constant gate would all point one way
        for (int c = 0; c < columns; c += lanes<double>) {
            reg<double> total = {};
            for (int i = 0; i < length; ++i) total += widen(log_decay.at(i) + c);
            store_split(high + c, low + c, exp<double>(total));
        }
    }

    Start<T> decay_state() const { return {Start<T>::decayed, high, low}; }

    // As ScalarGate's, but the decays go into the rows.
    DecayedRows<T> from_chunk_start(KeyRows<T> x, T factor) const { return weigh(x, start, factor); }
    DecayedRows<T> from_chunk_start_before(KeyRows<T> x, T factor) const { return weigh(x, start, factor); }
    DecayedRows<T> to_chunk_end(KeyRows<T> x) const { return weigh(x, end, T(1)); }

    // As ScalarGate::scores.
    void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, Packer<A>& packer) {
        const Tile<T> q = in.q.rows, k = in.k.rows, e = in.e.rows;
        if (P) fill(P, T(0), rows, rows);
        if (l) fill(l, T(0), rows, rows);
        for (int a = 0; a < rows; a += 16) {
            if (a > 0) {
                decay_to_anchor(a, k);
                const Right<A> keys_transposed = packer.right_transposed(keys, a, columns);
                if (P) anchored_scores(P, q, queries, a, in.scale, keys_transposed, packer);
                if (l) anchored_scores(l, e, erases, a, T(1), keys_transposed, packer);
            }
            block_scores(P, l, in, a);
        }
    }

    // As ScalarGate::scores_backward.
    void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T>, Tile<T>,
                         const ScoreRows<T>& in, bool gate_wanted, Packer<A>& packer) {
        const Tile<T> q = in.q.rows, k = in.k.rows, e = in.e.rows;
        keep_lower(d_P, in.scale, 1);
        if (d_l) keep_lower(d_l, T(1), 0);
        for (int a = 0; a < rows; a += 16) {
            if (a > 0) {
                decay_to_anchor(a, k);
                anchored_backward(d_q, d_k, d_e, d_P, d_l, q, e, a, gate_wanted, packer);
            }
            block_backward(d_q, d_k, d_e, d_P, d_l, q, e, k, a, gate_wanted);
        }
    }

    // ---- gradient of the log decays ----
    void start_gradient() {
        for (Tile<T> tile : {gradient_start, gradient_end, gradient_inside}) fill(tile, T(0), rows, columns);
        for (int c = 0; c < columns; ++c) through[c] = 0;
    }
    void add_from_start(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_from_start_before(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_to_end(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_end, x.rows, d_x); }
    void add_through(Tile<T> S, Tile<T> D, int value_columns) {
        for (int c = 0; c < columns; ++c) through[c] += row_dot(S, D, c, value_columns) * high[c];
    }
    void finish_gradient(Tile<T> gradient, bool) {
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> suffix = load<T>(through + c), prefix = {};
            for (int m = rows - 1; m >= 0; --m) {
                suffix += load<T>(gradient_start.at(m) + c);
                store<T>(gradient.at(m) + c, suffix + load<T>(gradient_inside.at(m) + c));
            }
            for (int m = 0; m < rows; ++m) {
                store<T>(gradient.at(m) + c, load<T>(gradient.at(m) + c) + prefix);
                prefix += load<T>(gradient_end.at(m) + c);
            }
        }
    }

  private:
    DecayedRows<T> weigh(KeyRows<T> x, Tile<T> decays, T factor) const {
        multiply(decayed, x.rows, decays, factor, rows, columns);
        return {decayed, nullptr};
    }

    void add_product(Tile<T> dst, Tile<T> a, Tile<T> b) const {
        for_each(dst, rows, columns, [&](int i, int j) {
            return fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), load<T>(dst.at(i) + j));
        });
    }

    void keep_lower(Tile<T> x, T factor, int diagonal) const {
        for_each(x, rows, rows, [&](int i, int j) { return keep_below<T>(load<T>(x.at(i) + j) * factor, j, i + diagonal); });
    }

    // Moves the anchor from a - 16 to a: to_anchor[j] = product of the decays j+1 .. a, keys[j] = k_j to_anchor[j].
    void decay_to_anchor(int a, Tile<T> k) {
        const int previous = a - 16;
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> block = load<T>(decay.at(a) + c);
            for (int j = a - 1; j >= previous; --j) {
                store<T>(to_anchor.at(j) + c, block);
                if (j > previous) block *= load<T>(decay.at(j) + c);
            }
            for (int j = 0; j < previous; ++j) store<T>(to_anchor.at(j) + c, load<T>(to_anchor.at(j) + c) * block);
        }
        multiply(keys, k, to_anchor, T(1), a, columns);
    }

    // dst = x_i e^{G_i - G_a} for the 16 rows from a on.
    void decay_from_anchor(Tile<T> dst, Tile<T> x, int a, T factor) const {
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> since = broadcast<T>(factor);
            for (int i = 0; i < 16; ++i) {
                if (i > 0) since *= load<T>(decay.at(a + i) + c);
                store<T>(dst.at(i) + c, load<T>(x.at(a + i) + c) * since);
            }
        }
    }

    void anchored_scores(Tile<T> dst, Tile<T> x, Tile<T> spare, int a, T factor, Right<A> keys_transposed,
                         Packer<A>& packer) const {
        decay_from_anchor(spare, x, a, factor);
        matmul<A>(dst.at(a), dst.row, packer.left(spare, 16, columns), keys_transposed, 16, a, columns);
    }

    // Scores among the 16 rows from a on: `product` holds k_j decayed to row i, one more gate at each step.
    void block_scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, int a) const {
        if (!l) return block_scores_panels<true, false>(P, l, in, a);
        if (!P) return block_scores_panels<false, true>(P, l, in, a);
        block_scores_panels<true, true>(P, l, in, a);
    }
    template <bool reading, bool erasing>
    void block_scores_panels(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, int a) const {
        int c = 0;
        for (; c + 4 * lanes<T> <= columns; c += 4 * lanes<T>) block_scores_panel<reading, erasing, 4>(P, l, in, a, c);
        for (; c < columns; c += lanes<T>) block_scores_panel<reading, erasing, 1>(P, l, in, a, c);
    }
    // Adds what `width` registers of channels from c on contribute.
    template <bool reading, bool erasing, int width>
    void block_scores_panel(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, int a, int c) const {
        constexpr int n = lanes<T>;
        reg<T> decays[width], query[width], erase[width];
        for (int i = 0; i < 16; ++i) {
            for (int w = 0; w < width; ++w) {
                decays[w] = load<T>(decay.at(a + i) + c + w * n);
                if constexpr (reading) query[w] = load<T>(in.q.rows.at(a + i) + c + w * n);
                if constexpr (erasing) erase[w] = load<T>(in.e.rows.at(a + i) + c + w * n);
            }
            for (int j = 0; j <= i; j += n) {
                reg<T> read[n], error[n];
                for (int lane = 0; lane < n; ++lane) {
                    read[lane] = error[lane] = reg<T>{};
                    if (j + lane > i) continue;
                    const bool own = j + lane == i;
                    T* decayed_key = product.at(j + lane) + c;
                    for (int w = 0; w < width; ++w) {
                        const reg<T> key = own ? load<T>(in.k.rows.at(a + i) + c + w * n) : load<T>(decayed_key + w * n) * decays[w];
                        store<T>(decayed_key + w * n, key);
                        if constexpr (reading) read[lane] = fma(query[w], key, read[lane]);
                        if constexpr (erasing) error[lane] = fma(erase[w], key, error[lane]);
                    }
                }
                if constexpr (reading) add_scores(P.at(a + i) + a + j, sum_each<T>(read), in.scale, j, i + 1);
                if constexpr (erasing) add_scores(l.at(a + i) + a + j, sum_each<T>(error), T(1), j, i);
            }
        }
    }
    static void add_scores(T* row, reg<T> terms, T factor, int first, int limit) {
        store<T>(row, fma(keep_below<T>(terms, first, limit), broadcast<T>(factor), load<T>(row)));
    }

    void anchored_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T> q, Tile<T> e, int a,
                           bool gate_wanted, Packer<A>& packer) {
        const Right<A> keys_right = packer.right(keys, a, columns);
        const Tile<T> d_P_block{d_P.at(a), d_P.row}, d_l_block{d_l ? d_l.at(a) : nullptr, d_l.row};
        // [16,K] gradients of the rows decayed from the anchor, decayed back: what d_q and the gates after a receive
        if (d_q) anchored_rows(d_q, d_P_block, q, a, gate_wanted, keys_right, packer);
        if (d_l && d_e) anchored_rows(d_e, d_l_block, e, a, gate_wanted, keys_right, packer);
        if (!d_k) return;
        decay_from_anchor(queries, q, a, T(1));
        matmul<A>(product.data, product.row, packer.left_transposed(d_P_block, 16, a), packer.right(queries, 16, columns), a,
                  columns, 16);
        if (d_l) {
            decay_from_anchor(erases, e, a, T(1));
            matmul<A>(product.data, product.row, packer.left_transposed(d_l_block, 16, a), packer.right(erases, 16, columns),
                      a, columns, 16, Part::full, {Start<T>::add});
        }
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> prefix = {};
            for (int j = 0; j < a; ++j) {
                const reg<T> d_key = load<T>(product.at(j) + c);
                store<T>(d_k.at(j) + c, fma(d_key, load<T>(to_anchor.at(j) + c), load<T>(d_k.at(j) + c)));
                if (!gate_wanted) continue;
                prefix = fma(d_key, load<T>(keys.at(j) + c), prefix);
                T* next = gradient_inside.at(j + 1) + c;
                store<T>(next, load<T>(next) + prefix);
            }
        }
    }

    void anchored_rows(Tile<T> d_x, Tile<T> d_scores, Tile<T> x, int a, bool gate_wanted, Right<A> keys_right,
                       Packer<A>& packer) {
        matmul<A>(product.data, product.row, packer.left(d_scores, 16, a), keys_right, 16, columns, a);
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> since[16];
            since[0] = broadcast<T>(1);
            for (int i = 1; i < 16; ++i) since[i] = since[i - 1] * load<T>(decay.at(a + i) + c);
            reg<T> suffix = {};
            for (int i = 15; i >= 0; --i) {
                const reg<T> d_row = load<T>(product.at(i) + c) * since[i];
                store<T>(d_x.at(a + i) + c, load<T>(d_x.at(a + i) + c) + d_row);
                if (!gate_wanted || i == 0) continue;
                suffix = fma(d_row, load<T>(x.at(a + i) + c), suffix);
                T* own = gradient_inside.at(a + i) + c;
                store<T>(own, load<T>(own) + suffix);
            }
        }
    }

    // Pairs inside the 16 rows from a on. Forwards: decayed keys give d_q, d_e and, by prefix sums over j, the gates'
    // terms. Backwards: the gradient of the decayed key walks from row 15 to its own row.
    void block_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T> q, Tile<T> e, Tile<T> k,
                        int a, bool gate_wanted) const {
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> key[16];
            for (int i = 0; i < 16; ++i) {
                const T* d_P_row = d_P.at(a + i) + a;
                const T* d_l_row = d_l ? d_l.at(a + i) + a : nullptr;
                const reg<T> query = load<T>(q.at(a + i) + c), own_decay = load<T>(decay.at(a + i) + c);
                const reg<T> erase = d_l ? load<T>(e.at(a + i) + c) : reg<T>{};
                reg<T> d_query = {}, d_erase = {}, prefix = {};
                for (int j = 0; j < i; ++j) {
                    key[j] *= own_decay;
                    d_query = fma(broadcast<T>(d_P_row[j]), key[j], d_query);
                    if (d_l) d_erase = fma(broadcast<T>(d_l_row[j]), key[j], d_erase);
                    if (!gate_wanted) continue;
                    reg<T> d_key = query * d_P_row[j];
                    if (d_l) d_key = fma(broadcast<T>(d_l_row[j]), erase, d_key);
                    prefix = fma(d_key, key[j], prefix);
                    T* next = gradient_inside.at(a + j + 1) + c;
                    store<T>(next, load<T>(next) + prefix);
                }
                key[i] = load<T>(k.at(a + i) + c);
                d_query = fma(broadcast<T>(d_P_row[i]), key[i], d_query);
                if (d_q) store<T>(d_q.at(a + i) + c, load<T>(d_q.at(a + i) + c) + d_query);
                if (d_e && d_l) store<T>(d_e.at(a + i) + c, load<T>(d_e.at(a + i) + c) + d_erase);
            }
            if (!d_k) continue;
            reg<T> d_key[16];
            for (int j = 0; j < 16; ++j) d_key[j] = reg<T>{};
            for (int i = 15; i >= 0; --i) {
                const T* d_P_row = d_P.at(a + i) + a;
                const T* d_l_row = d_l ? d_l.at(a + i) + a : nullptr;
                const reg<T> query = load<T>(q.at(a + i) + c), own_decay = load<T>(decay.at(a + i) + c);
                const reg<T> erase = d_l ? load<T>(e.at(a + i) + c) : reg<T>{};
                d_key[i] = fma(broadcast<T>(d_P_row[i]), query, d_key[i]);
                for (int j = 0; j < i; ++j) {
                    reg<T> sum = fma(broadcast<T>(d_P_row[j]), query, d_key[j]);
                    if (d_l) sum = fma(broadcast<T>(d_l_row[j]), erase, sum);
                    d_key[j] = sum * own_decay;
                }
            }
            for (int j = 0; j < 16; ++j) store<T>(d_k.at(a + j) + c, load<T>(d_k.at(a + j) + c) + d_key[j]);
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
