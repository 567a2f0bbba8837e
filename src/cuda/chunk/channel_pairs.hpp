// ChannelPairs: what the pairs of tokens of a chunk give the gradients of rows and gates under channel gates.
#pragma once

#include "cuda/chunk/channel_tokens.hpp"

namespace headrace::cuda {

// Blocks of 16 x 16 of the matrices W and L over pairs of tokens as right operands. L lies behind W: one address each
// way serves both, as registers are few.
enum class Pairs { reads, erases };
struct PairOperands {
    static constexpr int bytes = 2 * tensor_chunk * tensor_chunk;  // of a matrix
    OperandAt<tensor_chunk> across, down;
    HEADRACE_DEVICE PairOperands(Matrix<tensor_chunk> W, int own)
        : across(OperandAt<tensor_chunk>::across(W, own)), down(OperandAt<tensor_chunk>::down(W, own)) {}
    // Of later tokens as columns, the depth earlier ones; and the other way.
    HEADRACE_DEVICE void load_later(std::uint32_t (&b)[4], Pairs of, int later, int earlier) const {
        ptx::load_matrix(b, across.at(group_tokens * later, group_tokens * earlier) + behind(of));
    }
    HEADRACE_DEVICE void load_earlier(std::uint32_t (&b)[4], Pairs of, int later, int earlier) const {
        ptx::load_matrix_transposed(b, down.at(group_tokens * later, group_tokens * earlier) + behind(of));
    }

  private:
    HEADRACE_DEVICE static int behind(Pairs of) { return of == Pairs::reads ? 0 : bytes; }
};

// W and L [64,64] are the gradients of the scores, without decays: blocks of 16 x 16 below the diagonal, and those on
// it symmetric, diagonals left out. A pair of tokens meets at an anchor (docs/math.md, section 8), where W and L are
// multiplied by rows with decays from there to the later token, or from the earlier one to there, in bf16. With x and y
// two tokens of a block of 2^(level+1) in different halves and decays f to the anchor,
//     f_x reads_x, reads_x = sum_y W_xy f_y k_y of later x,                          joins d_q
//     f_x keys_x, keys_x = sum_y L_xy f_y k_y, of earlier x plus sum_y W_xy f_y q_y, joins d_k
// and f_x (q_x reads_x + k_x keys_x) is what token x adds to all gates between it and the anchor.
// Of decayed rows it takes what Digits say, of what tokens add to gates 8 bits or, `fine`, 16: they may alternate.
template <int K, bool delta, bool fine>
struct ChannelPairs {
    OperandAt<K> q;  // across, from the warp's first channel on; k lies behind it
    PairOperands operands;
    Tile<float> decays;  // [64 tokens, K] from the lane's first token and channel on
    float4* kept;        // [12, threads] of since (groups 1 to 3) and until (0 to 2) in whole groups
    Through<K> through;
    GateSums sums;
    Matrix<tensor_chunk> levels;  // has level_operands
    int values;                   // of the head, for goes_on

    // ---- inside groups of 16 tokens ----
    template <Digits of_rows>
    HEADRACE_DEVICE void add_inside(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate) const {
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            const int first = group_tokens * group;
            if (!goes_on(values)) return;
            Inside inside;
            load_queries(inside.q, group);
            load_keys(inside.k, group);
            operands.load_later(inside.W, Pairs::reads, group, group);
            if (delta) operands.load_later(inside.L, Pairs::erases, group, group);
            inside.decays.load(decays.from(first, 0));
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // of eight tokens
                add_level<0, of_rows>(d_q[group][h], d_k[group][h], d_gate[group][h], inside, h);
                add_level<1, of_rows>(d_q[group][h], d_k[group][h], d_gate[group][h], inside, h);
                add_level<2, of_rows>(d_q[group][h], d_k[group][h], d_gate[group][h], inside, h);
            }
            add_halves<of_rows>(d_q[group], d_k[group], d_gate[group], inside);
        }
    }
    // ---- between them ----
    // Sums over several groups are added up from the farthest one on, multiplied by the decays of groups on the way.
    template <Digits of_rows>
    HEADRACE_DEVICE void add_across(TokenGroups& d_q, TokenGroups& d_k, TokenGroups& d_gate) const {
        std::uint32_t keys[token_groups - 1][4];
#pragma unroll
        for (int group = 0; group < token_groups - 1; ++group) {
            TokenGroup rows, until;
            load_keys(rows, group);
            take(until, of_until(group));
            multiply(until, rows);
            to_operand<of_rows>(keys[group], until);
        }
#pragma unroll
        for (int group = 1; group < token_groups; ++group) {
            if (!goes_on(values)) return;
            add_earlier<of_rows>(d_q[group], d_k[group], d_gate[group], keys, group);
        }
#pragma unroll
        for (int group = token_groups - 2; group >= 0; --group) {
            if (!goes_on(values)) return;
            add_later(d_k[group], d_gate, group);
        }
    }

    // Again, as add_across leaves nothing of it.
    HEADRACE_DEVICE void keep_since() const {
#pragma unroll
        for (int group = 1; group < token_groups; ++group) {
            if (!goes_on(values)) return;
            GroupDecays of;
            of.load(decays.from(group_tokens * group, 0));
            of.join_all();
            keep(of.since, of_since(group));
        }
    }

    HEADRACE_DEVICE void load_queries(TokenGroup& x, int group) const {
        load_group(x, q.at(group_tokens * group, 0));
    }
    HEADRACE_DEVICE void load_keys(TokenGroup& x, int group) const {
        load_group(x, q.at(group_tokens * group, 0) + 2 * tensor_chunk * K);
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

    // Pairs that meet at a level, and on to blocks of the next one. Of later tokens reads, of earlier ones what queries
    // give keys: of either the other is zero.
    template <int level, Digits of_rows>
    HEADRACE_DEVICE void add_level(float (&d_q)[4], float (&d_k)[4], float (&d_gate)[4], Inside& inside, int h) const {
        GroupDecays& decays = inside.decays;
        const float(&q)[4] = inside.q[h];
        const float(&k)[4] = inside.k[h];
        const uint4 of_level = *level_operands(levels, lane(), level);  // as LevelOperands
        const bool is_later = (lane() & level) != 0;
        float factors[4], reads[4] = {}, written[4] = {}, gates[4];
        std::uint32_t queries[2], keys[2];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            factors[n] = (level == 0 ? n % 2 == 1 : is_later) ? decays.since[h][n] : decays.until[h][n];
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            const float first = level == 0 ? 0.0f : q[c] * factors[c];
            queries[c / 2] = to_operand<of_rows>(first, q[c + 1] * factors[c + 1]);
            keys[c / 2] = to_operand<of_rows>(k[c] * factors[c], k[c + 1] * factors[c + 1]);
        }
        const std::uint32_t w = inside.W[3 * h], l = delta ? inside.L[3 * h] & of_level.z : 0u;
        ptx::multiply_bf16(reads, {keys[0], keys[1], 0u, 0u}, {w & of_level.x, 0u});
        ptx::multiply_bf16(written, {queries[0], queries[1], delta ? keys[0] : 0u, delta ? keys[1] : 0u},
                           {w & of_level.y, l});
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const bool reads_any = level > 0 || n % 2 == 1;
            if (delta || level > 0 || n % 2 == 0) {
                d_k[n] = fmaf(factors[n], written[n], d_k[n]);
                gates[n] = k[n] * written[n];
            } else {
                gates[n] = 0;
            }
            if (reads_any) d_q[n] = fmaf(factors[n], reads[n], d_q[n]), gates[n] = fmaf(q[n], reads[n], gates[n]);
            gates[n] *= factors[n];
            if (level == 0 && reads_any) d_gate[n] += gates[n];
        }
        if constexpr (level > 0) {
            add_to_gates<Digits::high>(d_gate, gates, of_level.w);
            if (fine) add_to_gates<Digits::low>(d_gate, gates, of_level.w);
        }
        decays.template join<level>(h);
    }
    template <Digits digits>
    static HEADRACE_DEVICE void add_to_gates(float (&d_gate)[4], const float (&gates)[4], std::uint32_t sums) {
        ptx::multiply_bf16(
            d_gate, {to_operand<digits>(gates[0], gates[1]), to_operand<digits>(gates[2], gates[3]), 0u, 0u},
            {sums, 0u});
    }
    // d_gate of a group += sums of what its tokens add, by right operands for both halves.
    static HEADRACE_DEVICE void add_to_gates(TokenGroup& d_gate, TokenGroup& gates,
                                             const std::uint32_t (&first)[2], const std::uint32_t (&second)[2]) {
        HEADRACE_ROLLED
        for (int turn = 0; turn < (fine ? 2 : 1); ++turn) {
            std::uint32_t a[4];
            take_operand<fine>(a, gates);
            ptx::multiply_bf16(d_gate[0], a, first);
            ptx::multiply_bf16(d_gate[1], a, second);
        }
    }
    // Pairs of the first half of the group with the second one.
    template <Digits of_rows>
    HEADRACE_DEVICE void add_halves(TokenGroup& d_q, TokenGroup& d_k, TokenGroup& d_gate, const Inside& inside) const {
        const float(&until)[4] = inside.decays.until[0];
        const float(&since)[4] = inside.decays.since[1];
        const auto decayed = [](std::uint32_t(&to)[2], const float(&rows)[4], const float(&factors)[4]) {
#pragma unroll
            for (int c = 0; c < 2; ++c)
                to[c] = to_operand<of_rows>(rows[2 * c] * factors[2 * c], rows[2 * c + 1] * factors[2 * c + 1]);
        };
        std::uint32_t earlier[2], queries[2], keys[2] = {};
        decayed(earlier, inside.k[0], until);
        decayed(queries, inside.q[1], since);
        float reads[4] = {}, erases[4] = {}, written[4] = {};
        ptx::multiply_bf16(reads, {earlier[0], earlier[1], 0u, 0u}, {inside.W[2], 0u});
        if constexpr (delta) {
            decayed(keys, inside.k[1], since);
            ptx::multiply_bf16(erases, {earlier[0], earlier[1], 0u, 0u}, {inside.L[2], 0u});
        }
        ptx::multiply_bf16(written, {queries[0], queries[1], keys[0], keys[1]},
                           {inside.W[1], delta ? inside.L[1] : 0u});
        TokenGroup gates;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            d_k[0][n] = fmaf(until[n], written[n], d_k[0][n]);
            gates[0][n] = until[n] * (inside.k[0][n] * written[n]);
            d_q[1][n] = fmaf(since[n], reads[n], d_q[1][n]);
            gates[1][n] = inside.q[1][n] * reads[n];
            if (delta) {
                d_k[1][n] = fmaf(since[n], erases[n], d_k[1][n]);
                gates[1][n] = fmaf(inside.k[1][n], erases[n], gates[1][n]);
            }
            gates[1][n] *= since[n];
        }
        add_to_gates(d_gate, gates, {sums.before, 0u}, {0u, sums.from_own});
    }

    static HEADRACE_DEVICE void multiply_group(TokenGroup& out, const std::uint32_t (&a)[4],
                                               const std::uint32_t (&b)[4]) {
        ptx::multiply_bf16(out[0], a, {b[0], b[1]});
        ptx::multiply_bf16(out[1], a, {b[2], b[3]});
    }
    HEADRACE_DEVICE void decay(TokenGroup& out, int group) const {
        const float of[2] = {through.at(group, 0), through.at(group, 1)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) out[h][n] *= of[n / 2];
        }
    }
    // Of a group's decayed rows, reads and erases; they take the place of what was kept of since.
    HEADRACE_DEVICE uint4* operands_of(int group) const {
        return reinterpret_cast<uint4*>(kept) + of_since(group) * static_cast<int>(blockDim.x) + threadIdx.x;
    }
    // A group with all earlier ones, which meet at its start; leaves operands of its decayed rows.
    template <Digits of_rows>
    HEADRACE_DEVICE void add_earlier(TokenGroup& d_q, TokenGroup& d_k, TokenGroup& d_gate,
                                     const std::uint32_t (&keys)[token_groups - 1][4], int group) const {
        TokenGroup of_q = {}, of_k = {};
        std::uint32_t reads[4], erases[4] = {};
#pragma unroll
        for (int earlier = 0; earlier < group; ++earlier) {
            if (earlier > 0) decay(of_q, earlier), decay(of_k, earlier);
            std::uint32_t b[4];
            operands.load_later(b, Pairs::reads, group, earlier);
            multiply_group(of_q, keys[earlier], b);
            if (!delta) continue;
            operands.load_later(b, Pairs::erases, group, earlier);
            multiply_group(of_k, keys[earlier], b);
        }
        TokenGroup since, rows, gates;
        take(since, of_since(group));
        load_queries(rows, group);
        multiply(rows, since);
        add_rows(d_q, gates, of_q, since, rows, false);
        to_operand<of_rows>(reads, rows);
        if (delta) {
            load_keys(rows, group);
            multiply(rows, since);
            add_rows(d_k, gates, of_k, since, rows, true);
            to_operand<of_rows>(erases, rows);
        }
        uint4* const to = operands_of(group);
        to[0] = {reads[0], reads[1], reads[2], reads[3]};
        if (delta) to[blockDim.x] = {erases[0], erases[1], erases[2], erases[3]};
        add_to_gates(d_gate, gates, {sums.from_own, GateSums::all}, {0u, sums.from_own});
    }
    // d += factors out; gates = or += out times the rows, which have these factors.
    static HEADRACE_DEVICE void add_rows(TokenGroup& d, TokenGroup& gates, const TokenGroup& out,
                                         const TokenGroup& factors, const TokenGroup& rows, bool add) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                d[h][n] = fmaf(factors[h][n], out[h][n], d[h][n]);
                gates[h][n] = add ? fmaf(rows[h][n], out[h][n], gates[h][n]) : rows[h][n] * out[h][n];
            }
        }
    }
    // A group's keys with all later ones.
    HEADRACE_DEVICE void add_later(TokenGroup& d_k, TokenGroups& d_gate, int group) const {
        TokenGroup rows, until, out = {}, gates;
        load_keys(rows, group);
        take(until, of_until(group));
        multiply(rows, until);
#pragma unroll
        for (int later = token_groups - 1; later > group; --later) {
            if (later < token_groups - 1) {
                decay(out, later);
                add_spanning(d_gate[later], out, rows, group, later);
            }
            std::uint32_t b[4];
            const uint4* const from = operands_of(later);
            const uint4 reads = from[0];
            operands.load_earlier(b, Pairs::reads, later, group);
            multiply_group(out, {reads.x, reads.y, reads.z, reads.w}, b);
            if (!delta) continue;
            operands.load_earlier(b, Pairs::erases, later, group);
            const uint4 erases = from[blockDim.x];
            multiply_group(out, {erases.x, erases.y, erases.z, erases.w}, b);
        }
        add_rows(d_k, gates, out, until, rows, false);
        add_to_gates(d_gate[group], gates, {sums.before, 0u}, {GateSums::all, sums.before});
    }
    // All gates of `spanned` take what goes from an earlier group to groups behind it.
    HEADRACE_DEVICE void add_spanning(TokenGroup& d_gate, const TokenGroup& out, const TokenGroup& rows, int group,
                                      int spanned) const {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float sum = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int p = 0; p < 2; ++p) sum = fmaf(rows[h][2 * c + p], out[h][2 * c + p], sum);
            }
            sum += ptx::shuffle_xor(sum, 1);
            sum += ptx::shuffle_xor(sum, 2);
#pragma unroll
            for (int between = group + 1; between < spanned; ++between) sum *= through.at(between, c);
#pragma unroll
            for (int h = 0; h < 2; ++h) d_gate[h][2 * c] += sum, d_gate[h][2 * c + 1] += sum;
        }
    }
};

}  // namespace headrace::cuda
