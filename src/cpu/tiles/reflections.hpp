// reflections: how many tokens' roundings a state of the delta rule holds; it decides where a forward in fp32 ends.
#pragma once

#include "cpu/tiles/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A token multiplies the state, and the roundings in it, by I - beta k e^T. Seen from K channels that takes the share
// (2 beta k.e - beta^2 |k|^2 |e|^2) / K of their squares, the gate 1 - a^2. It leaves roundings of its own, in
// proportion to what it writes: beta^2 |k|^2 |e|^2 / 4 of those of a reflection (beta 2, unit keys). Where a token
// takes more than it leaves, twice over, K / 2 are held at most, and it is not counted. Reflections take nothing:
// without gates all of them add up. Erase keys that do not point where k does (Comba) make it take less than nothing:
// states that grow so may shrink again, and leave their roundings behind.
template <class T>
Unfinished left_at(const ChunkRange& done, Tile<T> state) {
    return {done.first + done.length, reinterpret_cast<const char*>(state.data), state.row, false, 0};
}

template <class T>
struct Reflections {
    static constexpr T growing = 256;  // reflections for each share that a token adds to the squares of a state
    // Tokens with beta k.e above the first reflect whole: what they round along one direction adds up, in one direction
    // too. A chunk computes of such tokens no more than these with one key: its scores, rounded once, are the same
    // error for each pair (t16 to t64: 2.4e-6 to 1.3e-5 of the final state), and a token alone has a tenth of it.
    static constexpr T whole = T(reflects_whole), most_repeats = 4;

    T held = 0;

    // What is left of a sequence whose state, which stands in the tile, may hold too many already.
    Unfinished begin(const KernelArgs& args, std::int64_t n, std::int64_t head, Tile<T> state) {
        load_roundings(&held, at_count(args, args.initial_roundings), n, head, 1);
        return too_many() ? Unfinished{0, reinterpret_cast<const char*>(state.data), state.row, true, 0} : Unfinished{};
    }
    void end(const KernelArgs& args, std::int64_t n, std::int64_t head) const {
        store_roundings(args.final_roundings, static_cast<const T*>(nullptr), n, head, args.roundings);
        store_roundings(at_count(args, args.final_roundings), &held, n, head, 1);
    }
    // After the tokens of the range. Final states are off by at most 0.55 of their bar after so many, by 1.6 after 4096
    // (16 channels, no gates).
    bool must_leave(const ChunkRange& range) const { return too_many() && (range.first + range.length) % cut_tokens == 0; }
    bool too_many() const { return held > T(most_reflections); }
    // The same of a chunk whose token i is the first with too many repeats: it is not to be done in fp32.
    Unfinished leave_before(const ChunkRange& range, int i, Tile<T> state) {
        held = 2 * T(most_reflections);
        return {range.first, reinterpret_cast<const char*>(state.data), state.row, false, i};
    }

    // The tokens in the tiles, a multiple of 16. With a beta per value channel, tokens.beta holds each token's largest.
    // Returns the first token with more than most_repeats, or length.
    int count(const TokenTiles<T>& tokens, int length) {
        const Products products(tokens, length);
        bool any = held > 0 || !products.one_key;
        for (int i = 0; i < length; ++i) any |= tokens.beta[i] * products.k_k[i] > T(4) / 3;
        if (!any) return length;  // one key: none takes less than twice what it leaves
        const T kept = kept_by_gate(tokens, length);
        Repeats repeats{tokens, products.k_k};
        int first = length;
        for (int i = 0; i < length; ++i) {
            held *= kept;
            const T beta = tokens.beta[i], left = beta * beta * products.k_k[i] * products.e_e[i];
            const T taken = 2 * beta * products.k_e[i] - left, share = taken / static_cast<T>(tokens.args.K);
            if (share > 0 && !tokens.args.elementwise_beta) held *= 1 - share;
            if (taken < left / 2) held += left < 4 ? left / 4 : T(1);
            if (share < 0) held += growing * -share;
            if (!(beta * products.k_e[i] > whole)) continue;
            // N along D directions hold N^2 / D, each of them N / D = sqrt(held / D); 1 / D from few is taken low.
            const T again = repeats.of(i), share_of_one = again / static_cast<T>(repeats.count + 7);
            const T along = static_cast<T>(__builtin_sqrt(static_cast<double>(held * share_of_one)));
            held += 2 * along;
            if ((again > most_repeats || along > most_repeats) && i < first) first = i;
        }
        return first;
    }

  private:
    // Behind the numbers of StateRoundings, which a forward in bf16 has instead.
    static Strided at_count(const KernelArgs& args, Strided numbers) {
        if (numbers.given) numbers.data += (args.roundings - 1) * numbers.stride[2] * 4;
        return numbers;
    }
    // How many tokens of the tiles that reflect whole share a later one's direction: the sum of cos^2, less what random
    // keys have.
    struct Repeats {
        const TokenTiles<T>& tokens;
        const T* k_k;
        int count = 0;
        int indices[64] = {};

        T of(int i) {
            constexpr int most = 8;  // compared: the last one, and others spread over all
            const int compared = count < most ? count : most;
            T sum = T(-1.5) * static_cast<T>(compared) / static_cast<T>(tokens.args.K);
            for (int n = 0; n < compared; ++n) {
                const int j = indices[count - 1 - n * count / compared];
                T dot = row_dot(tokens.k.from(i, 0), tokens.k.from(j, 0), 0, tokens.key_columns);
                if (tokens.k_norm != nullptr) dot *= tokens.k_norm[i] * tokens.k_norm[j];
                sum += dot * dot / (k_k[i] * k_k[j]);
            }
            if (count > most) sum *= static_cast<T>(count) / most;
            indices[count++] = i;
            return sum > 0 ? sum : T(0);
        }
    };
    // |k|^2, |e|^2 and k.e of each token
    struct Products {
        bool one_key;
        T own[3][64];
        const T *k_k = own[0], *e_e = own[0], *k_e = own[0];

        Products(const TokenTiles<T>& tokens, int length) : one_key(tokens.e == tokens.k) {
            if (one_key && tokens.args.l2norm) {
                for (int i = 0; i < length; ++i) own[0][i] = 1;
                return;
            }
            dots(own[0], tokens.k, tokens.k_norm, tokens.k, tokens.k_norm, length, tokens.key_columns);
            if (one_key) return;
            dots(own[1], tokens.e, tokens.e_norm, tokens.e, tokens.e_norm, length, tokens.key_columns);
            dots(own[2], tokens.k, tokens.k_norm, tokens.e, tokens.e_norm, length, tokens.key_columns);
            e_e = own[1], k_e = own[2];
        }
        static void dots(T* dst, Tile<T> a, const T* a_norm, Tile<T> b, const T* b_norm, int length, int columns) {
            row_dots(dst, a, b, length, columns);
            for (int i = 0; i < length && a_norm != nullptr; ++i) dst[i] *= a_norm[i] * b_norm[i];
        }
    };
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
