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

    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k) {
        const auto rows = OperandAt<K>::down(q).from(own_row());
        const auto row_operand = [&](int step) {
            SplitA a;
            ptx::load_matrix(a.high, rows.at(0, 16 * step));
            return a;
        };
        multiply_lower_rows<K, Format>(q_k, row_operand, k, own_row() / 16);
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) const {
        const LanePlace at;
        const int first_row = own_row();
        const ScalarDecays::Power middle = decays.at(first_row);
        float rows[2];  // factors; below the diagonal's block they are decays too, which meet at the first of the rows
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[half] = in.scale * norm(q_norm, first_row + at.row + 8 * half);
        float last[2][4];  // of the block on the diagonal
        float below[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            below[half] = rows[half] * ScalarDecays::between(decays.at(first_row + at.row + 8 * half), middle);
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            if (16 * block > first_row) break;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int place = 0; place < 4; ++place) last[tile][place] = q_k[2 * block + tile][place];
            }
            if (16 * block == first_row) break;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int j = 16 * block + 8 * tile + at.column;
                float columns[2];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    columns[odd] = norm(k_norm, j + odd) * ScalarDecays::between(middle, decays.at(j + odd));
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    P.store(first_row + at.row + 8 * half, j, last[tile][2 * half] * (below[half] * columns[0]),
                            last[tile][2 * half + 1] * (below[half] * columns[1]));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + at.row + 8 * half;
            const ScalarDecays::Power at_i = decays.at(i);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int j = first_row + 8 * tile + at.column;
                const auto score = [&](int odd) {
                    const float value = last[tile][2 * half + odd] * (rows[half] * norm(k_norm, j + odd));
                    if (diagonal != nullptr && j + odd == i) diagonal[i] = value;
                    const bool kept = j + odd < i || (j + odd == i && diagonal == nullptr);
                    return kept ? value * ScalarDecays::between(at_i, decays.at(j + odd)) : 0.0f;
                };
                P.store(i, j, score(0), score(1));
            }
        }
    }

  private:
    HEADRACE_DEVICE static int own_row() { return warp_here() % block_warps * 16; }
    HEADRACE_DEVICE float norm(const float* of, int i) const { return normalised ? of[i] : 1.0f; }
};

}  // namespace headrace::cuda
