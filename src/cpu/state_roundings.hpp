// StateRoundings: an estimate of what bf16 reads have left in a state of the delta rule; it decides which chunks read in fp32.
#pragma once

#include "cpu/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A token reads the state through operands rounded to bf16 and writes beta times what it read, error and all. In units of the
// error of one read, relative to the state (squares of norms), that adds beta^2 |k|^2 |e|^2 / m. The same token takes
// (2 beta k.e - beta^2 |k|^2 |e|^2) / m of all that is in the state, earlier errors included, and the gate takes 1 - a^2 of each
// channel; m is the number of channels that share the energy of the keys. With unit keys and beta <= 1 the errors settle at
// beta / (2 - beta) <= 1 or below. With beta near 2 a token reflects the state, nothing but gates takes errors away, and they
// add up over all tokens. A chunk that reads in fp32 adds none. What a chunk decides follows from chunks that are past: its
// outputs may not depend on later tokens.
template <class T>
struct StateRoundings {
    // A chunk reads in fp32 where errors, with those that it would add, might exceed this (docs/numerics.md has what remains).
    static constexpr T limit = T(0.75);
    static constexpr T most = T(1e6);  // of what a chunk adds: keeps the estimate finite

    int columns = 0;        // key channels
    bool fine = false;      // the chunk begun last reads in fp32 what its writes follow from
    bool reflects = false;  // some token of it has beta k.e > 1

    // Of an estimate: the errors in each channel [K], then what a chunk like the last would add, and whether that chunk's
    // gradients were refined (GradientRoundings), as those of the next one may have to be.
    static std::int64_t elements(int key_columns) { return key_columns + 16; }
    static T& refined(T* estimate, int key_columns) { return estimate[key_columns + 1]; }

    // From the estimate of the state that enters a chunk to that of the state that leaves it.
    template <class Gate>
    void begin_chunk(T* estimate, const Gate& gate, const T* beta, KeyRows<T> k, KeyRows<T> e, int length) {
        fine = mean(estimate) + estimate[columns] > limit;
        reflects = false;
        const T share = share_of_a_channel(k.rows, length);
        T kept = 1;
        fill(added, T(0), 1, columns);
        for (int i = 0; i < length; ++i) {
            const T k_norm = k.norm != nullptr ? k.norm[i] : T(1), e_norm = e.norm != nullptr ? e.norm[i] : T(1);
            const bool one_key = e.rows == k.rows;
            const T k_k = row_dot(k.rows, k.rows, i, columns) * k_norm * k_norm;
            const T e_e = one_key ? k_k : row_dot(e.rows, e.rows, i, columns) * e_norm * e_norm;
            const T k_e = one_key ? k_k : row_dot(k.rows, e.rows, i, columns) * k_norm * e_norm;
            const T written = beta[i] * beta[i] * k_k * e_e, left = 1 - (2 * beta[i] * k_e - written) * share;
            kept *= left < 1 ? left : T(1);
            reflects |= beta[i] * k_e > 1;
            const reg<T> adds = broadcast<T>(written * share < most ? written * share : most);
            for_each(added, 1, columns, [&](int, int c) {
                const reg<T> to_end = gate.decay_to_end(i, c);
                return fma(adds * to_end, to_end, load<T>(added.data + c));
            });
        }
        for_each(Tile<T>{estimate}, 1, columns, [&](int, int c) {
            const reg<T> decay = load<T>(gate.high + c), passed = load<T>(estimate + c) * kept * decay * decay;
            return fine ? passed : passed + load<T>(added.data + c);
        });
        estimate[columns] = mean(added.data);
    }

    void carve(Arena& arena, int key_columns) {
        columns = key_columns;
        added = arena.tile<T>(1, columns);
    }

  private:
    Tile<T> added;  // [1,K] by a chunk, if it reads in bf16

    T mean(const T* estimate) const {
        reg<T> total = {};
        for (int c = 0; c < columns; c += lanes<T>) total += load<T>(estimate + c);
        return sum<T>(total) / static_cast<T>(columns);
    }
    // 1 / m: of energies u of the channels, sum u^2 / (sum u)^2.
    T share_of_a_channel(Tile<T> k, int length) const {
        reg<T> all = {}, squares = {};
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> energy = {};
            for (int i = 0; i < length; ++i) energy = fma(load<T>(k.at(i) + c), load<T>(k.at(i) + c), energy);
            all += energy;
            squares = fma(energy, energy, squares);
        }
        const T total = sum<T>(all);
        return total > 0 ? sum<T>(squares) / (total * total) : T(0);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
