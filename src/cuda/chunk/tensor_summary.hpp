// tensor_summary: summaries of the delta rule on tensor cores, by the kernels of forwards and of their segments.
#pragma once

#include <algorithm>

#include "cuda/chunk/prepared.hpp"

namespace headrace::cuda {

class SummarizingImplementation : public PreparingImplementation {
  protected:
    static constexpr int multiprocessors = 132;  // of an H100 or H200

    static TensorKernels tensor(const Problem& problem, std::int64_t K) {
        return problem.rule == Rule::delta ? tensor_kernels<true>(K, problem.dtype)
                                           : tensor_kernels<false>(K, problem.dtype);
    }
    static std::size_t memory_limit(const Problem& problem) { return shared_memory_limit(problem); }
    // `most` of them, or as many as there is room for.
    static int stages_of(const Problem& problem, const Kernel& kernel, KernelArgs args, int most = 2) {
        for (args.stages = most; args.stages > 1; --args.stages)
            if (kernel.memory(args, 0).shared <= memory_limit(problem)) break;
        return args.stages;
    }
    static void launch_states(const Problem& problem, KernelArgs args, std::vector<Launch>& launches) {
        if (!args.final_state.given) args.V = 0;
        const std::int64_t heads = problem.N * problem.HV,
                           columns = blocks_of(args.V) + (args.transition.given ? blocks_of(args.K) : 0);
        for (Launch& each : prepare(problem, args, tensor(problem, args.K).prepare)) launches.push_back(each);
        const Kernel kernel =
            problem.channel_gate ? channel_segment_kernels<true>(problem.K).states : tensor(problem, args.K).states;
        // While some multiprocessors have no block one has one group's.
        const bool pairs = takes_pairs(problem, kernel) && heads * columns > multiprocessors;
        args.stages = stages_of(problem, kernel, args);
        args.segments.groups = pairs ? 2 : 1;
        args.segments.blocks = blocks_of(columns, args.segments.groups);
        const std::int64_t blocks = heads * args.segments.blocks;
        launches.push_back({kernel, args, blocks, states_threads(problem, takes_pairs(problem, kernel)),
                            steps_along(problem, tensor_chunk, blocks)});
    }
    // With more channels there is no kernel for states alone: forwards whose outputs nobody reads, from the state that
    // enters and, of a row of zeros for all values, from the unit matrix.
    static void walk_twice(const Problem& problem, const KernelArgs& args, std::vector<Launch>& launches) {
        launches.push_back(prepare_tokens(problem, args, tensor(problem, args.K).prepare));
        for (Launch& each : walks_of(problem, args, [&](KernelArgs walk) -> Launch {
                 const TensorKernels kernels = tensor(problem, walk.K);
                 const int threads = 2 * tensor_values + fetching_threads(walk.K);
                 walk.stages =
                     stages_of(problem, kernels.forward, walk,
                               has_third_group(kernels.forward, threads, problem.options.planned_gpu) ? 3 : 2);
                 const std::int64_t blocks = problem.N * problem.HV * blocks_of(walk.V);
                 return {kernels.forward, walk, blocks, threads, steps_along(problem, tensor_chunk, blocks)};
             }))
            launches.push_back(each);
    }
    static void take_for_walks(const Problem& problem, Carver& carver, KernelArgs& args) {
        take_identity(problem, carver, args);
        const std::int64_t columns = round_up_16(std::max(problem.K, problem.V));
        args.o = {static_cast<char*>(carver.take("outputs that nobody reads", problem.dtype,
                                                 {problem.B, problem.T, problem.HV, columns})),
                  {problem.T * problem.HV * columns, problem.HV * columns, columns, 1},
                  problem.dtype,
                  true};
    }
    // Of a gate per token, whose third group of warps fetches for two that walk.
    static bool takes_pairs(const Problem& problem, const Kernel& states) {
        return !problem.channel_gate && problem.rule == Rule::delta && fetching_threads(problem.K) > 0 &&
               takes(states.function, three_groups, problem.options.planned_gpu);
    }
    static int states_threads(const Problem& problem, bool pairs) {
        if (problem.channel_gate) return channel_walk_threads(true);
        return pairs ? three_groups : 2 * tensor_values;
    }
};

}  // namespace headrace::cuda
