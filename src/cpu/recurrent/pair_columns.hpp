// PairColumns: a few registers of columns of a state, together in the nearest cache, for pairs of tokens.
#pragma once

#include "cpu/recurrent/state_columns.hpp"
#include "cpu/tiles/prefetch.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// What a run of tokens leaves behind.
enum class Leaving { nothing, kept, final };

// Leaving::final: the last pair leaves S <- Diag(whole + part) S~ + k1 d1^T + k2 d2^T.
template <class T>
struct Ending {
    Leaving leaving;
    const T *whole, *part;  // [K]
};

template <class T, int width>
struct PairColumns {
    using Row = Values<T, width>;
    T* state;       // [keys][width registers]
    bool zero;      // as it arrives; the memory is then unwritten
    Tile<T> from;   // where it arrives otherwise: there, or in the caller's memory
    Tile<T> to;     // where these columns of the state itself are left
    int keys, first;
    const Ending<T>& ending;
    Prefetcher& ahead;  // of what the next segment reads: a part for every pair

    HEADRACE_INLINE_MEMBER Row values(const T* row) const {
        Row result;
        Row::each([&](auto w) __attribute__((always_inline)) { result.at[w] = load<T>(row + first + w * lanes<T>); });
        return result;
    }
    HEADRACE_INLINE_MEMBER void store_values(T* row, Row values) const {
        Row::each([&](auto w) __attribute__((always_inline)) { store<T>(row + first + w * lanes<T>, values.at[w]); });
    }

    // S~^T q and S~^T e of both tokens; the first of a run also bring the state to its place
    struct Read {
        Row q1, q2, e1, e2;
    };
    template <bool delta>
    HEADRACE_INLINE_MEMBER Read read_first(const algorithms::TokenPair<T>& pair) const {
        if (zero) return {};
        return walk<Arriving::kept, false, true, delta>(pair, {}, {}, pair);
    }
    template <bool delta>
    HEADRACE_INLINE_MEMBER Read write_and_read(int index, const algorithms::TokenPair<T>& pair, Row d1, Row d2,
                                               const algorithms::TokenPair<T>& next) const {
        ahead.next();
        if (zero && index == 0) return walk<Arriving::zero, true, true, delta>(pair, d1, d2, next);
        if (pair.kept != nullptr) return walk<Arriving::scaled, true, true, delta>(pair, d1, d2, next);
        return walk<Arriving::kept, true, true, delta>(pair, d1, d2, next);
    }
    HEADRACE_INLINE_MEMBER void leave(int index, const algorithms::TokenPair<T>& pair, Row d1, Row d2) const {
        const bool nothing_yet = zero && index == 0;
        if (ending.leaving == Leaving::final) {
            nothing_yet ? finish<true>(pair, d1, d2) : finish<false>(pair, d1, d2);
        } else if (ending.leaving == Leaving::kept) {
            if (nothing_yet) {
                walk<Arriving::zero, true, false, false>(pair, d1, d2, pair);
            } else if (pair.kept != nullptr) {
                walk<Arriving::scaled, true, false, false>(pair, d1, d2, pair);
            } else {
                walk<Arriving::kept, true, false, false>(pair, d1, d2, pair);
            }
        }
    }

  private:
    enum class Arriving { zero, kept, scaled };

    template <Arriving arriving, bool writes, bool reads, bool delta>
    HEADRACE_INLINE_MEMBER Read walk(const algorithms::TokenPair<T>& pair, Row d1, Row d2, const algorithms::TokenPair<T>& next) const {
        const T *const k1 = pair.k[0], *const k2 = pair.k[1], *const kept = pair.kept;
        const T *const q1 = next.q[0], *const q2 = next.q[1], *const e1 = next.e[0], *const e2 = next.e[1];
        T* row = state;
        const int rows = keys;
        Read sums{};
        for (int c = 0; c < rows; ++c, row += width * lanes<T>) {
            // Read before anything is stored: a store may change what any pointer leads to.
            reg<T> key1, key2, query1, query2, error1, error2, factor;
            if constexpr (arriving == Arriving::scaled) factor = broadcast<T>(kept[c]);
            if constexpr (writes) key1 = broadcast<T>(k1[c]), key2 = broadcast<T>(k2[c]);
            if constexpr (reads) query1 = broadcast<T>(q1[c]), query2 = broadcast<T>(q2[c]);
            if constexpr (reads && delta) error1 = broadcast<T>(e1[c]), error2 = broadcast<T>(e2[c]);
            Row::each([&](auto w) __attribute__((always_inline)) {
                reg<T> s = {};
                if constexpr (!writes) {
                    s = load<T>(from.at(c) + w * lanes<T>);
                    store<T>(row + w * lanes<T>, s);
                } else if constexpr (arriving != Arriving::zero) {
                    s = load<T>(row + w * lanes<T>);
                }
                if constexpr (arriving == Arriving::scaled) s *= factor;
                if constexpr (writes) {
                    s = cpu::fma(key2, d2.at[w], cpu::fma(key1, d1.at[w], s));
                    store<T>(row + w * lanes<T>, s);
                }
                if constexpr (reads) {
                    sums.q1.at[w] = cpu::fma(query1, s, sums.q1.at[w]);
                    sums.q2.at[w] = cpu::fma(query2, s, sums.q2.at[w]);
                }
                if constexpr (reads && delta) {
                    sums.e1.at[w] = cpu::fma(error1, s, sums.e1.at[w]);
                    sums.e2.at[w] = cpu::fma(error2, s, sums.e2.at[w]);
                }
            });
        }
        return sums;
    }
    template <bool zero_state>
    HEADRACE_INLINE_MEMBER void finish(const algorithms::TokenPair<T>& pair, Row d1, Row d2) const {
        for (int c = 0; c < keys; ++c) {
            const Decay<T> decay{broadcast<T>(ending.whole[c]), broadcast<T>(ending.part[c])};
            const T* const row = state + c * (width * lanes<T>);
            Row::each([&](auto w) __attribute__((always_inline)) {
                const reg<T> written = cpu::fma(broadcast<T>(pair.k[0][c]), d1.at[w], broadcast<T>(pair.k[1][c]) * d2.at[w]);
                const reg<T> left = zero_state ? written : decay.of(load<T>(row + w * lanes<T>), written);
                store<T>(to.at(c) + w * lanes<T>, left);
            });
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
