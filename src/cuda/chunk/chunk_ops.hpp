// ChunkOps: the primitives that the chunk pages of algorithms/ ask for, on a thread block.
#pragma once

#include "algorithms/chunk_backward.hpp"
#include "cuda/chunk/channel_gate.hpp"

namespace headrace::cuda {

// Columns that a warp has at once of values, in a block of up to 64 of them: more would be sums of nothing.
inline constexpr int few_values = 2;

template <class GateType, int value_parts = wide>
struct ChunkOps {
    using T = typename GateType::T;
    using Tile = cuda::Tile<T>;
    // Unit length is given to rows as they are loaded.
    struct Rows {
        Tile rows;
        const T* norm = nullptr;
        HEADRACE_DEVICE operator Tile() const { return rows; }
    };
    using State = Tile;
    using Decayed = typename GateType::Decayed;
    using Inputs = algorithms::ChunkInputs<ChunkOps>;

    static constexpr int state_parts = sizeof(T) == 8 ? wide : value_parts;  // of products with a row for each channel
    GateType gate;
    T* state_dots = nullptr;  // [K], backward only
    int rows = 0, K = 0, V = 0;
    bool undecayed_error = false;

    __host__ __device__ void carve(Arena& arena, int chunk, int key_columns, int value_columns, bool backward) {
        K = key_columns;
        V = value_columns;
        gate.carve(arena, chunk, K);
        if (backward) state_dots = arena.take<T>(K);
    }
    HEADRACE_DEVICE void start_chunk(int padded_rows, Tile log_decay) {
        rows = padded_rows;
        gate.prepare(log_decay, rows);
    }

    HEADRACE_DEVICE State right_state(State S) const { return S; }
    HEADRACE_DEVICE State left_state(State S) const { return S; }
    HEADRACE_DEVICE void scores(Tile P, Tile l, const Inputs& in) const {
        if (P || l) gate.scores(P, l, score_rows(in));
    }
    HEADRACE_DEVICE void scores_backward(Tile d_q, Tile d_k, Tile d_e, Tile d_P, Tile d_l, Tile P, Tile l,
                                         const Inputs& in, bool gate_wanted) const {
        gate.scores_backward(d_q, d_k, d_e, d_P, d_l, P, l, score_rows(in), gate_wanted);
    }

    HEADRACE_DEVICE void scale_value_rows(Tile dst, Tile a, const T* factors) const {
        for_each(dst, rows, V, [&](int i, int j) { return a.at(i, j) * factors[i]; });
    }
    HEADRACE_DEVICE void scale_rows(Tile dst, Tile a, const T* factors, T factor) const {
        for_each(dst, rows, rows, [&](int i, int j) { return a.at(i, j) * factors[i] * factor; });
    }
    HEADRACE_DEVICE void scale_columns(Tile dst, Tile a, const T* factors, T factor) const {
        for_each(dst, rows, rows, [&](int i, int j) { return a.at(i, j) * factors[j] * factor; });
    }
    HEADRACE_DEVICE void negate_scores(Tile x) const {
        for_each(x, rows, rows, [&](int i, int j) { return -x.at(i, j); });
    }
    HEADRACE_DEVICE void value_row_dots(T* dst, Tile a, Tile b) const {
        each_row_sum(
            rows, V, [&](int i, int j) { return a.at(i, j) * b.at(i, j); }, [&](int i, T sum) { dst[i] = sum; });
    }
    HEADRACE_DEVICE void add_through(State S, State D) const {
        each_row_sum(
            K, V, [&](int c, int j) { return S.at(c, j) * D.at(c, j); }, [&](int c, T sum) { state_dots[c] = sum; });
        gate.add_through(state_dots);
    }

    // scale q and -e, decayed from the chunk's start (Comba's erase rows: without the token's own gate).
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return gate.from_chunk_start(in.q, in.scale); }
    HEADRACE_DEVICE Decayed erases(const Inputs& in) const { return erase_from_start(in.e, -1); }
    // Rows decayed from the chunk's start (Comba's erase rows: without the token's own gate), or to its end.
    HEADRACE_DEVICE Decayed from_start(Rows x, T factor) const { return gate.from_chunk_start(x, factor); }
    HEADRACE_DEVICE Decayed erase_from_start(Rows x, T factor) const {
        return undecayed_error ? gate.from_chunk_start_before(x, factor) : gate.from_chunk_start(x, factor);
    }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return gate.to_chunk_end(x); }
    // dst = x
    HEADRACE_DEVICE void assign(Tile dst, Decayed x) const {
        for_each(dst, rows, K, [&](int i, int c) { return x.at(i, c); });
    }

    // dst[C,V] = a + x[C,K] S;  dst = x S + P b or P^T b, P lower;  dst[C,K] = a[C,V] S^T
    HEADRACE_DEVICE void add_read(Tile dst, Tile a, Decayed x, State S) const {
        read(x, S, [&](int i, int j, T sum) { dst.at(i, j) = a.at(i, j) + sum; });
    }
    HEADRACE_DEVICE void read_and_score(Tile dst, Decayed x, State S, Tile P, Tile b) const {
        read(x, S, [&](int i, int j, T sum) { dst.at(i, j) = sum; });
        multiply<T, value_parts>([&](int i, int m) { return P.at(i, m); }, [&](int m, int j) { return b.at(m, j); },
                                 rows, V, rows, Part::a_lower, [&](int i, int j, T sum) { dst.at(i, j) += sum; });
    }
    HEADRACE_DEVICE void read_and_score_transposed(Tile dst, Decayed x, State S, Tile P, Tile b) const {
        read(x, S, [&](int i, int j, T sum) { dst.at(i, j) = sum; });
        multiply<T, value_parts>([&](int i, int m) { return P.at(m, i); }, [&](int m, int j) { return b.at(m, j); },
                                 rows, V, rows, Part::a_upper, [&](int i, int j, T sum) { dst.at(i, j) += sum; });
    }
    HEADRACE_DEVICE void read_keys(Tile dst, Tile a, State S) const {
        multiply<T, wide>([&](int i, int j) { return a.at(i, j); }, [&](int j, int c) { return S.at(c, j); }, rows, K,
                          V, Part::full, [&](int i, int c, T sum) { dst.at(i, c) = sum; });
    }
    // next = decayed S + x^T b (+ y^T z), next may be S; x, y [C,K], b, z [C,V]
    HEADRACE_DEVICE void decay_and_write(State next, State S, Decayed x, Tile b) const {
        write(x, b, [&](int c, int j, T sum) {
            const SplitDecay<T> decay = gate.decay_of_state(c);
            next.at(c, j) = fma(S.at(c, j), decay.whole, fma(S.at(c, j), decay.part, sum));
        });
    }
    HEADRACE_DEVICE void decay_and_write(State next, State S, Decayed x, Tile b, Decayed y, Tile z) const {
        const auto left = [&](int c, int i) { return i < rows ? x.at(i, c) : y.at(i - rows, c); };
        const auto right = [&](int i, int j) { return i < rows ? b.at(i, j) : z.at(i - rows, j); };
        multiply<T, state_parts>(left, right, K, V, 2 * rows, Part::full, [&](int c, int j, T sum) {
            const SplitDecay<T> decay = gate.decay_of_state(c);
            next.at(c, j) = fma(S.at(c, j), decay.whole, fma(S.at(c, j), decay.part, sum));
        });
    }
    // dst = lower part of a b^T, a and b [C,V]
    HEADRACE_DEVICE void outer_lower(Tile dst, Tile a, Tile b) const {
        multiply<T, few_columns>([&](int i, int v) { return a.at(i, v); }, [&](int v, int j) { return b.at(j, v); },
                                 rows, rows, V, Part::lower_sums,
                                 [&](int i, int j, T sum) { dst.at(i, j) = j <= i ? sum : T(0); });
    }
    HEADRACE_DEVICE void solve(Tile x, Tile n) const { solve_unit_lower<Side::lower>(x, n, rows, V); }
    HEADRACE_DEVICE void solve_transposed(Tile x, Tile n) const { solve_unit_lower<Side::transposed>(x, n, rows, V); }

  private:
    template <class Leave>
    HEADRACE_DEVICE void read(Decayed x, State S, Leave leave) const {
        multiply<T, value_parts>([&](int i, int c) { return x.at(i, c); }, [&](int c, int j) { return S.at(c, j); },
                                 rows, V, K, Part::full, leave);
    }
    template <class Leave>
    HEADRACE_DEVICE void write(Decayed x, Tile b, Leave leave) const {
        multiply<T, state_parts>([&](int c, int i) { return x.at(i, c); }, [&](int i, int j) { return b.at(i, j); }, K,
                                 V, rows, Part::full, leave);
    }
    HEADRACE_DEVICE ScoreRows<T> score_rows(const Inputs& in) const {
        return {in.q, in.k, in.e, in.scale, in.undecayed_error};
    }
};

}  // namespace headrace::cuda
