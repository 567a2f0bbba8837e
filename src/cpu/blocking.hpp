// blocking: THE TABLE of this backend: chunk lengths and value blocks, each with the limit that sets it.
#pragma once

#include <algorithm>

#include "core/problem.hpp"

namespace headrace::cpu {

// The part of a chunk that grows with C (scores, C x V products) is work the recurrence does not have, so C is as small
// as keeps the state's traffic from L2 below the arithmetic: one walk over the state per chunk.
constexpr int default_chunk = 32;
constexpr int smallest_chunk = 16, largest_chunk = 64;

// The recurrent form walks a strip of the state three times per token: 128 x 64 floats are 32 KiB, two thirds of L1.
constexpr int recurrent_strip_bytes = 256;

// Outputs of this size leave nothing behind in a core's share of the last-level cache that a consumer could still find.
constexpr std::size_t streamed_bytes = std::size_t{8} << 20;

inline int chunk_of(const Problem& problem) {
    return problem.chunk == 0 ? default_chunk : std::clamp(problem.chunk, smallest_chunk, largest_chunk);
}

// Value blocks are independent, so few heads on many threads are split; blocks keep at least 32 columns, because every
// block computes the scores anew. The split changes no bit of the result.
inline int chunk_value_columns(const Problem& problem) {
    const std::int64_t heads = std::max<std::int64_t>(1, problem.N * problem.HV);
    const std::int64_t wanted = (2 * problem.threads + heads - 1) / heads;
    if (heads >= problem.threads && heads % problem.threads == 0) return static_cast<int>(problem.V);
    const std::int64_t columns = (problem.V + wanted - 1) / wanted;
    return static_cast<int>(std::min<std::int64_t>(problem.V, std::max<std::int64_t>(32, (columns + 15) / 16 * 16)));
}

inline int recurrent_value_columns(const Problem& problem) {
    const std::int64_t columns = recurrent_strip_bytes / static_cast<std::int64_t>(problem.wide ? 8 : 4);
    return static_cast<int>(std::min<std::int64_t>(problem.V, columns));
}

}  // namespace headrace::cpu
