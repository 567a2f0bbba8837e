// blocking: THE TABLE of this backend: chunk lengths, value blocks and memory, each with the limit that sets it.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "core/problem.hpp"

namespace headrace::cuda {

// Right for every size up to these; a state of 256 x 512 in fp32 is 512 KiB.
inline constexpr std::int64_t most_key_channels = 256, most_value_channels = 512;

// Pieces of a sequence may hand states on, and their gradients, in f64.
inline bool hands_doubles_on(const Problem& problem) {
    const TensorView* const states[] = {&problem.in.initial_state, &problem.out.final_state,
                                        &problem.d_out.d_final_state, &problem.grads.d_initial_state};
    return std::any_of(std::begin(states), std::end(states),
                       [](const TensorView* view) { return view->given() && view->dtype == DType::f64; });
}

// Whether a chunk of the delta rule may leave so little of the state, through differences of numbers near 1, that fp32
// is too little for any result, and, with one or two channels, double for one in f64.
inline bool erases_much(const Problem& problem) { return problem.rule == Rule::delta && problem.K < 16; }

// Where results rest on few sums, or the delta rule erases through differences what little is left, or keeps the
// roundings of many tokens, in double (docs/numerics.md). What lies on the device is not known here, so it is the
// shapes that decide.
inline bool computes_in_double(const Problem& problem) {
    const bool delta = problem.rule == Rule::delta;
    // Betas of 2 along one key keep the rounding of its norm: 32 tokens take the final state to 1.4 of its bar, 300 to
    // 7; 8192 sums in fp32, one after another, take o to 0.44 of its bar, 65536 past it. At any length, so that
    // prefixes keep their bits, and as products of doubles on tensor cores are faster than multiply-adds of floats; a
    // step's few tokens meet a state that is rounded anyway.
    const bool keeps_roundings = problem.dtype == DType::f32 && problem.direction != Direction::step &&
                                 (delta || !problem.runs_backward());
    const bool few_sums = problem.whole.tokens * problem.whole.heads < (problem.runs_backward() ? 8 : 2);
    return problem.wide || hands_doubles_on(problem) || erases_much(problem) || keeps_roundings || few_sums;
}

// Backwards of the chunk form always: on tensor cores products of doubles take less time than fp32 multiply-adds, by
// the model an eighth to three quarters of it (docs/performance.md).
inline bool chunks_in_double(const Problem& problem) { return problem.runs_backward() || computes_in_double(problem); }

// Shared memory of a block of the walk: what every GPU from compute capability 8.0 on has (8.6: 99 KiB), so that the
// division of the work, and with it every bit, is the same on all of them. What does not fit lies in the workspace, in
// L2.
inline constexpr std::size_t walk_shared_bytes = std::size_t{96} << 10;
// In double one block has all that the GPU gives it, up to what compute capability 9.0 and 10.0 have.
inline constexpr std::size_t most_shared_bytes = std::size_t{227} << 10;

// Tokens of a chunk of the walk and the split. Under channel gates a score costs two operations per channel and pair of
// tokens: few tokens. A chunk of the delta rule erases the state through differences, the more of it the more its keys
// outnumber the channels.
inline int walk_chunk(const Problem& problem) {
    const bool few_channels = problem.rule == Rule::delta && problem.K < 32;
    const int most = problem.channel_gate || few_channels ? 16 : 32;
    return problem.chunk == 0 ? most : std::clamp(problem.chunk, 16, most);
}

// Values of a block of a forward or a sweep: its state, 64 x K, fits into shared memory up to K = 256 in fp32; in
// double 32 x K, and 32 heads of 128 values fill 128 multiprocessors.
inline int walk_value_columns(const Problem& problem, std::int64_t values) {
    return static_cast<int>(std::min<std::int64_t>(values, chunks_in_double(problem) ? 32 : 64));
}

// Tokens of the segments that the tensor-core form cuts sequences into where few blocks have 64 values of a sequence
// and head each, else 0. A segment's state is computed twice, the delta rule's transition too (of more than 128 channels
// as much as four states of 64 values), and decayed rows of channel gates are read twice: segments are as short as they
// may be where they leave most of 132 multiprocessors without work, longer where they fill them, and gone where a
// sequence's own blocks do. By the model of an H200 these took the least time of 1000 to 65,000 tokens on the mean,
// where several would do. In a backward two walks of three have 64 key channels in place of values. By sizes that a
// longer sequence does not change, as its first tokens' outputs do not change.
struct SegmentsOf {
    std::int64_t most_blocks;  // of whole sequences
    int tokens;
};
// By the first row whose blocks are enough.
inline int segment_tokens(const Problem& problem, std::int64_t blocks, std::initializer_list<SegmentsOf> rows) {
    for (const SegmentsOf& row : rows)
        if (blocks <= row.most_blocks) return own_longest(problem) > row.tokens ? row.tokens : 0;
    return 0;
}
inline int segment_tokens(const Problem& problem) {
    const bool delta = problem.rule == Rule::delta, channels = problem.channel_gate;
    const std::int64_t columns = problem.runs_backward() ? std::max(problem.K, problem.V) : problem.V,
                       blocks = problem.N * problem.HV * ((columns + 63) / 64);
    if (!delta && channels) return segment_tokens(problem, blocks, {{16, 512}, {32, 1024}, {48, 2048}});
    if (!delta) return segment_tokens(problem, blocks, {{32, 512}, {64, 2048}});
    if (problem.K > 128 || problem.direction == Direction::summarize) return 0;
    if (problem.K <= 64) return segment_tokens(problem, blocks, {{32, 512}});
    if (channels) return segment_tokens(problem, blocks, {{16, 512}, {32, 1024}});
    return segment_tokens(problem, blocks, {{8, 512}, {24, 1024}});
}

// The same of sweeps, which take two blocks of 64 values of a sequence and head, one for each direction, and once more,
// with those of its transition, to find what enters segments.
inline int sweep_segment_tokens(const Problem& problem) {
    const bool delta = problem.rule == Rule::delta;
    const std::int64_t values = (problem.V + 63) / 64, keys = (problem.K + 63) / 64,
                       of_head = 4 * values + (delta ? keys : 0);
    if (delta && problem.K > 128) return 0;
    return segment_tokens(problem, problem.N * problem.HV * of_head, {{48, 512}, {80, 1024}});
}

// Blocks of a launch whose tiles lie beyond shared memory: the workspace has these once for each of them, whatever the
// number of sequences and heads, which several launches share then; or chunks, which the blocks take in turn. So many
// that the last ones leave few of the 132 multiprocessors of an H100 without work.
inline constexpr std::int64_t most_tiled_blocks = 528;

}  // namespace headrace::cuda
