// TensorOps: the primitives of the algorithm page chunk_forward on tensor cores, for bf16 tensors and scalar gates.
//
// Eight warps share a chunk of 64 tokens and 64 values. In products with tokens as rows a warp has 16 of them and half
// of the columns; of the state, which stays in registers in fp32, 16 rows (channels). q, k, e and v enter products as
// they came; decays and norms are factors of the sums. Rounded to bf16 on the way are the scores P, what is read of the
// state and what is written into it; docs/decisions/003 says which of it the delta rule computes with 16 bits more.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

inline constexpr int tensor_warps = 8;

template <int K, bool delta>
struct TensorOps {
    using T = float;
    // Rows of the caller's, and what makes them unit vectors (or 1).
    struct Rows {
        Matrix<K> matrix;
        const float* inverse_norm;
    };
    struct Decayed {
        Rows x;
        const float* decays;
        float factor;
    };
    // [C,64]: of values, as high + low, or of scores. [C,C] in fp32: `exact`.
    struct Tile {
        Matrix<tensor_values> high, low;
        cuda::Tile<float> exact;
        HEADRACE_DEVICE explicit operator bool() const { return high || exact; }
    };
    struct State {};  // the one in registers
    using Inputs = algorithms::ChunkInputs<TensorOps>;

    static constexpr int column_groups = K == 128 ? 1 : 2,  // of the state's 64 columns, over the warps
        state_tiles = 8 / column_groups;

    float write_scale;
    ScalarDecays decays;
    DeltaExactness<K> exactness;
    Matrix<tensor_values> S_high, S_low;  // [K,64] the state as products read it
    Tile written;                         // [C,64] what decay_and_write adds, decayed
    cuda::Tile<float> inverse;            // [C,C] of the solve
    Matrix<tensor_values> partner;        // [C,64] rows whose products with the outputs may be wanted (additive rule)
    bool dots_wanted;
    // A pair of a token with itself spans no gate: its score is kept from their sums, where its rounding would show.
    bool diagonal_apart;
    float* diagonal;              // [C]
    float *from_state, *in_all;   // [2,C] these, of the outputs' part from the state and of all, by halves of columns
    float state[state_tiles][4];  // this lane's part of S
    float values[4][4];           // and of the delta rule's residual, then d

    __host__ __device__ void carve(Arena& arena) {
        decays.carve(arena);
        S_high = Matrix<tensor_values>::take(arena, K);
        written.high = Matrix<tensor_values>::take(arena, tensor_chunk);
        if (!delta) return;
        exactness.carve(arena);
        S_low = Matrix<tensor_values>::take(arena, K);
        written.low = Matrix<tensor_values>::take(arena, tensor_chunk);
        inverse = exact_tile(arena);
    }
    // Rows 8 banks apart: lanes of a fragment meet different ones.
    static __host__ __device__ cuda::Tile<float> exact_tile(Arena& arena) {
        const int row = tensor_chunk + 8;
        return {arena.take<float>(static_cast<std::size_t>(tensor_chunk) * row), row};
    }

    // Where a warp works: rows and columns of a product with tokens as rows; rows and columns of the state.
    HEADRACE_DEVICE static int token_row() { return warp() / 2 * 16; }
    HEADRACE_DEVICE static int first_column() { return warp() % 2 * 32; }
    HEADRACE_DEVICE static int state_row() { return warp() / column_groups * 16; }
    HEADRACE_DEVICE static int state_column() { return warp() % column_groups * 32; }

    // f(tile, place, i, j) for this lane's accumulators of [16, 8 tiles] at (row, column).
    template <int tiles, class F>
    HEADRACE_DEVICE static void each_sum(int row, int column, F f) {
        const LanePlace at;
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place)
                f(tile, place, row + at.row + place / 2 * 8, column + 8 * tile + at.column + place % 2);
        }
    }
    // The same by two neighbours in a row: f(tile, place, i, j), j even.
    template <int tiles, class F>
    HEADRACE_DEVICE static void each_pair(int row, int column, F f) {
        const LanePlace at;
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; place += 2)
                f(tile, place, row + at.row + place / 2 * 8, column + 8 * tile + at.column);
        }
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const {
        each_pair<state_tiles>(state_row(), state_column(), [&](int tile, int place, int c, int j) {
            const SplitPair both = split_pair(state[tile][place], state[tile][place + 1]);
            S_high.pair(c, j) = both.high;
            if (delta && exactness.reads()) S_low.pair(c, j) = both.low;
        });
        ptx::sync_block();
        return {};
    }
    HEADRACE_DEVICE void scores(Tile P, Tile l, const Inputs& in) const {
        if (P) {
            float sums[4][4];
            score_sums(sums, in.q, in.k);
            each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
                const float row = in.scale * write_scale * in.q.inverse_norm[i];
                const auto score = [&](int column, float sum) {
                    const float value = sum * (row * in.k.inverse_norm[column]);
                    if (diagonal_apart && column == i) diagonal[i] = value;
                    return column < i || (column == i && !diagonal_apart) ? value * decays.between(i, column) : 0.0f;
                };
                P.high.pair(i, j) =
                    ptx::round_to_bf16(score(j, sums[tile][place]), score(j + 1, sums[tile][place + 1]));
            });
        }
        if (l) {
            float sums[4][4];
            score_sums(sums, in.e, in.k);
            each_sum<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
                const float factor = in.e.inverse_norm[i] * in.k.inverse_norm[j];
                l.exact.at(i, j) =
                    j < i ? sums[tile][place] * factor * decays.between(in.undecayed_error ? i - 1 : i, j) : 0.0f;
            });
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, decays.start, in.scale}; }
    HEADRACE_DEVICE Decayed erases(const Inputs& in) const {
        return {in.e, in.undecayed_error ? decays.before : decays.start, -1};
    }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, decays.end, write_scale}; }

    // values = a + x S
    HEADRACE_DEVICE void add_read(Tile /*values*/, Tile a, Decayed x, State) {
        float sums[4][4] = {};
        read_state(sums, x.x.matrix, S_high);
        if (exactness.reads()) read_state(sums, x.x.matrix, S_low);
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const float factor = x.factor * x.decays[i] * x.x.inverse_norm[i];
            const std::uint32_t own = a.high.pair(i, j);
            values[tile][place] = fmaf(factor, sums[tile][place], low_half(own));
            values[tile][place + 1] = fmaf(factor, sums[tile][place + 1], high_half(own));
        });
    }
    HEADRACE_DEVICE void scale_columns(Tile dst, Tile a, const float* factors, float factor) const {
        for_each(dst.exact, tensor_chunk, tensor_chunk,
                 [&](int i, int j) { return a.exact.at(i, j) * factors[j] * factor; });
    }
    // values <- (I - n)^-1 values, which pass through `x`.
    HEADRACE_DEVICE void solve(Tile x, Tile n) {
        store_values(x);
        UnitLowerInverse{n.exact, inverse}.compute();
#pragma unroll
        for (auto& tile : values)
            for (float& value : tile) value = 0;
        HEADRACE_ROLLED
        for (int d = 0; d <= token_row(); d += 16) {
            const SplitA a = split_a(inverse, token_row(), d);
#pragma unroll
            for (int tile = 0; tile < 4; tile += 2) {
                std::uint32_t high[4], low[4];
                load_b(high, x.high, d, first_column() + 8 * tile);
                load_b(low, x.low, d, first_column() + 8 * tile);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const SplitB b{{high[2 * half], high[2 * half + 1]}, {low[2 * half], low[2 * half + 1]}};
                    multiply(values[tile + half], a, b);
                }
            }
        }
    }
    // values *= factors, which the products read as `dst`.
    HEADRACE_DEVICE void scale_value_rows(Tile dst, Tile /*values*/, const float* factors) {
        each_sum<4>(token_row(), first_column(),
                    [&](int tile, int place, int i, int) { values[tile][place] *= factors[i]; });
        store_values(dst);
        ptx::sync_block();
    }
    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile b) const {
        float sums[4][4] = {};
        read_state(sums, x.x.matrix, S_high);
        if (delta && exactness.reads()) read_state(sums, x.x.matrix, S_low);
        each_sum<4>(token_row(), first_column(), [&](int tile, int place, int i, int) {
            sums[tile][place] *= x.factor * x.decays[i] * x.x.inverse_norm[i];
        });
        if (!delta && dots_wanted) partner_dots(from_state, sums);
        add_scored(sums, P, b.high);
        if (!delta && dots_wanted) partner_dots(in_all, sums);
        if (!delta && diagonal_apart) add_diagonal(sums, b);
        if (delta) add_scored(sums, P, b.low);
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            o.high.pair(i, j) = ptx::round_to_bf16(sums[tile][place], sums[tile][place + 1]);
        });
        ptx::sync_block();
    }
    // S = decayed S + x^T b. Tensor cores cut what they add to; the sum with the state rounds.
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile b) {
        const bool both = delta && exactness.writes();
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const float factor = x.factor * x.decays[i] * x.x.inverse_norm[i];
            float left = values[tile][place], right = values[tile][place + 1];
            if (!delta) left = low_half(b.high.pair(i, j)), right = high_half(b.high.pair(i, j));
            const SplitPair pair = split_pair(left * factor, right * factor);
            written.high.pair(i, j) = pair.high;
            if (both) written.low.pair(i, j) = pair.low;
        });
        ptx::sync_block();
        float sums[state_tiles][4] = {};
        add_written(sums, x.x.matrix, written.high);
        if (both) add_written(sums, x.x.matrix, written.low);
        const SplitDecay<float> decay = split_decay<float>(*decays.through);
#pragma unroll
        for (int tile = 0; tile < state_tiles; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const float S = state[tile][place];
                state[tile][place] = fmaf(S, decay.whole, fmaf(S, decay.part, sums[tile][place]));
            }
        }
    }

  private:
    // sums = x k^T; blocks above the diagonal stay zero.
    HEADRACE_DEVICE static void score_sums(float (&sums)[4][4], Rows x, Rows k) {
#pragma unroll
        for (auto& tile : sums)
            for (float& sum : tile) sum = 0;
        if (first_column() > token_row() + 15) return;
        add_product(
            sums, 0, K, [&](auto& a, int d) { load_a(a, x.matrix, token_row(), d); },
            [&](auto& b, int d, int j) { load_b_transposed(b, k.matrix, d, first_column() + j); });
    }
    HEADRACE_DEVICE static void read_state(float (&sums)[4][4], Matrix<K> x, Matrix<tensor_values> S) {
        add_product(
            sums, 0, K, [&](auto& a, int d) { load_a(a, x, token_row(), d); },
            [&](auto& b, int d, int j) { load_b(b, S, d, first_column() + j); });
    }
    HEADRACE_DEVICE static void add_scored(float (&sums)[4][4], Tile P, Matrix<tensor_values> b) {
        add_product(
            sums, 0, token_row() + 16, [&](auto& a, int d) { load_a(a, P.high, token_row(), d); },
            [&](auto& right, int d, int j) { load_b(right, b, d, first_column() + j); });
    }
    HEADRACE_DEVICE void add_diagonal(float (&sums)[4][4], Tile b) const {
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const std::uint32_t own = b.high.pair(i, j);
            sums[tile][place] = fmaf(diagonal[i], low_half(own), sums[tile][place]);
            sums[tile][place + 1] = fmaf(diagonal[i], high_half(own), sums[tile][place + 1]);
        });
    }
    HEADRACE_DEVICE void partner_dots(float* dots, const float (&sums)[4][4]) const {
        float of_rows[2] = {};
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const std::uint32_t row = partner.pair(i, j);
            float& dot = of_rows[place / 2];
            dot = fmaf(sums[tile][place], low_half(row), fmaf(sums[tile][place + 1], high_half(row), dot));
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float dot = of_rows[half];
            dot += ptx::shuffle_xor(dot, 1);
            dot += ptx::shuffle_xor(dot, 2);
            if (lane() % 4 == 0) dots[warp() % 2 * tensor_chunk + token_row() + lane() / 4 + 8 * half] = dot;
        }
    }
    HEADRACE_DEVICE static void add_written(float (&sums)[state_tiles][4], Matrix<K> x, Matrix<tensor_values> b) {
        add_product(
            sums, 0, tensor_chunk, [&](auto& a, int d) { load_a_transposed(a, x, state_row(), d); },
            [&](auto& right, int d, int j) { load_b(right, b, d, state_column() + j); });
    }
    HEADRACE_DEVICE void store_values(Tile dst) const {
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const SplitPair both = split_pair(values[tile][place], values[tile][place + 1]);
            dst.high.pair(i, j) = both.high;
            dst.low.pair(i, j) = both.low;
        });
    }
};

}  // namespace headrace::cuda
