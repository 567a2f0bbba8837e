// The chunk form on tensor cores, for tensors of 16 bits: the walk with its products in 16 bits and sums in fp32.
#include <algorithm>
#include <utility>

#include "cuda/chunk/key_parts.hpp"
#include "cuda/chunk/tensor_summary.hpp"
#include "cuda/implementations.hpp"

namespace headrace::cuda {
namespace {

class Tensor : public SummarizingImplementation {
  public:
    explicit Tensor(Direction direction) : direction_(direction) {}
    std::string name() const override { return "cuda.tensor"; }
    bool serves(Direction direction) const override { return runs_as(direction) == direction_; }

    std::string refusal(const Problem& problem, const Machine&) const override {
        const bool delta = problem.rule == Rule::delta, backward = direction_ == Direction::backward;
        if (std::string reason = chunk_refusal(problem); !reason.empty()) return reason;
        if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
            return "the tensor cores' products are in 16 bits";
        if (problem.dtype == DType::f16 && problem.channel_gate) return "under channel gates serves bf16 tensors";
        if (problem.options.allow_positive_gates) return "takes no positive gates";
        if (problem.K > most_key_part && (delta ? problem.channel_gate : problem.options.qk_l2norm))
            return "of the delta rule under channel gates, or of others with l2norm, takes up to 128 key channels";
        if (problem.K > most_key_part && delta && problem.dtype != DType::bf16)
            return "with the delta rule takes up to 128 key channels of f16";
        if (problem.K < (delta ? 64 : 32) || problem.V < 32 || problem.whole.longest < 32)
            return "fewer than 32 tokens, values or key channels, 64 of the delta rule, are too few to average "
                   "roundings";
        if (std::string reason = backward ? backward_refusal(problem) : ""; !reason.empty()) return reason;
        KernelArgs args{};
        args.undecayed_error = problem.erase_with_p;
        args.value_columns = tensor_values;
        args.o.given = true;
        args.stages = 1;
        const std::size_t needed = problem.channel_gate
                                       ? channel(problem).walk.memory(args, 0).shared
                                       : shared(tensor(problem, std::max(problem.K, backward ? problem.V : 0)), args);
        if (needed > memory_limit(problem)) return "needs more shared memory than the GPU has";
        return {};
    }

  protected:
    std::vector<Launch> staged_kernels(const Problem& problem, const KernelArgs& args) const override {
        if (problem.direction == Direction::summarize) return summary_launches(problem, args);
        if (problem.channel_gate) return channel_launches(problem, args);
        std::vector<Launch> launches;
        direction_ == Direction::forward ? walk_values(problem, args, launches) : gradients(problem, args, launches);
        return launches;
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        const bool backward = direction_ == Direction::backward;
        const std::int64_t chunks = parts_of(problem, tensor_chunk);
        KernelArgs args = make_args(problem, carver, backward ? chunks : -1);
        stage(problem, carver, args);
        if (problem.direction == Direction::summarize) {
            args.q = args.k;
            if (args.delta && problem.K > most_key_part) take_for_walks(problem, carver, args);
        }
        args.value_columns = tensor_values;
        if (backward) take_key_gradients(problem, carver, args);
        take_added_outputs(problem, carver, args, chunks);
        if (args.gate_gradient) take_gate_terms(problem, carver, args, chunks);
        if (args.delta || problem.channel_gate) args.prepared = take_prepared(problem, carver, chunks);
        const int tokens = args.segments.tokens = segment_tokens(problem);
        args.segments.to_end = problem.direction == Direction::summarize;
        if (tokens == 0) return args;
        const std::int64_t slots = parts_of(problem, tokens);
        args.segments.slots = slots;
        args.segments.states =
            static_cast<float*>(carver.take("segment states", DType::f32, {slots, problem.HV, problem.K, problem.V}));
        if (args.delta) {
            args.segments.transitions = static_cast<float*>(carver.take(
                "segment transitions", DType::f32, {slots, problem.HV, problem.K, (problem.K + 3) / 4 * 4}));
        } else {
            const std::int64_t decays = problem.channel_gate ? problem.K : 1;
            args.segments.decays =
                static_cast<double*>(carver.take("segment decays", DType::f64, {slots, problem.HV, decays}));
        }
        return args;
    }

  private:
    // Of the additive rule a forward's without outputs; of the delta rule what leaves segments, of whole sequences.
    static std::vector<Launch> summary_launches(const Problem& problem, const KernelArgs& args) {
        std::vector<Launch> launches;
        if (args.delta) {
            problem.K > most_key_part ? walk_twice(problem, args, launches) : launch_states(problem, args, launches);
            return launches;
        }
        if (args.transition.given) launches.push_back(decay_product(problem, args));
        if (!args.final_state.given) return launches;
        for (std::int64_t part = 0; part < key_parts(problem); ++part) {
            const KernelArgs of_part = part_of_keys(args, part);
            const bool joined = args.segments.tokens > 0;
            if (problem.channel_gate) launch_channels(problem, of_part, launches);
            if (!problem.channel_gate) walk(problem, of_part, launches, joined ? Part::entering : Part::all);
        }
        return launches;
    }
    static std::vector<Launch> channel_launches(const Problem& problem, const KernelArgs& args) {
        std::vector<Launch> launches;
        for (std::int64_t part = 0; part < key_parts(problem); ++part)
            launch_channels(problem, part_of_keys(args, part), launches);
        if (args.o.given && args.added.sums != nullptr)
            launches.push_back(add_outputs(problem, outputs_of_values(args)));
        return launches;
    }
    static void launch_channels(const Problem& problem, KernelArgs args, std::vector<Launch>& launches) {
        const ChannelKernels kernels = channel(problem);
        const bool two = walks_two(problem, args, kernels.walk_of_two);
        const Kernel& forward = two ? kernels.walk_of_two : kernels.walk;
        if (two) args.value_columns = 2 * tensor_values;
        args.stages = stages_of(problem, forward, args);
        const std::int64_t heads = problem.N * problem.HV, values = blocks_of(problem.V, args.value_columns);
        for (Launch& each : prepare_channels(problem, args)) launches.push_back(each);
        Steps steps = steps_along(problem, tensor_chunk, heads * values);
        const int threads = two ? three_groups : channel_walk_threads(args.delta);
        if (args.segments.tokens == 0) {
            launches.push_back({forward, args, heads * values, threads, steps});
            return;
        }
        const ChannelSegmentKernels segments =
            args.delta ? channel_segment_kernels<true>(problem.K) : channel_segment_kernels<false>(problem.K);
        KernelArgs of_states = args;
        of_states.o = {}, of_states.segments.blocks = values + (args.delta ? blocks_of(problem.K) : 0);
        of_states.stages = stages_of(problem, segments.states, of_states);
        join_segments(problem, {segments.states, of_states}, {segments.join, args}, threads, steps, launches);
        if (args.segments.to_end) return;
        launches.push_back({forward, args, args.segments.slots * problem.HV * values, threads, steps});
    }
    static const Kernel& forward_of(const TensorKernels& tensor, const KernelArgs& args) {
        if (args.gate_walk.terms != GateTerms::none) return tensor.forward_with_terms;
        return args.late_gate || args.key_gradient.walk || args.added.sums != nullptr ? tensor.forward_of_gradient
                                                                                      : tensor.forward;
    }
    static std::size_t shared(const TensorKernels& tensor, const KernelArgs& args) {
        return forward_of(tensor, args).memory(args, 0).shared;
    }
    static std::string backward_refusal(const Problem& problem) {
        const Gradients& grads = problem.grads;
        if (problem.rule == Rule::delta) return "has no backward of the delta rule";
        for (const TensorView* view : {&grads.d_q, &grads.d_k, &grads.d_v})
            if (view->given() && view->dtype != problem.dtype) return "stores d_q, d_k and d_v in the type of q";
        if (gates_rest_on_few_tokens(problem))
            return "gate gradients of fewer than 8 heads and sequences, and 256 tokens times value heads, rest on too "
                   "few sums to average roundings";
        if (!problem.d_out.d_o.given())
            return "a gradient through the final state alone may rest on too few tokens to average roundings";
        // Of f16, whose bars are half as wide, in any number.
        const std::int64_t heads = problem.whole.sequences * problem.whole.heads * problem.group;
        if (wants_gate_gradient(problem) && problem.options.gate_form == GateForm::softplus &&
            (problem.dtype == DType::f16 || heads < 32))
            return "gradients behind a softplus of fewer than 32 heads and sequences, or of f16 tensors, may rest on "
                   "strong gates alone, of which sums that cancel leave too little";
        return {};
    }

    // args as a forward's, of K key and V value channels. In segments what enters them comes before the outputs.
    enum class Part { all, entering, outputs };
    static void walk(const Problem& problem, KernelArgs args, std::vector<Launch>& launches, Part part = Part::all) {
        // Of all parts of keys the same, as what they leave lies in the order of its threads.
        const TensorKernels kernels = tensor(problem, args.added.parts > 1 ? most_key_part : args.K);
        const bool two = walks_two(problem, args, kernels.forward_of_two);
        if (two) args.value_columns = 2 * tensor_values;
        const Kernel& forward = two ? kernels.forward_of_two : forward_of(kernels, args);
        const std::int64_t values = blocks_of(args.V, args.value_columns);
        const int threads = args.delta ? 2 * args.value_columns + fetching_threads(args.K) : tensor_threads;
        args.stages = stages_of(problem, forward, args,
                                has_third_group(forward, threads, problem.options.planned_gpu) ? 3 : 2);
        KernelArgs of_states = args;
        of_states.o = {}, of_states.value_columns = tensor_values;
        const int tokens = args.segments.tokens;
        const bool pairs = tokens > 0 && takes_pairs(problem, kernels.states);
        of_states.segments.groups = pairs ? 2 : 1;
        of_states.segments.blocks =
            blocks_of(blocks_of(args.V) + (args.delta ? blocks_of(args.K) : 0), of_states.segments.groups);
        const int state_threads = args.delta ? states_threads(problem, pairs) : tensor_threads;
        const std::int64_t walks = tokens > 0 ? args.segments.slots : problem.N;
        const std::int64_t blocks = walks * problem.HV * values;
        Steps steps = steps_along(problem, tensor_chunk, problem.N * problem.HV * values);
        if (args.delta) launches.push_back(prepare_tokens(problem, args, tensor(problem, args.K).prepare));
        if (tokens > 0) {
            std::vector<Launch> joining;
            join_segments(problem, {kernels.states, of_states}, {kernels.join, args}, state_threads, steps, joining);
            if (part != Part::outputs) launches.insert(launches.end(), joining.begin(), joining.end());
        }
        if (part == Part::entering) return;
        launches.push_back({forward, args, blocks, threads, steps});
    }
    // Whether a walk is by two groups of a block, which find the same bits: a chunk takes them 1.7 times as long as one
    // takes one whose outputs others compute, by the model of an H200.
    static bool walks_two(const Problem& problem, const KernelArgs& args, const Kernel& of_two) {
        const std::int64_t values = blocks_of(args.V), blocks = problem.N * problem.HV * values;
        if (of_two.function == nullptr || args.segments.tokens > 0 || values % 2 != 0) return false;
        return 17 * blocks_of(blocks / 2, multiprocessors) < 10 * blocks_of(blocks, multiprocessors) &&
               takes(of_two.function, three_groups, problem.options.planned_gpu);
    }

    // By all parts of the keys, outputs of value heads.
    static void walk_values(const Problem& problem, const KernelArgs& args, std::vector<Launch>& launches) {
        walk_parts(problem, args, launches);
        if (args.o.given && args.added.sums != nullptr)
            launches.push_back(add_outputs(problem, outputs_of_values(args)));
    }
    static void walk_parts(const Problem& problem, const KernelArgs& args, std::vector<Launch>& launches) {
        for (std::int64_t part = 0; part < key_parts(args.K, args.delta); ++part)
            walk(problem, part_of_keys(args, part), launches);
    }

    // Of the additive rule each gradient is the output of a forward (math.md, section 5): d_q of queries d_o, keys v
    // and values k; d_k, from the end, of queries v, keys d_o, values q; d_v, from the end, of k, q, d_o.
    static void gradients(const Problem& problem, const KernelArgs& args, std::vector<Launch>& launches) {
        KernelArgs of_q = args;
        of_q.q = args.d_o, of_q.k = args.v, of_q.v = args.k, of_q.o = args.d_q;
        of_q.initial_state = transposed(args.initial_state);
        of_q.gate_walk.terms = args.gate_gradient ? GateTerms::of_queries : GateTerms::none;
        of_q.key_gradient.rows = args.q;
        KernelArgs of_v = args;
        of_v.q = args.k, of_v.k = args.q, of_v.v = args.d_o, of_v.o = args.d_v;
        of_v.initial_state = args.d_final_state, of_v.final_state = args.d_initial_state;
        if (key_parts(problem) == 1) of_v.added.sums = nullptr;
        KernelArgs of_k = args;
        of_k.q = args.v, of_k.k = args.d_o, of_k.v = args.q, of_k.o = args.d_k;
        of_k.initial_state = transposed(args.d_final_state);
        of_k.gate_walk.terms = args.gate_gradient ? GateTerms::of_keys : GateTerms::none;
        of_k.key_gradient.rows = args.k;
        std::swap(of_k.key_gradient.row_norms, of_k.key_gradient.value_norms);
        for (KernelArgs* of_keys : {&of_q, &of_k}) {
            of_keys->K = args.V, of_keys->V = args.K, of_keys->final_state = {};
            of_keys->key_gradient.walk = true;
            of_keys->key_gradient.left_q_norms = of_keys->key_gradient.left_k_norms = nullptr;
            of_keys->added.parts = static_cast<int>(key_parts(of_keys->K));
            if (!adds_key_gradients(problem)) of_keys->added.sums = nullptr;
        }
        of_v.key_gradient.row_norms = of_v.key_gradient.value_norms = nullptr;
        for (KernelArgs* from_end : {&of_v, &of_k}) {
            from_end->reverse = !args.reverse, from_end->late_gate = true;
            std::swap(from_end->scale, from_end->write_scale);
        }
        const bool norms = args.key_gradient.row_norms != nullptr;  // which the walk of d_v leaves to the others
        if (norms) walk(problem, of_v, launches);
        for (const KernelArgs* of_keys : {&of_q, &of_k}) {
            if (of_keys->o.given || args.gate_gradient) walk_parts(problem, *of_keys, launches);
            if (of_keys->o.given && of_keys->added.sums != nullptr) launches.push_back(add_outputs(problem, *of_keys));
        }
        if (!norms && (args.d_v.given || args.d_initial_state.given)) walk_of_values(problem, of_v, of_k, launches);
        if (!args.gate_gradient) return;
        launches.push_back({tensor(problem, args.K).gate, args, args.added.chunks * problem.HV, launched_threads,
                            one_step(problem, problem.HV)});
    }
    // Behind the walk of d_k, if there was one. Gradients of states enter its segments transposed, so that d_v takes them
    // from it, but for l2norm, where its walk is the first. No bit depends on which gradients are wanted.
    static void walk_of_values(const Problem& problem, KernelArgs of_v, const KernelArgs& of_k,
                               std::vector<Launch>& launches) {
        if (of_v.segments.tokens == 0 || of_v.l2norm || key_parts(problem) > 1 || key_parts(problem.V) > 1)
            return walk_values(problem, of_v, launches);
        if (!of_k.o.given && !of_k.gate_gradient) walk(problem, of_k, launches, Part::entering);
        of_v.segments.transposed = true;
        walk(problem, of_v, launches, Part::outputs);
    }
    // Whether d_q and d_k are what a launch behind their walks makes of theirs.
    static bool adds_key_gradients(const Problem& problem) {
        return (problem.grads.d_q.given() || problem.grads.d_k.given()) &&
               (problem.group > 1 || problem.options.qk_l2norm || key_parts(problem.V) > 1);
    }
    // Of a forward, or of a backward's gradients one after the other.
    static void take_added_outputs(const Problem& problem, Carver& carver, KernelArgs& args, std::int64_t chunks) {
        args.added = {chunks, static_cast<int>(key_parts(problem)), 0, nullptr};
        const bool of_values = key_parts(problem) > 1, of_keys = problem.runs_backward() && adds_key_gradients(problem);
        const std::int64_t blocks = std::max(of_values ? key_parts(problem) * blocks_of(problem.V) : 0,
                                             of_keys ? key_parts(problem.V) * blocks_of(problem.K) : 0);
        if (blocks > 0) args.added.sums = take_added(problem, carver, blocks, chunks);
    }
    static void take_key_gradients(const Problem& problem, Carver& carver, KernelArgs& args) {
        KeyGradient& to = args.key_gradient;
        const std::int64_t tokens = problem.B * problem.T;
        to.tokens = tokens;
        const bool keys = args.d_q.given || args.d_k.given;
        if (!args.l2norm || !(keys || args.gate_gradient)) return;
        const auto norms = [&](const char* name) {
            return static_cast<float*>(carver.take(name, DType::f32, {problem.H, tokens}));
        };
        // the walk of d_v has keys as its q
        to.row_norms = to.left_k_norms = norms("inverse norms of queries");
        to.value_norms = to.left_q_norms = norms("inverse norms of keys");
    }
    static void take_gate_terms(const Problem& problem, Carver& carver, KernelArgs& args, std::int64_t chunks) {
        GateWalk& to = args.gate_walk;
        const std::int64_t blocks = key_parts(problem.V) * blocks_of(problem.K), HV = problem.HV,
                           rows = problem.V <= 64 ? 64 : 128;
        to.blocks = static_cast<int>(blocks);
        const auto take = [&](const char* name, std::int64_t count, std::int64_t numbers) {
            return static_cast<float*>(carver.take(name, DType::f32, {blocks, count, HV, numbers}));
        };
        const std::int64_t tokens = problem.B * problem.T;
        to.ending = take("gate terms ending", tokens, 1);
        to.leaving = take("gate terms leaving", tokens, 1);
        to.inside = take("gate terms inside", tokens, 1);
        to.crossing = take("gate terms crossing", chunks, 1);
        const bool wide = problem.state_dtype == DType::f32 || problem.dtype == DType::f16;
        to.state_dtype = wide ? DType::f32 : DType::bf16;
        const std::int64_t count = blocks * chunks * HV, numbers = rows * tensor_values;
        const Memory lent = memory_until_last_walk(problem);
        to.states_in_d_v = lent.data;
        to.in_d_v = std::min(count, lent.bytes / (numbers * static_cast<std::int64_t>(size_of(to.state_dtype))));
        to.states =
            static_cast<char*>(carver.take("saved states", to.state_dtype, {count - to.in_d_v, rows, tensor_values}));
    }
    // d_v where its elements lie together and are all written later, from a multiple of 16 bytes on: not with l2norm,
    // as its walk then comes first, nor where a list of sequences that nobody has read may leave some out.
    struct Memory {
        char* data;
        std::int64_t bytes;
    };
    static Memory memory_until_last_walk(const Problem& problem) {
        const TensorView &view = problem.grads.d_v, &sequences = problem.in.cu_seqlens;
        if (problem.options.qk_l2norm || (sequences.given() && sequences.device != Device::cpu)) return {nullptr, 0};
        std::int64_t last = 0;
        for (int i = 0; i < view.rank; ++i) {
            if (view.strides[i] < 0) return {nullptr, 0};
            last += (view.shape[i] - 1) * view.strides[i];
        }
        if (view.numel() == 0 || last + 1 != view.numel()) return {nullptr, 0};
        constexpr std::uintptr_t unit = 16;
        const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(view.data) + unit - 1) / unit * unit;
        const auto bytes = view.numel() * static_cast<std::int64_t>(size_of(view.dtype));
        return {reinterpret_cast<char*>(first), bytes - std::int64_t{unit}};  // wherever it begins
    }
    static Strided transposed(Strided state) {
        std::swap(state.stride[2], state.stride[3]);
        return state;
    }

    Direction direction_;
};

}  // namespace

std::vector<const Implementation*> tensor_implementations() {
    return {new Tensor(Direction::forward), new Tensor(Direction::backward)};
}

}  // namespace headrace::cuda
