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
HEADRACE_DEVICE void multiply_cut(float (&sums)[4], const float (&a)[4], const float (&b)[2], bool fine,
                                  bool fine_8) {
    const auto bits = [](float x) { return __float_as_uint(x); };
    const auto rest = [&](float x) { return bits(x - __uint_as_float(bits(x) & 0xffffe000u)); };
    const std::uint32_t left[4] = {bits(a[0]), bits(a[1]), bits(a[2]), bits(a[3])}, right[2] = {bits(b[0]), bits(b[1])};
    if (precision != Precision::cut) {
        std::uint32_t fine_left[4], left_rest[4];
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const bool own = precision == Precision::fine || (place % 2 == 0 ? fine : fine_8);
            fine_left[place] = own ? left[place] : 0, left_rest[place] = own ? rest(a[place]) : 0;
        }
        ptx::multiply_tf32(sums, left_rest, right);
        ptx::multiply_tf32(sums, fine_left, {rest(b[0]), rest(b[1])});
    }
    ptx::multiply_tf32(sums, left, right);
}
// The factor of a left operand whose right one is lifted: a fine row takes that back.
HEADRACE_DEVICE float left_lift(bool fine) { return fine ? 1 / lift : lift; }

// Of Precision::cut `since` and `until` are lifted, and `through` has the decays through the token's block.
template <Precision precision>
struct ChannelSlice {
    static constexpr bool cut = precision == Precision::cut, mixed = precision == Precision::mixed;

    float q[2][lane_channels], k[2][lane_channels];  // of the lane's tokens
    float since[2][lane_channels];                   // decays from the start of the token's block, its own included
    float until[2][lane_channels];                   // decays behind the token to the end of its block
    float through[2][lane_channels];

    // From blocks of one token, `since` their decays.
    HEADRACE_DEVICE void start_blocks() {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                until[which][c] = cut ? lift : 1.0f;
                if (!cut) continue;
                through[which][c] = since[which][c];
                since[which][c] *= lift;
            }
        }
    }
    HEADRACE_DEVICE float decay_through(int which, int c) const {
        return cut ? through[which][c] : since[which][c] * until[which][c];
    }
    // sums += rows later, in their blocks of 2 l, times keys earlier: rows 0 to 7 are q, the others k, of later_token;
    // columns earlier_token. Of different blocks it means nothing.
    HEADRACE_DEVICE void add_pairs(float (&sums)[4], int l, const bool (&fine)[2]) const {
        const bool first = first_is_later(l), fine_row = mixed && chosen(first, fine[0], fine[1]);
        const float factor = l > 1 ? left_lift(fine_row) : fine_row ? 1.0f : lift,
                    right_factor = mixed ? lift : 1.0f;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float a[4], b[2];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int c = 2 * pair + odd;
                const float decay = chosen(first, since[0][c], since[1][c]), left = mixed ? decay * factor : decay,
                            key = chosen(first, k[1][c], k[0][c]);
                a[2 * odd] = chosen(first, q[0][c], q[1][c]) * left;
                a[2 * odd + 1] = chosen(first, k[0][c], k[1][c]) * left;
                b[odd] = l == 1 ? key : key * (chosen(first, until[1][c], until[0][c]) * right_factor);
            }
            multiply_cut<precision>(sums, a, b, fine_row, fine_row);
        }
    }
    // From blocks of l tokens to blocks of 2 l.
    HEADRACE_DEVICE void join_blocks(int l) {
        const bool first = first_is_later(l);
#pragma unroll
        for (int c = 0; c < lane_channels; ++c) {
            const float own[2] = {decay_through(0, c), decay_through(1, c)};
            float other[2];
#pragma unroll
            for (int which = 0; which < 2; ++which)
                other[which] = 2 * l == slice_tokens ? own[1 - which] : ptx::shuffle_xor(own[which], 4 * l);
            since[0][c] *= first ? other[0] : 1.0f;
            until[1][c] *= first ? other[1] : 1.0f;
            since[1][c] *= first ? 1.0f : other[1];
            until[0][c] *= first ? 1.0f : other[0];
            if (cut) through[0][c] *= other[0], through[1][c] *= other[1];
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
