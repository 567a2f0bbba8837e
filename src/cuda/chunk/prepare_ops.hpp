// PrepareOps: the primitives of the algorithm page chunk_scores on tensor cores, for scalar gates and the delta rule.
//
// Four warps share the ten blocks of 16 x 16 tokens on and below the diagonal (LowerBlock). q, k and e enter products
// as they came, once for all value heads of a key head; decays, norms and the scale are factors of the sums.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/meeting_decays.hpp"
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

template <int K, class Format, bool for_gradients>
struct PrepareOps {
    using T = float;
    struct Rows {};  // of which only products are left
    // P, which is stored at once. l gets its factors, betas, as it is found; it stays in registers and, on the diagonal,
    // goes to `inverse`.
    struct Tile {
        LowerImage image, low;  // low: where the image is not enough
        HEADRACE_DEVICE explicit operator bool() const { return static_cast<bool>(image); }
    };
    struct State {};
    static constexpr bool keeps_low = for_gradients || Format::splits_scores;  // all of P's
    using Inputs = algorithms::ChunkInputs<PrepareOps>;
    using Products = float[LowerBlock::turns][2][4];  // this lane's, of the blocks of its warp

    using Meeting = MeetingDecays<for_gradients>;

    // Of all value heads; of the one whose scores are asked for.
    float *meetings, *meetings_of_undecayed;  // [prepared_heads, Meeting's sizes]
    int head;
    ScalarDecays decays;
    Products q_k, e_k;  // of rows; behind finish_products with the scale and a minus
    UnitLowerBlocks inverse;

    float* most_overlap;     // [block_warps] of the parts of rows that a warp has
    float* of_warps;         // [block_warps] the first row that overlaps, or tensor_chunk; behind them of a backward
                             // sums of squares of l
    Products l_own;          // this lane's part of -l times beta
    std::uint32_t overlaps;  // of this lane's rows of blocks, a bit for each (find_overlapping_rows)

    // Of a backward, in the end divided by the betas, none may be zero.
    HEADRACE_DEVICE static float beta_of_solve(float beta) { return for_gradients ? divisible(beta) : beta; }
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
    // Squares of k's rows, which are e, from the diagonal of what multiply_rows left.
    HEADRACE_DEVICE void find_squares(float* k_k) const {
        const LanePlace at;
        const int next = at.row - at.column;  // in an accumulator's pair, where the lane has some of the diagonal
        each_block([&](int turn, LowerBlock block) {
            if (!may_lie_on_diagonal(turn) || !block.on_diagonal()) return;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float square = next == 0 ? e_k[turn][tile][2 * tile] : e_k[turn][tile][2 * tile + 1];
                if (next == 0 || next == 1) k_k[block.row + 8 * tile + at.row] = square;
            }
        });
        ptx::sync_warp();  // or its lanes stay apart
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

    HEADRACE_DEVICE Meeting meeting_of(int value_head) const {
        float* const undecayed = meetings_of_undecayed;
        return {meetings + value_head * Meeting::size,
                undecayed != nullptr ? undecayed + value_head * Meeting::size_of_undecayed : nullptr};
    }

    // What 8 bits leave of the rows that overlap, of others zeros. `beta` as of scores.
    HEADRACE_DEVICE void store_low_scores(LowerImage low, const float* beta) {
        const OwnRows rows = find_own_rows<Wanted::reads>();
        each_block([&](int turn, LowerBlock block) {
            float of_reads[2][4];
            find<Wanted::reads>(of_reads, turn, block, rows, beta);
            each_place(low, block, [&](std::uint32_t& to, int tile, int half) {
                const SplitPair pair = split_pair(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]);
                to = (overlaps >> (2 * (turn % 2) + half) & 1) != 0 ? pair.low : 0;
            });
        });
    }

    // ---- what the page asks for ----
    // P; of a forward P Diag(beta), as its walks keep r and not d = beta r.
    HEADRACE_DEVICE void scores(Tile P, Tile, const Inputs& in) {
        in.undecayed_error ? find_scores<Wanted::undecayed_too>(P, in.beta) : find_scores<Wanted::all>(P, in.beta);
    }
    // What scores left of l's diagonal is there for all warps.
    HEADRACE_DEVICE void scale_columns(Tile, Tile, const float*, float) { ptx::sync_block(); }
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
    // Which of this warp's rows of scores need 16 bits: where keys overlap, what is written are small differences, and
    // what scores make of them is, too. Of a row as far as the warp has it, which follows from no later token. Returns
    // the first of them, or tensor_chunk.
    HEADRACE_DEVICE int find_overlapping_rows(const float (&squares)[LowerBlock::turns][2]) {
        const float most = most_overlap[warp()];
        // What is no number does.
        const auto overlap = [&](float sum) { return sum_of_quad(sum) <= most ? 0u : 1u; };
        overlaps = 0;
        const bool own_rows = LowerBlock(1, warp_of_blocks()).new_rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (own_rows) {
                overlaps |= overlap(squares[0][half]) << half | overlap(squares[1][half]) << (2 + half);
            } else {
                overlaps |= 5 * overlap(squares[0][half] + squares[1][half] + squares[2][half]) << half;
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
    HEADRACE_DEVICE static bool may_lie_on_diagonal(int turn) { return turn + 1 < LowerBlock::turns; }
    HEADRACE_DEVICE static float2 betas_of(const float* beta, int j) {
        const float2 of = *reinterpret_cast<const float2*>(beta + j);
        return {beta_of_solve(of.x), beta_of_solve(of.y)};
    }

    // Scores of reads alone, once more: the same bits; or also -l times beta, and what it says of the chunk's keys, of
    // errors with their own gate's decay or (comba) without.
    enum class Wanted { reads, all, undecayed_too };
    // What this lane's part of l says: sums of its squares times weights, of its rows of blocks, for most_overlap; of a
    // backward the sum of all squares.
    struct Weighed {
        float squares[LowerBlock::turns][2] = {}, energy = 0;
    };

    // Of this lane's rows of the blocks below the diagonal, of which a warp has one row or none: their decays, and
    // where columns' begin.
    struct OwnRows {
        float reads[2], erases[2];
        int columns;
    };

    template <Wanted wanted>
    HEADRACE_DEVICE void find_scores(Tile P, const float* beta) {
        Weighed weighed;
        const OwnRows rows = find_own_rows<wanted>();
        each_block([&](int turn, LowerBlock block) {
            float of_reads[2][4];
            find<wanted>(of_reads, turn, block, rows, beta, &weighed);
            each_place(P.image, block, [&](std::uint32_t& to, int tile, int half) {
                to = Bf16::round(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]);
            });
            if (!keeps_low) return;
            each_place(P.low, block, [&](std::uint32_t& to, int tile, int half) {
                to = split_pair(of_reads[tile][2 * half], of_reads[tile][2 * half + 1]).low;
            });
        });
        const auto of_warp = static_cast<float>(find_overlapping_rows(weighed.squares));
        const float energy = for_gradients ? sum_of_warp(weighed.energy) : 0.0f;
        if (lane() != 0) return;
        of_warps[warp()] = of_warp;
        if constexpr (for_gradients) energy_of_warps()[warp()] = energy;
    }
    template <Wanted wanted>
    HEADRACE_DEVICE void find(float (&of_reads)[2][4], int turn, LowerBlock block, const OwnRows& rows,
                              const float* beta, Weighed* weighed = nullptr) {
        if (may_lie_on_diagonal(turn) && block.on_diagonal()) {
            find_on_diagonal<wanted>(of_reads, turn, block, beta, weighed);
        } else {
            find_below<wanted>(of_reads, turn, block, rows, weighed);
        }
    }
    template <Wanted wanted>
    HEADRACE_DEVICE OwnRows find_own_rows() const {
        constexpr bool undecayed = wanted == Wanted::undecayed_too;
        const LanePlace at;
        const Meeting with = meeting_of(head);
        const int row_of_blocks = 3 - warp_of_blocks(), row = 16 * row_of_blocks + at.row;
        const float reads[2] = {with.read_rows[row], with.read_rows[row + 8]};
        return {{reads[0], reads[1]},
                {undecayed ? with.erase_rows[row] : reads[0], undecayed ? with.erase_rows[row + 8] : reads[1]},
                Meeting::first_of(row_of_blocks) + at.column};
    }
    // Of a block below the diagonal. Squares are added up over columns before they get their rows' decays.
    template <Wanted wanted>
    HEADRACE_DEVICE void find_below(float (&of_reads)[2][4], int turn, LowerBlock block, const OwnRows& rows,
                                    Weighed* weighed) {
        constexpr bool undecayed = wanted == Wanted::undecayed_too;
        const Meeting with = meeting_of(head);
        const int columns = rows.columns + block.column;
        const float(&reads)[2] = rows.reads, (&erases)[2] = rows.erases;
        float squares[2] = {}, energies[2] = {};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const auto pair = [&](const float* from) {
                return *reinterpret_cast<const float2*>(from + columns + 8 * tile);
            };
            const float2 of_read = pair(with.reads), of_erase = for_gradients ? pair(with.erases) : of_read,
                         of_overlap = pair(with.overlaps);
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const int half = place / 2;
                const auto own = [&](float2 of) { return place % 2 == 0 ? of.x : of.y; };
                const float e = e_k[turn][tile][place], read = reads[half] * own(of_read);
                of_reads[tile][place] = q_k[turn][tile][place] * read;
                if constexpr (wanted == Wanted::reads) continue;
                l_own[turn][tile][place] = e * (for_gradients || undecayed ? erases[half] * own(of_erase) : read);
                const float weighted = e * own(of_overlap);
                squares[half] = fmaf(weighted, weighted, squares[half]);
                if constexpr (for_gradients) {
                    const float l = e * own(of_read);
                    energies[half] = fmaf(l, l, energies[half]);
                }
            }
        }
        if constexpr (wanted != Wanted::reads) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float of_row = erases[half] * erases[half];
                weighed->squares[turn][half] = squares[half] * of_row;
                if constexpr (for_gradients) weighed->energy = fmaf(energies[half], of_row, weighed->energy);
            }
        }
    }
    // Of a block on the diagonal, whose l goes to `inverse`, and of whose quarters of 8 x 8 two are of earlier tokens
    // up to the row's own, one of earlier ones alone, and the one above it zero.
    template <Wanted wanted>
    HEADRACE_DEVICE void find_on_diagonal(float (&of_reads)[2][4], int turn, LowerBlock block, const float* beta,
                                          Weighed* weighed) {
        constexpr bool undecayed = wanted == Wanted::undecayed_too;
        const LanePlace at;
        const Between reads(decays, block, 0), erases(decays, block, undecayed ? 1 : 0);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int columns = block.column + 8 * tile + at.column;
            const float2 betas = betas_of(beta, columns);
            float2 roots{};
            if constexpr (wanted != Wanted::reads)
                roots = *reinterpret_cast<const float2*>(meeting_of(head).roots + columns);
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const int half = place / 2, next = place % 2;
                of_reads[tile][place] = 0;
                if constexpr (wanted != Wanted::reads) l_own[turn][tile][place] = 0;
                if (tile > half) continue;
                // Where it is zero no factor may become another number.
                const bool is_before = tile < half || at.column + next < at.row,
                           is_there = tile < half || at.column + next <= at.row;
                const float of_beta = next == 0 ? betas.x : betas.y, decay = reads.decay(tile, place);
                if (is_there)
                    of_reads[tile][place] = q_k[turn][tile][place] * (for_gradients ? decay : decay * of_beta);
                if constexpr (wanted == Wanted::reads) continue;
                const float erased = undecayed ? erases.decay(tile, place) : decay,
                            l = is_before ? e_k[turn][tile][place] * erased : 0.0f;
                if (is_before) l_own[turn][tile][place] = l * of_beta;
                const float of_overlap = l * (next == 0 ? roots.x : roots.y);
                weighed->squares[turn][half] = fmaf(of_overlap, of_overlap, weighed->squares[turn][half]);
                if constexpr (for_gradients) weighed->energy = fmaf(l, l, weighed->energy);
            }
            if constexpr (wanted != Wanted::reads) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    inverse.diagonal_pair(block.row / 16, at.row + 8 * half, at.column + 8 * tile) = {
                        l_own[turn][tile][2 * half], l_own[turn][tile][2 * half + 1]};
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
