// AdditiveScores: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the additive
// rule, by the second four warps of a block.
//
// They share the ten blocks of 16 x 16 tokens on and below the diagonal. q and k enter products as they came; decays
// and norms are factors of the sums.
#pragma once

#include "cuda/chunk/prepare_ops.hpp"
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
    float* diagonal;                     // [C] where scores of tokens with themselves are kept apart, or null
    float q_k[LowerBlock::turns][2][4];  // this lane's products of rows

    // Of the blocks of this warp.
    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k) {
#pragma unroll
        for (auto& block : q_k) clear(block);
        const auto left_at = OperandAt<K>::down(q), right_at = OperandAt<K>::across(k);
#pragma unroll
        for (int d = 0; d < K; d += 16) {
            std::uint32_t left[4];
            each_block([&](int turn, LowerBlock at) {
                if (at.new_rows) ptx::load_matrix(left, left_at.at(at.row, d));
                std::uint32_t right[4];
                ptx::load_matrix(right, right_at.at(at.column, d));
                Format::multiply(q_k[turn][0], left, {right[0], right[1]});
                Format::multiply(q_k[turn][1], left, {right[2], right[3]});
            });
        }
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) const {
        each_block([&](int turn, LowerBlock block) {
            const Factors factors = factors_of(block, in.scale);
            if (block.column < block.row) {
                each_pair(block, [&](int tile, int place, int i, int j) {
                    const float row = factors.rows[place / 2];
                    P.store(i, j, q_k[turn][tile][place] * (row * factors.columns[2 * tile]),
                            q_k[turn][tile][place + 1] * (row * factors.columns[2 * tile + 1]));
                });
                return;
            }
            each_pair(block, [&](int tile, int place, int i, int j) {
                const ScalarDecays::Power at_i = decays.at(i);
                const auto score = [&](int odd) {
                    const float value =
                        q_k[turn][tile][place + odd] * (factors.rows[place / 2] * factors.columns[2 * tile + odd]);
                    if (diagonal != nullptr && j + odd == i) diagonal[i] = value;
                    const bool kept = j + odd < i || (j + odd == i && diagonal == nullptr);
                    return kept ? value * ScalarDecays::between(at_i, decays.at(j + odd)) : 0.0f;
                };
                P.store(i, j, score(0), score(1));
            });
        });
    }

  private:
    // Of a block's rows and columns. Below the diagonal they are decays too, which meet at the first of the rows: none
    // is above 1, and where their product is not zero, neither is.
    struct Factors {
        float rows[2], columns[4];
    };
    HEADRACE_DEVICE Factors factors_of(LowerBlock block, float scale) const {
        const LanePlace at;
        const bool below = block.column < block.row;
        const ScalarDecays::Power middle = decays.at(block.row);
        Factors of;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = block.row + at.row + 8 * half;
            of.rows[half] = scale;
            if (normalised) of.rows[half] *= q_norm[i];
            if (below) of.rows[half] *= ScalarDecays::between(decays.at(i), middle);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int j = block.column + c / 2 * 8 + at.column + c % 2;
            of.columns[c] = 1;
            if (normalised) of.columns[c] = k_norm[j];
            if (below) of.columns[c] *= ScalarDecays::between(middle, decays.at(j));
        }
        return of;
    }
};

}  // namespace headrace::cuda
