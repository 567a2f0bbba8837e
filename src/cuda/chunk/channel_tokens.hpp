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

// The lane's first token of the half h of a group, and its first channel of a warp's.
HEADRACE_DEVICE int group_token(int h) { return 8 * h + lane() % 4 * 2; }
HEADRACE_DEVICE int group_channel(int c) { return lane() / 4 + 8 * c; }

// What of a number enters a product: its bf16, or what that leaves.
enum class Digits { high, low };

HEADRACE_DEVICE void to_operand(std::uint32_t (&a)[4], const TokenGroup& x, Digits digits = Digits::high) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) a[2 * h + c] = ptx::round_to_bf16(x[h][2 * c], x[h][2 * c + 1]);
    }
    if (digits == Digits::high) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const std::uint32_t high = a[2 * h + c];
            a[2 * h + c] = ptx::round_to_bf16(x[h][2 * c] - low_half(high), x[h][2 * c + 1] - high_half(high));
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
// Of rows [64 tokens, K], `rows` as OperandAt::across, the tokens from `token` on, channels from `channel` on.
template <int K>
HEADRACE_DEVICE void load_group(TokenGroup& x, OperandAt<K> rows, int channel, int token) {
    std::uint32_t a[4];
    ptx::load_matrix_transposed(a, rows.at(token, channel));
    from_operand(x, a);
}

// Decays in blocks of 2^level tokens, from single tokens to the whole group.
struct GroupDecays {
    TokenGroup since;    // from the start of the token's block, its own included
    TokenGroup until;    // behind the token to the end of its block
    TokenGroup through;  // of the block

    // `decays` [64 tokens, K] from the lane's first token of the group and its first channel on.
    HEADRACE_DEVICE void load(Tile<float> decays) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                since[h][n] = through[h][n] = decays.at(8 * h + n % 2, n / 2 * 8);
                until[h][n] = 1;
            }
        }
    }
    // Whether the token lies in the later half of its block of the next level: as told by [h][., p], or by the lane.
    template <int level>
    static HEADRACE_DEVICE bool later(int h, int p) {
        return level == 0 ? p == 1 : level == 3 ? h == 1 : (lane() & level) != 0;
    }
    // To blocks of the next level.
    template <int level>
    HEADRACE_DEVICE void join() {
        TokenGroup other;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (level == 0) {
                    other[h][n] = through[h][n ^ 1];
                } else if (level == 3) {
                    other[h][n] = through[1 - h][n];
                } else {
                    other[h][n] = n % 2 == 0 ? ptx::shuffle_xor(through[h][n], level) : other[h][n - 1];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const bool is_later = later<level>(h, n % 2);
                since[h][n] *= is_later ? other[h][n] : 1.0f;
                until[h][n] *= is_later ? 1.0f : other[h][n];
                through[h][n] *= other[h][n];
            }
        }
    }
    HEADRACE_DEVICE void join_all() { join<0>(), join<1>(), join<2>(), join<3>(); }
};
// Through the group, of both of the lane's channels.
HEADRACE_DEVICE void group_total(float (&total)[2], Tile<float> decays) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        total[c] = decays.at(0, 8 * c) * decays.at(1, 8 * c) * (decays.at(8, 8 * c) * decays.at(9, 8 * c));
        total[c] *= ptx::shuffle_xor(total[c], 1);
        total[c] *= ptx::shuffle_xor(total[c], 2);
    }
}

// Constant right operands of 8 tokens y deep and 8 tokens x wide: ones where a sum over tokens y belongs to gate x.
struct GateSums {
    static constexpr std::uint32_t all = 0x3f803f80u;
    std::uint32_t from_own;   // y >= x: what ends at token y
    std::uint32_t before;     // y < x: what begins at token y
    std::uint32_t halves[3];  // at [level] in blocks of 2^(level+1): from_own in later halves, before in earlier ones

    HEADRACE_DEVICE GateSums() {
        const int x = lane() / 4, y = lane() % 4 * 2;
        from_own = ones(y >= x, y + 1 >= x);
        before = ones(y < x, y + 1 < x);
#pragma unroll
        for (int level = 1; level < 3; ++level) {
            const std::uint32_t sums = (x & 1 << level) != 0 ? from_own : before;
            halves[level] = x >> level == y >> level ? sums : 0u;
        }
    }

  private:
    static HEADRACE_DEVICE std::uint32_t ones(bool low, bool high) {
        return (low ? 0x3f80u : 0u) | (high ? 0x3f800000u : 0u);
    }
};
// Of a symmetric matrix over 8 tokens as a right operand, the pairs (x, y) that meet at a level below 3: of one block
// of 2^(level+1), in different halves of it.
template <int level>
HEADRACE_DEVICE std::uint32_t meeting(std::uint32_t pair) {
    const int x = lane() / 4, y = lane() % 4 * 2;
    if (level == 0) return (x ^ y) > 1 ? 0u : pair & (x % 2 == 0 ? 0xffff0000u : 0x0000ffffu);
    return (x ^ y) >> level == 1 ? pair : 0u;
}

}  // namespace headrace::cuda
