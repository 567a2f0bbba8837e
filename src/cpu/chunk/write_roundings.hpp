// WriteRoundings: whether what is left of a state is small against what bf16 rounds of a chunk's writes into it.
#pragma once

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// What a chunk writes of a token, later tokens of the same chunk erase again where their keys overlap, but not what
// bf16 rounds of it: a sum of many writes has the roundings of each. Energies (squares of norms) of the roundings, in
// units of one, and of what is left, of a few columns j of S = decayed S + x^T b:
//     sum_ij |x_i|^2 b_ij^2     and     sum_cj S_cj^2
// times the operands that are rounded: b, and under channel gates x.
template <class T>
struct WriteRoundings {
    // Columns that are judged together: whatever part of a state a walk has, it has these in one piece.
    static constexpr int block = 16;
    // With random keys the quotients are 0.5 to 3. Errors are their roots times 1.6e-3, one rounding's in
    // root-mean-square: at this limit 0.7 of the bar.
    static constexpr T most = T(3);
    // Under channel gates, of chunks of fewer tokens: several share what is left of a state, and each rounds.
    static constexpr T most_of_few = T(1.5);

    T limit = most;                         // of the chunk weighed last
    T* energies = nullptr;                  // [C] of rows
    T *written = nullptr, *left = nullptr;  // [V] sums of columns

    void carve(Arena& arena, int chunk, int value_columns) {
        energies = arena.take<T>(static_cast<std::size_t>(chunk));
        for (T** vector : {&written, &left}) *vector = arena.take<T>(static_cast<std::size_t>(value_columns));
    }

    // Of x = k decayed [rows,K] and b [rows,V], to be multiplied by x.factor, and S [K,V]: whether there are columns
    // that exceed(). of_keys: |x.rows_i|^2, before gates.
    bool weigh(DecayedRows<T> x, Tile<T> b, const T* of_keys, Tile<T> S, int rows, int K, int V) {
        weigh_rows(x, of_keys, rows, K);
        limit = x.weights && rows < 64 ? most_of_few : most;
        for (int j = 0; j < V; j += lanes<T>) {
            store<T>(written + j, reg<T>{});
            store<T>(left + j, reg<T>{});
        }
        add_columns(written, b, rows, V, [this](int i) { return broadcast<T>(energies[i]); });
        constexpr int step = 32;  // rows of a state: the first ones mostly tell
        for (int c = 0; c < K; c += step) {
            add_columns(left, S.from(c, 0), K - c < step ? K - c : step, V, [](int) { return broadcast<T>(1); });
            bool any = false;
            for (int j = 0; j < V; j += block) any |= exceed(j);
            if (!any) return false;
        }
        return true;
    }
    bool exceed(int column) const { return sum_of(written + column, block) > limit * sum_of(left + column, block); }

  private:
    void weigh_rows(DecayedRows<T> x, const T* of_keys, int rows, int K) {
        if (!x.weights) {
            for (int i = 0; i < rows; ++i) energies[i] = of_keys[i] * x.factor[i] * x.factor[i];
            return;
        }
        row_sums(energies, rows, K, [&](reg<T> sum, int i, int c) {
            const reg<T> element = load<T>(x.rows.at(i) + c) * load<T>(x.weights.at(i) + c);
            return fma(element, element, sum);
        });
        for (int i = 0; i < rows; ++i) energies[i] *= 2 * x.scale * x.scale;
    }
    // sums[j] += sum_i weight(i) a[i,j]^2
    template <class Weight>
    static void add_columns(T* sums, Tile<T> a, int rows, int columns, const Weight& weight) {
        constexpr int n = lanes<T>, together = 8;
        int j = 0;
        for (; j + together * n <= columns; j += together * n) add_columns_of<together>(sums + j, a.from(0, j), rows, weight);
        for (; j < columns; j += n) add_columns_of<1>(sums + j, a.from(0, j), rows, weight);
    }
    template <int count, class Weight>
    static void add_columns_of(T* sums, Tile<T> a, int rows, const Weight& weight) {
        constexpr int n = lanes<T>;
        reg<T> totals[count];
        for (int j = 0; j < count; ++j) totals[j] = load<T>(sums + j * n);
        for (int i = 0; i < rows; ++i) {
            const reg<T> factor = weight(i);
            for (int j = 0; j < count; ++j) {
                const reg<T> element = load<T>(a.at(i) + j * n);
                totals[j] = fma(element * element, factor, totals[j]);
            }
        }
        for (int j = 0; j < count; ++j) store<T>(sums + j * n, totals[j]);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
