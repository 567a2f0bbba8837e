// ChannelGate: one decay per token and key channel inside a chunk; the decay sits inside the contraction of the scores.
#pragma once

#include "cpu/packer.hpp"

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
    Tile<T> since, growth;    // [C,K] e^{G_i - G_a}, a the anchor of row i; its reciprocal
    Tile<T> later_reach;      // [C,K] reach() of blocks but the first
    Tile<T> keys, queries;    // [C,K] k_j reach_j; x_i since_i
    Tile<T> pairs;            // [C,C] scores of a block
    Tile<T> gradient_start, gradient_end, gradient_inside;  // [C,K] terms from the chunk's start, to its end, inside
    T* through = nullptr;     // [K]
    int* anchors = nullptr;   // first rows of the blocks, then `rows`
    int blocks = 0;
    int anchored = -1;        // the block that reach and keys belong to

    void carve(Arena& arena, int chunk, int key_columns, bool gradient) {
        columns = key_columns;
        for (Tile<T>* tile : {&decay, &start, &end, &since, &growth, &later_reach, &keys, &queries}) {
            *tile = arena.tile<T>(chunk, columns);
        }
        pairs = arena.tile<T>(chunk, chunk);
        for (Tile<T>* tile : {&gradient_start, &gradient_end, &gradient_inside}) {
            if (gradient) *tile = arena.tile<T>(chunk, columns);
        }
        for (T** vector : {&high, &low, &through}) *vector = arena.take<T>(static_cast<std::size_t>(key_columns));
        anchors = arena.take<int>(static_cast<std::size_t>(chunk) + 1);
    }

    // Without scores only what the state needs.
    void prepare(Tile<T> log_decay, int true_rows, int padded_rows, bool scores) {
        length = true_rows;
        rows = padded_rows;
        blocks = 0;
        anchored = -1;
        for (int i = 0; i < rows; ++i) {
            decay_row(log_decay.at(i), i);
            if (scores) anchor_row(i);
        }
        anchors[blocks] = rows;
        fill(Tile<T>{end.at(rows - 1)}, T(1), 1, columns);
        for (int i = rows - 1; i > 0; --i) {
            multiply(Tile<T>{end.at(i - 1)}, Tile<T>{end.at(i)}, Tile<T>{decay.at(i)}, T(1), 1, columns);
        }
        if constexpr (A::pack == 2) {  // the products round more than these sums
            for (int c = 0; c < columns; c += lanes<T>) {
                reg<T> total = {};
                for (int i = 0; i < length; ++i) total += load<T>(log_decay.at(i) + c);
                store<T>(high + c, exp<T>(total));
            }
            return;
        }
        // in double: roundings of a constant gate would all point one way
        for (int c = 0; c < columns; c += lanes<double>) {
            reg<double> total = {};
            for (int i = 0; i < length; ++i) total += widen(log_decay.at(i) + c);
            store_split(high + c, low + c, exp<double>(total));
        }
    }

    Start<T> decay_state() const { return {Start<T>::decayed, high, low}; }

    // As ScalarGate's, but a decay per element.
    DecayedRows<T> from_chunk_start(KeyRows<T> x, T factor) const { return {x.rows, nullptr, start, factor}; }
    DecayedRows<T> from_chunk_start_before(KeyRows<T> x, T factor) const { return from_chunk_start(x, factor); }
    DecayedRows<T> to_chunk_end(KeyRows<T> x) const { return {x.rows, nullptr, end, T(1)}; }

    // As ScalarGate::scores, by products of Small: in fp32 for the delta rule, whose errors feed back. `rounded`: P in A.
    template <class Small>
    void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, Packer<A>&, Packer<A>& passing, Packer<Small>& small, bool rounded) {
        for (int block = 0; block < blocks; ++block) {
            move_anchor(block, in.k.rows);
            passing.reset();
            small.reset();
            if (l) block_scores(l, in.e.rows, block, T(1), small);
            if (!P) continue;
            rounded ? block_scores(P, in.q.rows, block, in.scale, passing) : block_scores(P, in.q.rows, block, in.scale, small);
        }
        if (P) own_scores(P, in);
    }

    // As ScalarGate::scores_backward.
    void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T>, Tile<T>,
                         const ScoreRows<T>& in, bool gate_wanted, Packer<A>&) {
        for (int block = 0; block < blocks; ++block) {
            move_anchor(block, in.k.rows);
            block_backward({d_P, in.q.rows, in.scale, d_q, d_k, gate_wanted}, block);
            if (d_l) block_backward({d_l, in.e.rows, T(1), d_e, d_k, gate_wanted}, block);
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
    // Begins with the terms from the chunk's start of q, and to its end of k.
    void start_gradient(KeyRows<T> q, Tile<T> d_q, KeyRows<T> k, Tile<T> d_k) {
        multiply(gradient_start, q.rows, d_q, T(1), rows, columns);
        multiply(gradient_end, k.rows, d_k, T(1), rows, columns);
        fill(gradient_inside, T(0), rows, columns);
        for (int c = 0; c < columns; ++c) through[c] = 0;
    }
    void add_from_start(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_from_start_before(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_through(const T* state_dots) {
        for (int c = 0; c < columns; ++c) through[c] += state_dots[c] * high[c];
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
    // Factors of a block lie between least and 1 / least: half of fp32's exponents, so that rows may take the other half.
    static constexpr T least = T(0x1p-64);

    void decay_row(const T* log_decay, int i) {
        for (int c = 0; c < columns; c += lanes<T>) {
            store<T>(decay.at(i) + c, i < length ? exp<T>(load<T>(log_decay + c)) : broadcast<T>(1));
        }
    }
    // The products of decays up to row i; begins a block where one leaves its range.
    void anchor_row(int i) {
        const int previous = i > 0 ? i - 1 : 0;
        const T* const a_row = decay.at(i);
        T *const start_row = start.at(i), *const since_row = since.at(i), *const growth_row = growth.at(i);
        const T *const start_before = start.at(previous), *const since_before = since.at(previous);
        const reg<T> one = broadcast<T>(1);
        typename vec<T>::integer outside = {};
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> a = load<T>(a_row + c);
            const reg<T> decays = i > 0 ? load<T>(since_before + c) * a : one;
            outside |= (decays < broadcast<T>(least)) | (decays > broadcast<T>(T(1) / least));
            store<T>(start_row + c, i > 0 ? load<T>(start_before + c) * a : a);
            store<T>(since_row + c, decays);
            store<T>(growth_row + c, one / decays);
        }
        if (i > 0 && !any<T>(outside)) return;
        anchors[blocks++] = i;
        fill(Tile<T>{since_row}, T(1), 1, columns);
        fill(Tile<T>{growth_row}, T(1), 1, columns);
    }

    // dst += a * b
    void add_product(Tile<T> dst, Tile<T> a, Tile<T> b) const {
        for_each(dst, rows, columns, [&](int i, int j) {
            return fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), load<T>(dst.at(i) + j));
        });
    }

    // [C,K] e^{G_a - G_j}, a the anchor moved to, rows up to the end of its block
    Tile<T> reach() const { return anchored == 0 ? growth : later_reach; }

    // Makes reach and keys those of a block, coming from the one before; keys behind it become zero.
    void move_anchor(int block, Tile<T> k) {
        if (anchored == block) return;
        const int first = anchors[block], last = anchors[block + 1];
        const Tile<T> before = reach();
        anchored = block;
        for (int c = 0; c < columns && first > 0; c += lanes<T>) {
            const reg<T> step = load<T>(since.at(first - 1) + c) * load<T>(decay.at(first) + c);
            for (int j = 0; j < first; ++j) store<T>(later_reach.at(j) + c, load<T>(before.at(j) + c) * step);
            for (int j = first; j < last; ++j) store<T>(later_reach.at(j) + c, load<T>(growth.at(j) + c));
        }
        multiply(keys, k, reach(), T(1), last, columns);
        fill(Tile<T>{keys.at(last), keys.row}, T(0), round_up(last, 16) - last, columns);
    }

    // dst[i,j] = factor x_i.k_j e^{G_i - G_j} for the rows i of a block and j < i, else 0. Neighbouring rows fill the last
    // register tile and are dropped.
    template <class Any>
    void block_scores(Tile<T> dst, Tile<T> x, int block, T factor, Packer<Any>& packer) {
        const int first = anchors[block], last = anchors[block + 1];
        const int padded = round_up(last - first, first == 0 ? 16 : row_block);
        const int from = first < rows - padded ? first : rows - padded;
        const Right<Any> keys_transposed = packer.right_transposed_once(keys, round_up(last, 16), columns);
        const Left<Any> left = packer.left({x.at(from), x.row}, {since.at(from), since.row}, factor, queries, padded, columns);
        matmul<Any>(pairs.data, pairs.row, left, keys_transposed, padded, round_up(last, 16), columns,
                    first == 0 ? Part::dst_lower : Part::full);
        for (int i = first; i < last; ++i) {
            for (int j = 0; j < rows; j += lanes<T>) {
                const reg<T> row = j < last ? load<T>(pairs.at(i - from) + j) : reg<T>{};
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

    static constexpr int panel = 2, together = 4;  // registers of channels and rows that a pass over pairs takes

    struct PairGradients {
        Tile<T> d_scores, x;  // [C,C] of which only j < i is read, [C,K]
        T factor;             // of the scores
        Tile<T> d_x, d_k;     // [C,K] are added to, or empty
        bool gate_wanted;
    };

    // The pairs j < i of the rows i of a block: those with keys before it, then those inside by halves, so that every gate
    // receives sums of the pairs that span it, and never a difference of sums. A panel of channels at a time stays in L1.
    void block_backward(const PairGradients& to, int block) {
        const int first = anchors[block], last = anchors[block + 1];
        multiply({queries.at(first), queries.row}, {to.x.at(first), to.x.row}, {since.at(first), since.row}, to.factor,
                 last - first, columns);
        int c = 0;
        for (; c + panel * lanes<T> <= columns; c += panel * lanes<T>) panel_backward<panel>(to, first, last, c);
        for (; c < columns; c += lanes<T>) panel_backward<1>(to, first, last, c);
    }
    template <int width>
    void panel_backward(const PairGradients& to, int first, int last, int c) {
        if (first > 0) pairs_across<together, width>(to, 0, first, last, c);
        halves_backward<width>(to, first, last, c);
    }
    template <int width>
    void halves_backward(const PairGradients& to, int first, int last, int c) {
        switch (last - first) {
            case 0: case 1: return;
            case 8: return even_halves<4, width>(to, first, c);
            case 16: return even_halves<8, width>(to, first, c);
            case 32: return even_halves<16, width>(to, first, c);
        }
        const int middle = (first + last) / 2;
        pairs_across<together, width>(to, first, middle, last, c);
        halves_backward<width>(to, first, middle, c);
        halves_backward<width>(to, middle, last, c);
    }
    // Loops of sizes that the compiler knows: those of small halves would end in a mispredicted branch each.
    template <int half, int width>
    void even_halves(const PairGradients& to, int first, int c) {
        pairs_across<(half < together ? half : together), width>(to, first, first + half, first + 2 * half, c);
        if constexpr (half > 1) {
            even_halves<half / 2, width>(to, first, c);
            even_halves<half / 2, width>(to, first + half, c);
        }
    }
    // Rows middle <= i < last, keys first <= j < middle, registers [c, c + width lanes).
    template <int count, int width>
    [[gnu::always_inline]] inline void pairs_across(const PairGradients& to, int first, int middle, int last, int c) const {
        reg<T> suffix[width], prefix[width];
        for (int w = 0; w < width; ++w) suffix[w] = prefix[w] = reg<T>{};
        int i = last;
        for (; i - count >= middle; i -= count) rows_across<count, width>(to, first, middle, i - count, c, suffix);
        for (; i > middle; --i) rows_across<1, width>(to, first, middle, i - 1, c, suffix);
        int j = first;
        for (; j + count <= middle; j += count) keys_across<count, width>(to, j, middle, last, c, prefix);
        for (; j < middle; ++j) keys_across<1, width>(to, j, middle, last, c, prefix);
    }
    // sums[r][w] = sum_k scores[r * row + k * step] x[k, c + w lanes]
    template <int count, int width>
    [[gnu::always_inline]] static inline void weighted_sums(reg<T> (&sums)[count][width], const T* scores, long row, long step,
                                                            const T* x, long x_row, int terms) {
        for (int r = 0; r < count; ++r) {
            for (int w = 0; w < width; ++w) sums[r][w] = reg<T>{};
        }
        for (int k = 0; k < terms; ++k) {
            for (int r = 0; r < count; ++r) {
                const reg<T> score = broadcast<T>(scores[r * row + k * step]);
                for (int w = 0; w < width; ++w) sums[r][w] = fma(score, load<T>(x + k * x_row + w * lanes<T>), sums[r][w]);
            }
        }
    }
    // `count` rows from i on, the last first.
    template <int count, int width>
    [[gnu::always_inline]] inline void rows_across(const PairGradients& to, int first, int middle, int i, int c,
                                                   reg<T> (&suffix)[width]) const {
        reg<T> d_rows[count][width];
        weighted_sums<count, width>(d_rows, to.d_scores.at(i) + first, to.d_scores.row, 1, keys.at(first) + c, keys.row, middle - first);
        const Tile<T> d_x = to.d_x, x = queries, decays = since, inside = gradient_inside;
        const T factor = to.factor;
        const bool gate_wanted = to.gate_wanted;
        for (int r = count - 1; r >= 0; --r) {
            for (int w = 0; w < width; ++w) {
                const int column = c + w * lanes<T>;
                if (d_x) add_to(d_x.at(i + r) + column, d_rows[r][w] * (load<T>(decays.at(i + r) + column) * factor));
                if (!gate_wanted || i + r == middle) continue;
                suffix[w] = fma(d_rows[r][w], load<T>(x.at(i + r) + column), suffix[w]);
                add_to(inside.at(i + r) + column, suffix[w]);
            }
        }
    }
    template <int count, int width>
    [[gnu::always_inline]] inline void keys_across(const PairGradients& to, int j, int middle, int last, int c,
                                                   reg<T> (&prefix)[width]) const {
        reg<T> d_keys[count][width];
        weighted_sums<count, width>(d_keys, to.d_scores.at(middle) + j, 1, to.d_scores.row, queries.at(middle) + c, queries.row, last - middle);
        const Tile<T> d_k = to.d_k, k = keys, decays = reach(), inside = gradient_inside;
        const bool gate_wanted = to.gate_wanted;
        for (int r = 0; r < count; ++r) {
            for (int w = 0; w < width; ++w) {
                const int column = c + w * lanes<T>;
                if (d_k) add_to(d_k.at(j + r) + column, d_keys[r][w] * load<T>(decays.at(j + r) + column));
                if (!gate_wanted) continue;
                prefix[w] = fma(d_keys[r][w], load<T>(k.at(j + r) + column), prefix[w]);
                add_to(inside.at(j + r + 1) + column, prefix[w]);
            }
        }
    }
    static void add_to(T* place, reg<T> term) { store<T>(place, load<T>(place) + term); }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
