// ChannelGate: one decay per token and key channel inside a chunk; the decay sits inside the contraction of the scores.
#pragma once

#include "cpu/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Scores meet at an anchor a: P_ij = sum_c (q_ic e^{G_i - G_a}) (k_jc e^{G_a - G_j}), one product of matrices for all rows i
// from a on, as long as the factors stay within range; the next row begins a block with an anchor of its own. So anchors
// depend on the gates up to their row and on none behind it, no exponential has a positive argument, and hard resets and
// huge gates need no special case: they begin a block.
template <class A>
struct ChannelGate {
    using T = typename A::real;
    static constexpr bool per_channel = true;

    int rows = 0, length = 0, columns = 0;
    Tile<T> decay;            // [C,K] e^{g}
    Tile<T> start, end;       // [C,K] e^{G_i}; e^{G_L - G_i}
    T *high = nullptr, *low = nullptr;  // [K] e^{G_L} and its rounding error
    Tile<T> since, growth;    // [C,K] lift e^{G_i - G_a}, a the anchor of row i; its reciprocal
    Tile<T> later_reach;      // [C,K] reach() of blocks but the first
    Tile<T> keys, queries;    // [C,K] k_j reach_j; x_i since_i
    Tile<T> pairs;            // [C,C] scores of a block or their gradient
    Tile<T> decayed, d_keys;  // [C,K] spare
    Tile<T> gradient_start, gradient_end, gradient_inside;  // [C,K] terms from the chunk's start, to its end, inside
    Tile<T> row_terms;        // [C,K] x_i d_x_i of the rows of a block
    T* through = nullptr;     // [K]
    int* anchors = nullptr;   // first rows of the blocks, then `rows`
    int blocks = 0;
    int anchored = -1;        // the block that reach and keys belong to

    void carve(Arena& arena, int chunk, int key_columns, bool gradient) {
        columns = key_columns;
        for (Tile<T>* tile : {&decay, &start, &end, &since, &growth, &later_reach, &keys, &queries, &decayed, &d_keys}) {
            *tile = arena.tile<T>(chunk, columns);
        }
        pairs = arena.tile<T>(chunk, chunk);
        for (Tile<T>* tile : {&gradient_start, &gradient_end, &gradient_inside, &row_terms}) {
            if (gradient) *tile = arena.tile<T>(chunk, columns);
        }
        for (T** vector : {&high, &low, &through}) *vector = arena.take<T>(static_cast<std::size_t>(key_columns));
        anchors = arena.take<int>(static_cast<std::size_t>(chunk) + 1);
    }

    void prepare(Tile<T> log_decay, int true_rows, int padded_rows) {
        length = true_rows;
        rows = padded_rows;
        blocks = 0;
        anchored = -1;
        for (int i = 0; i < rows; ++i) decay_row(log_decay.at(i), i);
        anchors[blocks] = rows;
        fill(Tile<T>{end.at(rows - 1)}, T(1), 1, columns);
        for (int i = rows - 1; i > 0; --i) {
            multiply(Tile<T>{end.at(i - 1)}, Tile<T>{end.at(i)}, Tile<T>{decay.at(i)}, T(1), 1, columns);
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
        for (int block = 0; block < blocks; ++block) {
            const std::size_t mark = packer.used;
            move_anchor(block, in.k.rows);
            const Right<A> keys_transposed = packer.right_transposed(keys, round_up(anchors[block + 1], 16), columns);
            if (P) block_scores(P, in.q.rows, block, in.scale, keys_transposed, packer);
            if (l) block_scores(l, in.e.rows, block, T(1), keys_transposed, packer);
            packer.used = mark;
        }
        if (P) own_scores(P, in);
    }

    // As ScalarGate::scores_backward.
    void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T>, Tile<T>,
                         const ScoreRows<T>& in, bool gate_wanted, Packer<A>&) {
        for (int block = 0; block < blocks; ++block) {
            const int first = anchors[block], last = anchors[block + 1];
            move_anchor(block, in.k.rows);
            if (gate_wanted) fill(row_terms, T(0), last - first, columns);
            if (d_k) fill(d_keys, T(0), round_up(last, row_block), columns);
            block_backward(d_q, d_k, d_P, in.q.rows, block, in.scale, gate_wanted);
            if (d_l) block_backward(d_e, d_k, d_l, in.e.rows, block, T(1), gate_wanted);
            if (d_k) add_product(d_k, d_keys, reach(), last);
            if (gate_wanted) add_inside(first, last);
        }
        // a token's own pair spans no gate
        for (int i = 0; i < rows; ++i) {
            const reg<T> d_own = broadcast<T>(d_P.at(i)[i] * in.scale);
            for (int c = 0; c < columns; c += lanes<T>) {
                if (d_q) store<T>(d_q.at(i) + c, fma(d_own, load<T>(in.k.rows.at(i) + c), load<T>(d_q.at(i) + c)));
                if (d_k) store<T>(d_k.at(i) + c, fma(d_own, load<T>(in.q.rows.at(i) + c), load<T>(d_k.at(i) + c)));
            }
        }
    }

    // ---- gradient of the log decays ----
    void start_gradient() {
        for (Tile<T> tile : {gradient_start, gradient_end, gradient_inside}) fill(tile, T(0), rows, columns);
        for (int c = 0; c < columns; ++c) through[c] = 0;
    }
    void add_from_start(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x, rows); }
    void add_from_start_before(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x, rows); }
    void add_to_end(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_end, x.rows, d_x, rows); }
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
    // Factors of a block lie between 1 / lift and lift: far enough inside fp32's range for any rows.
    static constexpr T lift = T(0x1p50);
    using Unrounded = std::conditional_t<sizeof(T) == 8, F64, F32>;

    // e^{g} and the products of decays up to row i; begins a block where one leaves its range.
    void decay_row(const T* log_decay, int i) {
        const int previous = i > 0 ? i - 1 : 0;
        T *const a_row = decay.at(i), *const start_row = start.at(i), *const since_row = since.at(i), *const growth_row = growth.at(i);
        const T *const start_before = start.at(previous), *const since_before = since.at(previous);
        const reg<T> one = broadcast<T>(1);
        typename vec<T>::integer outside = {};
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> a = i < length ? exp<T>(load<T>(log_decay + c)) : one;
            const reg<T> decays = i > 0 ? load<T>(since_before + c) * a : one;
            outside |= (decays < broadcast<T>(T(1) / lift)) | (decays > broadcast<T>(lift));
            store<T>(a_row + c, a);
            store<T>(start_row + c, i > 0 ? load<T>(start_before + c) * a : a);
            store<T>(since_row + c, decays);
            store<T>(growth_row + c, one / decays);
        }
        if (i > 0 && !any<T>(outside)) return;
        anchors[blocks++] = i;
        fill(Tile<T>{since_row}, lift, 1, columns);
        fill(Tile<T>{growth_row}, T(1) / lift, 1, columns);
    }

    DecayedRows<T> weigh(KeyRows<T> x, Tile<T> decays, T factor) const {
        multiply(decayed, x.rows, decays, factor, rows, columns);
        return {decayed, nullptr};
    }

    // dst += a * b
    void add_product(Tile<T> dst, Tile<T> a, Tile<T> b, int count) const {
        for_each(dst, count, columns, [&](int i, int j) {
            return fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), load<T>(dst.at(i) + j));
        });
    }

    // [C,K] e^{G_a - G_j} / lift, a the anchor moved to, rows up to the end of its block
    Tile<T> reach() const { return anchored == 0 ? growth : later_reach; }

    // Makes reach and keys those of a block, coming from the one before; keys behind it become zero.
    void move_anchor(int block, Tile<T> k) {
        if (anchored == block) return;
        const int first = anchors[block], last = anchors[block + 1];
        const Tile<T> before = reach();
        anchored = block;
        for (int c = 0; c < columns && first > 0; c += lanes<T>) {
            const reg<T> step = load<T>(since.at(first - 1) + c) * load<T>(decay.at(first) + c) * broadcast<T>(T(1) / lift);
            for (int j = 0; j < first; ++j) store<T>(later_reach.at(j) + c, load<T>(before.at(j) + c) * step);
            for (int j = first; j < last; ++j) store<T>(later_reach.at(j) + c, load<T>(growth.at(j) + c));
        }
        multiply(keys, k, reach(), T(1), last, columns);
        fill(Tile<T>{keys.at(last), keys.row}, T(0), round_up(last, 16) - last, columns);
    }

    // queries = factor x_i since_i for the rows of a block, then zeros.
    int decay_from_anchor(Tile<T> x, int block, T factor) {
        const int first = anchors[block], count = anchors[block + 1] - first, padded = round_up(count, row_block);
        multiply(queries, {x.at(first), x.row}, {since.at(first), since.row}, factor, count, columns);
        fill(Tile<T>{queries.at(count), queries.row}, T(0), padded - count, columns);
        return padded;
    }

    // dst[i,j] = factor x_i.k_j e^{G_i - G_j} for the rows i of a block and j < i, else 0.
    void block_scores(Tile<T> dst, Tile<T> x, int block, T factor, Right<A> keys_transposed, Packer<A>& packer) {
        const int first = anchors[block], last = anchors[block + 1], padded = decay_from_anchor(x, block, factor);
        matmul<A>(pairs.data, pairs.row, packer.left(queries, padded, columns), keys_transposed, padded, round_up(last, 16),
                  columns, first == 0 ? Part::dst_lower : Part::full);
        for (int i = first; i < last; ++i) {
            for (int j = 0; j < rows; j += lanes<T>) {
                const reg<T> row = j < last ? load<T>(pairs.at(i - first) + j) : reg<T>{};
                store<T>(dst.at(i) + j, keep_below<T>(row, j, i));
            }
        }
    }

    // A token's own pair decays by nothing; it stays in fp32 also for bf16.
    void own_scores(Tile<T> P, const ScoreRows<T>& in) const {
        constexpr int n = lanes<T>;
        for (int i = 0; i < rows; i += n) {
            reg<T> dots[n];
            for (int lane = 0; lane < n; ++lane) {
                const T *q = in.q.rows.at(i + lane), *k = in.k.rows.at(i + lane);
                dots[lane] = load<T>(q) * load<T>(k);
                for (int c = n; c < columns; c += n) dots[lane] = fma(load<T>(q + c), load<T>(k + c), dots[lane]);
            }
            const reg<T> own = sum_each<T>(dots) * in.scale;
            for (int lane = 0; lane < n; ++lane) P.at(i + lane)[i + lane] = own[lane];
        }
    }

    // Pairs j < i of the rows i of a block: adds to d_x, to d_keys and to the gates' terms, in fp32 also for bf16: the gates
    // between i and j receive differences of these sums.
    void block_backward(Tile<T> d_x, Tile<T> d_k, Tile<T> d_scores, Tile<T> x, int block, T factor, bool gate_wanted) {
        const int first = anchors[block], last = anchors[block + 1], inner = round_up(last, 16);
        const int padded = decay_from_anchor(x, block, T(1));
        for_each(pairs, padded, inner, [&](int i, int j) {
            return i + first < last ? keep_below<T>(load<T>(d_scores.at(i + first) + j) * factor, j, i + first) : reg<T>{};
        });
        Packer<Unrounded> direct;
        if (d_k) {
            matmul<Unrounded>(d_keys.data, d_keys.row, direct.left_transposed(pairs, padded, inner),
                              direct.right(queries, padded, columns), round_up(last, row_block), columns, padded, Part::full,
                              {Start<T>::add});
        }
        if (!d_x) return;
        matmul<Unrounded>(decayed.data, decayed.row, direct.left(pairs, padded, inner), direct.right(keys, inner, columns),
                          padded, columns, last);
        for (int i = first; i < last; ++i) {
            for (int c = 0; c < columns; c += lanes<T>) {
                const reg<T> d_row = load<T>(decayed.at(i - first) + c) * load<T>(since.at(i) + c);
                store<T>(d_x.at(i) + c, load<T>(d_x.at(i) + c) + d_row);
                if (!gate_wanted) continue;
                T* terms = row_terms.at(i - first) + c;
                store<T>(terms, fma(d_row, load<T>(x.at(i) + c), load<T>(terms)));
            }
        }
    }

    // Gate m receives the pairs j < m <= i: those that end in the block, without those that lie behind m.
    void add_inside(int first, int last) {
        for (int c = 0; c < columns; c += lanes<T>) {
            const auto key_terms = [&](int j) { return load<T>(d_keys.at(j) + c) * load<T>(keys.at(j) + c); };
            reg<T> prefix = {}, suffix = {};
            for (int m = 1; m <= first; ++m) {
                prefix += key_terms(m - 1);
                T* gradient = gradient_inside.at(m) + c;
                store<T>(gradient, load<T>(gradient) + prefix);
            }
            for (int m = last - 1; m > first; --m) {
                suffix += load<T>(row_terms.at(m - first) + c) - key_terms(m);
                T* gradient = gradient_inside.at(m) + c;
                store<T>(gradient, load<T>(gradient) + suffix);
            }
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
