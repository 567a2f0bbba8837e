// The backward on tensor cores of the delta rule and of channel gates, for bf16 tensors: sweeps that save what lies
// between chunks, then the chunks in any order.

#include "cuda/chunk/key_parts.hpp"
#include "cuda/chunk/prepared.hpp"
#include "cuda/implementations.hpp"

namespace headrace::cuda {
namespace {

class TensorBackward : public PreparingImplementation {
  public:
    std::string name() const override { return "cuda.tensor"; }
    bool serves(Direction direction) const override { return runs_as(direction) == Direction::backward; }

    std::string refusal(const Problem& problem, const Machine&) const override {
        if (std::string reason = chunk_refusal(problem); !reason.empty()) return reason;
        if (problem.rule != Rule::delta && !problem.channel_gate) return "serves the delta rule and gates of channels";
        if (problem.dtype != DType::bf16) return "the tensor cores' products are in bf16";
        if (problem.options.allow_positive_gates) return "takes no positive gates";
        if (problem.K > most_key_part) {
            const bool delta = problem.rule == Rule::delta;
            if (delta ? problem.channel_gate : problem.options.qk_l2norm)
                return "of the delta rule under channel gates, or of others with l2norm, takes up to 128 key channels";
            if (!delta && wants_gate_gradient(problem) &&
                (problem.options.gate_form != GateForm::log_decay || problem.in.g_gamma.given()))
                return "of gates with a formula or a part of their head's takes up to 128 key channels";
        }
        if (problem.K < (problem.rule == Rule::delta ? 64 : 32) || problem.V < 32 || problem.whole.longest < 32)
            return "fewer than 32 tokens, values or key channels, 64 of the delta rule, are too few to average bf16 "
                   "roundings";
        const Gradients& grads = problem.grads;
        for (const TensorView* view : {&grads.d_q, &grads.d_k, &grads.d_p, &grads.d_v})
            if (view->given() && view->dtype != DType::bf16) return "stores d_q, d_k, d_p and d_v in bf16";
        if (gates_rest_on_few_tokens(problem))
            return "gate gradients of fewer than 8 heads and sequences, and 256 tokens times value heads, rest on too "
                   "few sums to average bf16 roundings";
        if (!problem.d_out.d_o.given())
            return "a gradient through the final state alone may rest on too few tokens to average bf16 roundings";
        KernelArgs args{};
        args.undecayed_error = problem.erase_with_p;
        args.K = static_cast<int>(problem.K), args.V = static_cast<int>(problem.V);
        args.value_columns = values_of_block(problem);
        args.stages = 1;
        args.delta = problem.rule == Rule::delta;
        const TensorBackwardKernels backward = of(problem);
        const std::size_t most = shared_memory_limit(problem);
        const bool low = problem.channel_gate && args.delta;
        if (shared(problem, backward.sweeps, args) > most || shared(problem, backward.gradients, args) > most ||
            (low && shared(problem, channel_gradients_low_kernel(problem.K), args) > most))
            return "needs more shared memory than the GPU has";
        return {};
    }

  protected:
    std::vector<Launch> staged_kernels(const Problem& problem, const KernelArgs& args) const override {
        std::vector<Launch> launches;
        for (std::int64_t part = 0; part < key_parts(problem); ++part)
            for (Launch& each : kernels_of_part(problem, part_of_keys(args, part))) launches.push_back(each);
        if (args.added.sums == nullptr || !args.d_v.given) return launches;
        KernelArgs of_values = outputs_of_values(args);
        of_values.o = args.d_v;
        launches.push_back(add_outputs(problem, of_values));
        return launches;
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        const std::int64_t chunks = parts_of(problem, tensor_chunk), places = chunks * problem.HV,
                           V = round_up_16(problem.V), K = swept_channels(problem);
        KernelArgs args = make_args(problem, carver, chunks);
        stage(problem, carver, args);
        args.value_columns = values_of_block(problem);
        args.prepared = take_prepared(problem, carver, chunks);
        args.added = {chunks, static_cast<int>(key_parts(problem)), 0, nullptr};
        if (args.added.parts > 1)
            args.added.sums = take_added(problem, carver, args.added.parts * blocks_of(problem.V), chunks);
        take_segments(problem, carver, args);
        if (!wants_gradients(problem)) return args;
        const auto take = [&](const char* name, std::int64_t columns) {
            return static_cast<std::uint16_t*>(carver.take(name, DType::bf16, {places, V, columns}));
        };
        args.swept.states = take("saved states", K);
        args.swept.adjoints = take("saved adjoints", K);
        if (problem.channel_gate && problem.group > 1)
            args.swept.key_gradients = static_cast<float*>(
                carver.take("saved gradients of keys", DType::f32, {places, 2, tensor_chunk, K}));
        if (!args.delta) return args;
        args.swept.residuals = take("saved residuals", tensor_chunk);
        args.swept.residuals_low = take("saved residuals, low", tensor_chunk);
        args.swept.d_written = take("saved gradients of what is written", tensor_chunk);
        args.swept.d_written_low = take("saved gradients of what is written, low", tensor_chunk);
        if (problem.channel_gate) return args;
        if (problem.K > most_key_part && problem.options.qk_l2norm)
            args.swept.key_gradients = static_cast<float*>(carver.take(
                "gradients of keys' first channels", DType::f32, {chunks, problem.H, 3, tensor_chunk, most_key_part}));
        args.d_log_decays = args.d_g;
        if (makes_gate_gradients(problem))
            args.d_log_decays = {static_cast<char*>(carver.take("gradients of log decays", DType::f32,
                                                                {problem.B, problem.T, problem.HV})),
                                 {problem.T * problem.HV, problem.HV, 1},
                                 DType::f32,
                                 true};
        return args;
    }

  private:
    static void take_segments(const Problem& problem, Carver& carver, KernelArgs& args) {
        Segments& to = args.segments;
        to.tokens = sweep_segment_tokens(problem);
        if (to.tokens == 0) return;
        to.slots = parts_of(problem, to.tokens);
        const std::int64_t slots = to.slots, HV = problem.HV, K = problem.K;
        const auto take = [&](const char* name, std::int64_t columns) {
            return static_cast<float*>(carver.take(name, DType::f32, {slots, HV, K, columns}));
        };
        if (wants_gradients(problem)) to.states = take("segment states", problem.V);
        to.adjoints = take("segment adjoints", problem.V);
        if (args.delta) {
            const std::int64_t columns = (K + 3) / 4 * 4;
            if (wants_gradients(problem)) to.transitions = take("segment transitions", columns);
            to.transposed_transitions = take("segment transitions, transposed", columns);
        } else {
            to.decays = static_cast<double*>(carver.take("segment decays", DType::f64, {slots, HV, K}));
        }
    }
    static std::vector<Launch> kernels_of_part(const Problem& problem, const KernelArgs& args) {
        const TensorBackwardKernels backward = of(problem);
        const bool gradients = wants_gradients(problem);
        const std::int64_t chunks = args.sums, value_blocks = blocks_of(args.V, args.value_columns),
                           of_place = problem.HV * value_blocks * (gradients ? 2 : 1);
        std::vector<Launch> launches = prepare(problem, args, backward.prepare);
        const int sweep_threads = 2 * args.value_columns + (problem.channel_gate ? 0 : fetching_threads(problem.K));
        Steps steps = steps_along(problem, tensor_chunk, problem.N * of_place);
        const KernelArgs sweeps = staged(problem, backward.sweeps, args);
        if (args.segments.tokens > 0) {
            KernelArgs leaving = sweeps;
            leaving.swept = {}, leaving.d_v = {}, leaving.added.sums = nullptr;
            leaving.segments.blocks =
                value_blocks * (gradients ? 2 : 1) + (args.delta ? blocks_of(args.K, args.value_columns) : 1);
            const Kernel join = args.delta ? tensor_kernels<true>(problem.K, DType::bf16).join
                                           : channel_segment_kernels<false>(problem.K).join;
            const Kernel segments = problem.channel_gate ? channel_sweep_segments_kernel(problem.K, args.delta)
                                                         : tensor_sweep_segments_kernel(problem.K);
            join_segments(problem, {segments, leaving}, {join, args}, sweep_threads, steps, launches);
        }
        launches.push_back({backward.sweeps, sweeps, swept_places(problem) * of_place, sweep_threads, steps});
        if (!gradients) return launches;
        const auto once = [&](const Kernel& kernel, const KernelArgs& of, std::int64_t heads, int threads) {
            launches.push_back({kernel, of, chunks * heads, threads, one_step(problem, heads)});
        };
        const int threads = problem.channel_gate ? channel_gradient_threads(problem.K) : tensor_threads;
        once(backward.gradients, gradients_staged(problem, backward.gradients, args),
             problem.channel_gate ? problem.HV : problem.H, threads);
        if (problem.channel_gate && args.delta) {
            const Kernel low = channel_gradients_low_kernel(problem.K);
            once(low, gradients_staged(problem, low, args), problem.HV, threads);
        }
        if (makes_gate_gradients(problem))
            once(tensor_kernels<false>(problem.K, problem.dtype).gate, args, problem.HV, launched_threads);
        if (problem.channel_gate && args.swept.key_gradients != nullptr)
            once(channel_key_sums_kernel(problem.K), args, problem.H, threads);
        return launches;
    }
    static TensorBackwardKernels of(const Problem& problem) {
        const bool delta = problem.rule == Rule::delta;
        if (problem.channel_gate)
            return {{}, channel_sweeps_kernel(problem.K, delta), channel_gradients_kernel(problem.K, delta)};
        return tensor_backward_kernels(problem.K, problem.erase_with_p);
    }
    // With what a third group of warps takes, where the kernel's code for the GPU has one.
    static std::size_t shared(const Problem& problem, const Kernel& kernel, const KernelArgs& args) {
        const bool more = kernel.more_shared > 0 && takes(kernel.function, three_groups, problem.options.planned_gpu);
        return kernel.memory(args, 0).shared + (more ? kernel.more_shared : 0);
    }
    static KernelArgs staged(const Problem& problem, const Kernel& kernel, KernelArgs args) {
        args.stages = 2;
        if (shared(problem, kernel, args) > shared_memory_limit(problem)) args.stages = 1;
        return args;
    }
    // Under channel gates two blocks of 64 channels fit onto a multiprocessor if each has one stage, and those of up to
    // 64 values have no use for another.
    static KernelArgs gradients_staged(const Problem& problem, const Kernel& kernel, KernelArgs args) {
        args.stages = 1;
        const bool one = args.V <= tensor_values || (problem.channel_gate && problem.K <= 64);
        return one ? args : staged(problem, kernel, args);
    }
    // Values of a block that sweeps: under channel gates twice as many where multiprocessors of an H100 would get more
    // than one block; no bit depends on it.
    static int values_of_block(const Problem& problem) {
        constexpr std::int64_t multiprocessors = 132;
        const std::int64_t blocks =
            swept_places(problem) * problem.HV * blocks_of(problem.V) * (wants_gradients(problem) ? 2 : 1);
        return problem.channel_gate && problem.V > 64 && blocks > multiprocessors ? 128 : 64;
    }
    // Sequences, or segments of them.
    static std::int64_t swept_places(const Problem& problem) {
        const int tokens = sweep_segment_tokens(problem);
        return tokens > 0 ? parts_of(problem, tokens) : problem.N;
    }
    // That a kernel is compiled for.
    static std::int64_t swept_channels(const Problem& problem) {
        if (problem.K <= 64) return 64;
        return problem.K > most_key_part && key_parts(problem) == 1 ? 256 : 128;
    }
    // Whether gradients of log decays are not d_g itself, or not all that is wanted of gates per token, or added up
    // over parts of channels.
    static bool makes_gate_gradients(const Problem& problem) {
        const bool formula = problem.in.g.given() && problem.options.gate_form != GateForm::log_decay;
        const bool in_parts = problem.K > most_key_part && problem.grads.d_g.given();
        return !problem.channel_gate &&
               (problem.grads.d_g_gamma.given() || in_parts || (formula && wants_gate_gradient(problem)));
    }
    static bool wants_gradients(const Problem& problem) {
        const Gradients& g = problem.grads;
        return g.d_q.given() || g.d_k.given() || g.d_p.given() || g.d_beta.given() || wants_gate_gradient(problem);
    }
};

}  // namespace

const Implementation* tensor_sweeping_backward() { return new TensorBackward; }

}  // namespace headrace::cuda
