// AdditiveScores: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the additive
// rule, by the second four warps of a block.
//
// Each has the scores of 16 tokens with all up to them. q and k enter products as they came; decays and norms are
// factors of the sums.
#pragma once

#include "cuda/chunk/meeting_decays.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

template <int K, class Format>
struct AdditiveScores {
    using T = float;
    struct Rows {};  // of which only products are left
    struct Tile {
        Matrix<64> matrix, low;  // low of scores in 16 bits
        HEADRACE_DEVICE void store(const PairsAt<64>& pairs, int tile, int down, float x, float y) const {
            if constexpr (Format::splits_scores) {
                const SplitPair both = split_pair(x, y);
                pairs.of(matrix, tile, down) = both.high, pairs.of(low, tile, down) = both.low;
            } else {
                pairs.of(matrix, tile, down) = ptx::round_to_bf16(x, y);
            }
        }
        HEADRACE_DEVICE explicit operator bool() const { return static_cast<bool>(matrix); }
    };
    using Inputs = algorithms::ChunkInputs<AdditiveScores>;

    ScalarDecays decays;
    float* meetings;               // AdditiveMeetings
    const float *q_norm, *k_norm;  // [C], with l2norm
    bool normalised;
    float* diagonal;  // [C] where scores of tokens with themselves are kept apart, or null
    TokenSums q_k;    // products of this warp's rows of q with those of k

    // What products are multiplied by, of blocks of 16 tokens before this warp's, and of its own.
    float weights[6][4], own_weights[2][4];  // none above the diagonal

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
    HEADRACE_DEVICE void find_weights(float scale) { normalised ? weigh<true>(scale) : weigh<false>(scale); }

    // ---- what the page asks for ----
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs&) const {
        const LanePlace at;
        const int first_row = own_row();
        const PairsAt<64> before(first_row, 0), own(first_row, first_row);
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
                    P.store(before, 2 * block + tile, 8 * half, last[tile][2 * half] * weight[2 * half],
                            last[tile][2 * half + 1] * weight[2 * half + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float pair[2] = {};
#pragma unroll
                for (int odd = 0; odd < 2 && tile <= half; ++odd) {
                    const int place = 2 * half + odd, beyond = at.column + odd - at.row;
                    const float score = last[tile][place] * own_weights[tile][place];
                    if (tile == half && beyond == 0 && diagonal != nullptr)
                        diagonal[first_row + 8 * half + at.row] = score;
                    pair[odd] = tile < half || beyond < 0 || (beyond == 0 && diagonal == nullptr) ? score : 0.0f;
                }
                P.store(own, tile, 8 * half, pair[0], pair[1]);
            }
        }
    }

  private:
    HEADRACE_DEVICE static int own_row() { return warp_here() % block_warps * 16; }
    // What find_weights does, with or without norms.
    template <bool with_norms>
    HEADRACE_DEVICE void weigh(float scale) {
        const LanePlace at;
        const int first_row = own_row();
        const AdditiveMeetings meeting(meetings);
        ScalarDecays::Power own[2];
        float rows[2], below[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + at.row + 8 * half;
            own[half] = decays.at(i), rows[half] = with_norms ? scale * q_norm[i] : scale;
            below[half] = rows[half] * meeting.rows[i];
        }
        const float* const columns = meeting.columns + AdditiveMeetings::first_of(first_row / 16) + at.column;
#pragma unroll
        for (int tile = 0; tile < 6; ++tile) {
            if (8 * tile >= first_row) break;
            float2 column = *reinterpret_cast<const float2*>(columns + 8 * tile);
            if (with_norms) column.x *= k_norm[8 * tile + at.column], column.y *= k_norm[8 * tile + at.column + 1];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                weights[tile][2 * half] = below[half] * column.x, weights[tile][2 * half + 1] = below[half] * column.y;
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int j = first_row + 8 * tile + at.column;
            ScalarDecays::Power of[2];
            decays.pair_at(of, j);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
                for (int half = tile; half < 2; ++half)
                    own_weights[tile][2 * half + odd] = (with_norms ? rows[half] * k_norm[j + odd] : rows[half]) *
                                                        ScalarDecays::between(own[half], of[odd]);
            }
        }
    }
};

}  // namespace headrace::cuda
