// GradientRoundings: whether a chunk's gradients are small against what bf16 rounds on the way to them.
#pragma once

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Keys that overlap leave small differences of large numbers. The gradient D of the state holds what no key erases:
// with keys of few directions it grows with the tokens, while what a key reads in it stays small. And d_q (d_e) is what
// the state holds now, added up of all that was written since the chunk's start. Energies (squares of norms) of the
// roundings, in units of one rounding, and of what they end up in:
//     y:    sum_ic (k_ic e^{G_L - G_i})^2 |D_c|^2 + 2 sum_ij P_ij^2 |d_o_i|^2
//     d_q:  (scale^2 / V) sum_i |d_o_i|^2 sum_{j <= i} |d_j|^2 |k_j e^{G_i - G_j}|^2        d_e: z in the place of d_o,
//     no scale
// times the operands that are rounded.
template <class T>
struct GradientRoundings {
    // With random keys the quotients are 3 to 7 and about 1. Errors grow as their roots: at these limits they are 0.8
    // of the bar.
    static constexpr T most_of_y = T(10), most_of_keys = T(5);

    int columns = 0;            // key channels
    T* state_energy = nullptr;  // [K] |D_c|^2
    T *of_d = nullptr, *of_d_o = nullptr, *of_z = nullptr, *of_P = nullptr;  // [C] |d_i|^2, |d_o_i|^2, |z_i|^2, |P_i|^2
    T* spare = nullptr;         // [C]

    void carve(Arena& arena, int chunk, int key_columns) {
        columns = key_columns;
        state_energy = arena.take<T>(static_cast<std::size_t>(columns));
        for (T** vector : {&of_d, &of_d_o, &of_z, &of_P, &spare}) *vector = arena.take<T>(static_cast<std::size_t>(chunk));
    }

    // After chunk_gradients; d_q and d_e empty where not wanted.
    template <class Gate>
    bool exceed(const Gate& gate, KeyRows<T> k, Tile<T> D, Tile<T> P, Tile<T> d, Tile<T> d_o, Tile<T> y, Tile<T> z, Tile<T> d_q,
                Tile<T> d_e, T scale, int rows, int V) const {
        constexpr T keys_rounded = Gate::per_channel ? 2 : 1, scores_rounded = Gate::per_channel ? 2 : 3;
        row_dots(state_energy, D, D, columns, V);
        row_dots(of_d, d, d, rows, V);
        row_dots(of_d_o, d_o, d_o, rows, V);
        row_dots(of_z, z, z, rows, V);
        row_dots(of_P, P, P, rows, rows);
        reg<T> read = {}, for_q = {}, for_e = {};
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> D_c = load<T>(state_energy + c);
            reg<T> written = {};
            for (int i = 0; i < rows; ++i) {
                const reg<T> key = load<T>(k.rows.at(i) + c) * (k.norm != nullptr ? k.norm[i] : T(1)), energy = key * key;
                const reg<T> to_end = gate.decay_to_end(i, c), a = gate.decay_of(i, c);
                read = fma(energy * D_c, to_end * to_end, read);
                written = fma(written, a * a, energy * of_d[i]);
                for_q = fma(written, broadcast<T>(of_d_o[i]), for_q);
                for_e = fma(written, broadcast<T>(of_z[i]), for_e);
            }
        }
        T scored = 0;
        for (int i = 0; i < rows; ++i) scored += of_d_o[i] * of_P[i];
        const T of_scores = scores_rounded / static_cast<T>(V);
        return above(keys_rounded * sum<T>(read) + 2 * scored, y, rows, V, most_of_y) ||
               above(of_scores * scale * scale * sum<T>(for_q), d_q, rows, columns, most_of_keys) ||
               above(of_scores * sum<T>(for_e), d_e, rows, columns, most_of_keys);
    }

    // Whether keys overlap, by the mean over pairs of the squares of erase scores (random unit keys: 1 / K), and some
    // token reflects the state along its own. Elements of the inverse are near 2 all over then, so that roundings of y
    // add up over the chunk, which what y reads and ends up in does not show. (Of a summary l has its rows times beta.)
    bool reflect(KeyRows<T> k, KeyRows<T> e, const T* beta, Tile<T> l, int rows) const {
        constexpr T most_of_pairs = T(1) / 32;
        row_dots(spare, l, l, rows, rows);
        if (!(sum_of(spare, rows) > most_of_pairs * static_cast<T>(rows * (rows - 1) / 2))) return false;
        row_dots(spare, k.rows, e.rows, rows, columns);
        for (int i = 0; i < rows; ++i) {
            const T norms = (k.norm != nullptr ? k.norm[i] : T(1)) * (e.norm != nullptr ? e.norm[i] : T(1));
            if (beta[i] * spare[i] * norms > 1) return true;
        }
        return false;
    }

  private:
    bool above(T roundings, Tile<T> gradient, int rows, int width, T most) const {
        if (!gradient) return false;
        row_dots(spare, gradient, gradient, rows, width);
        return roundings > most * sum_of(spare, rows);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
