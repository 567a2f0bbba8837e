// RecurrentOps: the primitives of the token page: row vectors against a state [K,V].
#pragma once

#include "algorithms/recurrent.hpp"
#include "cpu/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct RecurrentOps {
    using Tile = cpu::Tile<T>;
    int keys = 0, values = 0;  // padded; values columns of the state

    void multiply_keys(T* dst, const T* a, const T* b) const {
        for (int c = 0; c < keys; c += lanes<T>) store<T>(dst + c, load<T>(a + c) * load<T>(b + c));
    }
    // b null: 1
    void multiply_values(T* dst, const T* a, const T* b) const {
        for (int j = 0; j < values; j += lanes<T>) store<T>(dst + j, b == nullptr ? load<T>(a + j) : load<T>(a + j) * load<T>(b + j));
    }
    void copy_values(T* dst, const T* a) const { multiply_values(dst, a, nullptr); }
    // dst = beta (v - read)
    void delta_values(T* dst, const T* v, const T* read, const T* beta) const {
        for (int j = 0; j < values; j += lanes<T>) store<T>(dst + j, load<T>(beta + j) * (load<T>(v + j) - load<T>(read + j)));
    }
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

    void read(T* dst, Tile S, const T* a) const { read_columns<1>(dst, nullptr, S, a, nullptr); }
    void read_two(T* dst, T* dst2, Tile S, const T* a, const T* b) const { read_columns<2>(dst, dst2, S, a, b); }

    // S <- Diag(decay) S Diag(value_decay) + k d^T
    void decay_and_write(Tile S, const algorithms::Token<T>& token, const T* d) const {
        const T* const k = token.k;
        const int rows = keys, columns = values;
        for (int c = 0; c < rows; ++c) {
            const reg<T> key = broadcast<T>(k[c]);
            T* const row = S.at(c);
            each_decay(token, columns, c, [&](int j, const Decay& decay) __attribute__((always_inline)) {
                store<T>(row + j, decay.of(load<T>(row + j), key * load<T>(d + j)));
            });
        }
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
    // With S' = Diag(decay) S Diag(value_decay) and D' = D + scale q d_o^T, z given: - e z^T: d_decay[c] = D'[c,:].S'[c,:];
    // d_value_decay = colsum(D' * S'); z given: d_e[c] = -S'[c,:].z; then D <- Diag(decay) D' Diag(value_decay).
    void decay_and_write_adjoint(Tile D, Tile S, const algorithms::Token<T>& token, const T* d_o, const T* z,
                                 const algorithms::TokenGradients<T>& gradients) const {
        const int columns = values;
        for (int j = 0; j < columns; ++j) gradients.d_value_decay[j] = 0;
        for (int c = 0; c < keys; ++c) {
            const reg<T> query = broadcast<T>(token.scale * token.q[c]), key = broadcast<T>(token.e[c]);
            reg<T> through = {}, error = {};
            each_decay(token, columns, c, [&](int j, const Decay& decay) __attribute__((always_inline)) {
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
    struct Decay {
        reg<T> whole, part;
        // x decayed + more
        reg<T> of(reg<T> x, reg<T> more) const { return fma(x, whole, fma(x, part, more)); }
    };
    // body(j, the decay of row c of a state in the columns from j on)
    template <class Body>
    [[gnu::always_inline]] static void each_decay(const algorithms::Token<T>& token, int values, int c, const Body& body) {
        const Decay of_key{broadcast<T>(token.decay_whole[c]), broadcast<T>(token.decay_part[c])};
        if (token.value_decay == nullptr) {
            for (int j = 0; j < values; j += lanes<T>) body(j, of_key);
            return;
        }
        for (int j = 0; j < values; j += lanes<T>) {
            const Decay of_value{load<T>(token.value_whole + j), load<T>(token.value_part + j)};
            body(j, Decay{of_key.whole * of_value.whole,
                          fma(of_key.part, of_value.part, fma(of_key.whole, of_value.part, of_key.part * of_value.whole))});
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

    // dst = S^T a and, with count 2, dst2 = S^T b in one walk over the state, four registers of columns at a time.
    template <int count>
    void read_columns(T* dst, T* dst2, Tile S, const T* a, const T* b) const {
        int j = 0;
        for (; j + 4 * lanes<T> <= values; j += 4 * lanes<T>) read_block<count, 4>(dst, dst2, S, a, b, j);
        for (; j < values; j += lanes<T>) read_block<count, 1>(dst, dst2, S, a, b, j);
    }
    template <int count, int width>
    void read_block(T* dst, T* dst2, Tile S, const T* a, const T* b, int j) const {
        reg<T> first[width] = {}, second[width] = {};
        for (int c = 0; c < keys; ++c) {
            for (int w = 0; w < width; ++w) {
                const reg<T> state = load<T>(S.at(c) + j + w * lanes<T>);
                first[w] = fma(broadcast<T>(a[c]), state, first[w]);
                if constexpr (count == 2) second[w] = fma(broadcast<T>(b[c]), state, second[w]);
            }
        }
        for (int w = 0; w < width; ++w) {
            store<T>(dst + j + w * lanes<T>, first[w]);
            if constexpr (count == 2) store<T>(dst2 + j + w * lanes<T>, second[w]);
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
