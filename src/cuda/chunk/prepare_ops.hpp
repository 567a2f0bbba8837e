// PrepareOps: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the delta rule.
//
// Four warps share the ten blocks of 16 x 16 tokens on and below the diagonal (LowerBlock). q, k and e enter products
// as they came, once for all value heads of a key head; decays, norms and the scale are factors of the sums.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/tiles/unit_lower_blocks.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// What a solve that is to be divided by beta takes for it: next to nothing for nothing.
HEADRACE_DEVICE float divisible(float beta) {
    constexpr float least = 0x1p-60f;
    return fabsf(beta) < least ? least : beta;
}

// Squares of l with so many earlier tokens, times their weights (overlap_weight), add up to more in rows whose keys
// overlap. Of unit keys at random K times the sum of squares is distributed as chi squared, and beyond this limit once
// in 100,000, for 1 to 48 tokens alike.
HEADRACE_DEVICE float most_overlap(const KernelArgs& args, int tokens) {
    const float count = static_cast<float>(tokens);
    return (count + 6 * ptx::root_approximate(count) + 12) * ptx::inverse_approximate(static_cast<float>(args.K));
}
// Of an earlier token: one that reflects writes more than is left of it.
HEADRACE_DEVICE float overlap_weight(float beta) {
    constexpr float of_square = 1 / 1.5f;
    return fmaxf(beta * (beta * of_square), 1.0f);
}

template <int K, class Format, bool for_gradients>
struct PrepareOps {
    using T = float;
    struct Rows {};  // of which only products are left
    // P, which is stored at once. What becomes of l stays in registers, on the diagonal it goes to `inverse`.
    struct Tile {
        LowerImage image, low;  // low: where the image is not enough
        HEADRACE_DEVICE explicit operator bool() const { return static_cast<bool>(image); }
    };
    struct State {};
    static constexpr bool keeps_low = for_gradients || Format::splits_scores,  // all of P's
        finds_overlap = !Format::splits_scores;                                // in rows of l
    using Inputs = algorithms::ChunkInputs<PrepareOps>;
    using Products = float[LowerBlock::turns][2][4];  // this lane's, of the blocks of its warp

    ScalarDecays decays;      // of the value head
    Products q_k, e_k;        // of rows; behind finish_products with the scale and a minus
    UnitLowerBlocks inverse;

    float* most_overlap;  // [block_warps] of the parts of rows that a warp has
    float* of_warps;      // [block_warps] behind scale_columns: the first row that overlaps, or tensor_chunk; behind
                          // them of a backward sums of squares of l
    Products l_own;      // this lane's part of -l; behind scale_columns of what becomes of it
    std::uint32_t overlaps;  // of this lane's rows of blocks, a bit for each (find_overlapping_rows)

    HEADRACE_DEVICE float* energy_of_warps() const { return of_warps + block_warps; }
    // Products of rows, of the blocks of this warp.
    HEADRACE_DEVICE void multiply_rows(Matrix<K> q, Matrix<K> k, Matrix<K> e) {
        const int own = warp_of_blocks();
        const LowerBlock blocks[LowerBlock::turns] = {{0, own}, {1, own}, {2, own}};
        const auto left_q = OperandAt<K>::down(q), left_e = OperandAt<K>::down(e), right = OperandAt<K>::across(k);
#pragma unroll
        for (int turn = 0; turn < LowerBlock::turns; ++turn) clear(q_k[turn]), clear(e_k[turn]);
#pragma unroll 8
        for (int d = 0; d < K; d += 16) {
            std::uint32_t of_q[4], of_e[4];
#pragma unroll
            for (int turn = 0; turn < LowerBlock::turns; ++turn) {
                const LowerBlock& block = blocks[turn];
                if (!block.there) continue;
                if (block.new_rows) {
                    ptx::load_matrix(of_q, left_q.from(block.row).at(0, d));
                    ptx::load_matrix(of_e, left_e.from(block.row).at(0, d));
                }
                std::uint32_t of_k[4];
                ptx::load_matrix(of_k, right.from(block.column).at(0, d));
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    Format::multiply(q_k[turn][tile], of_q, {of_k[2 * tile], of_k[2 * tile + 1]});
                    Format::multiply(e_k[turn][tile], of_e, {of_k[2 * tile], of_k[2 * tile + 1]});
                }
            }
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
    HEADRACE_DEVICE void finish_products(float scale) {
#pragma unroll
        for (int turn = 0; turn < LowerBlock::turns; ++turn) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                q_k[turn][n / 4][n % 4] *= scale;
                e_k[turn][n / 4][n % 4] = 0 - e_k[turn][n / 4][n % 4];  // once, not at each use
            }
        }
    }

    // What 8 bits leave of the rows that overlap, of others zeros. `beta` as of scores.
    HEADRACE_DEVICE void store_low_scores(LowerImage low, const float* beta) {
        each_block([&](int turn, LowerBlock block) {
            float of_reads[2][4];
            find_reads(of_reads, turn, block);
            scale_by_column(of_reads, block, beta);
            each_place(low, block, [&](std::uint32_t& to, int tile, int half) {
                const SplitPair pair = split_pair(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]);
                to = (overlaps >> (2 * (turn % 2) + half) & 1) != 0 ? pair.low : 0;
            });
        });
    }

    // ---- what the page asks for ----
    // P; of a forward P Diag(beta), as its walks keep r and not d = beta r.
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) {
        each_block([&](int turn, LowerBlock block) {
            float of_reads[2][4];
            in.undecayed_error ? find_scores<true>(of_reads, turn, block) : find_scores<false>(of_reads, turn, block);
            if constexpr (!for_gradients) scale_by_column(of_reads, block, in.beta);
            each_place(P.image, block, [&](std::uint32_t& to, int tile, int half) {
                to = Bf16::round(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]);
            });
            if (!keeps_low) return;
            each_place(P.low, block, [&](std::uint32_t& to, int tile, int half) {
                to = split_pair(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]).low;
            });
        });
    }
    HEADRACE_DEVICE void scale_columns(Tile, Tile, const float* factors, float factor) {
        float of_warp = tensor_chunk;
        const float energy = for_gradients ? energy_of_warp() : 0.0f;
        float squares[LowerBlock::turns][2] = {};  // of this lane's rows of blocks, for most_overlap
        each_block([&](int turn, LowerBlock block) {
            const LanePlace at;
            float(&own)[2][4] = l_own[turn];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float2 of = *reinterpret_cast<const float2*>(factors + block.column + at.column + 8 * tile);
                // Of a backward, in the end divided by the betas, none may be zero.
                if (for_gradients) of = {divisible(of.x), divisible(of.y)};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float &x = own[tile][2 * half], &y = own[tile][2 * half + 1], &sum = squares[turn][half];
                    if constexpr (finds_overlap) {
                        sum = fmaf(x * overlap_weight(of.x), x, fmaf(y * overlap_weight(of.y), y, sum));
                    }
                    x *= of.x * -factor, y *= of.y * -factor;
                }
            }
            if (!block.on_diagonal()) return;
            clear_from_diagonal<false>(own);  // where l is zero no factor may become another number
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    inverse.diagonal_pair(block.row / 16, at.row + 8 * half, at.column + 8 * tile) = {
                        own[tile][2 * half], own[tile][2 * half + 1]};
            }
        });
        if constexpr (finds_overlap) of_warp = static_cast<float>(find_overlapping_rows(squares));
        if (lane() == 0) {
            of_warps[warp()] = of_warp;
            if constexpr (for_gradients) energy_of_warps()[warp()] = energy;
        }
        ptx::sync_block();
    }
    // What has become of l.
    HEADRACE_DEVICE void spread(cuda::Tile<float> to) const {
        each_block([&](int turn, LowerBlock block) {
            each_pair(block, [&](int tile, int place, int i, int j) {
                *reinterpret_cast<float2*>(&to.at(i, j)) = {l_own[turn][tile][place], l_own[turn][tile][place + 1]};
            });
        });
        ptx::sync_block();
    }

  private:
    // Sum of the squares of the warp's part of l.
    HEADRACE_DEVICE float energy_of_warp() const {
        float sum = 0;
        each_block([&](int turn, LowerBlock) {
#pragma unroll
            for (int n = 0; n < 8; ++n) sum = fmaf(l_own[turn][n / 4][n % 4], l_own[turn][n / 4][n % 4], sum);
        });
        return sum_of_warp(sum);
    }
    // Which of this warp's rows of scores need 16 bits: where keys overlap, what is written are small differences, and
    // what scores make of them is, too. Of a row as far as the warp has it, which follows from no later token. Returns
    // the first of them, or tensor_chunk.
    HEADRACE_DEVICE int find_overlapping_rows(const float (&squares)[LowerBlock::turns][2]) {
        const bool own_rows = LowerBlock(1, warp_of_blocks()).new_rows;
        const float most = most_overlap[warp()];
        overlaps = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float all = squares[0][half] + squares[1][half] + squares[2][half];
#pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                if (sum_of_quad(own_rows ? squares[turn][half] : all) > most) overlaps |= 1u << (2 * turn + half);
            }
        }
        int first = tensor_chunk;
        if (!ptx::any_of_warp(overlaps != 0)) return first;
        const LanePlace at;
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = LowerBlock(turn, warp_of_blocks()).row + at.row + 8 * half;
                if ((overlaps >> (2 * turn + half) & 1) != 0 && row < first) first = row;
            }
        }
#pragma unroll
        for (int distance = 4; distance < warp_lanes; distance *= 2) {  // lanes of a quad have the same rows
            const int other = ptx::shuffle_xor(first, distance);
            first = other < first ? other : first;
        }
        return first;
    }
    HEADRACE_DEVICE static void scale_by_column(float (&own)[2][4], LowerBlock block, const float* factors) {
        const LanePlace at;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float2 of = *reinterpret_cast<const float2*>(factors + block.column + at.column + 8 * tile);
            own[tile][0] *= of.x, own[tile][1] *= of.y, own[tile][2] *= of.x, own[tile][3] *= of.y;
        }
    }

    // Of a block: scores of reads, and -l.
    template <bool undecayed_error>
    HEADRACE_DEVICE void find_scores(float (&of_reads)[2][4], int turn, LowerBlock block) {
        const Between reads(decays, block, 0), erases(decays, block, undecayed_error ? 1 : 0);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const float decay = reads.decay(tile, place),
                            erased = undecayed_error ? erases.decay(tile, place) : decay;
                of_reads[tile][place] = q_k[turn][tile][place] * decay;
                l_own[turn][tile][place] = e_k[turn][tile][place] * erased;
            }
        }
        if (!block.on_diagonal()) return;
        clear_from_diagonal<true>(of_reads);
        clear_from_diagonal<false>(l_own[turn]);
    }
    HEADRACE_DEVICE void find_reads(float (&of_reads)[2][4], int turn, LowerBlock block) const {
        const Between reads(decays, block, 0);
#pragma unroll
        for (int n = 0; n < 8; ++n) of_reads[n / 4][n % 4] = q_k[turn][n / 4][n % 4] * reads.decay(n / 4, n % 4);
        if (block.on_diagonal()) clear_from_diagonal<true>(of_reads);
    }
    // Of a block on the diagonal: what lies above it, or on it too.
    template <bool keeps_diagonal>
    HEADRACE_DEVICE static void clear_from_diagonal(float (&own)[2][4]) {
        const LanePlace at;
        const int below = at.row - at.column;  // of the first
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const int ahead = 8 * tile + place % 2 - place / 2 * 8;
                if (keeps_diagonal ? below < ahead : below <= ahead) own[tile][place] = 0;
            }
        }
    }

    // Decays of a lane's pairs of tokens in a block, up to `earlier` tokens before that of the row.
    struct Between {
        ScalarDecays::Power rows[2], columns[2][2];
        HEADRACE_DEVICE Between(const ScalarDecays& decays, LowerBlock block, int earlier) {
            const LanePlace at;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = block.row + at.row + 8 * half - earlier;
                rows[half] = decays.at(i > 0 ? i : 0);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) decays.pair_at(columns[tile], block.column + 8 * tile + at.column);
        }
        HEADRACE_DEVICE float decay(int tile, int place) const {
            return ScalarDecays::between(rows[place / 2], columns[tile][place % 2]);
        }
    };

    // f(place in the image, tile, half) for the pairs of this lane's accumulators of a block.
    template <class F>
    HEADRACE_DEVICE static void each_place(LowerImage image, LowerBlock block, F f) {
        const LanePlace at;
        std::uint16_t* const first = image.first + (256 * block.number + 16 * at.row + at.column);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                f(*reinterpret_cast<std::uint32_t*>(first + 8 * tile + 16 * 8 * half), tile, half);
        }
    }
    // As each_pair, for each of the accumulators.
    template <class F>
    HEADRACE_DEVICE static void each_score(LowerBlock block, F f) {
        each_pair(block,
                  [&](int tile, int place, int i, int j) { f(tile, place, i, j), f(tile, place + 1, i, j + 1); });
    }
};

}  // namespace headrace::cuda
