// blocking: THE TABLE of this backend: chunk lengths and value blocks, each with the limit that sets it.
#pragma once

#include <algorithm>
#include <string>

#include "core/problem.hpp"
#include "cpu/plumbing/kernel_args.hpp"

namespace headrace::cpu {

// The part of a chunk that grows with C (scores, C x V products) is work the recurrence does not have, so C is as small
// as keeps the state's traffic from L2 below the arithmetic: one walk over the state per chunk.
constexpr int default_chunk = 32;
constexpr int smallest_chunk = 16, largest_chunk = 64;

// The recurrent form walks its columns of a state three times per token: up to this size they lie in L2 from the second
// on.
constexpr std::int64_t recurrent_columns_bytes = std::int64_t{512} << 10;

// A core's share of the last-level cache. Outputs of this size are stored past the caches: they would leave nothing
// behind there that a consumer could still find.
constexpr std::size_t cached_bytes = std::size_t{8} << 20;

inline std::int64_t state_bytes(const Problem& problem) {
    return problem.K * problem.V * static_cast<std::int64_t>(problem.wide ? 8 : 4);
}

// A step fetches what it reads next: the next state where a core's own cache does not hold its states until the next
// step (14 to 20 % less time), the next columns where its nearest cache does not hold all states, but these columns and
// the next (1 to 21 %; the additive rule, with one walk, gains nothing there).
constexpr std::int64_t own_cache = std::int64_t{1} << 20, nearest_cache = std::int64_t{32} << 10;
constexpr std::int64_t fetched_columns = 64;  // of a part, at most

inline Fetching fetching_of(const Problem& problem) {
    const std::int64_t share = problem.N * problem.HV * state_bytes(problem) / problem.threads;
    if (problem.direction != Direction::step || share <= nearest_cache) return Fetching::nothing;
    if (share > own_cache) return Fetching::state;
    const bool fits = problem.K * fetched_columns * 4 <= nearest_cache && problem.V % fetched_columns == 0;
    return problem.rule == Rule::delta && !problem.wide && fits ? Fetching::columns : Fetching::nothing;
}

// A forward with states of up to smallest_chunk_state bytes takes the smallest chunks (up to 14 % less time): half the
// scores, and tiles that stay in L1. Larger states want fewer walks over them; a backward, which saves a state per
// chunk, fewer states; products in bf16, which are fast, fewer operands to pack, unless the scores stay in fp32: those
// of the delta rule under channel gates (5 % less time).
constexpr std::int64_t smallest_chunk_state = std::int64_t{64} << 10;

// Fewer channels than this are left to the recurrent form.
constexpr int fewest_delta_channels = 16;

// A chunk of the delta rule erases the state through differences, the more of it the more its keys outnumber the
// channels: with 16 channels, resets and beta up to 2 the worst of 800 gradients of initial states was off by 2.4e-5
// with chunks of 64, by 8e-6 with 32 and 3e-6 with 16; with 32 channels by 4e-6 with chunks of 64.
inline int chunk_of(const Problem& problem, bool bf16_products, Direction direction) {
    const int longest = problem.rule == Rule::delta && 2 * problem.K < largest_chunk ? default_chunk : largest_chunk;
    if (problem.chunk != 0) return std::clamp(problem.chunk, smallest_chunk, longest);
    const bool fp32_scores = !bf16_products || (problem.rule == Rule::delta && problem.channel_gate);
    const bool smallest = direction == Direction::forward && fp32_scores && state_bytes(problem) <= smallest_chunk_state;
    return smallest ? smallest_chunk : default_chunk;
}

// Between tokens states are the same bits in a backward as in the forward.
inline int state_chunk_of(const Problem& problem, bool bf16_products) {
    return chunk_of(problem, bf16_products, Direction::forward);
}

// Where the recurrent form leaves the chunk form behind, which then yields; measured with 16 heads on AVX-512 and AVX2,
// fp32 and f64 (docs/performance-log.md). Forward, two tokens at a time against a state in the nearest cache: 0.3 to
// 0.6 of the time at 8 tokens, and still 4 to 27 % less at 64, whatever the rule and the channels; on longer sequences
// chunks catch up, the sooner the larger the state, and sooner without erasure. Where nothing is forgotten, roundings
// of a state add up as the square root of the tokens: in fp32 to 1.2e-6 of it after 4096, and to 4.6e-6, above the bar,
// after 65536; chunks round it once each. Backward, token by token: a chunk of 16 padded rows costs about as much as 6
// tokens.
constexpr std::int64_t forward_tokens = 64, small_state_tokens = 4096, backward_tokens = 6;
constexpr std::int64_t small_state = std::int64_t{4} << 10, small_delta_state = std::int64_t{16} << 10;

// Forwards in fp32 whose states may come to hold too many roundings: the rest of such a sequence is computed in double,
// token by token. They keep memory for it at any length: a workspace does not grow with T. Steps round their states
// after every call anyway.
inline bool reflections_may_add_up(const Problem& problem) {
    return problem.rule == Rule::delta && problem.dtype == DType::f32 && problem.runs_forward();
}

inline std::string recurrent_form_is_faster(const Problem& problem, bool bf16_products) {
    if (problem.runs_forward() && bf16_products) return {};
    const std::int64_t state = problem.rule == Rule::delta ? small_delta_state : small_state;
    const bool small = problem.runs_forward() && problem.K * problem.V * 4 <= state;
    const std::int64_t border = problem.runs_backward() ? backward_tokens : small ? small_state_tokens : forward_tokens;
    if (problem.whole.longest > border) return {};
    const std::string states = small ? " with states of up to " + std::to_string(state >> 10) + " KiB" : std::string();
    return "sequences of up to " + std::to_string(border) + " tokens" + states + ": the recurrent form is faster";
}

// The same of summaries, of which the recurrent form computes what it need not: of the delta rule 0.4 to 0.7 of the
// time at 4 to 8 tokens, 1.1 at 16; of the additive rule 0.5 at 2 tokens, 1.1 at 8 (16 heads, K = V = 128, AVX-512).
constexpr std::int64_t delta_summary_tokens = 8, additive_summary_tokens = 4;

inline std::string recurrent_summary_is_faster(const Problem& problem) {
    const std::int64_t border = problem.rule == Rule::delta ? delta_summary_tokens : additive_summary_tokens;
    if (problem.whole.longest > border) return {};
    return "sequences of up to " + std::to_string(border) + " tokens: the recurrent form is faster";
}

// With so few tokens and heads an output may be one sum, or a few, that cancel by chance: of 2000 random backwards in
// fp32 with one token of one head 17 missed a relative 1e-5, with two tokens 4, with four 1, with eight none. Value
// heads of a group share their q.k: they are no further sums.
inline bool rests_on_few_sums(const Problem& problem) {
    const std::int64_t few = problem.runs_backward() ? 8 : 2, tokens = problem.whole.tokens;
    return !problem.wide && tokens > 0 && tokens * problem.whole.heads < few;
}

// About what a call takes on one thread: the state of each token and head at 8 elements in a nanosecond; the chunk form
// takes half.
inline std::int64_t rough_nanoseconds(const Problem& problem) {
    std::int64_t tokens = 0;
    for (const Sequence& s : problem.sequences) tokens += s.end - s.begin;
    const std::int64_t sweeps = problem.direction == Direction::backward ? 5 : 1;
    return tokens * problem.HV * problem.K * problem.V * sweeps / 8;
}

// Value blocks are independent, so few heads on many threads are split; blocks keep at least 32 columns, because every
// block computes the scores anew. The split changes no bit of the result.
inline int chunk_value_columns(const Problem& problem, std::int64_t all_columns) {
    const std::int64_t heads = std::max<std::int64_t>(1, problem.N * problem.HV);
    const std::int64_t wanted = (2 * problem.threads + heads - 1) / heads;
    if (heads >= problem.threads && heads % problem.threads == 0) return static_cast<int>(all_columns);
    const std::int64_t columns = (all_columns + wanted - 1) / wanted;
    return static_cast<int>(std::min<std::int64_t>(all_columns, std::max<std::int64_t>(32, (columns + 15) / 16 * 16)));
}
inline int chunk_value_columns(const Problem& problem) { return chunk_value_columns(problem, problem.V); }

// Heads of a token are neighbours in memory. A task that takes a few of them through the chunks together meets each
// page once for all of them, and address translation no longer slows long sequences. Their states stay in L2 beside the
// tiles of a chunk; tasks enough remain for all threads, and with them saved states of at most half of all heads. One
// thread has nobody to share with, so a piece of some heads takes as many together as the whole would; several threads
// could not share its few tasks. H is at least 1 (make_problem), N may be 0.
constexpr std::int64_t walked_bytes = std::int64_t{256} << 10;
constexpr std::int64_t most_walked = 4;

inline int heads_walked(const Problem& problem, std::int64_t heads, std::int64_t state_bytes_per_head, int chunk) {
    for (std::int64_t walk = most_walked; walk > 1; walk /= 2) {
        const std::int64_t tasks = problem.N * heads / walk, threads = problem.threads;
        const std::int64_t of_whole = problem.whole.sequences * problem.whole.heads * (heads / problem.H) / walk;
        const bool balanced = tasks >= 8 * threads || (tasks >= 2 * threads && tasks % threads == 0) ||
                              (threads == 1 && of_whole >= 2);
        const bool fits = walk * state_bytes_per_head * chunk <= walked_bytes * default_chunk;
        if (heads % walk == 0 && balanced && fits) return static_cast<int>(walk);
    }
    return 1;
}
inline int value_heads_walked(const Problem& problem, int chunk) {
    return heads_walked(problem, problem.HV, state_bytes(problem), chunk);
}
inline int key_heads_walked(const Problem& problem, int chunk) {
    return heads_walked(problem, problem.H, problem.group * state_bytes(problem), chunk);
}

// The same for the recurrent form: as few blocks as the threads can share evenly, each of which prepares keys and gates
// anew (whole heads instead of 64 columns: 10 to 30 % less time).
inline int recurrent_value_columns(const Problem& problem) {
    const std::int64_t heads = problem.N * problem.HV, threads = problem.threads;
    std::int64_t blocks = 1;
    while (heads * blocks % threads != 0 && heads * blocks < 8 * threads && problem.V / (blocks + 1) >= 32) ++blocks;
    const std::int64_t shared = (problem.V + blocks - 1) / blocks;
    const std::int64_t column_bytes = problem.K * (problem.wide ? 8 : 4);
    const std::int64_t most = std::max<std::int64_t>(32, recurrent_columns_bytes / std::max<std::int64_t>(column_bytes, 1) / 16 * 16);
    return static_cast<int>(std::min({problem.V, (shared + 15) / 16 * 16, most}));
}

}  // namespace headrace::cpu
