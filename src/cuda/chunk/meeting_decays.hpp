// MeetingDecays: decays between tokens of different blocks of 16 of a chunk, as factors of rows and columns of scores.
#pragma once

#include "cuda/chunk/tensor_decays.hpp"

namespace headrace::cuda {

// The root of overlap_weight.
HEADRACE_DEVICE float overlap_weight_root(float beta) {
    constexpr float of_beta = 0.81649658f;  // 1.5^-1/2
    return fmaxf(fabsf(beta) * of_beta, 1.0f);
}
// The weight of the square of l with an earlier token: one that reflects writes more than is left of it.
HEADRACE_DEVICE float overlap_weight(float beta) {
    const float root = overlap_weight_root(beta);
    return root * root;
}

// Tokens i of a block and j of an earlier one meet where the block of i begins, behind token b:
// e^{G_i - G_j} = e^{G_i - G_b} e^{G_b - G_j}, of which neither is above 1.
struct MeetingBlocks {
    static constexpr int block = 16, blocks = tensor_chunk / block, pairs = block * blocks * (blocks - 1) / 2;

    // [pairs] e^{G_b - G_j} of the tokens before a block, for one block behind another: the first one's place.
    HEADRACE_DEVICE static int first_of(int of_block) { return block / 2 * of_block * (of_block - 1); }

    // Of a warp, whose lanes have tokens 2 lane and 2 lane + 1; `own` theirs. f(place, decay, next) of both for each
    // block behind them.
    template <class F>
    HEADRACE_DEVICE static void each_of_columns(const ScalarDecays& decays, const ScalarDecays::Power (&own)[2], F f) {
        const int j = 2 * lane();
#pragma unroll
        for (int of_block = 1; of_block < blocks; ++of_block) {
            const ScalarDecays::Power meeting = decays.at(block * of_block - 1);
            const float first = ScalarDecays::between(meeting, own[0]), next = ScalarDecays::between(meeting, own[1]);
            if (j < block * of_block) f(first_of(of_block) + j, first, next);
        }
        ptx::sync_warp();  // or its lanes stay apart
    }
    // Where the lane's tokens, as those of a block, meet others. Nothing of the first block's.
    HEADRACE_DEVICE static ScalarDecays::Power of_rows(const ScalarDecays& decays) {
        const int begin = 2 * lane() / block * block;
        return decays.at(begin > 0 ? begin - 1 : 0);
    }
};

// Of the additive rule.
struct AdditiveMeetings : MeetingBlocks {
    static constexpr int size = pairs + tensor_chunk;  // floats

    float *columns, *rows;  // [pairs] e^{G_b - G_j}; [C] e^{G_i - G_b}

    HEADRACE_DEVICE explicit AdditiveMeetings(float* data) : columns(data), rows(data + pairs) {}
    // By the warp that prepared `decays`.
    HEADRACE_DEVICE void prepare(const ScalarDecays& decays) const {
        const int j = 2 * lane();
        ptx::sync_warp();
        ScalarDecays::Power own[2];
        decays.pair_at(own, j);
        const auto store = [](float* to, float first, float next) { *reinterpret_cast<float2*>(to) = {first, next}; };
        each_of_columns(decays, own, [&](int at, float first, float next) { store(columns + at, first, next); });
        const ScalarDecays::Power meeting = of_rows(decays);
        store(rows + j, ScalarDecays::between(own[0], meeting), ScalarDecays::between(own[1], meeting));
    }
};

// Of a value head of the delta rule.
template <bool for_gradients>
struct MeetingDecays : MeetingBlocks {
    static constexpr int size = (for_gradients ? 3 : 2) * pairs + 2 * tensor_chunk,  // floats
        size_of_undecayed = tensor_chunk;                                            // more, of comba

    // [pairs] e^{G_b - G_j} times: of `reads` a forward's beta (chunk_scores), of `erases` beta, of `overlaps` the root
    // of its overlap_weight.
    float *reads, *erases, *overlaps;
    // [C] e^{G_i - G_b}, where i reads and where it erases. Nothing of the first block's tokens. And roots of
    // overlap_weight.
    float *read_rows, *erase_rows, *roots;

    // `data` [size], `of_undecayed` [size_of_undecayed] or null
    HEADRACE_DEVICE MeetingDecays(float* data, float* of_undecayed)
        : reads(data),
          erases(for_gradients ? data + 2 * pairs : data),
          overlaps(data + pairs),
          read_rows(data + size - tensor_chunk),
          erase_rows(of_undecayed != nullptr ? of_undecayed : read_rows),
          roots(read_rows - tensor_chunk) {}

    // By the warp that prepared `decays`; `beta` of tokens 2 lane and 2 lane + 1. Readers wait for a barrier.
    HEADRACE_DEVICE void prepare(const ScalarDecays& decays, const float (&beta)[2]) const {
        const int j = 2 * lane();
        ptx::sync_warp();
        ScalarDecays::Power own[2];
        decays.pair_at(own, j);
        const auto pair = [&](float* from, int at) -> float2& { return *reinterpret_cast<float2*>(from + at); };
        const float2 of_overlap = {overlap_weight_root(beta[0]), overlap_weight_root(beta[1])};
        pair(roots, j) = of_overlap;
        each_of_columns(decays, own, [&](int at, float first, float next) {
            const float2 of_beta = {first * beta[0], next * beta[1]};
            pair(overlaps, at) = {first * of_overlap.x, next * of_overlap.y};
            pair(erases, at) = of_beta;
            if (for_gradients) pair(reads, at) = {first, next};
        });
        const ScalarDecays::Power meeting = of_rows(decays);
        const float first = ScalarDecays::between(own[0], meeting), next = ScalarDecays::between(own[1], meeting);
        pair(read_rows, j) = {first, next};
        if (erase_rows != read_rows)
            pair(erase_rows, j) = {ScalarDecays::between(decays.at(j > 0 ? j - 1 : 0), meeting), first};
    }
};

}  // namespace headrace::cuda
