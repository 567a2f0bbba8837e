// PrepareOps: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the delta rule.
//
// Four warps share the ten blocks of 16 x 16 tokens on and below the diagonal. q, k and e enter products as they came,
// once for all value heads of a key head; decays and norms are factors of the sums.
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

    ScalarDecays decays;                       // of the value head
    float q_k[turns][2][4], e_k[turns][2][4];  // this lane's products of rows

    // Products of rows, of the blocks of this warp.
    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k, Matrix<K> e) {
        each_block([&](int turn, LowerBlock at) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                for (int place = 0; place < 4; ++place) q_k[turn][tile][place] = e_k[turn][tile][place] = 0;
#pragma unroll 2
            for (int d = 0; d < K; d += 16) {
                std::uint32_t left_q[4], left_e[4], right[4];
                load_a(left_q, q, at.row, d);
                load_a(left_e, e, at.row, d);
                load_b_transposed(right, k, d, at.column);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    ptx::multiply_bf16(q_k[turn][tile], left_q, {right[2 * tile], right[2 * tile + 1]});
                    ptx::multiply_bf16(e_k[turn][tile], left_e, {right[2 * tile], right[2 * tile + 1]});
                }
            }
        });
    }

    // ---- what the page asks for ----
    // P; l is made where it is scaled.
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) {
        inputs = in;
        each_block([&](int turn, LowerBlock block) {
            Tokens<4> keys = keys_of(block);
            Tokens<2> queries;
            each_row(block, [&](int half, int i) {
                queries.power[half] = decays.at(i);
                queries.factor[half] = in.scale * in.q.inverse_norm[i];
            });
            float score[2][4];
            each_score(block, [&](int tile, int place, int i, int j) {
                score[tile][place] = j <= i ? q_k[turn][tile][place] * weight(queries, keys, tile, place) : 0.0f;
            });
            each_score(block, [&](int tile, int place, int i, int j) {
                if (place % 2 == 0) P.image.pair(i, j) = ptx::round_to_bf16(score[tile][place], score[tile][place + 1]);
            });
        });
    }
    HEADRACE_DEVICE void scale_columns(Tile dst, Tile, const float* factors, float factor) const {
        each_block([&](int turn, LowerBlock block) {
            Tokens<4> keys = keys_of(block);
            each_key(block, [&](int c, int j) { keys.factor[c] *= factors[j] * factor; });
            Tokens<2> erased;
            each_row(block, [&](int half, int i) {
                erased.power[half] = decays.at(inputs.undecayed_error && i > 0 ? i - 1 : i);
                erased.factor[half] = inputs.e.inverse_norm[i];
            });
            each_score(block, [&](int tile, int place, int i, int j) {
                dst.exact.at(i, j) = j < i ? e_k[turn][tile][place] * weight(erased, keys, tile, place) : 0.0f;
            });
        });
        ptx::sync_block();
    }

  private:
    Inputs inputs{};

    // Of the rows or columns that a lane has of a block.
    template <int count>
    struct Tokens {
        ScalarDecays::Power power[count];
        float factor[count];
    };
    HEADRACE_DEVICE static float weight(const Tokens<2>& rows, const Tokens<4>& columns, int tile, int place) {
        const int row = place / 2, column = 2 * tile + place % 2;
        return rows.factor[row] * columns.factor[column] *
               ScalarDecays::between(rows.power[row], columns.power[column]);
    }
    template <class F>
    HEADRACE_DEVICE static void each_row(LowerBlock block, F f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) f(half, block.row + LanePlace().row + 8 * half);
    }
    template <class F>
    HEADRACE_DEVICE static void each_key(LowerBlock block, F f) {
#pragma unroll
        for (int c = 0; c < 4; ++c) f(c, block.column + c / 2 * 8 + LanePlace().column + c % 2);
    }
    HEADRACE_DEVICE Tokens<4> keys_of(LowerBlock block) const {
        Tokens<4> keys;
        each_key(block, [&](int c, int j) {
            keys.power[c] = decays.at(j);
            keys.factor[c] = inputs.k.inverse_norm[j];
        });
        return keys;
    }

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
