// TensorOps: the primitives of the algorithm page chunk_forward on tensor cores, for the additive rule.
//
// Eight warps share a chunk of 64 tokens and 64 values. In products with tokens as rows a warp has 16 of them and half
// of the columns; of the state, which stays in registers in fp32, 16 rows (channels). q, k, e and v enter products as
// they came; decays and norms are factors of the sums. Rounded to bf16 on the way are the scores P, what is read of the
// state and what is written into it.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/tensor_decays.hpp"

namespace headrace::cuda {

inline constexpr int tensor_warps = 8;

template <int K>
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
    // [C,64]: of values or of scores.
    struct Tile {
        Matrix<tensor_values> high;
        HEADRACE_DEVICE explicit operator bool() const { return static_cast<bool>(high); }
    };
    struct State {};  // the one in registers
    using Inputs = algorithms::ChunkInputs<TensorOps>;

    static constexpr int column_groups = K == 128 ? 1 : 2,  // of the state's 64 columns, over the warps
        state_tiles = 8 / column_groups;

    float write_scale;
    ScalarDecays decays;
    float *start, *end;             // [C] e^{G_i}, e^{G_L - G_i}
    double* through;                // [1] e^{G_L}
    Matrix<tensor_values> S_high;   // [K,64] the state as products read it
    Matrix<tensor_values> written;  // [C,64] what decay_and_write adds, decayed
    Matrix<tensor_values> partner;  // [C,64] rows whose products with the outputs may be wanted (additive rule)
    bool dots_wanted;
    // A pair of a token with itself spans no gate: its score is kept from their sums, where its rounding would show.
    bool diagonal_apart;
    float* diagonal;              // [C]
    float *from_state, *in_all;   // [2,C] these, of the outputs' part from the state and of all, by halves of columns
    float state[state_tiles][4];  // this lane's part of S

    __host__ __device__ void carve(Arena& arena) {
        decays.carve(arena);
        for (float** vector : {&start, &end}) *vector = arena.take<float>(tensor_chunk);
        through = arena.take<double>(1);
        S_high = Matrix<tensor_values>::take(arena, K);
        written = Matrix<tensor_values>::take(arena, tensor_chunk);
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
            S_high.pair(c, j) = ptx::round_to_bf16(state[tile][place], state[tile][place + 1]);
        });
        ptx::sync_block();
        return {};
    }
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) const {
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
        ptx::sync_block();
    }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, start, in.scale}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, end, write_scale}; }

    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile b) const {
        float sums[4][4] = {};
        read_state(sums, x.x.matrix, S_high);
        each_sum<4>(token_row(), first_column(), [&](int tile, int place, int i, int) {
            sums[tile][place] *= x.factor * x.decays[i] * x.x.inverse_norm[i];
        });
        if (dots_wanted) partner_dots(from_state, sums);
        add_scored(sums, P, b.high);
        if (dots_wanted) partner_dots(in_all, sums);
        if (diagonal_apart) add_diagonal(sums, b);
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            o.high.pair(i, j) = ptx::round_to_bf16(sums[tile][place], sums[tile][place + 1]);
        });
        ptx::sync_block();
    }
    // S = decayed S + x^T b. Tensor cores cut what they add to; the sum with the state rounds.
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile b) {
        each_pair<4>(token_row(), first_column(), [&](int tile, int place, int i, int j) {
            const float factor = x.factor * x.decays[i] * x.x.inverse_norm[i];
            const std::uint32_t own = b.high.pair(i, j);
            written.pair(i, j) = ptx::round_to_bf16(low_half(own) * factor, high_half(own) * factor);
        });
        ptx::sync_block();
        float sums[state_tiles][4] = {};
        add_written(sums, x.x.matrix, written);
        const SplitDecay<float> decay = split_decay<float>(*through);
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
};

}  // namespace headrace::cuda
