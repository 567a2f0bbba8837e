// StateRoundings: what bf16 reads have left in a state of the delta rule, about; it decides which chunks read fp32.
#pragma once

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A token reads the state through operands rounded to bf16 and writes beta times what it read, error and all. In units
// of the error of one read, relative to the state (squares of norms), that adds beta^2 |k|^2 |e|^2 / m. The same token
// takes (2 beta k.e - beta^2 |k|^2 |e|^2) / m of all that is in the state, earlier errors included, and the gate takes
// 1 - a^2 of each channel; m is the number of channels that share the energy of the keys. With unit keys and beta <= 1
// the errors settle at beta / (2 - beta) <= 1 or below. With beta near 2 a token reflects the state, nothing but gates
// takes errors away, and they add up over all tokens. A chunk that reads in fp32 adds none. What a chunk decides
// follows from chunks that are past: its outputs may not depend on later tokens.
template <class T>
struct StateRoundings {
    // A chunk reads in fp32 where errors, with those that it would add, might exceed this (docs/numerics.md has what
    // remains).
    static constexpr T limit = T(0.75);
    // On the mean of tokens. N tokens that erase the share b of one of D directions each have N b / 2D; WriteRoundings'
    // quotient for them is 2 N b / D, so that its limit is 0.75 here, and under channel gates half of that.
    static constexpr T least_overlap = T(0.25);
    // Gates per channel forget most pairs of a chunk, but not what its roundings leave. Chunks of fewer than 64 tokens
    // have fewer pairs, random ones, with 64 channels and betas of 1, up to 6 / K.
    static T least_overlap_by_channel(int rows, int key_columns) {
        const T few = T(0.045), random = 6 / static_cast<T>(key_columns);
        return rows >= 64 ? T(0.1) : few > random ? few : random;
    }
    static constexpr T most = T(1e6);  // of what a chunk adds: keeps the estimate finite

    int columns = 0;        // key channels
    bool fine = false;      // the chunk begun last reads in fp32 what its writes follow from
    bool reflects = false;  // some token of it has beta k.e > 1

    // Of an estimate (KernelArgs::roundings numbers): the errors in each channel [K], then what a chunk like the last
    // would add, and whether that chunk's gradients were refined (GradientRoundings), as those of the next one may have
    // to be.
    static T& refined(T* estimate, int key_columns) { return estimate[key_columns + 1]; }

    void carve(Arena& arena, int chunk, int key_columns) {
        columns = key_columns;
        for (T** vector : {&k_k, &e_e, &k_e, &written, &of_key, &erased, &of_rows}) *vector = arena.take<T>(static_cast<std::size_t>(chunk));
        added = arena.take<T>(static_cast<std::size_t>(columns));
    }

    // From the estimate of the state that enters a chunk to that of the state that leaves it; rows of the chunk as
    // padded.
    template <class Gate>
    void begin_chunk(T* estimate, const Gate& gate, const T* beta, KeyRows<T> k, KeyRows<T> e, int length, int rows) {
        fine = mean(estimate) + estimate[columns] > limit;
        weigh_tokens(beta, k, e, length, rows);
        const T share = add_up(gate, k.rows, length);
        T kept = 1;
        for (int i = 0; i < length; ++i) {
            const T left = 1 - (2 * beta[i] * k_e[i] - written[i]) * share;
            kept *= left < 1 ? left : T(1);
        }
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> decay = load<T>(gate.through_decay + c), passed = load<T>(estimate + c) * kept * decay * decay;
            store<T>(estimate + c, fine ? passed : passed + load<T>(added + c));
        }
        estimate[columns] = mean(added);
    }

    // |k_i|^2 of the rows of the chunk begun last, without norms that lie apart.
    const T* key_energies() const { return k_k; }
    // Whether tokens of that chunk erase much of what others wrote in it: sums of beta_i cos^2(e_i, k_j), decayed, over
    // pairs j < i. Tokens each along one of D directions have i beta / D, random keys i beta / K.
    bool overlap(Tile<T> l, int length, int rows, T least) const {
        row_sums(of_rows, rows, rows, [&](reg<T> sum, int i, int j) {
            const reg<T> score = load<T>(l.at(i) + j);
            return fma(score * score, load<T>(of_key + j), sum);
        });
        T total = 0;
        for (int i = 0; i < length; ++i) total += of_rows[i] * erased[i];
        return total > least * static_cast<T>(length);
    }

  private:
    T *k_k = nullptr, *e_e = nullptr, *k_e = nullptr;  // [C] |k|^2, |e|^2, k.e
    T* written = nullptr;                              // [C] beta^2 |k|^2 |e|^2
    T *of_key = nullptr, *erased = nullptr;            // [C] 1 / |k|^2; beta |k| / |e|
    T* of_rows = nullptr;                              // [C] spare
    T* added = nullptr;                                // [K] by a chunk, if it reads in bf16

    T mean(const T* values) const { return sum_of(values, columns) / static_cast<T>(columns); }
    void weigh_tokens(const T* beta, KeyRows<T> k, KeyRows<T> e, int length, int rows) {
        const bool one_key = e.rows == k.rows;
        row_dots(k_k, k.rows, k.rows, rows, columns);
        if (!one_key) row_dots(e_e, e.rows, e.rows, rows, columns);
        if (!one_key) row_dots(k_e, k.rows, e.rows, rows, columns);
        reflects = false;
        for (int i = length; i < rows; ++i) of_key[i] = 0;
        for (int i = 0; i < length; ++i) {
            const T k_norm = k.norm != nullptr ? k.norm[i] : T(1), e_norm = e.norm != nullptr ? e.norm[i] : T(1);
            const T energy = k_k[i] * k_norm * k_norm, of_e = one_key ? energy : e_e[i] * e_norm * e_norm;
            k_e[i] = one_key ? energy : k_e[i] * k_norm * e_norm;
            written[i] = beta[i] * beta[i] * energy * of_e;
            of_key[i] = energy > 0 ? 1 / energy : T(0);
            erased[i] = one_key ? beta[i] : of_e > 0 ? beta[i] * static_cast<T>(__builtin_sqrt(static_cast<double>(energy / of_e))) : T(0);
            reflects |= beta[i] * k_e[i] > 1;
        }
    }
    // `added`, and 1 / m: of energies u of the channels, sum u^2 / (sum u)^2.
    template <class Gate>
    T add_up(const Gate& gate, Tile<T> k, int length) {
        reg<T> all = {}, squares = {};
        T same = 0;  // of all channels
        if constexpr (!Gate::per_channel) {
            for (int i = 0; i < length; ++i) same += written[i] * gate.end[i] * gate.end[i];
        }
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> energy = {}, total = broadcast<T>(same);
            for (int i = 0; i < length; ++i) {
                const reg<T> key = load<T>(k.at(i) + c);
                energy = fma(key, key, energy);
                if constexpr (Gate::per_channel) {
                    const reg<T> to_end = gate.decay_to_end(i, c);
                    total = fma(to_end * to_end, broadcast<T>(written[i]), total);
                }
            }
            all += energy;
            squares = fma(energy, energy, squares);
            store<T>(added + c, total);
        }
        const T energy = sum<T>(all), share = energy > 0 ? sum<T>(squares) / (energy * energy) : T(0);
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> total = load<T>(added + c) * share, bound = broadcast<T>(most);
            store<T>(added + c, total < bound ? total : bound);
        }
        return share;
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
