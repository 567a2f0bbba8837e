// ChannelPairs: what the scores of pairs of tokens give to the gradients of queries, keys and a channel gate.
#pragma once

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// scores_ij = sum_c x_ic keys_jc, decayed to and from an anchor: x = factor x' since.
template <class T>
struct ScoresGradient {
    Tile<T> d_scores;  // [C,C] of which only j < i is read
    Tile<T> x;         // [C,K]
    T factor;
    Tile<T> d_x;       // [C,K] gradient of x', is added to; or empty
};

// Of one or two kinds of scores with the same keys, k reach.
template <class T, int kinds>
struct ChannelPairs {
    ScoresGradient<T> of[kinds];
    Tile<T> k, since, reach;  // [C,K]
    Tile<T> d_k;              // [C,K] is added to; or empty
    Tile<T> inside;           // [C,K] by gate: of the pairs that span it, is added to; or empty
    T* keys;                  // [C * keys_row] spare
    static constexpr int panel = 2, keys_row = panel * lanes<T>;  // registers and channels of a pass over pairs

    // Of the pairs j < i, first <= i < last: those with keys before `first`, then those inside by halves, so that every
    // gate receives sums of the pairs that span it, and never a difference of sums. A panel of channels at a time stays
    // in L1.
    void add_gradients(int first, int last, int columns) const {
        int c = 0;
        for (; c + panel * lanes<T> <= columns; c += panel * lanes<T>) add_panel<panel>(first, last, c);
        for (; c < columns; c += lanes<T>) add_panel<1>(first, last, c);
    }

  private:
    static constexpr int together = 4;  // rows of a pass

    const T* keys_at(int j, int w) const { return keys + j * keys_row + w * lanes<T>; }

    template <int width>
    void add_panel(int first, int last, int c) const {
        for (int j = 0; j < last; ++j) {
            for (int w = 0; w < width; ++w) {
                const int column = c + w * lanes<T>;
                store<T>(keys + j * keys_row + w * lanes<T>, load<T>(k.at(j) + column) * load<T>(reach.at(j) + column));
            }
        }
        if (first > 0) add_across<together, width>(0, first, last, c);
        add_halves<width>(first, last, c);
    }
    template <int width>
    void add_halves(int first, int last, int c) const {
        switch (last - first) {
            case 0: case 1: return;
            case 8: return add_even_halves<4, width>(first, c);
            case 16: return add_even_halves<8, width>(first, c);
            case 32: return add_even_halves<16, width>(first, c);
        }
        const int middle = (first + last) / 2;
        add_across<together, width>(first, middle, last, c);
        add_halves<width>(first, middle, c);
        add_halves<width>(middle, last, c);
    }
    // Loops of sizes that the compiler knows: those of small halves would end in a mispredicted branch each.
    template <int half, int width>
    void add_even_halves(int first, int c) const {
        if constexpr (2 * half == leaf) {
            for (int w = 0; w < width; ++w) add_leaf(first, c + w * lanes<T>, w);
        } else {
            add_across<together, width>(first, first + half, first + 2 * half, c);
            add_even_halves<half / 2, width>(first, c);
            add_even_halves<half / 2, width>(first + half, c);
        }
    }
    // The same for as few rows as keep all their sums in registers.
    static constexpr int leaf = row_block;
    struct LeafSums {
        reg<T> d_rows[leaf], d_keys[leaf], inside[leaf];
    };
    void add_leaf(int first, int column, int w) const {
        LeafSums sums;
        unroll<leaf, 1>([&](auto i, auto) __attribute__((always_inline)) { sums.d_keys[i] = sums.inside[i] = reg<T>{}; });
        for (const ScoresGradient<T>& one : of) {
            unroll<leaf, 1>([&](auto i, auto) __attribute__((always_inline)) { sums.d_rows[i] = reg<T>{}; });
            leaf_halves<0, leaf>(sums, {one.d_scores.at(first) + first, one.d_scores.row}, {one.x.at(first) + column, one.x.row},
                                 keys_at(first, w));
            if (!one.d_x) continue;
            unroll<leaf, 1>([&](auto i, auto) __attribute__((always_inline)) {
                const int row = first + i;
                add_to(one.d_x.at(row) + column, sums.d_rows[i] * (load<T>(since.at(row) + column) * one.factor));
            });
        }
        unroll<leaf, 1>([&](auto i, auto) __attribute__((always_inline)) {
            const int row = first + i;
            if (d_k) add_to(d_k.at(row) + column, sums.d_keys[i] * load<T>(reach.at(row) + column));
            if (inside) add_to(inside.at(row) + column, sums.inside[i]);
        });
    }
    template <int begin, int count>
    [[gnu::always_inline]] static inline void leaf_halves(LeafSums& sums, Tile<T> scores, Tile<T> x, const T* k) {
        if constexpr (count > 1) {
            constexpr int half = count / 2, middle = begin + half;
            reg<T> d_keys[half], suffix = {}, prefix = {};
            unroll<half, 1>([&](auto j, auto) __attribute__((always_inline)) { d_keys[j] = reg<T>{}; });
            unroll<half, 1>([&](auto back, auto) __attribute__((always_inline)) {
                constexpr int i = begin + count - 1 - back;
                const reg<T> x_i = load<T>(x.at(i));
                reg<T> d_row = {};
                unroll<half, 1>([&](auto j, auto) __attribute__((always_inline)) {
                    const reg<T> score = broadcast<T>(scores.at(i)[begin + j]);
                    d_row = fma(score, load<T>(k + (begin + j) * keys_row), d_row);
                    d_keys[j] = fma(score, x_i, d_keys[j]);
                });
                sums.d_rows[i] += d_row;
                if constexpr (i == middle) return;
                suffix = fma(d_row, x_i, suffix);
                sums.inside[i] += suffix;
            });
            unroll<half, 1>([&](auto j, auto) __attribute__((always_inline)) {
                sums.d_keys[begin + j] += d_keys[j];
                prefix = fma(d_keys[j], load<T>(k + (begin + j) * keys_row), prefix);
                sums.inside[begin + j + 1] += prefix;
            });
            leaf_halves<begin, half>(sums, scores, x, k);
            leaf_halves<middle, half>(sums, scores, x, k);
        }
    }
    // Rows middle <= i < last, keys first <= j < middle, registers [c, c + width lanes).
    template <int count, int width>
    [[gnu::always_inline]] inline void add_across(int first, int middle, int last, int c) const {
        reg<T> suffix[width], prefix[width];
        unroll<1, width>([&](auto, auto w) __attribute__((always_inline)) { suffix[w] = prefix[w] = reg<T>{}; });
        int i = last;
        for (; i - count >= middle; i -= count) rows_across<count, width>(first, middle, i - count, c, suffix);
        for (; i > middle; --i) rows_across<1, width>(first, middle, i - 1, c, suffix);
        int j = first;
        for (; j + count <= middle; j += count) keys_across<count, width>(j, middle, last, c, prefix);
        for (; j < middle; ++j) keys_across<1, width>(j, middle, last, c, prefix);
    }
    // sums[r][w] += sum_i scores[r * row + i * step] x[i, w lanes]
    template <int count, int width>
    [[gnu::always_inline]] static inline void add_weighted(reg<T> (&sums)[count][width], const T* scores, long row, long step,
                                                           const T* x, long x_row, int rows) {
        for (int i = 0; i < rows; ++i) {
            unroll<count, width>([&](auto r, auto w) __attribute__((always_inline)) {
                sums[r][w] = fma(broadcast<T>(scores[r * row + i * step]), load<T>(x + i * x_row + w * lanes<T>), sums[r][w]);
            });
        }
    }
    // `count` rows from i on, the last first.
    template <int count, int width>
    [[gnu::always_inline]] inline void rows_across(int first, int middle, int i, int c, reg<T> (&suffix)[width]) const {
        reg<T> d_rows[kinds][count][width];
        unroll<kinds, 1>([&](auto kind, auto) __attribute__((always_inline)) {
            const Tile<T> d_scores = of[kind].d_scores;
            unroll<count, width>([&](auto r, auto w) __attribute__((always_inline)) { d_rows[kind][r][w] = reg<T>{}; });
            add_weighted<count, width>(d_rows[kind], d_scores.at(i) + first, d_scores.row, 1, keys_at(first, 0), keys_row, middle - first);
        });
        unroll<count, width>([&](auto before, auto w) __attribute__((always_inline)) {
            constexpr int r = count - 1 - before;
            const int column = c + w * lanes<T>;
            const reg<T> decay = load<T>(since.at(i + r) + column);
            unroll<kinds, 1>([&](auto kind, auto) __attribute__((always_inline)) {
                const ScoresGradient<T>& one = of[kind];
                if (one.d_x) add_to(one.d_x.at(i + r) + column, d_rows[kind][r][w] * (decay * one.factor));
                suffix[w] = fma(d_rows[kind][r][w], load<T>(one.x.at(i + r) + column), suffix[w]);
            });
            if (inside && i + r > middle) add_to(inside.at(i + r) + column, suffix[w]);
        });
    }
    template <int count, int width>
    [[gnu::always_inline]] inline void keys_across(int j, int middle, int last, int c, reg<T> (&prefix)[width]) const {
        reg<T> d_keys[count][width];
        unroll<count, width>([&](auto r, auto w) __attribute__((always_inline)) { d_keys[r][w] = reg<T>{}; });
        for (const auto& [d_scores, x, factor, d_x] : of) {
            add_weighted<count, width>(d_keys, d_scores.at(middle) + j, 1, d_scores.row, x.at(middle) + c, x.row, last - middle);
        }
        unroll<count, width>([&](auto r, auto w) __attribute__((always_inline)) {
            const int column = c + w * lanes<T>;
            if (d_k) add_to(d_k.at(j + r) + column, d_keys[r][w] * load<T>(reach.at(j + r) + column));
            if (!inside) return;
            prefix[w] = fma(d_keys[r][w], load<T>(keys_at(j + r, w)), prefix[w]);
            add_to(inside.at(j + r + 1) + column, prefix[w]);
        });
    }
    static void add_to(T* place, reg<T> term) { store<T>(place, load<T>(place) + term); }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
