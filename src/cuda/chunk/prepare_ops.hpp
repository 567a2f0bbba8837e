// PrepareOps: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the delta rule.
//
// Four warps share the ten blocks of 16 x 16 tokens on and below the diagonal. q, k and e enter products as they came,
// once for all value heads of a key head; decays and norms are factors of the sums.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

// What a solve that is to be divided by beta takes for it: next to nothing for nothing.
HEADRACE_DEVICE float divisible(float beta) {
    constexpr float least = 0x1p-60f;
    return fabsf(beta) < least ? least : beta;
}

// Squares of l with so many earlier tokens add up to more in rows whose keys overlap. Of unit keys at random K times
// their sum is distributed as chi squared, and beyond this limit once in 100,000, for 1 to 48 tokens alike.
HEADRACE_DEVICE float most_overlap(const KernelArgs& args, int tokens) {
    const float count = static_cast<float>(tokens);
    return (count + 6 * sqrtf(count) + 12) / static_cast<float>(args.K);
}

// Blocks of 16 x 16 on and below the diagonal of [64,64], up to three for each of four warps that follow each other,
// one after another; those of the first three warps share their rows.
struct LowerBlock {
    static constexpr int turns = 3;
    int row, column;  // of its first element
    bool there, new_rows;
    HEADRACE_DEVICE explicit LowerBlock(int turn) {
        const int own = ptx::not_before(warp() % block_warps);
        const bool corners = own == 3;  // of the diagonal
        row = corners ? 48 * (1 - turn) : 16 * (3 - own);
        column = corners ? row : 16 * turn;
        there = corners || own == 2 ? turn < 2 : true;
        new_rows = turn == 0 || corners;
    }
};

// f(turn, block) for the blocks of this warp
template <class F>
HEADRACE_DEVICE void each_block(F f) {
#pragma unroll
    for (int turn = 0; turn < LowerBlock::turns; ++turn) {
        const LowerBlock block(turn);
        if (block.there) f(turn, block);
    }
}
// f(tile, place, i, j) for this lane's accumulators of a block, by two neighbours in a row.
template <class F>
HEADRACE_DEVICE void each_pair(LowerBlock block, F f) {
    const LanePlace at;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int place = 0; place < 4; place += 2)
            f(tile, place, block.row + at.row + place / 2 * 8, block.column + 8 * tile + at.column);
    }
}

template <int K, class Format>
struct PrepareOps {
    using T = float;
    struct Rows {};  // of which only products are left
    // P, which is stored at once; or what becomes of l, in fp32.
    struct Tile {
        LowerImage image;
        cuda::Tile<float> exact;
        LowerImage low;  // of P, where the image is not enough
        HEADRACE_DEVICE explicit operator bool() const { return image || exact; }
    };
    struct State {};
    using Inputs = algorithms::ChunkInputs<PrepareOps>;

    ScalarDecays decays;                                               // of the value head
    float q_k[LowerBlock::turns][2][4], e_k[LowerBlock::turns][2][4];  // this lane's products of rows

    bool divide_by_beta;  // of a backward: what is made of the betas in the end, so that none may be zero
    float most_overlap;   // of this warp's parts of rows
    float* of_warps;      // [block_warps] behind scale_columns: of a backward sums of squares of l, else the number of
                          // rows that overlap
    float l_own[LowerBlock::turns][2][4];  // this lane's part of l
    float l_energy;                        // sum of its squares
    bool overlaps[LowerBlock::turns][2];   // this lane's rows of blocks (find_overlapping_rows)

    // Products of rows, of the blocks of this warp.
    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k, Matrix<K> e) {
#pragma unroll
        for (int turn = 0; turn < LowerBlock::turns; ++turn)
            for (int tile = 0; tile < 2; ++tile)
                for (int place = 0; place < 4; ++place) q_k[turn][tile][place] = e_k[turn][tile][place] = 0;
        HEADRACE_ROLLED
        for (int d = 0; d < K; d += 16) {
            std::uint32_t left_q[4], left_e[4];
            each_block([&](int turn, LowerBlock at) {
                if (at.new_rows) load_a(left_q, q, at.row, d), load_a(left_e, e, at.row, d);
                std::uint32_t right[4];
                load_b_transposed(right, k, d, at.column);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    Format::multiply(q_k[turn][tile], left_q, {right[2 * tile], right[2 * tile + 1]});
                    Format::multiply(e_k[turn][tile], left_e, {right[2 * tile], right[2 * tile + 1]});
                }
            });
        }
    }
    // The same of unit vectors.
    HEADRACE_DEVICE void normalise(const float* q_norm, const float* k_norm, const float* e_norm) {
        each_block([&](int turn, LowerBlock block) {
            each_score(block, [&](int tile, int place, int i, int j) {
                q_k[turn][tile][place] *= q_norm[i] * k_norm[j];
                e_k[turn][tile][place] *= e_norm[i] * k_norm[j];
            });
        });
    }

    // What 8 bits leave of the rows that overlap, of others zeros, when nothing more follows from l.
    HEADRACE_DEVICE void store_low_scores(LowerImage low, float scale) {
        scores_of<false>(scale, [&](int turn, int half, int to, SplitPair pair) {
            *reinterpret_cast<std::uint32_t*>(low.first + to) = overlaps[turn][half] ? pair.low : 0;
        });
    }

    // ---- what the page asks for ----
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) {
        const auto store = [&](int, int, int to, SplitPair pair) {
            *reinterpret_cast<std::uint32_t*>(P.image.first + to) = pair.high;
            if (P.low) *reinterpret_cast<std::uint32_t*>(P.low.first + to) = pair.low;
        };
        in.undecayed_error ? scores_of<true>(in.scale, store) : scores_of<false>(in.scale, store);
    }
    HEADRACE_DEVICE void scale_columns(Tile dst, Tile, const float* factors, float factor) {
        l_energy = 0;
        each_block([&](int turn, LowerBlock block) {
            const LanePlace at;
            const int j = block.column + at.column, below = block.row + at.row - j;  // of the first
            float* const first = &dst.exact.at(block.row + at.row, j);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float2 of = *reinterpret_cast<const float2*>(factors + j + 8 * tile);
                if (divide_by_beta) of = {divisible(of.x), divisible(of.y)};
                of = {of.x * factor, of.y * factor};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 own{l_own[turn][tile][2 * half], l_own[turn][tile][2 * half + 1]};
                    l_energy = fmaf(own.y, own.y, fmaf(own.x, own.x, l_energy));
                    // Where l is zero none of a factor's may become another number.
                    const int ahead = 8 * tile - 8 * half;
                    *reinterpret_cast<float2*>(first + 8 * half * dst.exact.row + 8 * tile) = {
                        below > ahead ? own.x * of.x : 0.0f, below > ahead + 1 ? own.y * of.y : 0.0f};
                }
            }
        });
        const float of_warp = divide_by_beta           ? sum_of_warp(l_energy)
                              : Format::splits_scores ? 0.0f
                                                       : find_overlapping_rows();
        if (lane() == 0) of_warps[warp()] = of_warp;
        ptx::sync_block();
    }

  private:
    // Which of this warp's rows of scores need 16 bits: where keys overlap, what is written are small differences, and
    // what scores make of them is, too. Of a row as far as the warp has it, which follows from no later token. Returns
    // their number.
    HEADRACE_DEVICE float find_overlapping_rows() {
        float squares[LowerBlock::turns][2] = {};
        each_block([&](int turn, LowerBlock) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const float of = l_own[turn][n / 4][n % 4];
                squares[turn][n / 2 % 2] = fmaf(of, of, squares[turn][n / 2 % 2]);
            }
        });
        const bool own_rows = LowerBlock(1).new_rows;
        float count = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float all = squares[0][half] + squares[1][half] + squares[2][half];
#pragma unroll
            for (int turn = 0; turn < LowerBlock::turns; ++turn) {
                overlaps[turn][half] = sum_of_quad(own_rows ? squares[turn][half] : all) > most_overlap;
                count += overlaps[turn][half] ? 1 : 0;
            }
        }
        return sum_of_warp(count);
    }
    // P by store(turn, half, place in a LowerImage, pair), and l.
    template <bool undecayed_error, class Store>
    HEADRACE_DEVICE void scores_of(float scale, Store store) {
        each_block([&](int turn, LowerBlock block) {
            const Between reads(decays, block, 0), erases(decays, block, undecayed_error ? 1 : 0);
            const LanePlace at;
            const int place = LowerImage::place(block.row + at.row, block.column + at.column);
            const int below = block.row + at.row - block.column - at.column;  // of the first
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int own = 0; own < 4; own += 2) {
                    float of_reads[2];
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const int ahead = 8 * tile + odd - 4 * own;
                        const float decay = reads.decay(tile, own + odd),
                                    erased = undecayed_error ? erases.decay(tile, own + odd) : decay;
                        of_reads[odd] = below >= ahead ? scale * q_k[turn][tile][own + odd] * decay : 0.0f;
                        l_own[turn][tile][own + odd] = below > ahead ? e_k[turn][tile][own + odd] * erased : 0.0f;
                    }
                    store(turn, own / 2, place + 8 * tile + 16 * 4 * own, split_pair(of_reads[0], of_reads[1]));
                }
            }
        });
    }

    // Decays of a lane's pairs of tokens in a block, up to `earlier` tokens before that of the row.
    struct Between {
        ScalarDecays::Power rows[2], columns[4];
        HEADRACE_DEVICE Between(const ScalarDecays& decays, LowerBlock block, int earlier) {
            const LanePlace at;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = block.row + at.row + 8 * half - earlier;
                rows[half] = decays.at(i > 0 ? i : 0);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) columns[c] = decays.at(block.column + c / 2 * 8 + at.column + c % 2);
        }
        HEADRACE_DEVICE float decay(int tile, int place) const {
            return ScalarDecays::between(rows[place / 2], columns[2 * tile + place % 2]);
        }
    };

    // As each_pair, for each of the accumulators.
    template <class F>
    HEADRACE_DEVICE static void each_score(LowerBlock block, F f) {
        each_pair(block,
                  [&](int tile, int place, int i, int j) { f(tile, place, i, j), f(tile, place + 1, i, j + 1); });
    }
};

}  // namespace headrace::cuda
