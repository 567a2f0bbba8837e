// channel_decays: a slice of a chunk under channel gates as one warp holds it: rows of 16 tokens, the decays inside
// them, and the products that meet at anchors.
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

// Where a row of sums of a pair of tokens lies: of the pair `number` of the block, the later or the earlier token.
HEADRACE_DEVICE int later_token(int number, int l) { return (number & l) != 0 ? number : slice_tokens - 1 - number; }
HEADRACE_DEVICE int earlier_token(int number, int l) { return slice_tokens - 1 - later_token(number, l); }

// Tensor cores cut operands of tf32 to 11 bits. `lift` is a factor of what is to be cut so that half of the last bit is
// added on the mean (0.35 to 0.7): numbers of 11 bits stay as they are.
inline constexpr float lift = 1 + 0x1.6p-12f;

// Rows of scores: all with 11 bits, some with 22, or all.
enum class Precision { cut, mixed, fine };

// sums += a b in tf32, a 16 x 8 and b 8 x 8: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4) and (t, g), (t + 4, g). The
// rows that are `fine`, g and g + 8, with 22 bits.
template <Precision precision>
HEADRACE_DEVICE void multiply_cut(float (&sums)[4], const float (&a)[4], const float (&b)[2], const bool (&fine)[2]) {
    const auto bits = [](float x) { return __float_as_uint(x); };
    const auto rest = [&](float x) { return bits(x - __uint_as_float(bits(x) & 0xffffe000u)); };
    const std::uint32_t left[4] = {bits(a[0]), bits(a[1]), bits(a[2]), bits(a[3])}, right[2] = {bits(b[0]), bits(b[1])};
    if (precision != Precision::cut) {
        std::uint32_t fine_left[4], left_rest[4];
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const bool own = precision == Precision::fine || fine[place % 2];
            fine_left[place] = own ? left[place] : 0, left_rest[place] = own ? rest(a[place]) : 0;
        }
        ptx::multiply_tf32(sums, left_rest, right);
        ptx::multiply_tf32(sums, fine_left, {rest(b[0]), rest(b[1])});
    }
    ptx::multiply_tf32(sums, left, right);
}
// The factors of operands: a fine row takes back what its columns were lifted.
template <Precision precision>
HEADRACE_DEVICE float left_lift(bool fine) {
    return precision == Precision::fine ? 1.0f : precision == Precision::mixed && fine ? 1 / lift : lift;
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
