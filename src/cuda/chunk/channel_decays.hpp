// channel_decays: a slice of a chunk under channel gates as one warp holds it: which rows of 16 tokens, and the decays
// inside them.
#pragma once

#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// A lane holds tokens x = lane / 4 and 15 - x of the warp's 16, and four channels from 4 (lane % 4) on of the slice's
// 16. Of the two tokens, bits of whose numbers are all different, at each power of two l < 16 one lies in the later
// half of its block of 2 l and the other in the earlier half of its own: a left operand of later rows and a right one
// of earlier keys need nothing of another lane.
inline constexpr int slice_tokens = 16, slice_channels = 16;

HEADRACE_DEVICE int first_token() { return lane() / 4; }
HEADRACE_DEVICE int token_of(int which) { return which == 0 ? first_token() : slice_tokens - 1 - first_token(); }
HEADRACE_DEVICE int lane_channel() { return lane() % 4 * lane_channels; }

// Which of the lane's tokens is the later one at l.
HEADRACE_DEVICE bool first_is_later(int l) { return l < slice_tokens / 2 && (first_token() & l) != 0; }
template <class T>
HEADRACE_DEVICE T chosen(bool first, T x, T y) {
    return first ? x : y;
}

// Of tokens 0 and 1 of a lane and its channels.
using LaneTokens = float[2][lane_channels];

// Decays of tokens inside their block. Those since its start follow from no later token; where one of them is below
// `least`, a channel's pairs of tokens from there on do not meet at the start.
struct ChannelDecays {
    static constexpr float least = 0x1p-64f;

    LaneTokens since;              // from the start of the block, the token's own included
    float through[lane_channels];  // to its end

    // `since` has the decays of single tokens.
    HEADRACE_DEVICE void find_since() {
#pragma unroll
        for (int distance = 1; distance < slice_tokens / 2; distance *= 2) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                ptx::multiply_by_lane_before(since[0][c], 4 * distance);
                ptx::multiply_by_lane_behind(since[1][c], 4 * distance);
            }
        }
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            since[1][c] *= ptx::shuffle_from(since[0][c], warp_lanes - 4 + lane() % 4);
            through[c] = ptx::shuffle_from(since[1][c], lane() % 4);
        }
    }
    // Whether all pairs of the warp's tokens meet at the block's start.
    HEADRACE_DEVICE bool have_one_anchor() const {
        const float of_lane = ptx::minimum(ptx::minimum(through[0], through[1]), ptx::minimum(through[2], through[3]));
        return !ptx::any_of_warp(!(of_lane >= least));
    }
};

// Pairs of tokens that meet where the later one's half of the smallest block of 2, 4, 8 or 16 tokens that has both
// begins: for each size one product.
struct ChannelLevels {
    static constexpr int count = 4;

    LaneTokens since, until;  // inside blocks of `l` tokens; at first `since` has the decays of single tokens
    int l = 1;

    // From blocks of l tokens to those of 2 l.
    HEADRACE_DEVICE void join() {
        const bool first = first_is_later(l);
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            const float own[2] = {since[0][c] * until[0][c], since[1][c] * until[1][c]};
            float other[2];
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float of_lane = ptx::shuffle_xor(own[which], 4 * l & (warp_lanes - 1));
                other[which] = 2 * l == slice_tokens ? own[1 - which] : of_lane;
            }
            since[0][c] *= first ? other[0] : 1.0f;
            until[1][c] *= first ? other[1] : 1.0f;
            since[1][c] *= first ? 1.0f : other[1];
            until[0][c] *= first ? 1.0f : other[0];
        }
        l *= 2;
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
    const int own = lane_here();  // found each time, as registers are few
    return values / 2 * (own >> 2 & 1) + values / 4 * (own >> 3 & 1) + (values == 8 ? own >> 4 & 1 : 0);
}

}  // namespace headrace::cuda
