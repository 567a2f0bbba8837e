// RecurrentOps: the primitives of the token page: row vectors against a state [K,V].
#pragma once

#include "cpu/recurrent/state_columns.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct RecurrentOps {
    using Tile = cpu::Tile<T>;
    int keys = 0, values = 0;  // padded; values columns of the state
    int key_rows = 0;          // rows of the state that are not padding
    Fetching fetching = Fetching::nothing;  // by for_columns
    Tile next{};               // the state that is read next, in one piece; without data: none

    void multiply_keys(T* dst, const T* a, const T* b) const {
        for (int c = 0; c < keys; c += lanes<T>) store<T>(dst + c, load<T>(a + c) * load<T>(b + c));
    }
    // b null: 1
    void multiply_values(T* dst, const T* a, const T* b) const {
        for (int j = 0; j < values; j += lanes<T>) store<T>(dst + j, b == nullptr ? load<T>(a + j) : load<T>(a + j) * load<T>(b + j));
    }
    void copy_values(T* dst, const T* a) const { multiply_values(dst, a, nullptr); }
    void error_values(T* read, const T* v) const {
        for (int j = 0; j < values; j += lanes<T>) store<T>(read + j, load<T>(v + j) - load<T>(read + j));
    }
    // In double: with one token and no state, every output rests on these sums, which may cancel.
    double dot_keys(const T* a, const T* b) const { return dot(a, b, keys); }
    double dot_values(const T* a, const T* b) const { return dot(a, b, values); }
    // dst = decay dst + weight a; decay null: 1
    void combine_keys(T* dst, const T* decay, T weight, const T* a) const {
        for (int c = 0; c < keys; c += lanes<T>) {
            const reg<T> whole = load<T>(dst + c);
            store<T>(dst + c, fma(broadcast<T>(weight), load<T>(a + c), decay != nullptr ? whole * load<T>(decay + c) : whole));
        }
    }
    // dst = factor (read + weight d)
    void combine(T* dst, T factor, const T* read, T weight, const T* d) const {
        for (int j = 0; j < values; j += lanes<T>) {
            store<T>(dst + j, fma(broadcast<T>(weight), load<T>(d + j), load<T>(read + j)) * factor);
        }
    }

    // dst = S^T a, four registers of columns at a time
    void read(T* dst, Tile S, const T* a) const {
        int j = 0;
        for (; j + 4 * lanes<T> <= values; j += 4 * lanes<T>) read_block<4>(dst + j, S.from(0, j), a);
        for (; j < values; j += lanes<T>) read_block<1>(dst + j, S.from(0, j), a);
    }

    // body(columns) for all columns of a state, read at `from` and left at `to`, four registers at a time.
    template <class Body>
    void for_columns(Tile from, Tile to, const Body& body) const {
        int j = 0;
        for (; j + 4 * lanes<T> <= values; j += 4 * lanes<T>) body(StateColumns<T, 4>{from, to, key_rows, j, ahead_of<4>(from, j)});
        for (; j + 2 * lanes<T> <= values; j += 2 * lanes<T>) body(StateColumns<T, 2>{from, to, key_rows, j, ahead_of<2>(from, j)});
        for (; j < values; j += lanes<T>) body(StateColumns<T, 1>{from, to, key_rows, j, ahead_of<1>(from, j)});
    }

    // S += factor a b^T
    void add_outer(Tile S, T factor, const T* a, const T* b) const {
        for (int c = 0; c < keys; ++c) {
            const reg<T> key = broadcast<T>(factor * a[c]);
            for (int j = 0; j < values; j += lanes<T>) store<T>(S.at(c) + j, fma(key, load<T>(b + j), load<T>(S.at(c) + j)));
        }
    }
    // dst[c] = factor S[c,:].b
    void rows_times(T* dst, T factor, Tile S, const T* b) const {
        for (int c = 0; c < keys; ++c) dst[c] = factor * row_dot(S, Tile{const_cast<T*>(b)}, c, values, 0);
    }
    // With S' = Diag(decay) S Diag(value_decay) and D' = D + scale q d_o^T, z given: - e z^T: d_decay[c] =
    // D'[c,:].S'[c,:]; d_value_decay = colsum(D' * S'); z given: d_e[c] = -S'[c,:].z; then D <- Diag(decay) D'
    // Diag(value_decay).
    void decay_and_write_adjoint(Tile D, Tile S, const algorithms::Token<T>& token, const T* d_o, const T* z,
                                 const algorithms::TokenGradients<T>& gradients) const {
        const int columns = values;
        for (int j = 0; j < columns; ++j) gradients.d_value_decay[j] = 0;
        for (int c = 0; c < keys; ++c) {
            const reg<T> query = broadcast<T>(token.scale * token.q[c]), key = broadcast<T>(token.e[c]);
            reg<T> through = {}, error = {};
            each_decay(token, columns, c, [&](int j, const Decay<T>& decay) __attribute__((always_inline)) {
                const reg<T> state = decay.of(load<T>(S.at(c) + j), reg<T>{}), adjoint = load<T>(D.at(c) + j);
                reg<T> written = query * load<T>(d_o + j);
                if (z != nullptr) {
                    error = fma(state, load<T>(z + j), error);
                    written -= key * load<T>(z + j);
                }
                const reg<T> product = (adjoint + written) * state;
                through += product;
                store<T>(gradients.d_value_decay + j, load<T>(gradients.d_value_decay + j) + product);
                store<T>(D.at(c) + j, decay.of(adjoint, decay.of(written, reg<T>{})));
            });
            gradients.d_decay[c] = sum<T>(through);
            if (z != nullptr) gradients.d_e[c] = -sum<T>(error);
        }
    }

  private:
    // What is fetched while so many registers of columns from column j on are walked: those behind them, at last the
    // first ones of the next state; or as many lines of the next state, which are neighbours there.
    template <int width>
    Ahead ahead_of(Tile from, int j) const {
        using Columns = StateColumns<T, width>;
        if (fetching == Fetching::nothing) return {};
        if (fetching == Fetching::state) {
            const int lines = Columns::lines - Columns::first_lines;
            if (next.data == nullptr) return {};
            return {reinterpret_cast<const char*>(next.data + static_cast<std::int64_t>(j) * key_rows), lines * line_bytes,
                    static_cast<std::int64_t>(key_rows) * Columns::first_lines * line_bytes};
        }
        const int behind = j + width * lanes<T>;
        const Tile columns = behind < values ? from.from(0, behind) : next;
        return {reinterpret_cast<const char*>(columns.data), columns.row * static_cast<std::int64_t>(sizeof(T)),
                Columns::first_lines * line_bytes};
    }
    // body(j, the decay of row c of a state in the columns from j on)
    template <class Body>
    [[gnu::always_inline]] static void each_decay(const algorithms::Token<T>& token, int values, int c, const Body& body) {
        const Decay<T> of_key{broadcast<T>(token.decay_whole[c]), broadcast<T>(token.decay_part[c])};
        if (token.value_decay == nullptr) {
            for (int j = 0; j < values; j += lanes<T>) body(j, of_key);
            return;
        }
        for (int j = 0; j < values; j += lanes<T>) {
            body(j, of_key.times({load<T>(token.value_whole + j), load<T>(token.value_part + j)}));
        }
    }
    static double dot(const T* a, const T* b, int count) {
        constexpr int n = lanes<double>;
        reg<double> total = {};
        for (int i = 0; i < count; i += n) total += widen(a + i) * widen(b + i);
        return sum<double>(total);
    }
    static T row_dot(Tile a, Tile b, int i, int columns, int row_of_b) {
        reg<T> total = {};
        for (int j = 0; j < columns; j += lanes<T>) total = fma(load<T>(a.at(i) + j), load<T>(b.at(row_of_b) + j), total);
        return sum<T>(total);
    }
    static T row_dot(Tile a, Tile b, int i, int columns) { return row_dot(a, b, i, columns, i); }

    template <int width>
    void read_block(T* dst, Tile S, const T* a) const {
        reg<T> sums[width] = {};
        for (int c = 0; c < keys; ++c) {
            for (int w = 0; w < width; ++w) sums[w] = fma(broadcast<T>(a[c]), load<T>(S.at(c) + w * lanes<T>), sums[w]);
        }
        for (int w = 0; w < width; ++w) store<T>(dst + w * lanes<T>, sums[w]);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
