// PrepareOps: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the delta rule.
//
// Four warps share the ten blocks of 16 x 16 tokens on and below the diagonal. q, k and e enter products as they came;
// decays and norms are factors of the sums.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

// Blocks of 16 x 16 on and below the diagonal of [64,64], row by row.
struct LowerBlock {
    static constexpr int count = 10;
    int row, column;  // of its first element
    HEADRACE_DEVICE explicit LowerBlock(int number) {
        const int i = number < 1 ? 0 : number < 3 ? 1 : number < 6 ? 2 : 3;
        row = 16 * i, column = 16 * (number - i * (i + 1) / 2);
    }
};

template <int K>
struct PrepareOps {
    using T = float;
    struct Rows {
        Matrix<K> matrix;
        const float* inverse_norm;
    };
    // P, which is stored at once, as the image of a matrix; or l and what becomes of it, in fp32.
    struct Tile {
        Matrix<64> image;
        cuda::Tile<float> exact;
        HEADRACE_DEVICE explicit operator bool() const { return image || exact; }
    };
    struct State {};
    using Inputs = algorithms::ChunkInputs<PrepareOps>;

    static constexpr int turns = (LowerBlock::count + block_warps - 1) / block_warps;

    ScalarDecays decays;
    float l_sums[turns][2][4];  // this lane's part of l, until it is scaled

    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) {
        each_block([&](int turn, LowerBlock at) {
            float P_sums[2][4] = {}, (&l)[2][4] = l_sums[turn];
#pragma unroll
            for (auto& tile : l)
                for (float& sum : tile) sum = 0;
#pragma unroll 2
            for (int d = 0; d < K; d += 16) {
                std::uint32_t q[4], e[4], k[4];
                load_a(q, in.q.matrix, at.row, d);
                load_a(e, in.e.matrix, at.row, d);
                load_b_transposed(k, in.k.matrix, d, at.column);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    ptx::multiply_bf16(P_sums[tile], q, {k[2 * tile], k[2 * tile + 1]});
                    ptx::multiply_bf16(l[tile], e, {k[2 * tile], k[2 * tile + 1]});
                }
            }
            each_score(at, [&](int tile, int place, int i, int j) {
                const float factor = in.e.inverse_norm[i] * in.k.inverse_norm[j];
                float& score = l[tile][place];
                score = j < i ? score * factor * decays.between(in.undecayed_error ? i - 1 : i, j) : 0.0f;
            });
            each_score(at, [&](int tile, int place, int i, int j) {
                const float factor = in.scale * in.q.inverse_norm[i] * in.k.inverse_norm[j];
                float& score = P_sums[tile][place];
                score = j <= i ? score * factor * decays.between(i, j) : 0.0f;
                if (place % 2 == 1) P.image.pair(i, j - 1) = ptx::round_to_bf16(P_sums[tile][place - 1], score);
            });
        });
    }
    HEADRACE_DEVICE void scale_columns(Tile dst, Tile, const float* factors, float factor) const {
        ptx::sync_block();  // dst may lie where rows were
        each_block([&](int turn, LowerBlock at) {
            each_score(at, [&](int tile, int place, int i, int j) {
                dst.exact.at(i, j) = l_sums[turn][tile][place] * factors[j] * factor;
            });
        });
        ptx::sync_block();
    }

  private:
    // f(turn, block) for the blocks of this warp
    template <class F>
    HEADRACE_DEVICE static void each_block(F f) {
#pragma unroll
        for (int turn = 0; turn < turns; ++turn) {
            const int number = turn * block_warps + warp();
            if (number < LowerBlock::count) f(turn, LowerBlock(number));
        }
    }
    // f(tile, place, i, j) for this lane's accumulators of a block
    template <class F>
    HEADRACE_DEVICE static void each_score(LowerBlock block, F f) {
        const LanePlace at;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place)
                f(tile, place, block.row + at.row + place / 2 * 8, block.column + 8 * tile + at.column + place % 2);
        }
    }
};

}  // namespace headrace::cuda
