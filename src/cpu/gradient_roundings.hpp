// GradientRoundings: whether a chunk's gradients are small against what bf16 rounds on the way to them.
#pragma once

#include "cpu/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Keys that overlap leave small differences of large numbers. The gradient D of the state holds what no key erases: with keys of
// few directions it grows with the tokens, while what a key reads in it stays small. And d_q (d_e) is what the state holds now,
// added up of all that was written since the chunk's start. Energies (squares of norms) of the roundings, in units of one
// rounding, and of what they end up in:
//     y:    sum_ic (k_ic e^{G_L - G_i})^2 |D_c|^2 + 2 sum_ij P_ij^2 |d_o_i|^2
//     d_q:  (scale^2 / V) sum_i |d_o_i|^2 sum_{j <= i} |d_j|^2 |k_j e^{G_i - G_j}|^2        d_e: z in the place of d_o, no scale
// times the operands that are rounded.
template <class T>
struct GradientRoundings {
    // With random keys the quotients are 3 to 7 and about 1. Errors grow as their roots: at these limits they are 0.8 of the bar.
    static constexpr T most_of_y = T(10), most_of_keys = T(5);

    int columns = 0;                  // key channels
    T *state_energy = nullptr, *written = nullptr;  // [K] spare

    void carve(Arena& arena, int key_columns) {
        columns = key_columns;
        for (T** vector : {&state_energy, &written}) *vector = arena.take<T>(static_cast<std::size_t>(columns));
    }

    // After chunk_gradients; d_q and d_e empty where not wanted.
    template <class Gate>
    bool exceed(const Gate& gate, KeyRows<T> k, Tile<T> D, Tile<T> P, Tile<T> d, Tile<T> d_o, Tile<T> y, Tile<T> z, Tile<T> d_q,
                Tile<T> d_e, T scale, int rows, int V) const {
        constexpr T keys_rounded = Gate::per_channel ? 2 : 1, scores_rounded = Gate::per_channel ? 2 : 3;
        for (int c = 0; c < columns; ++c) state_energy[c] = row_dot(D, D, c, V);
        fill(Tile<T>{written}, T(0), 1, columns);
        reg<T> read = {};
        T scored = 0, of_queries = 0, of_erases = 0;
        for (int i = 0; i < rows; ++i) {
            const T norm = k.norm != nullptr ? k.norm[i] : T(1), d_i = row_dot(d, d, i, V), d_o_i = row_dot(d_o, d_o, i, V);
            reg<T> all = {};
            for_each(Tile<T>{written}, 1, columns, [&](int, int c) {
                const reg<T> key = load<T>(k.rows.at(i) + c) * norm, kept = key * gate.decay_to_end(i, c), a = gate.decay_of(i, c);
                read = fma(kept * kept, load<T>(state_energy + c), read);
                const reg<T> now = fma(a * a, load<T>(written + c), key * key * d_i);
                all += now;
                return now;
            });
            scored += d_o_i * row_dot(P, P, i, rows);
            of_queries += d_o_i * sum<T>(all);
            of_erases += row_dot(z, z, i, V) * sum<T>(all);
        }
        const auto above = [&](T roundings, Tile<T> gradient, int width, T most) {
            T energy = 0;
            for (int i = 0; i < rows; ++i) energy += row_dot(gradient, gradient, i, width);
            return roundings > most * energy;
        };
        return above(keys_rounded * sum<T>(read) + 2 * scored, y, V, most_of_y) ||
               (d_q && above(scores_rounded / V * scale * scale * of_queries, d_q, columns, most_of_keys)) ||
               (d_e && above(scores_rounded / V * of_erases, d_e, columns, most_of_keys));
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
