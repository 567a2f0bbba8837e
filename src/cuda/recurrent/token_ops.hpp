// TileOps: the primitives of the page of one token on states in memory: row vectors against a state [K,V].
#pragma once

#include "algorithms/recurrent.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

template <class T>
struct TileOps {
    using Tile = cuda::Tile<T>;
    int keys = 0, values = 0;  // padded
    double* dots = nullptr;    // [warps]

    // A column of a state that one thread reads at `from` and leaves at `to`.
    struct Column {
        Tile from, to;
        int keys, j;
        // null: 1
        HEADRACE_DEVICE T values(const T* row) const { return row == nullptr ? T(1) : row[j]; }
        HEADRACE_DEVICE void store_values(T* row, T value) const { row[j] = value; }
        struct Two {
            T a, b;
        };
        HEADRACE_DEVICE Two read_two(const T* a, const T* b) const {
            Two sums{0, 0};
            HEADRACE_ROLLED
            for (int c = 0; c < keys; ++c) sums = {fma(from.at(c, j), a[c], sums.a), fma(from.at(c, j), b[c], sums.b)};
            return sums;
        }
        HEADRACE_DEVICE void write(const algorithms::Token<T>& token, T d) const {
            HEADRACE_ROLLED
            for (int c = 0; c < keys; ++c) to.at(c, j) = decayed(token, c, j, from.at(c, j), token.k[c] * d);
        }
        HEADRACE_DEVICE T read_and_write(const T* q, const algorithms::Token<T>& token, T d) const {
            T sum = 0;
            HEADRACE_ROLLED
            for (int c = 0; c < keys; ++c) sum = fma(from.at(c, j), q[c], sum);
            write(token, d);
            return sum;
        }
    };

    // x decayed + more, the sum rounded once
    HEADRACE_DEVICE static T decayed(const algorithms::Token<T>& token, int c, int j, T x, T more) {
        T whole = token.decay_whole[c], part = token.decay_part[c];
        if (token.value_decay != nullptr) {
            const T whole_value = token.value_whole[j], part_value = token.value_part[j];
            part = fma(part, part_value, fma(whole, part_value, part * whole_value));
            whole *= whole_value;
        }
        return fma(x, whole, fma(x, part, more));
    }

    HEADRACE_DEVICE void multiply_keys(T* dst, const T* a, const T* b) const {
        each(keys, [&](int c) { dst[c] = a[c] * b[c]; });
        ptx::sync_block();
    }
    // b null: 1
    HEADRACE_DEVICE void multiply_values(T* dst, const T* a, const T* b) const {
        each(values, [&](int j) { dst[j] = b == nullptr ? a[j] : a[j] * b[j]; });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void copy_values(T* dst, const T* a) const { multiply_values(dst, a, nullptr); }
    HEADRACE_DEVICE void error_values(T* read, const T* v) const {
        each(values, [&](int j) { read[j] = v[j] - read[j]; });
        ptx::sync_block();
    }
    // In double: with one token and no state, every output rests on these sums, which may cancel.
    HEADRACE_DEVICE double dot_keys(const T* a, const T* b) const { return dot(a, b, keys); }
    HEADRACE_DEVICE double dot_values(const T* a, const T* b) const { return dot(a, b, values); }
    // dst = decay dst + weight a; decay null: 1
    HEADRACE_DEVICE void combine_keys(T* dst, const T* decay, T weight, const T* a) const {
        each(keys, [&](int c) { dst[c] = fma(weight, a[c], decay != nullptr ? dst[c] * decay[c] : dst[c]); });
        ptx::sync_block();
    }
    // dst = factor (read + weight d)
    HEADRACE_DEVICE void combine(T* dst, T factor, const T* read, T weight, const T* d) const {
        each(values, [&](int j) { dst[j] = fma(weight, d[j], read[j]) * factor; });
        ptx::sync_block();
    }
    // dst = S^T a
    HEADRACE_DEVICE void read(T* dst, Tile S, const T* a) const {
        each(values, [&](int j) {
            T sum = 0;
            HEADRACE_ROLLED
            for (int c = 0; c < keys; ++c) sum = fma(a[c], S.at(c, j), sum);
            dst[j] = sum;
        });
        ptx::sync_block();
    }
    // body(column) for all columns of a state, read at `from` and left at `to`
    template <class Body>
    HEADRACE_DEVICE void for_columns(Tile from, Tile to, const Body& body) const {
        each(values, [&](int j) { body(Column{from, to, keys, j}); });
        ptx::sync_block();
    }
    // S += factor a b^T
    HEADRACE_DEVICE void add_outer(Tile S, T factor, const T* a, const T* b) const {
        for_each(S, keys, values, [&](int c, int j) { return fma(factor * a[c], b[j], S.at(c, j)); });
    }
    // dst[c] = factor S[c,:].b
    HEADRACE_DEVICE void rows_times(T* dst, T factor, Tile S, const T* b) const {
        each_row_sum(
            keys, values, [&](int c, int j) { return S.at(c, j) * b[j]; },
            [&](int c, T sum) { dst[c] = factor * sum; });
    }
    // With S' = Diag(decay) S Diag(value_decay) and D' = D + scale q d_o^T, z given: - e z^T: d_decay[c] =
    // D'[c,:].S'[c,:]; d_value_decay = colsum(D' * S'); z given: d_e[c] = -S'[c,:].z; then D <- Diag(decay) D'
    // Diag(value_decay).
    HEADRACE_DEVICE void decay_and_write_adjoint(Tile D, Tile S, const algorithms::Token<T>& token, const T* d_o,
                                                 const T* z, const algorithms::TokenGradients<T>& gradients) const {
        const auto written = [&](int c, int j) {
            const T of_read = token.scale * token.q[c] * d_o[j];
            return z != nullptr ? of_read - token.e[c] * z[j] : of_read;
        };
        const auto state = [&](int c, int j) { return decayed(token, c, j, S.at(c, j), T(0)); };
        each(values, [&](int j) {
            T sum = 0;
            HEADRACE_ROLLED
            for (int c = 0; c < keys; ++c) sum += (D.at(c, j) + written(c, j)) * state(c, j);
            gradients.d_value_decay[j] = sum;
        });
        each_row_sum(
            keys, values, [&](int c, int j) { return (D.at(c, j) + written(c, j)) * state(c, j); },
            [&](int c, T sum) { gradients.d_decay[c] = sum; });
        if (z != nullptr) {
            each_row_sum(
                keys, values, [&](int c, int j) { return state(c, j) * z[j]; },
                [&](int c, T sum) { gradients.d_e[c] = -sum; });
        }
        for_each(D, keys, values, [&](int c, int j) {
            return decayed(token, c, j, D.at(c, j), decayed(token, c, j, written(c, j), T(0)));
        });
    }

  private:
    HEADRACE_DEVICE double dot(const T* a, const T* b, int count) const {
        double sum = 0;
        HEADRACE_ROLLED
        for (int i = static_cast<int>(threadIdx.x); i < count; i += block_threads)
            sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
        sum = sum_of_warp(sum);
        ptx::sync_block();
        if (lane() == 0) dots[warp()] = sum;
        ptx::sync_block();
        double total = 0;
        HEADRACE_ROLLED
        for (int w = 0; w < block_warps; ++w) total += dots[w];
        return total;
    }
};

}  // namespace headrace::cuda
