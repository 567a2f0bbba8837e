// key_parts: keys of more than most_key_part channels, of the additive rule: launches of a part of them each, and one
// that adds up their outputs. The delta rule's kernels have all channels, as what it erases rests on all of them.
#pragma once

#include "core/problem.hpp"
#include "cuda/kernels/kernels.hpp"

namespace headrace::cuda {

constexpr std::int64_t key_parts(std::int64_t channels, bool delta = false) {
    return delta ? 1 : (channels + most_key_part - 1) / most_key_part;
}
inline std::int64_t key_parts(const Problem& problem) { return key_parts(problem.K, problem.rule == Rule::delta); }

// Of a walk, or all launches of a sweep: no channel of a state knows of another, so that a part's keys, states and
// gates per channel are a problem of their own, with the same values, whose outputs are summands.
inline KernelArgs part_of_keys(KernelArgs args, std::int64_t part) {
    if (args.delta) return args;
    const std::int64_t first = part * most_key_part, blocks = (args.V + tensor_values - 1) / tensor_values;
    const auto skip = [&](Strided& tensor, int dimension) {
        if (tensor.given)
            tensor.data += first * tensor.stride[dimension] * static_cast<std::int64_t>(size_of(tensor.dtype));
    };
    for (Strided* rows : {&args.q, &args.k, &args.d_q, &args.d_k}) skip(*rows, 3);
    for (Strided* state : {&args.initial_state, &args.final_state, &args.d_initial_state, &args.d_final_state})
        skip(*state, 2);
    if (args.channel_gate)
        for (Strided* gates : {&args.g, &args.log_decays, &args.d_g}) skip(*gates, 3);
    const std::int64_t left = args.K - first;
    args.K = static_cast<int>(left < most_key_part ? left : most_key_part);
    args.added.first_block = static_cast<int>(part * blocks);
    return args;
}

// Of value heads: o of all parts' walks of args.
inline KernelArgs outputs_of_values(KernelArgs args) {
    args.H = args.HV, args.group = 1;
    return args;
}

}  // namespace headrace::cuda
