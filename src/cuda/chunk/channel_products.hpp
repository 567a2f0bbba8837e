// channel_products: scores of 16 tokens with each other under channel gates, of a slice of channels, by one warp.
#pragma once

#include "cuda/chunk/channel_decays.hpp"

namespace headrace::cuda {

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

// Rows of a slice, of the lane's tokens.
struct ChannelSlice {
    LaneTokens q, k;
    ChannelDecays decays;
};
// Once more, and decays on the way to where blocks meet.
struct LevelRows {
    Piece q[2], k[2];
    ChannelLevels decays;
};
// To the end of the block: decays, and keys as right operands.
struct Leaving {
    LaneTokens decays, keys;
};

// Of 16 rows, with 16 keys: columns of tokens `number` and 15 - number; kinds q k^T and, of two, k k^T.
template <int kinds>
using ChannelSums = float[2][kinds][4];

template <Precision precision, int kinds>
struct ChannelProducts {
    using Sums = ChannelSums<kinds>;

    const bool (&fine)[2];  // rows of the lane's tokens

    // Rows with their decays from the start of the block, as left operands: of channels 0 and 1, 2 and 3.
    using Left = float[kinds][2][4];
    HEADRACE_DEVICE void find_left(Left& left, const ChannelSlice& rows) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float factor = left_lift<precision>(fine[which]);
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                const float since = rows.decays.since[which][c],
                            decay = precision == Precision::fine ? since : since * factor;
                left[0][c / 2][c % 2 * 2 + which] = rows.q[which][c] * decay;
                if (kinds > 1) left[kinds - 1][c / 2][c % 2 * 2 + which] = rows.k[which][c] * decay;
            }
        }
    }
    // With keys as right operands that have their decays' inverse.
    HEADRACE_DEVICE void find_leaving(LaneTokens& right, Leaving& leaving, const ChannelSlice& rows) const {
        const ChannelDecays& decays = rows.decays;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                const float inverse = ptx::inverse_approximate(decays.since[which][c]);
                right[which][c] = rows.k[which][c] * lifted(inverse);
                leaving.decays[which][c] = decays.through[c] * inverse;
                leaving.keys[which][c] = right[which][c] * decays.through[c];
            }
        }
    }
    // sums += left right
    HEADRACE_DEVICE void multiply_inside(Sums& sums, const Left& left, const LaneTokens& right) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                for (int kind = 0; kind < kinds; ++kind)
                    multiply_cut<precision>(sums[which][kind], left[kind][pair],
                                            {right[which][2 * pair], right[which][2 * pair + 1]}, fine);
            }
        }
    }
    HEADRACE_DEVICE void find_leaving(Leaving& leaving, const LevelRows& of) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                leaving.decays[which][c] = of.decays.until[which][c];
                leaving.keys[which][c] = of.k[which].at(c) * lifted(of.decays.until[which][c]);
            }
        }
    }
    // Where not all pairs meet at the start of the block; load(rows) loads the slice again.
    template <class Load>
    HEADRACE_DEVICE void add_in_between(Sums& sums, Leaving& leaving, const Left& left, const ChannelSlice& rows,
                                        Load load) const {
        const unsigned near = multiply_near(sums, left, rows);
        LevelRows of;
        load(of);
        HEADRACE_ROLLED
        for (int level = 0; level < ChannelLevels::count; ++level) {
            float met[4] = {};
            multiply_level(met, of, near);
            add_met(sums, met, of.decays.l);
            of.decays.join();
        }
        find_leaving(leaving, of);
    }

  private:
    HEADRACE_DEVICE static float lifted(float of_right) {
        return precision == Precision::fine ? of_right : of_right * lift;
    }
    // The pairs that do. Returns a bit for each of the lane's tokens and channels whose pairs with earlier ones do.
    HEADRACE_DEVICE unsigned multiply_near(Sums& sums, const Left& left, const ChannelSlice& rows) const {
        unsigned near = 0;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float near_left[kinds][4], right[2][2];
#pragma unroll
            for (int which = 0; which < 2; ++which) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int c = 2 * pair + n, place = 2 * n + which;
                    const float since = rows.decays.since[which][c];
                    const bool meets = since >= ChannelDecays::least;
                    near |= meets ? near_bit(which, c) : 0;
                    right[which][n] = meets ? rows.k[which][c] * lifted(ptx::inverse_approximate(since)) : 0.0f;
#pragma unroll
                    for (int kind = 0; kind < kinds; ++kind)
                        near_left[kind][place] = meets ? left[kind][pair][place] : 0.0f;
                }
            }
#pragma unroll
            for (int which = 0; which < 2; ++which) {
#pragma unroll
                for (int kind = 0; kind < kinds; ++kind)
                    multiply_cut<precision>(sums[which][kind], near_left[kind], right[which], fine);
            }
        }
        return near;
    }
    HEADRACE_DEVICE static unsigned near_bit(int which, int c) { return 1u << (lane_channels * which + c); }
    // Rows 0 to 7 are q, the others k, of later_token; columns earlier_token.
    HEADRACE_DEVICE void multiply_level(float (&met)[4], const LevelRows& of, unsigned near) const {
        const bool first = first_is_later(of.decays.l), fine_row = chosen(first, fine[0], fine[1]);
        const float factor = left_lift<precision>(fine_row);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float a[4], b[2];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int c = 2 * pair + odd;
                const auto chosen_row = [&](const Piece(&rows)[2], bool first_token) {
                    return Piece{{chosen(first_token, rows[0].pairs[0], rows[1].pairs[0]),
                                  chosen(first_token, rows[0].pairs[1], rows[1].pairs[1])}}
                        .at(c);
                };
                const bool met_before = (near & chosen(first, near_bit(0, c), near_bit(1, c))) != 0;
                const float since = chosen(first, of.decays.since[0][c], of.decays.since[1][c]),
                            until = chosen(first, of.decays.until[1][c], of.decays.until[0][c]),
                            left = met_before ? 0.0f : since * factor;
                a[2 * odd] = chosen_row(of.q, first) * left;
                a[2 * odd + 1] = chosen_row(of.k, first) * left;
                b[odd] = chosen_row(of.k, !first) * lifted(until);
            }
            multiply_cut<precision>(met, a, b, {fine_row, fine_row});
        }
    }
    // To where they lie inside; those of different blocks mean nothing.
    HEADRACE_DEVICE void add_met(Sums& sums, const float (&met)[4], int l) const {
        const LanePlace at;
        const int i = later_token(at.row, l);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            const int number = at.column + next, j = earlier_token(number, l);
            const bool met_here = i / (2 * l) == j / (2 * l);
#pragma unroll
            for (int which = 0; which < 2; ++which) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool here = met_here && (j == number) == (which == 0) && (i == at.row) == (half == 0);
#pragma unroll
                    for (int kind = 0; kind < kinds; ++kind)
                        sums[which][kind][2 * half + next] += here ? met[2 * kind + next] : 0.0f;
                }
            }
        }
    }
};

}  // namespace headrace::cuda
