// What CudaImplementation says about its launches.
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

// Steps of the longest sequence, and of all of them.
struct Steps {
    std::int64_t longest;
    double all;
};

Steps steps_of(const Problem& problem, int tokens) {
    std::int64_t longest = problem.T;
    double all = static_cast<double>(problem.N * problem.T);
    if (problem.in.cu_seqlens.given()) {
        all = static_cast<double>(problem.T);
        longest = problem.N > 0 ? (problem.T + problem.N - 1) / problem.N : 0;  // unless their lengths are known
        for (std::size_t i = 0; i < problem.sequences.size(); ++i) {
            const std::int64_t length = problem.sequences[i].end - problem.sequences[i].begin;
            longest = i == 0 ? length : std::max(longest, length);
        }
    }
    return {(longest + tokens - 1) / tokens, all / tokens};
}

LaunchPlan plan_of_numbers() {
    LaunchPlan plan{"numbers", 1, launched_threads, registers_allowed(launched_threads, 1), 0, DType::i64, 0, 0,
                    {},        {}};
    plan.block.saved_bytes = 8.0 * most_numbers;
    return plan;
}

LaunchPlan plan_of(const SumsArgs& sums) {
    const std::int64_t blocks = blocks_of(sums), count = sums.heads * sums.channels;
    LaunchPlan plan{"parameter_sums",
                    blocks,
                    launched_threads,
                    registers_allowed(launched_threads, 1),
                    0,
                    DType::f64,
                    0,
                    0,
                    {},
                    {}};
    const double of_block = static_cast<double>(count) / static_cast<double>(blocks);
    plan.block.saved_bytes = 8 * of_block * static_cast<double>(sums.N);
    plan.block.output_bytes = of_block * static_cast<double>(size_of(sums.target.dtype));
    plan.block.memory_waits = static_cast<double>(sums.N);
    return plan;
}

}  // namespace

std::vector<LaunchPlan> CudaImplementation::launches(const Problem& problem) const {
    Carver carver(reinterpret_cast<void*>(Carver::alignment));  // addresses that nobody follows
    const KernelArgs args = layout(problem, carver);
    std::vector<LaunchPlan> all;
    for (std::int64_t i = 0; i < sequence_launches(problem.in.cu_seqlens, problem.N); ++i)
        all.push_back(plan_of_numbers());
    for (const Launch& each : kernels(problem, args)) {
        if (each.blocks == 0) continue;
        const Steps steps = steps_of(problem, each.tokens_of_step);
        const BlockWork work = each.kernel.work(args, args.shared_limit);
        const double blocks_of_sequence = static_cast<double>(each.blocks) / static_cast<double>(problem.N);
        all.push_back({each.kernel.name, each.blocks, each.threads, each.kernel.registers,
                       each.kernel.memory(args, args.shared_limit).shared,
                       computes_in_double(problem) ? DType::f64 : DType::f32, steps.longest,
                       steps.all * blocks_of_sequence, work.block, work.step});
    }
    for (const SumsArgs& sums : parameter_sums(problem, args)) {
        if (blocks_of(sums) > 0) all.push_back(plan_of(sums));
    }
    return all;
}

}  // namespace headrace::cuda
