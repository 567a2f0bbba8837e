// AdditiveScores: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the additive
// rule, by the second four warps of a block.
//
// Each has the scores of 16 tokens with all up to them. q and k enter products as they came; decays and norms are
// factors of the sums.
#pragma once

#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

template <int K, class Format>
struct AdditiveScores {
    using T = float;
    struct Rows {};  // of which only products are left
    struct Tile {
        Matrix<64> matrix, low;  // low of scores in 16 bits
        HEADRACE_DEVICE void store(int i, int j, float x, float y) const {
            if constexpr (Format::splits_scores) {
                const SplitPair both = split_pair(x, y);
                matrix.pair(i, j) = both.high, low.pair(i, j) = both.low;
            } else {
                matrix.pair(i, j) = ptx::round_to_bf16(x, y);
            }
        }
        HEADRACE_DEVICE explicit operator bool() const { return static_cast<bool>(matrix); }
    };
    using Inputs = algorithms::ChunkInputs<AdditiveScores>;

    ScalarDecays decays;
    const float *q_norm, *k_norm;  // [C], with l2norm
    bool normalised;
    float* diagonal;  // [C] where scores of tokens with themselves are kept apart, or null
    TokenSums q_k;    // products of this warp's rows of q with those of k

    // What products are multiplied by, of blocks of 16 tokens before this warp's, and of its own.
    float weights[6][4], own_weights[2][4];

    // meanwhile() while products of groups go on.
    template <class Meanwhile = group_products::Nothing>
    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k, Meanwhile meanwhile = {}) {
        const auto rows = OperandAt<K>::down(q).from(own_row());
        const auto row_operand = [&](int step) {
            SplitA a;
            ptx::load_matrix(a.high, rows.at(0, 16 * step));
            return a;
        };
        multiply_lower_rows<K, Format>(q_k, row_operand, k, own_row() / 16, meanwhile);
    }
    // From decays and norms, times `scale`.
    HEADRACE_DEVICE void find_weights(float scale) {
        const LanePlace at;
        const int first_row = own_row();
        const ScalarDecays::Power middle = decays.at(first_row);
        ScalarDecays::Power own[2];
        // Factors; below the diagonal's block they are decays too, which meet at the first row.
        float rows[2], below[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + at.row + 8 * half;
            own[half] = decays.at(i), rows[half] = scale * norm(q_norm, i);
            below[half] = rows[half] * ScalarDecays::between(own[half], middle);
        }
#pragma unroll
        for (int tile = 0; tile < 6; ++tile) {
            if (8 * tile >= first_row) break;
            each_column(8 * tile + at.column, [&](int odd, ScalarDecays::Power at_j, float norm_of_j) {
                const float column = norm_of_j * ScalarDecays::between(middle, at_j);
                weights[tile][odd] = below[0] * column, weights[tile][2 + odd] = below[1] * column;
            });
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            each_column(first_row + 8 * tile + at.column, [&](int odd, ScalarDecays::Power at_j, float norm_of_j) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    own_weights[tile][2 * half + odd] = rows[half] * norm_of_j * ScalarDecays::between(own[half], at_j);
            });
        }
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs&) const {
        const LanePlace at;
        const int first_row = own_row();
        float last[2][4];  // of the block on the diagonal
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            if (16 * block > first_row) break;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int place = 0; place < 4; ++place) last[tile][place] = q_k[2 * block + tile][place];
            }
            if (block == 3 || 16 * block == first_row) break;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float(&weight)[4] = weights[block < 3 ? 2 * block + tile : 0];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    P.store(first_row + at.row + 8 * half, 16 * block + 8 * tile + at.column,
                            last[tile][2 * half] * weight[2 * half], last[tile][2 * half + 1] * weight[2 * half + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + at.row + 8 * half;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int j = first_row + 8 * tile + at.column;
                const auto score = [&](int odd) {
                    const float value = last[tile][2 * half + odd] * own_weights[tile][2 * half + odd];
                    if (diagonal != nullptr && j + odd == i) diagonal[i] = value;
                    return j + odd < i || (j + odd == i && diagonal == nullptr) ? value : 0.0f;
                };
                P.store(i, j, score(0), score(1));
            }
        }
    }

  private:
    HEADRACE_DEVICE static int own_row() { return warp_here() % block_warps * 16; }
    // f(odd, decay, norm) of the token j, even, and the next.
    template <class F>
    HEADRACE_DEVICE void each_column(int j, F f) const {
        ScalarDecays::Power of[2];
        decays.pair_at(of, j);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) f(odd, of[odd], norm(k_norm, j + odd));
    }
    HEADRACE_DEVICE float norm(const float* of, int i) const { return normalised ? of[i] : 1.0f; }
};

}  // namespace headrace::cuda
