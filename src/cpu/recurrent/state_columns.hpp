// StateColumns: a few registers of columns of a state, which a token reads and writes in the nearest cache.
#pragma once

#include "algorithms/recurrent.hpp"
#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// A decay as whole + part (exp_parts, store_decay).
template <class T>
struct Decay {
    reg<T> whole, part;
    // x decayed + more, the sum rounded once
    HEADRACE_INLINE_MEMBER reg<T> of(reg<T> x, reg<T> more) const { return fma(x, whole, fma(x, part, more)); }
    // by both
    HEADRACE_INLINE_MEMBER Decay times(Decay other) const {
        return {whole * other.whole, fma(part, other.part, fma(whole, other.part, part * other.whole))};
    }
};

// A row of so many registers.
template <class T, int width>
struct Values {
    reg<T> at[width];
    template <class Body>
    HEADRACE_INLINE_MEMBER static void each(const Body& body) {
        unroll<1, width>([&](auto, auto w) __attribute__((always_inline)) { body(w); });
    }
    HEADRACE_INLINE_MEMBER friend Values operator*(Values a, Values b) {
        each([&](auto w) __attribute__((always_inline)) { a.at[w] *= b.at[w]; });
        return a;
    }
    HEADRACE_INLINE_MEMBER friend Values operator*(T a, Values b) {
        each([&](auto w) __attribute__((always_inline)) { b.at[w] *= a; });
        return b;
    }
    HEADRACE_INLINE_MEMBER friend Values operator-(Values a, Values b) {
        each([&](auto w) __attribute__((always_inline)) { a.at[w] -= b.at[w]; });
        return a;
    }
    // a b + c
    HEADRACE_INLINE_MEMBER friend Values fma(T a, Values b, Values c) {
        each([&](auto w) __attribute__((always_inline)) { c.at[w] = cpu::fma(broadcast<T>(a), b.at[w], c.at[w]); });
        return c;
    }
};

// What is fetched while a state's rows are walked: lines that lie `row` bytes further from row to row, those of a
// second walk `rest` bytes behind the first ones. Without data: nothing.
struct Ahead {
    const char* data = nullptr;
    std::int64_t row = 0, rest = 0;
};

template <class T, int width>
struct StateColumns {
    using Row = Values<T, width>;
    // Lines of a row of these columns; a walk that reads twice fetches the first of them on its first way.
    static constexpr int lines = (width * register_bytes + line_bytes - 1) / line_bytes, first_lines = lines / 2;
    Tile<T> from, to;  // where the state is read, and where it is left; `from` without data: zero
    int keys, first;   // true rows; the first column
    Ahead ahead;

    // null: 1
    HEADRACE_INLINE_MEMBER Row values(const T* row) const {
        Row result;
        Row::each([&](auto w) __attribute__((always_inline)) {
            result.at[w] = row == nullptr ? broadcast<T>(1) : load<T>(row + first + w * lanes<T>);
        });
        return result;
    }
    HEADRACE_INLINE_MEMBER void store_values(T* row, Row values) const {
        Row::each([&](auto w) __attribute__((always_inline)) { store<T>(row + first + w * lanes<T>, values.at[w]); });
    }

    // S^T a and S^T b
    struct Two {
        Row a, b;
    };
    HEADRACE_INLINE_MEMBER Two read_two(const T* a, const T* b) const {
        return ahead.data != nullptr ? read_two<true>(a, b) : read_two<false>(a, b);
    }

    // S <- Diag(decay) S Diag(value_decay) + k d^T; returns S^T a, S as it was.
    HEADRACE_INLINE_MEMBER Row read_and_write(const T* a, const algorithms::Token<T>& token, Row d) const {
        return ahead.data != nullptr ? walk<true, true>(a, token, d) : walk<true, false>(a, token, d);
    }
    // After read_two, which has fetched the first part of what lies ahead.
    HEADRACE_INLINE_MEMBER void write(const algorithms::Token<T>& token, Row d) const {
        ahead.data != nullptr ? walk<false, true>(nullptr, token, d) : walk<false, false>(nullptr, token, d);
    }

  private:
    template <int from_line, int to_line>
    HEADRACE_INLINE_MEMBER void fetch(int row) const {
        const char* const fetched = ahead.data + row * ahead.row;
        for (int line = from_line; line < to_line; ++line) {
            const bool first_way = line < first_lines;
            __builtin_prefetch(fetched + (first_way ? 0 : ahead.rest) + (first_way ? line : line - first_lines) * line_bytes, 1, 3);
        }
    }
    template <bool fetches>
    HEADRACE_INLINE_MEMBER Two read_two(const T* a, const T* b) const {
        Two sums{};
        for (int c = 0; c < readable(); ++c) {
            const T* const row = from.at(c) + first;
            if constexpr (fetches) fetch<0, first_lines>(c);
            Row::each([&](auto w) __attribute__((always_inline)) {
                const reg<T> state = load<T>(row + w * lanes<T>);
                sums.a.at[w] = cpu::fma(broadcast<T>(a[c]), state, sums.a.at[w]);
                sums.b.at[w] = cpu::fma(broadcast<T>(b[c]), state, sums.b.at[w]);
            });
        }
        return sums;
    }
    HEADRACE_INLINE_MEMBER int readable() const { return from.data == nullptr ? 0 : keys; }
    HEADRACE_INLINE_MEMBER Row row_of_state(int c) const {
        if (from.data == nullptr) return {};
        Row result;
        Row::each([&](auto w) __attribute__((always_inline)) { result.at[w] = load<T>(from.at(c) + first + w * lanes<T>); });
        return result;
    }
    template <bool reads, bool fetches>
    HEADRACE_INLINE_MEMBER Row walk(const T* a, const algorithms::Token<T>& token, Row d) const {
        const T *const k = token.k, *const wholes = token.decay_whole, *const parts = token.decay_part;
        Row sums{};
        const auto rows = [&](const auto& decay_of) __attribute__((always_inline)) {
            for (int step = 0; step < keys; ++step) {
                const int c = reads ? step : keys - 1 - step;  // what was read last is still in the nearest cache
                if constexpr (fetches) fetch<reads ? 0 : first_lines, lines>(step);
                const Row state = row_of_state(c);
                const Decay<T> decay{broadcast<T>(wholes[c]), broadcast<T>(parts[c])};
                const reg<T> key = broadcast<T>(k[c]), query = reads ? broadcast<T>(a[c]) : key;
                Row::each([&](auto w) __attribute__((always_inline)) {
                    if constexpr (reads) sums.at[w] = cpu::fma(query, state.at[w], sums.at[w]);
                    const reg<T> written = key * d.at[w];
                    store<T>(to.at(c) + first + w * lanes<T>, decay_of(decay, w).of(state.at[w], written));
                });
            }
        };
        if (token.value_decay == nullptr) {
            rows([](const Decay<T>& decay, auto) __attribute__((always_inline)) { return decay; });
        } else {
            const Row whole = values(token.value_whole), part = values(token.value_part);
            rows([&](const Decay<T>& decay, auto w) __attribute__((always_inline)) { return decay.times({whole.at[w], part.at[w]}); });
        }
        return sums;
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
