// channel_decays: a slice of a chunk under channel gates as one warp holds it: rows of 16 tokens, the decays inside
// them, and the products that meet at anchors.
#pragma once

#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// A lane holds tokens x = lane / 4 and 15 - x of the warp's 16, and four channels from 4 (lane % 4) on of the slice's
// 16. Of the two tokens, bits of whose numbers are all different, at each power of two l < 16 one lies in the later
// half of its block of 2 l and the other in the earlier half of its own: a left operand of later rows and a right one
// of earlier keys need nothing of another lane.
inline constexpr int slice_tokens = 16, slice_channels = 16, lane_channels = 4;

HEADRACE_DEVICE int first_token() { return lane() / 4; }
HEADRACE_DEVICE int token_of(int which) { return which == 0 ? first_token() : slice_tokens - 1 - first_token(); }
HEADRACE_DEVICE int lane_channel() { return lane() % 4 * lane_channels; }

// Four bf16, in the order of memory.
struct Piece {
    std::uint32_t pairs[lane_channels / 2];
    HEADRACE_DEVICE float at(int c) const { return c % 2 == 0 ? low_half(pairs[c / 2]) : high_half(pairs[c / 2]); }
};

// Which of the lane's tokens is the later one at l.
HEADRACE_DEVICE bool first_is_later(int l) { return (first_token() & l) != 0; }
template <class T>
HEADRACE_DEVICE T chosen(bool first, T x, T y) {
    return first ? x : y;
}

// Where a row of sums of a pair of tokens lies: of the pair `number` of the block, the later or the earlier token.
HEADRACE_DEVICE int later_token(int number, int l) { return (number & l) != 0 ? number : slice_tokens - 1 - number; }
HEADRACE_DEVICE int earlier_token(int number, int l) { return slice_tokens - 1 - later_token(number, l); }

struct ChannelSlice {
    Piece q[2], k[2];               // of the lane's tokens
    float since[2][lane_channels];  // decays from the start of the token's block, its own included
    float until[2][lane_channels];  // decays behind the token to the end of its block

    // From blocks of one token, `since` their decays.
    HEADRACE_DEVICE void start_blocks() {
#pragma unroll
        for (auto& of_token : until)
            for (float& decay : of_token) decay = 1;
    }
    // sums += rows later, in their blocks of 2 l, times keys earlier: rows 0 to 7 are q, the others k, of later_token;
    // columns earlier_token. Of different blocks it means nothing.
    HEADRACE_DEVICE void add_pairs(float (&sums)[4], int l) const {
        const bool first = first_is_later(l);
        SplitA a;
        SplitB b;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int c = 2 * pair;
            const float left = chosen(first, since[0][c], since[1][c]),
                        right = chosen(first, since[0][c + 1], since[1][c + 1]);
            const std::uint32_t query = chosen(first, q[0].pairs[pair], q[1].pairs[pair]),
                                row = chosen(first, k[0].pairs[pair], k[1].pairs[pair]),
                                key = chosen(first, k[1].pairs[pair], k[0].pairs[pair]);
            a.set(2 * pair, low_half(query) * left, high_half(query) * right);
            a.set(2 * pair + 1, low_half(row) * left, high_half(row) * right);
            b.set(pair, low_half(key) * chosen(first, until[1][c], until[0][c]),
                  high_half(key) * chosen(first, until[1][c + 1], until[0][c + 1]));
        }
        multiply(sums, a, b);
    }
    // From blocks of l tokens to blocks of 2 l.
    HEADRACE_DEVICE void join_blocks(int l) {
        const bool first = first_is_later(l);
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            const float own[2] = {since[0][c] * until[0][c], since[1][c] * until[1][c]};
            float other[2];
#pragma unroll
            for (int which = 0; which < 2; ++which)
                other[which] = 2 * l == slice_tokens ? own[1 - which] : ptx::shuffle_xor(own[which], 4 * l);
            since[0][c] *= first ? other[0] : 1.0f;
            until[1][c] *= first ? other[1] : 1.0f;
            since[1][c] *= first ? 1.0f : other[1];
            until[0][c] *= first ? 1.0f : other[0];
        }
    }
};

// From a lane's sums to those of the eight lanes that share its channels: sums[0] becomes that of summed_value.
template <int values>
HEADRACE_DEVICE void sum_over_tokens(float (&sums)[values]) {
    int count = values;
#pragma unroll
    for (int distance = 4; distance < warp_lanes; distance *= 2) {
        const bool upper = (lane() & distance) != 0;
        if (count == 1) {
            sums[0] += ptx::shuffle_xor(sums[0], distance);
            continue;
        }
        count /= 2;
#pragma unroll
        for (int n = 0; n < values / 2; ++n) {
            if (n >= count) continue;
            const float sent = upper ? sums[n] : sums[n + count];
            sums[n] = (upper ? sums[n + count] : sums[n]) + ptx::shuffle_xor(sent, distance);
        }
    }
}
// Which value sums[0] is; of four, several lanes have the same.
template <int values>
HEADRACE_DEVICE int summed_value() {
    static_assert(values == 4 || values == 8);
    const int row = lane() / 4;
    return values / 2 * (row & 1) + values / 4 * (row / 2 & 1) + (values == 8 ? row / 4 & 1 : 0);
}

}  // namespace headrace::cuda
