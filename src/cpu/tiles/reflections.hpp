// reflections: how many tokens' roundings a state of the delta rule holds; it decides where a forward in fp32 ends.
#pragma once

#include "cpu/tiles/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A token multiplies the state, and the roundings in it, by I - beta k e^T. Seen from K channels that takes the share
// (2 beta k.e - beta^2 |k|^2 |e|^2) / K of their squares, the gate 1 - a^2. It leaves roundings of its own, in proportion to what
// it writes: beta^2 |k|^2 |e|^2 / 4 of those of a reflection (beta 2, unit keys). Where a token takes more than it leaves, twice
// over, K / 2 are held at most, and it is not counted. Reflections take nothing: without gates all of them add up. Erase keys that
// do not point where k does (Comba) make it take less than nothing: states that grow so may shrink again, and leave their
// roundings behind.
template <class T>
struct Reflections {
    static constexpr T growing = 256;  // reflections for each share that a token adds to the squares of a state

    T held = 0;

    void begin() { held = 0; }
    // Final states are off by at most 0.55 of their bar after so many, by 1.6 after 4096 (16 channels, no gates).
    bool too_many() const { return held > T(most_reflections); }

    // The tokens in the tiles. With a beta per value channel, tokens.beta holds each token's largest.
    void count(const TokenTiles<T>& tokens, int length) {
        const bool unit_keys = tokens.args.l2norm && !tokens.args.undecayed_error;
        if (unit_keys && held == 0 && !any_above(tokens.beta, T(4) / 3, length)) return;
        const T kept = kept_by_gate(tokens, length);
        for (int i = 0; i < length; ++i) {
            held *= kept;
            T k_e = 1, energies = 1;
            if (!unit_keys) products(tokens, i, &k_e, &energies);
            const T beta = tokens.beta[i], left = beta * beta * energies, taken = 2 * beta * k_e - left;
            const T share = taken / static_cast<T>(tokens.args.K);
            if (share > 0 && !tokens.args.elementwise_beta) held *= 1 - share;
            if (taken < left / 2) held += left < 4 ? left / 4 : T(1);
            if (share < 0) held += growing * -share;
        }
    }

  private:
    static bool any_above(const T* values, T limit, int count) {
        bool any = false;
        for (int i = 0; i < count; ++i) any |= values[i] > limit;
        return any;
    }
    // k.e and |k|^2 |e|^2
    static void products(const TokenTiles<T>& tokens, int i, T* k_e, T* energies) {
        const T k_norm = tokens.k_norm != nullptr ? tokens.k_norm[i] : T(1), e_norm = tokens.e_norm != nullptr ? tokens.e_norm[i] : T(1);
        const T k_k = row_dot(tokens.k, tokens.k, i, tokens.key_columns) * k_norm * k_norm;
        const bool one_key = tokens.e == tokens.k;
        *k_e = one_key ? k_k : row_dot(tokens.k, tokens.e, i, tokens.key_columns) * k_norm * e_norm;
        *energies = k_k * (one_key ? k_k : row_dot(tokens.e, tokens.e, i, tokens.key_columns) * e_norm * e_norm);
    }
    // By one of the tokens: the square of the slowest channel's decay.
    static T kept_by_gate(const TokenTiles<T>& tokens, int length) {
        T slowest = T(-1e30);
        for (int c = 0; c < (tokens.channel ? tokens.args.K : 1); ++c) {
            T total = 0;
            for (int i = 0; i < length; ++i) total += tokens.channel ? tokens.log_decay.at(i)[c] : tokens.log_decay.data[i];
            slowest = total > slowest ? total : slowest;
        }
        return slowest < 0 ? exp<T>(broadcast<T>(2 * slowest / static_cast<T>(length)))[0] : T(1);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
