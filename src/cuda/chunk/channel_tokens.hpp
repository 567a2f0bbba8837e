// channel_tokens: 16 tokens of 16 channels as a warp of the backward under channel gates holds them: channels as rows,
// their decays, and the constant operands that pick and sum up tokens.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// With g = lane / 4, t = lane % 4 a lane has channels g + 8 c and tokens 8 h + 2 t + p, at [h][2 c + p]: two
// accumulators side by side, and once pairs of tokens are rounded a left operand of a product over tokens.
inline constexpr int group_tokens = 16, group_channels = 16, token_groups = tensor_chunk / group_tokens;
using TokenGroup = float[2][4];
using TokenGroups = TokenGroup[token_groups];  // of a chunk

// The lane's first token of the half h of a group, and its first channel of a warp's.
HEADRACE_DEVICE int group_token(int h) { return 8 * h + lane() % 4 * 2; }
HEADRACE_DEVICE int group_channel(int c) { return lane() / 4 + 8 * c; }

// The warp's first channel.
HEADRACE_DEVICE int warp_channel() { return warp_here() * group_channels; }
// f(i) for the chunk's tokens, of which no thread has two.
template <class F>
HEADRACE_DEVICE void each_token(F f) {
    const int i = thread_here();
    if (i < tensor_chunk) f(i);
}

// Whether a parameter that is never zero is that: true, of which the compiler knows nothing, so that it computes
// nothing ahead of a branch on it. What stands before has the registers that this would have taken.
HEADRACE_DEVICE bool goes_on(int parameter) { return ptx::not_before(parameter) != 0; }

// What of a number enters a product: its bf16, or what that leaves.
enum class Digits { high, low };

template <Digits digits = Digits::high>
HEADRACE_DEVICE std::uint32_t to_operand(float first, float second) {
    const std::uint32_t both = ptx::round_to_bf16(first, second);
    return digits == Digits::high ? both : ptx::round_to_bf16(first - low_half(both), second - high_half(both));
}
template <Digits digits = Digits::high>
HEADRACE_DEVICE void to_operand(std::uint32_t (&a)[4], const TokenGroup& x) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) a[2 * h + c] = to_operand<digits>(x[h][2 * c], x[h][2 * c + 1]);
    }
}
// The upper 8 bits of x, of which the others are left if there is to be another turn.
template <bool goes_on>
HEADRACE_DEVICE void take_operand(std::uint32_t (&a)[4], TokenGroup& x) {
    to_operand(a, x);
    if constexpr (goes_on) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int c = 0; c < 2; ++c) x[h][2 * c] -= low_half(a[2 * h + c]), x[h][2 * c + 1] -= high_half(a[2 * h + c]);
        }
    }
}
HEADRACE_DEVICE void from_operand(TokenGroup& x, const std::uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) x[h][2 * c] = low_half(a[2 * h + c]), x[h][2 * c + 1] = high_half(a[2 * h + c]);
    }
}
// Of rows of tokens, where OperandAt::across has the group's 16 of the warp's channels.
HEADRACE_DEVICE void load_group(TokenGroup& x, std::uint32_t place) {
    std::uint32_t a[4];
    ptx::load_matrix_transposed(a, place);
    from_operand(x, a);
}

// Decays in blocks of 2^level tokens, from single tokens to the whole group.
struct GroupDecays {
    TokenGroup since;     // from the start of the token's block, its own included
    TokenGroup until;     // behind the token to the end of its block
    float through[2][2];  // of the block, from level 1 on: [h][c], as both tokens [2 c + p] lie in one

    // `decays` [64 tokens, K] from the lane's first token of the group and its first channel on.
    HEADRACE_DEVICE void load(Tile<float> decays) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                since[h][n] = decays.at(8 * h + n % 2, n / 2 * 8);
                until[h][n] = 1;
            }
        }
    }
    // Of a half of the group, from blocks of 2^level tokens to those of the next level.
    template <int level>
    HEADRACE_DEVICE void join(int h) {
        static_assert(level < 3);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float* const own_since = since[h] + 2 * c;
            float* const own_until = until[h] + 2 * c;
            if constexpr (level == 0) {
                own_until[0] = own_since[1];
                own_since[1] *= own_since[0];
                through[h][c] = own_since[1];
            } else {
                const float other = ptx::shuffle_xor(through[h][c], level);
                const bool is_later = (lane() & level) != 0;
                const float before = is_later ? other : 1.0f, behind = is_later ? 1.0f : other;
                own_since[0] *= before, own_since[1] *= before;
                own_until[0] *= behind, own_until[1] *= behind;
                through[h][c] *= other;
            }
        }
    }
    // Of halves, to the whole group.
    HEADRACE_DEVICE void join_halves() {
#pragma unroll
        for (int n = 0; n < 4; ++n) since[1][n] *= through[0][n / 2], until[0][n] *= through[1][n / 2];
    }
    HEADRACE_DEVICE void join_all() {
#pragma unroll
        for (int h = 0; h < 2; ++h) join<0>(h), join<1>(h), join<2>(h);
        join_halves();
    }
};
// Through the group, of the lane's two channels.
HEADRACE_DEVICE float2 group_total(Tile<float> decays) {
    float total[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        total[c] = decays.at(0, 8 * c) * decays.at(1, 8 * c) * (decays.at(8, 8 * c) * decays.at(9, 8 * c));
        total[c] *= ptx::shuffle_xor(total[c], 1);
        total[c] *= ptx::shuffle_xor(total[c], 2);
    }
    return {total[0], total[1]};
}
// Decays through whole groups in shared memory, which lanes of the same channels share: registers are few.
template <int K>
struct Through {
    float* totals;  // [token_groups, K] from the lane's first channel on
    HEADRACE_DEVICE float at(int group, int c) const { return totals[group * K + 8 * c]; }
    // Of the groups behind it.
    HEADRACE_DEVICE float behind(int group, int c) const {
        float decay = 1;
#pragma unroll
        for (int later = token_groups - 1; later > group; --later) decay *= at(later, c);
        return decay;
    }
    HEADRACE_DEVICE void set(int group, float2 total) const {
        if (lane() % 4 == 0) totals[group * K] = total.x, totals[group * K + 8] = total.y;
    }
};

// Constant right operands of 8 tokens y deep and 8 tokens x wide: ones where a sum over tokens y belongs to gate x.
struct GateSums {
    static constexpr std::uint32_t all = 0x3f803f80u;
    std::uint32_t from_own;  // y >= x: what ends at token y
    std::uint32_t before;    // y < x: what begins at token y

    HEADRACE_DEVICE explicit GateSums(int own) {  // of the lane
        const int x = own / 4, y = own % 4 * 2;
        from_own = ones(y >= x, y + 1 >= x);
        before = ones(y < x, y + 1 < x);
    }

  private:
    static HEADRACE_DEVICE std::uint32_t ones(bool low, bool high) {
        return (low ? 0x3f80u : 0u) | (high ? 0x3f800000u : 0u);
    }
};
// What a level below 3 makes of right operands of 8 tokens y deep and 8 tokens x wide. Of a symmetric matrix, bits of
// the pairs (x, y) that meet there, which are of one block of 2^(level+1), in different halves of it: those with x in
// the later half, in the earlier one, all. And GateSums in blocks of 2^(level+1): from_own in later halves, before in
// earlier ones.
struct LevelOperands {
    std::uint32_t later, earlier, meeting, gates;

    HEADRACE_DEVICE LevelOperands(int own, int level) {  // of the lane
        const int x = own / 4, y = own % 4 * 2;
        const GateSums sums(own);
        const std::uint32_t of_neighbours = (x ^ y) > 1 ? 0u : x % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
        meeting = level == 0 ? of_neighbours : (x ^ y) >> level == 1 ? 0xffffffffu : 0u;
        const bool is_later = (x & 1 << level) != 0;
        later = is_later ? meeting : 0u, earlier = is_later ? 0u : meeting;
        gates = x >> level >> 1 != y >> level >> 1 ? 0u : is_later ? sums.from_own : sums.before;
    }
};
// They lie in a matrix over pairs of tokens whose blocks of 16 above the diagonal nobody has a use for.
HEADRACE_DEVICE uint4* level_operands(Matrix<tensor_chunk> m, int own, int level) {
    const int row = own / 2, place = row * tensor_chunk + (own % 2 ^ row % 8) * 8;
    return reinterpret_cast<uint4*>(m.data + (place ^ 16 * (1 + level)));
}
HEADRACE_DEVICE void leave_level_operands(Matrix<tensor_chunk> m) {
    const int own = lane(), level = warp();
    if (level >= 3) return;
    const LevelOperands of(own, level);
    *level_operands(m, own, level) = {of.later, of.earlier, of.meeting, of.gates};
}

}  // namespace headrace::cuda
