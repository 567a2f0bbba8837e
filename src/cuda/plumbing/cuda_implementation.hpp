// CudaImplementation: what the implementations of this backend share: the device, the arithmetic, memory, the order of
// a run.
#pragma once

#include <algorithm>

#include "core/implementation.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/args.hpp"
#include "cuda/plumbing/blocking.hpp"
#include "cuda/plumbing/launch.hpp"
#include "cuda/plumbing/staging.hpp"

namespace headrace::cuda {

// select.operator()<delta, channel_gate>() of the rule and gate of a problem
template <class Select>
auto select_kernels(const Problem& problem, Select select) {
    const auto of_gate = [&]<bool delta>() {
        return problem.channel_gate ? select.template operator()<delta, true>()
                                    : select.template operator()<delta, false>();
    };
    return problem.rule == Rule::delta ? of_gate.template operator()<true>() : of_gate.template operator()<false>();
}

class CudaImplementation : public Implementation {
  public:
    Device device() const final { return Device::cuda; }
    std::string states(const Problem&) const final { return "cuda"; }  // no bits are promised: headrace::Piece
    void carve(const Problem& problem, Carver& carver) const final { layout(problem, carver); }
    Status allocate(const Problem& problem, std::size_t bytes, Block* block) const final {
        const OnDevice device(named_views(problem));
        return device.status().ok() ? cuda::allocate(bytes, problem.options.stream, block) : device.status();
    }
    Status run(const Problem& problem, Carver& carver) const final {
        const OnDevice device(named_views(problem));
        if (!device.status().ok()) return device.status();
        KernelArgs args = layout(problem, carver);
        Status status = device.check_workspace(args.refused, problem.options.stream);
        if (status.ok()) status = prepare(problem, args);
        for (Launch& each : all_kernels(problem, args)) {
            if (status.ok() && wants_more(problem, each)) {
                std::size_t limit = 0;
                status = device.shared_memory(&limit);
                if (status.ok()) each.raise(limit);
            }
            if (!status.ok()) break;
            const BlockMemory memory = each.memory();
            each.args.spill_bytes = spill_bytes(memory);
            status = launch(each.kernel.function, each.kernel.name, each.blocks, each.block(), &each.args,
                            problem.options.stream);
        }
        if (status.ok()) status = store_parameter_gradients(problem, args);
        if (status.ok())
            status = spoil_results(named_views(problem), problem.in.cu_seqlens, args.cu_seqlens, problem.N, problem.T,
                                   problem.options.stream);
        return status.ok() ? check_refused(problem, args) : status;
    }

    std::vector<LaunchPlan> launches(const Problem& problem) const final;

  protected:
    // A summary runs as a forward that leaves no outputs, or as a backward that leaves no other gradients.
    static Direction runs_as(Direction direction) {
        if (direction == Direction::summarize) return Direction::forward;
        return direction == Direction::summarize_backward ? Direction::backward : direction;
    }
    // Whether the kernel's code for the GPU has more threads than these (takes()).
    static bool has_third_group(const Kernel& kernel, int threads, const GpuLimits* planned) {
        return kernel.more_threads > 0 && takes(kernel.function, threads + kernel.more_threads, planned);
    }
    // Of the block with the most, one after another; of all blocks, where a last, shorter step counts by its tokens;
    // blocks that have none (LaunchPlan::idle_blocks).
    struct Steps {
        std::int64_t longest;
        double all;
        std::int64_t idle_blocks = 0;
    };
    // Blocks that each walk a sequence, by so many tokens.
    static Steps steps_along(const Problem& problem, int tokens, std::int64_t blocks);
    // Blocks that each have a chunk of tensor_chunk, so many for each of parts_of.
    static Steps one_step(const Problem& problem, std::int64_t blocks_of_chunk);
    struct Launch {
        Kernel kernel;
        KernelArgs args;
        std::int64_t blocks;
        int threads;
        Steps steps;
        BlockMemory memory() const { return kernel.memory(args, args.shared_limit); }
        // With a third group where the kernel's code for the GPU has one.
        BlockSize block(const GpuLimits* planned = nullptr) const {
            const bool more = has_third_group(kernel, threads, planned);
            return {threads + (more ? kernel.more_threads : 0), memory().shared + (more ? kernel.more_shared : 0)};
        }
        // As much of a block in shared memory as that has room for: what lies where is no part of a result, and what
        // the workspace has for it, which no GPU decides, is enough.
        void raise(std::size_t limit) {
            limit = std::min(limit, most_shared_bytes);
            if (kernel.memory(args, limit).spill <= memory().spill) args.shared_limit = limit;
        }
    };

    // Whether this form computes in double, for its results or for its speed.
    virtual bool in_double(const Problem& problem) const { return computes_in_double(problem); }
    // Of forms whose blocks are alone on a multiprocessor.
    virtual bool takes_all_shared_memory(const Problem&) const { return false; }
    bool wants_more(const Problem& problem, const Launch& launch) const {
        return takes_all_shared_memory(problem) && launch.memory().spill > 0;
    }
    virtual KernelArgs layout(const Problem& problem, Carver& carver) const = 0;
    // The kernels of a run in their order, behind which the sums of parameter gradients follow.
    virtual std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const = 0;

    std::vector<Launch> all_kernels(const Problem& problem, const KernelArgs& args) const {
        std::vector<Launch> launches;
        for (const Launch& each : kernels(problem, args)) add_parts(launches, each);
        for (const KernelArgs& each : zero_roundings(problem)) launches.push_back(copy(each));
        return launches;
    }
    // The launch, or several where the tiles of its blocks would take too much of the workspace.
    static void add_parts(std::vector<Launch>& launches, const Launch& whole) {
        if (whole.blocks <= most_tiled_blocks || whole.memory().spill == 0) return launches.push_back(whole);
        for (std::int64_t first = 0; first < whole.blocks; first += most_tiled_blocks) {
            Launch part = whole;
            part.args.first_item = first;
            part.blocks = std::min(whole.blocks - first, most_tiled_blocks);
            part.steps.all *= static_cast<double>(part.blocks) / static_cast<double>(whole.blocks);
            launches.push_back(part);
        }
    }
    // Bytes of the workspace for tiles beyond shared memory.
    static std::int64_t tiles_of(const Launch& launch) {
        return std::min(launch.blocks, most_tiled_blocks) * spill_bytes(launch.memory());
    }
    static Launch copy(const KernelArgs& args) {
        const std::int64_t blocks = blocks_of_copy(args);
        return {staged_copy_kernel(), args, blocks, launched_threads, {1, static_cast<double>(blocks)}};
    }

    // Of a summary by walks that are a forward's: before the walk of a state, if that is wanted, that of the unit
    // matrix without values, or the product of decays. `walk` of a forward's args.
    template <class MakeWalk>
    static std::vector<Launch> walks_of(const Problem& problem, const KernelArgs& args, MakeWalk walk) {
        std::vector<Launch> launches;
        if (args.transition.given && !args.delta) launches.push_back(decay_product(problem, args));
        if (args.transition.given && args.delta) {
            launches.push_back(
                {unit_matrix_kernel(), args, args.K, launched_threads, {1, static_cast<double>(args.K)}});
            KernelArgs zeros = args;
            zeros.N = zeros.T = zeros.H = 1, zeros.K = 0, zeros.V = static_cast<int>(round_up_16(args.K));
            zeros.o = args.zeros;
            launches.push_back(copy(zeros));
            launches.push_back(walk(args_of_transition(args)));
        }
        if (problem.direction != Direction::summarize || args.final_state.given) launches.push_back(walk(args));
        return launches;
    }
    static Launch decay_product(const Problem& problem, const KernelArgs& args) {
        const std::int64_t parts =
                               args.channel_gate ? (args.K + decay_product_channels - 1) / decay_product_channels : 1,
                           blocks = problem.N * problem.HV * parts;
        const bool wide = problem.dtype == DType::f64 || problem.dtype == DType::f32;
        return {decay_product_kernel(wide), args, blocks, decay_product_threads, {1, static_cast<double>(blocks)}};
    }
    static KernelArgs args_of_transition(KernelArgs args) {
        args.v = args.zeros, args.initial_state = args.identity, args.final_state = args.transition;
        args.V = args.K, args.walks_identity = true;
        return args;
    }
    static void take_identity(const Problem& problem, Carver& carver, KernelArgs& args) {
        if (!args.transition.given || !args.delta) return;
        const std::int64_t K = problem.K;
        args.identity = {static_cast<char*>(carver.take("unit matrix", args.transition.dtype, {K, K})),
                         {0, 0, K, 1},
                         args.transition.dtype,
                         true};
        args.zeros = {static_cast<char*>(carver.take("zeros for values", problem.dtype, {round_up_16(K)})),
                      {0, 0, 0, 1},
                      problem.dtype,
                      true};
    }

    // What the blocks need beyond shared memory.
    static char* take_spill(Carver& carver, std::int64_t bytes) {
        return static_cast<char*>(carver.take("tiles beyond shared memory", DType::f32, {bytes / 4}));
    }
    static std::int64_t spill_bytes(const BlockMemory& block) {
        return static_cast<std::int64_t>((block.spill + 127) / 128 * 128);
    }
    // Parts of so many tokens of all sequences. Sequences of unknown lengths leave up to one each unused (saved_place).
    static std::int64_t parts_of(const Problem& problem, int tokens) {
        return problem.in.cu_seqlens.given() ? problem.T / tokens + problem.N
                                             : problem.N * ((problem.T + tokens - 1) / tokens);
    }
    // A state for every part of each head.
    void take_saved_states(const Problem& problem, Carver& carver, KernelArgs& args, int tokens) const {
        args.parts = parts_of(problem, tokens);
        args.state_dtype = in_double(problem) ? DType::f64 : DType::f32;
        args.saved_states = take_saved(problem, carver, args, "saved states", args.state_dtype, round_up_16(problem.K));
    }
    // Rows of values for each of the parts and heads.
    static char* take_saved(const Problem& problem, Carver& carver, const KernelArgs& args, const char* name,
                            DType dtype, std::int64_t rows) {
        return static_cast<char*>(carver.take(name, dtype, {args.parts * problem.HV, rows, round_up_16(problem.V)}));
    }
    // Of rows that kernels read and write in pieces of 16 bytes, whatever the type.
    static std::int64_t round_up_16(std::int64_t size) { return (size + 15) / 16 * 16; }
    static std::string chunk_refusal(const Problem& problem) {
        if (problem.value_gate) return "the chunk form has no value-side gate (gv)";
        if (problem.elementwise_beta) return "the chunk form needs one beta per token";
        if (problem.wide && erases_much(problem))
            return "the delta rule of f64 tensors in chunks needs at least 16 key channels to stay accurate";
        return common_refusal(problem);
    }
    static std::string common_refusal(const Problem& problem) {
        if (wants_states(problem)) return "backward_states is computed on the CPU only";
        if (problem.K > most_key_channels || problem.V > most_value_channels)
            return "takes up to 256 key and 512 value channels";
        return {};
    }
};

}  // namespace headrace::cuda
