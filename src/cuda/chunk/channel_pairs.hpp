// ChannelPairs: what the pairs of tokens of a chunk give the gradients of rows and gates under channel gates.
#pragma once

#include "cuda/chunk/channel_tokens.hpp"

namespace headrace::cuda {

// Gradients of a warp's 16 channels over the chunk's tokens.
using TokenGroups = TokenGroup[token_groups];

// Blocks of 16 x 16 of a matrix over pairs of tokens as right operands.
struct PairOperands {
    OperandAt<tensor_chunk> across, down;
    HEADRACE_DEVICE explicit PairOperands(Matrix<tensor_chunk> m)
        : across(OperandAt<tensor_chunk>::across(m)), down(OperandAt<tensor_chunk>::down(m)) {}
    // Of later tokens as columns, the depth earlier ones; and the other way.
    HEADRACE_DEVICE void load_later(std::uint32_t (&b)[4], int later, int earlier) const {
        ptx::load_matrix(b, across.at(group_tokens * later, group_tokens * earlier));
    }
    HEADRACE_DEVICE void load_earlier(std::uint32_t (&b)[4], int later, int earlier) const {
        ptx::load_matrix_transposed(b, down.at(group_tokens * later, group_tokens * earlier));
    }
};

// W and L [64,64] are the gradients of the scores, without decays: blocks of 16 x 16 below the diagonal, and those on
// it symmetric, diagonals left out. A pair of tokens meets at an anchor (docs/math.md, section 8), where W and L are
// multiplied by rows with decays from there to the later token, or from the earlier one to there, in bf16. Both
// directions of a level are one product: with x and y two tokens of a block of 2^(level+1) in different halves, decays
// f to the anchor and row m = q in the later half, k in the earlier one,
//     f_x reads_x, reads_x = sum_y W_xy f_y m_y,       joins d_q in the later half, d_k in the earlier one
//     f_x erases_x, erases_x = sum_y L_xy f_y k_y,     joins d_k
// and f_x (m_x reads_x + k_x erases_x) is what token x adds to all gates between it and the anchor.
template <int K, bool delta>
struct ChannelPairs {
    OperandAt<K> q, k;  // across
    PairOperands W, L;
    Digits of_rows;      // what of decayed rows enters
    Tile<float> decays;  // [64 tokens, K] from the lane's first token and channel on
    int channel;         // the warp's first
    float4* kept;        // [12, threads] of since (groups 1 to 3) and until (0 to 2) in whole groups
    const float (&through)[token_groups][2];
    const GateSums& sums;

    // ---- inside groups of 16 tokens ----
    HEADRACE_DEVICE void add_inside(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate) const {
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            const int first = group_tokens * group;
            Inside inside;
            load_group(inside.q, q, channel, first);
            load_group(inside.k, k, channel, first);
            W.load_later(inside.W, group, group);
            if (delta) L.load_later(inside.L, group, group);
            inside.decays.load(decays.from(first, 0));
            add_level<0>(d_q[group], d_k[group], d_gate[group], inside);
            add_level<1>(d_q[group], d_k[group], d_gate[group], inside);
            add_level<2>(d_q[group], d_k[group], d_gate[group], inside);
            add_level<3>(d_q[group], d_k[group], d_gate[group], inside);
        }
    }
    // ---- between them ----
    // Sums over several groups are added up from the farthest one on, multiplied by the decays of groups on the way.
    HEADRACE_DEVICE void add_across(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate) const {
        std::uint32_t reads[token_groups][4], erases[token_groups][4];
        {
            std::uint32_t keys[token_groups - 1][4];
#pragma unroll
            for (int group = 0; group < token_groups - 1; ++group) {
                TokenGroup rows, until;
                load_group(rows, k, channel, group_tokens * group);
                take(until, of_until(group));
                multiply(until, rows);
                to_operand(keys[group], until, of_rows);
            }
#pragma unroll
            for (int group = 1; group < token_groups; ++group)
                add_earlier(d_q[group], d_k[group], d_gate[group], reads[group], erases[group], keys, group);
        }
#pragma unroll
        for (int group = token_groups - 2; group >= 0; --group) add_later(d_k[group], d_gate, reads, erases, group);
    }

    // Where `kept` has them.
    static HEADRACE_DEVICE int of_since(int group) { return 2 * (group - 1); }
    static HEADRACE_DEVICE int of_until(int group) { return 6 + 2 * group; }
    HEADRACE_DEVICE void keep(const TokenGroup& x, int place) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            kept[(place + h) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)] = {x[h][0], x[h][1],
                                                                                                x[h][2], x[h][3]};
    }

  private:
    struct Inside {
        TokenGroup q, k;
        GroupDecays decays;
        std::uint32_t W[4], L[4];
    };

    HEADRACE_DEVICE void take(TokenGroup& x, int place) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 of = kept[(place + h) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
            x[h][0] = of.x, x[h][1] = of.y, x[h][2] = of.z, x[h][3] = of.w;
        }
    }
    static HEADRACE_DEVICE void multiply(TokenGroup& x, const TokenGroup& y) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) x[h][n] *= y[h][n];
        }
    }

    // Pairs that meet at a level, and on to blocks of the next one.
    template <int level>
    HEADRACE_DEVICE void add_level(TokenGroup& d_q, TokenGroup& d_k, TokenGroup& d_gate, Inside& inside) const {
        GroupDecays& decays = inside.decays;
        TokenGroup factors, rows, keys, reads = {}, erases = {}, gates;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const bool later = GroupDecays::later<level>(h, n % 2);
                factors[h][n] = later ? decays.since[h][n] : decays.until[h][n];
                rows[h][n] = (later ? inside.q[h][n] : inside.k[h][n]) * factors[h][n];
                keys[h][n] = inside.k[h][n] * factors[h][n];
            }
        }
        multiply_level<level>(reads, rows, inside.W);
        if (delta) multiply_level<level>(erases, keys, inside.L);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const bool later = GroupDecays::later<level>(h, n % 2);
                const float of = factors[h][n], both = reads[h][n] + erases[h][n];
                d_q[h][n] = fmaf(of, later ? reads[h][n] : 0.0f, d_q[h][n]);
                d_k[h][n] = fmaf(of, later ? erases[h][n] : both, d_k[h][n]);
                gates[h][n] = fmaf(rows[h][n], reads[h][n], keys[h][n] * erases[h][n]);
                if (level == 0 && n % 2 == 1) d_gate[h][n] += gates[h][n];
            }
        }
        if constexpr (level > 0) {
            std::uint32_t a[4];
            to_operand(a, gates);
            ptx::multiply_bf16(d_gate[0], a, {level == 3 ? sums.before : sums.halves[level % 3], 0u});
            ptx::multiply_bf16(d_gate[1], a, {0u, level == 3 ? sums.from_own : sums.halves[level % 3]});
        }
        if constexpr (level < 3) decays.template join<level>();
    }
    template <int level>
    HEADRACE_DEVICE void multiply_level(TokenGroup& out, const TokenGroup& rows, const std::uint32_t (&b)[4]) const {
        std::uint32_t a[4];
        to_operand(a, rows, of_rows);
        if constexpr (level == 3) {
            ptx::multiply_bf16(out[0], a, {0u, b[1]});
            ptx::multiply_bf16(out[1], a, {b[2], 0u});
        } else {
            ptx::multiply_bf16(out[0], a, {meeting<level>(b[0]), 0u});
            ptx::multiply_bf16(out[1], a, {0u, meeting<level>(b[3])});
        }
    }

    static HEADRACE_DEVICE void multiply_group(TokenGroup& out, const std::uint32_t (&a)[4],
                                               const std::uint32_t (&b)[4]) {
        ptx::multiply_bf16(out[0], a, {b[0], b[1]});
        ptx::multiply_bf16(out[1], a, {b[2], b[3]});
    }
    HEADRACE_DEVICE void decay(TokenGroup& out, int group) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) out[h][n] *= through[group][n / 2];
        }
    }
    // A group with all earlier ones, which meet at its start; leaves operands of its decayed rows.
    HEADRACE_DEVICE void add_earlier(TokenGroup& d_q, TokenGroup& d_k, TokenGroup& d_gate, std::uint32_t (&reads)[4],
                                     std::uint32_t (&erases)[4], const std::uint32_t (&keys)[token_groups - 1][4],
                                     int group) const {
        TokenGroup of_q = {}, of_k = {};
#pragma unroll
        for (int earlier = 0; earlier < group; ++earlier) {
            if (earlier > 0) decay(of_q, earlier), decay(of_k, earlier);
            std::uint32_t b[4];
            W.load_later(b, group, earlier);
            multiply_group(of_q, keys[earlier], b);
            if (!delta) continue;
            L.load_later(b, group, earlier);
            multiply_group(of_k, keys[earlier], b);
        }
        TokenGroup since, rows, gates;
        take(since, of_since(group));
        load_group(rows, q, channel, group_tokens * group);
        add_rows(d_q, gates, of_q, since, rows, false);
        multiply(rows, since);
        to_operand(reads, rows, of_rows);
        if (delta) {
            load_group(rows, k, channel, group_tokens * group);
            add_rows(d_k, gates, of_k, since, rows, true);
            multiply(rows, since);
            to_operand(erases, rows, of_rows);
        }
        std::uint32_t a[4];
        to_operand(a, gates);
        ptx::multiply_bf16(d_gate[0], a, {sums.from_own, GateSums::all});
        ptx::multiply_bf16(d_gate[1], a, {0u, sums.from_own});
    }
    // d += factors out; gates = or += that times the rows.
    static HEADRACE_DEVICE void add_rows(TokenGroup& d, TokenGroup& gates, const TokenGroup& out,
                                         const TokenGroup& factors, const TokenGroup& rows, bool add) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float of = factors[h][n] * out[h][n];
                d[h][n] += of;
                gates[h][n] = add ? fmaf(rows[h][n], of, gates[h][n]) : rows[h][n] * of;
            }
        }
    }
    // A group's keys with all later ones.
    HEADRACE_DEVICE void add_later(TokenGroup& d_k, TokenGroups& d_gate, const std::uint32_t (&reads)[token_groups][4],
                                   const std::uint32_t (&erases)[token_groups][4], int group) const {
        TokenGroup rows, until, out = {}, gates;
        load_group(rows, k, channel, group_tokens * group);
        take(until, of_until(group));
#pragma unroll
        for (int later = token_groups - 1; later > group; --later) {
            if (later < token_groups - 1) {
                decay(out, later);
                add_spanning(d_gate[later], out, rows, until, group, later);
            }
            std::uint32_t b[4];
            W.load_earlier(b, later, group);
            multiply_group(out, reads[later], b);
            if (!delta) continue;
            L.load_earlier(b, later, group);
            multiply_group(out, erases[later], b);
        }
        add_rows(d_k, gates, out, until, rows, false);
        std::uint32_t a[4];
        to_operand(a, gates);
        ptx::multiply_bf16(d_gate[group][0], a, {sums.before, 0u});
        ptx::multiply_bf16(d_gate[group][1], a, {GateSums::all, sums.before});
    }
    // All gates of `spanned` take what goes from an earlier group to groups behind it.
    HEADRACE_DEVICE void add_spanning(TokenGroup& d_gate, const TokenGroup& out, const TokenGroup& rows,
                                      const TokenGroup& until, int group, int spanned) const {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float sum = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int p = 0; p < 2; ++p)
                    sum = fmaf(rows[h][2 * c + p] * until[h][2 * c + p], out[h][2 * c + p], sum);
            }
            sum += ptx::shuffle_xor(sum, 1);
            sum += ptx::shuffle_xor(sum, 2);
#pragma unroll
            for (int between = group + 1; between < spanned; ++between) sum *= through[between][c];
#pragma unroll
            for (int h = 0; h < 2; ++h) d_gate[h][2 * c] += sum, d_gate[h][2 * c + 1] += sum;
        }
    }
};

}  // namespace headrace::cuda
