// What CudaImplementation says about its launches.
#include "cuda/plumbing/cuda_implementation.hpp"

#include "cuda/plumbing/issued.hpp"

namespace headrace::cuda {
namespace {

// A kernel of a few lines, without steps or shared memory.
LaunchPlan plan_of_small(const char* kernel, std::int64_t blocks, DType arithmetic) {
    LaunchPlan plan;
    plan.kernel = kernel;
    plan.blocks = blocks;
    plan.threads = launched_threads;
    plan.registers = registers_allowed(launched_threads, 1);
    plan.arithmetic = arithmetic;
    return plan;
}

// One of sequence_launches.
LaunchPlan plan_of_sequences(const TensorView& cu_seqlens, std::int64_t N) {
    const bool checks = checked_on_device(cu_seqlens);
    LaunchPlan plan = plan_of_small(checks ? "check_sequences" : "numbers", 1, DType::i64);
    plan.block.saved_bytes = 8.0 * most_numbers;
    if (!checks) return plan;
    plan.threads = checking_threads, plan.registers = registers_allowed(checking_threads, 1);
    plan.block.input_bytes = 3.0 * static_cast<double>(N * size_of(cu_seqlens.dtype));
    plan.block.saved_bytes = 8.0 * static_cast<double>(N);
    plan.block.memory_waits = 2.0 * static_cast<double>(N / checking_threads + 1);
    return plan;
}

LaunchPlan plan_of_spoiling() {
    LaunchPlan plan = plan_of_small("spoil", spoiling_blocks, DType::i64);
    plan.block.saved_bytes = 8;
    plan.block.memory_waits = 1;
    return plan;
}

LaunchPlan plan_of(const SumsArgs& sums) {
    const std::int64_t blocks = blocks_of(sums), count = sums.heads * sums.channels;
    LaunchPlan plan = plan_of_small("parameter_sums", blocks, DType::f64);
    const double of_block = static_cast<double>(count) / static_cast<double>(blocks);
    plan.block.saved_bytes = 8 * of_block * static_cast<double>(sums.count);
    plan.block.output_bytes = of_block * static_cast<double>(size_of(sums.target.dtype));
    // Each warp has a total, of which its lanes add up interleaved parts; five exchanges of a double join these.
    constexpr std::int64_t lanes = 32;
    plan.block.memory_waits = static_cast<double>((sums.count + lanes - 1) / lanes);
    plan.block.tile_waits = 2 * 5;
    return plan;
}

}  // namespace

CudaImplementation::Steps CudaImplementation::steps_along(const Problem& problem, int tokens, std::int64_t blocks) {
    const bool known = problem.sequences.size() == static_cast<std::size_t>(problem.N);
    const std::int64_t longest = known ? own_longest(problem) : (problem.T + problem.N - 1) / problem.N;
    const double mean =
        static_cast<double>(problem.B * problem.T) / static_cast<double>(std::max<std::int64_t>(problem.N, 1));
    return {(longest + tokens - 1) / tokens, static_cast<double>(blocks) * mean / tokens};
}

CudaImplementation::Steps CudaImplementation::one_step(const Problem& problem, std::int64_t blocks_of_chunk) {
    const std::int64_t places = parts_of(problem, tensor_chunk);
    const auto chunks_of = [](std::int64_t tokens) { return (tokens + tensor_chunk - 1) / tensor_chunk; };
    std::int64_t chunks = places;
    if (problem.in.cu_seqlens.given() && problem.N > 0) {
        chunks = problem.sequences.empty() ? problem.N * chunks_of((problem.T + problem.N - 1) / problem.N) : 0;
        for (const auto& sequence : problem.sequences) chunks += chunks_of(sequence.end - sequence.begin);
    }
    return {1, static_cast<double>(chunks * blocks_of_chunk), (places - chunks) * blocks_of_chunk};
}

std::vector<LaunchPlan> CudaImplementation::launches(const Problem& problem) const {
    Carver carver(reinterpret_cast<void*>(Carver::alignment));  // addresses that nobody follows
    const KernelArgs args = layout(problem, carver);
    std::vector<LaunchPlan> all;
    for (std::int64_t i = 0; i < sequence_launches(problem.in.cu_seqlens, problem.N); ++i)
        all.push_back(plan_of_sequences(problem.in.cu_seqlens, problem.N));
    for (Launch& each : all_kernels(problem, args)) {
        if (each.blocks == 0) continue;
        if (wants_more(problem, each)) each.raise(shared_memory_limit(problem));
        BlockWork work = each.kernel.work(each.args, each.args.shared_limit);
        set_issued(work, each.kernel, each.args, in_double(problem), each.threads);
        const BlockSize block = each.block(problem.options.planned_gpu);
        all.push_back({each.kernel.name, each.blocks, each.steps.idle_blocks, block.threads, each.kernel.registers,
                       block.shared, in_double(problem) ? DType::f64 : DType::f32, each.steps.longest, each.steps.all,
                       work.block, work.step});
    }
    for (const SumsArgs& sums : parameter_sums(problem, args)) {
        if (blocks_of(sums) > 0) all.push_back(plan_of(sums));
    }
    if (checked_on_device(problem.in.cu_seqlens)) all.push_back(plan_of_spoiling());
    return all;
}

}  // namespace headrace::cuda
