// prepared: the part of the workspace where the chunks of the form on tensor cores leave what their walks read, and the
// launches that do so under channel gates.
#pragma once

#include <algorithm>

#include "core/problem.hpp"
#include "core/workspace.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {

// For `rows` chunks of each value head.
inline std::uint16_t* take_lower(const Problem& problem, Carver& carver, std::int64_t rows, const char* name) {
    return static_cast<std::uint16_t*>(carver.take(name, DType::bf16, {rows * problem.HV, lower_size}));
}

// Places for `rows` chunks (parts_of(problem, tensor_chunk)) of each value head.
inline Prepared take_prepared(const Problem& problem, Carver& carver, std::int64_t rows) {
    const std::int64_t places = rows * problem.HV, C = tensor_chunk, K = problem.K <= 64 ? 64 : 128;
    const bool delta = problem.rule == Rule::delta;
    const auto matrix = [&](const char* name, std::int64_t columns) {
        return static_cast<std::uint16_t*>(carver.take(name, DType::bf16, {places, C, columns}));
    };
    const auto numbers = [&](const char* name, std::int64_t count) {
        return static_cast<float*>(carver.take(name, DType::f32, {places, count}));
    };
    Prepared to{};
    to.scores = take_lower(problem, carver, rows, "prepared scores");
    if (delta) to.solve_high = take_lower(problem, carver, rows, "prepared solve, high");
    if (delta) to.solve_low = take_lower(problem, carver, rows, "prepared solve, low");
    to.factors = numbers("prepared factors", 4 * C);
    to.decay = numbers("prepared decay", problem.channel_gate ? 2 * K : 2);
    if (delta) to.numbers = numbers("prepared numbers", 4);
    to.of_backward = problem.runs_backward();
    if (delta && to.of_backward) {
        to.solve_rest = take_lower(problem, carver, rows, "prepared solve, rest");
        to.overlap = static_cast<std::int32_t*>(carver.take("prepared overlap", DType::i32, {places}));
    }
    if (delta || to.of_backward) to.scores_low = take_lower(problem, carver, rows, "prepared scores, low");
    if (delta && !to.of_backward)
        to.exact = static_cast<std::int32_t*>(carver.take("prepared exactness", DType::i32, {places, 2}));
    if (!problem.channel_gate) return to;
    to.reads = matrix("prepared reads", K), to.writes = matrix("prepared writes", K);
    if (!delta) return to;
    to.erases = matrix("prepared erases", K);
    to.erases_low = matrix("prepared erases, low", K), to.writes_low = matrix("prepared writes, low", K);
    to.added = numbers("prepared roundings", K);
    return to;
}

class PreparingImplementation : public CudaImplementation {
  protected:
    bool in_double(const Problem&) const final { return false; }
    // What a run has between copies of tensors that its kernels cannot take as they lie.
    virtual std::vector<Launch> staged_kernels(const Problem& problem, const KernelArgs& args) const = 0;
    std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const final {
        std::vector<Launch> launches;
        for (const KernelArgs& each : copies_in(problem, args)) launches.push_back(copy(each));
        if (makes_log_decays(problem)) {
            const std::int64_t blocks = blocks_of_log_decays(problem);
            launches.push_back({log_decays_kernel(problem.channel_gate),
                                args_of_log_decays(problem, args),
                                blocks,
                                launched_threads,
                                {1, static_cast<double>(blocks)}});
        }
        for (Launch& each : staged_kernels(problem, args)) launches.push_back(each);
        for (const KernelArgs& each : copies_out(problem, args)) launches.push_back(copy(each));
        return launches;
    }
    // Of so many blocks of 64 columns, of all parts of keys: AddedOutputs::sums.
    static float* take_added(const Problem& problem, Carver& carver, std::int64_t blocks, std::int64_t chunks) {
        return static_cast<float*>(carver.take("outputs to be added up", DType::f32,
                                               {blocks, chunks, problem.HV, std::int64_t{added_outputs}}));
    }
    // Rows of args.o, behind all that left sums of them.
    static Launch add_outputs(const Problem& problem, const KernelArgs& args) {
        const int threads = adding_threads(args.V), columns = threads / launched_threads * tensor_values;
        const std::int64_t of_chunk = args.H * ((args.V + columns - 1) / columns);
        return {tensor_kernels<false>(args.V, problem.dtype).add_outputs, args, args.added.chunks * of_chunk, threads,
                one_step(problem, of_chunk)};
    }
    static std::int64_t blocks_of(std::int64_t columns, int of_block = tensor_values) {
        return (columns + of_block - 1) / of_block;
    }
    // What leaves the segments, by args.segments.blocks of a segment and head, and what enters them; from then on a
    // walk along sequences goes along segments.
    struct Joining {
        Kernel kernel;
        const KernelArgs& args;
    };
    static void join_segments(const Problem& problem, Joining states, Joining join, int threads, Steps& steps,
                              std::vector<Launch>& launches) {
        const int tokens = join.args.segments.tokens;
        const std::int64_t heads = problem.N * problem.HV, blocks = states.args.segments.blocks,
                           ends =
                               join.args.segments.adjoints != nullptr && join.args.segments.states != nullptr ? 2 : 1,
                           joined = ends * heads * blocks_of(join.args.V, join_columns(join.args.delta));
        Steps of_states = steps_along(problem, tensor_chunk, heads * blocks),
              segments = steps_along(problem, tokens, joined);
        steps.longest = of_states.longest = tokens / tensor_chunk;
        // The last segment of a sequence leaves no state to another, and the first one no gradient; of a backward
        // transitions are left by all, those of the additive rule, products of decays, in no time.
        const bool all = join.args.segments.to_end;
        const double longest = static_cast<double>(segments.longest), leaving = all ? 1 : (longest - 1) / longest,
                     values = blocks_of(states.args.V, states.args.value_columns),
                     of_all =
                         join.args.segments.adjoints == nullptr ? 0 : 1 - (ends * values) / static_cast<double>(blocks);
        of_states.all *= (join.args.delta ? of_all : 0) + (1 - of_all) * leaving;
        segments.all *= leaving, segments.longest -= all ? 0 : 1;
        launches.push_back(
            {states.kernel, states.args, states.args.segments.slots * problem.HV * blocks, threads, of_states});
        launches.push_back({join.kernel, join.args, joined, join_threads(join.args.delta, join.args.K), segments});
    }
    static ChannelKernels channel(const Problem& problem) {
        return problem.rule == Rule::delta ? channel_kernels<true>(problem.K) : channel_kernels<false>(problem.K);
    }
    // Of `places`, of which most want nothing: a block looks at some of them, where enough blocks are left.
    static Launch of_wanted(const Kernel& kernel, KernelArgs args, std::int64_t places, int threads) {
        constexpr std::int64_t most = 16, blocks_wanted = 4 * 132;
        const std::int64_t looked_at = std::clamp<std::int64_t>(places / blocks_wanted, 1, most),
                           blocks = (places + looked_at - 1) / looked_at;
        args.prepared.looked_at = static_cast<int>(looked_at);
        return {kernel, args, blocks, threads, {1, static_cast<double>(blocks)}};
    }
    // By that kernel with a gate per token.
    static std::vector<Launch> prepare(const Problem& problem, const KernelArgs& args, const Kernel& of_tokens) {
        if (problem.channel_gate) return prepare_channels(problem, args);
        return {prepare_tokens(problem, args, of_tokens)};
    }
    static Launch prepare_tokens(const Problem& problem, const KernelArgs& args, const Kernel& kernel) {
        const std::int64_t of_chunk = problem.H * ((problem.group + prepared_heads - 1) / prepared_heads);
        const std::int64_t blocks = parts_of(problem, tensor_chunk) * of_chunk;
        return {kernel, args, blocks, launched_threads, one_step(problem, of_chunk)};
    }
    static std::vector<Launch> prepare_channels(const Problem& problem, const KernelArgs& args) {
        const ChannelKernels kernels = channel(problem);
        const std::int64_t chunks = parts_of(problem, tensor_chunk) * problem.HV, heads = problem.N * problem.HV,
                           warps = launched_threads / 32, estimates = (heads + warps - 1) / warps;
        std::vector<Launch> launches{{kernels.prepare, args, chunks, launched_threads, one_step(problem, problem.HV)}};
        if (!args.delta) return launches;
        launches.push_back(
            {kernels.estimate, args, estimates, launched_threads, steps_along(problem, tensor_chunk, estimates)});
        launches.push_back(of_wanted(kernels.prepare_low, args, chunks, launched_threads));
        return launches;
    }
};

}  // namespace headrace::cuda
