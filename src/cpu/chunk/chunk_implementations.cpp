// The chunk form on every ISA: forward, and the backward in one pass, two passes or two sweeps.
#include <algorithm>
#include <vector>

#include "core/debug_nan.hpp"
#include "core/threads.hpp"
#include "cpu/implementations.hpp"
#include "cpu/plumbing/blocking.hpp"
#include "cpu/plumbing/isa_implementation.hpp"

namespace headrace::cpu {

namespace {

class ChunkImplementation : public IsaImplementation {
  public:
    ChunkImplementation(const Isa& isa, const char* algorithm, Direction direction)
        : IsaImplementation(isa, algorithm), direction_(direction) {}
    bool serves(Direction direction) const override { return direction == direction_; }

    std::string refusal(const Problem& problem, const Machine& machine) const override {
        if (problem.value_gate) return "the chunk form has no value-side gate (gv)";
        if (problem.elementwise_beta) return "the chunk form needs one beta per token";
        if (isa_.bf16_only && gates_rest_on_few_tokens(problem)) {
            return "gate gradients of so few tokens and heads rest on too few sums to average bf16 roundings";
        }
        return chunk_refusal(problem, machine);
    }
    std::string yields(const Problem& problem) const override {
        const std::string narrow = yields_to_fp32();
        return narrow.empty() ? recurrent_form_is_faster(problem, isa_.bf16_only) : narrow;
    }
    void carve(const Problem& problem, Carver& carver) const override {
        wants_states(problem) ? forward_layout(problem, carver) : layout(problem, carver);
    }
    bool compute_on(const Problem& problem, Carver& carver) const override {
        if (wants_states(problem)) return run_forward(problem, forward_layout(problem, carver));
        const bool gates_accepted = compute(problem, layout(problem, carver));
        report_states(problem);
        return gates_accepted;
    }
    std::string states(const Problem& problem) const override {
        return isa_.name + " chunks of " + std::to_string(state_chunk_of(problem, isa_.bf16_only));
    }

  protected:
    struct Layout {
        KernelArgs args;
        Scratch scratch, rest;      // rest: of forwards
        std::int64_t* first_chunk;  // [N + 1] chunks of earlier sequences; two-pass only
    };

    const ChunkKernels& kernels(const Problem& problem) const {
        const Arithmetic arithmetic = problem.wide ? Arithmetic::f64 : isa_.bf16_only ? Arithmetic::bf16 : Arithmetic::f32;
        return isa_.kernels().chunk[static_cast<int>(arithmetic)][problem.rule == Rule::delta][problem.channel_gate];
    }
    static std::int64_t longest(const Problem& problem) {
        std::int64_t tokens = 0;
        for (const Sequence& s : problem.sequences) tokens = std::max(tokens, s.end - s.begin);
        return tokens;
    }
    static std::int64_t chunks(std::int64_t tokens, int chunk) { return (tokens + chunk - 1) / chunk; }
    static std::int64_t round_up_16(std::int64_t size) { return (size + 15) / 16 * 16; }

    virtual Layout layout(const Problem& problem, Carver& carver) const {
        Layout layout{make_args(problem, carver), {}, {}, nullptr};
        layout.args.state_chunk = state_chunk_of(problem, isa_.bf16_only);
        layout.args.chunk = wants_states(problem) ? layout.args.state_chunk : chunk_of(problem, isa_.bf16_only, problem.direction);
        layout.args.walk = 1;
        // Saved states may be in the type of the inputs; everything else is in the tile type. A gradient through the
        // final state alone may rest on a few tokens, and gate gradients of few heads on few sums: too few to average
        // the roundings of saved states.
        if (problem.wide) {
            layout.args.state_dtype = DType::f64;
        } else if (problem.direction == Direction::backward &&
                   (!problem.d_out.d_o.given() || has_few_gate_sums(problem))) {
            layout.args.state_dtype = DType::f32;
        }
        // What keys of few directions read in the gradient of a state is far below it, and below its roundings.
        const bool exact_adjoints = problem.rule == Rule::delta && !problem.wide;
        layout.args.adjoint_dtype = exact_adjoints ? DType::f32 : layout.args.state_dtype;
        return layout;
    }

    virtual bool compute(const Problem& problem, const Layout& l) const = 0;

    // A forward: of a forward's outputs, or of the states alone that a backward recomputes.
    Layout forward_layout(const Problem& problem, Carver& carver) const {
        Layout l = ChunkImplementation::layout(problem, carver);
        l.args.value_columns = chunk_value_columns(problem);
        l.args.walk = value_heads_walked(problem, l.args.chunk);
        // What follows a forward that ended early takes the place of chunks in double.
        KernelArgs narrow = l.args;
        narrow.widens = false;
        const auto forward_scratch = kernels(problem).forward_scratch;
        const std::size_t before_rest = forward_scratch(narrow), both = before_rest + rest_bytes(l.args);
        l.scratch = take_scratch(carver, problem.threads, std::max(forward_scratch(l.args), both));
        if (l.scratch.base != nullptr) l.rest = {l.scratch.base + before_rest, l.scratch.bytes};
        return l;
    }
    bool run_forward(const Problem& problem, const Layout& l) const {
        const KernelArgs& args = l.args;
        const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
        const std::int64_t walks = problem.HV / args.walk;
        parallel_for(problem.N * walks * blocks, problem.threads, [&](std::int64_t task, int thread) {
            const int first = static_cast<int>(task % blocks) * args.value_columns;
            const std::int64_t head = task / blocks % walks * args.walk, n = task / blocks / walks;
            const int values = std::min(args.value_columns, args.V - first);
            Unfinished rest[most_walked]{};
            kernels(problem).forward(args, n, head, first, values, l.scratch.of(thread), rest);
            for (int j = 0; j < args.walk; ++j) finish(args, n, head + j, first, values, rest[j], l.rest.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        return *args.gate_refused == 0;
    }

    // Room for `count` chunk states (and the delta rule's residuals and erase scores) between the sweeps of a backward.
    static void take_saved(const Problem& problem, Carver& carver, KernelArgs& args, std::int64_t count, bool adjoints) {
        const std::int64_t K = round_up_16(problem.K), V = round_up_16(problem.V);
        args.saved_states = static_cast<char*>(carver.take("saved states", args.state_dtype, {count, K, V}));
        if (adjoints) args.saved_adjoints = static_cast<char*>(carver.take("saved adjoints", args.adjoint_dtype, {count, K, V}));
        // f16 spans 2^-14 to 2^15; a state may lie anywhere.
        if (args.state_dtype == DType::f16) {
            args.state_scales = static_cast<float*>(carver.take("saved scales", DType::f32, {count}));
        }
        if (adjoints && args.adjoint_dtype == DType::f16) {
            args.adjoint_scales = static_cast<float*>(carver.take("saved adjoint scales", DType::f32, {count}));
        }
        if (args.delta) {
            args.saved_residuals = carver.take("saved residuals and scores", problem.wide ? DType::f64 : DType::f32,
                                               {count, args.chunk, V + (args.state_chunk == args.chunk ? args.chunk : 0)});
        }
    }

    // The state entering every chunk of every sequence and head, and with `adjoints` the gradient of the one leaving
    // it.
    Layout layout_of_all_states(const Problem& problem, Carver& carver, bool adjoints) const {
        Layout l = ChunkImplementation::layout(problem, carver);
        std::int64_t count = 0;
        for (const Sequence& s : problem.sequences) count += chunks(s.end - s.begin, l.args.chunk);
        take_saved(problem, carver, l.args, count * problem.HV, adjoints);
        l.first_chunk = static_cast<std::int64_t*>(carver.take("first chunks", DType::i64, {problem.N + 1}));
        l.scratch = take_scratch(carver, problem.threads, kernels(problem).backward_scratch(l.args));
        return l;
    }
    void compute_all_states(const Problem& problem, const Layout& l, bool adjoints) const {
        const std::int64_t H = problem.H, HV = problem.HV;
        l.first_chunk[0] = 0;
        for (std::int64_t n = 0; n < problem.N; ++n) {
            const Sequence& s = problem.sequences[static_cast<std::size_t>(n)];
            l.first_chunk[n + 1] = l.first_chunk[n] + chunks(s.end - s.begin, l.args.chunk);
        }
        parallel_for(problem.N * HV, problem.threads, [&](std::int64_t task, int thread) {
            const std::int64_t n = task / HV, head = task % HV;
            kernels(problem).save_states(l.args, n, head, l.first_chunk[n] * HV + head, l.scratch.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        if (!adjoints) return;
        parallel_for(problem.N * H, problem.threads, [&](std::int64_t task, int thread) {
            const std::int64_t n = task / H, head = task % H;
            kernels(problem).adjoint_pass(l.args, n, head, l.first_chunk[n] * HV + head * problem.group, l.scratch.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
    }
    // HEADRACE_DEBUG_NAN: computes the states once more, with memory of its own, and reports them.
    void report_states(const Problem& problem) const {
        if (!debug_nan_enabled()) return;
        const bool adjoints = problem.direction == Direction::backward;
        Carver measure;
        layout_of_all_states(problem, measure, adjoints);
        std::vector<char> memory(measure.size());
        Carver carver(memory.data());
        Layout l = layout_of_all_states(problem, carver, adjoints);
        for (Strided* output : {&l.args.d_v, &l.args.d_beta, &l.args.d_initial_state}) output->given = false;
        compute_all_states(problem, l, adjoints);
        const std::initializer_list<std::int64_t> shape = {l.first_chunk[problem.N], problem.HV, round_up_16(problem.K),
                                                           round_up_16(problem.V)};
        debug_stage("state", TensorView(l.args.saved_states, l.args.state_dtype, shape));
        if (adjoints) debug_stage("D", TensorView(l.args.saved_adjoints, l.args.adjoint_dtype, shape));
    }

  private:
    Direction direction_;
};

class ChunkForward : public ChunkImplementation {
  public:
    explicit ChunkForward(const Isa& isa) : ChunkImplementation(isa, "chunk", Direction::forward) {}

  protected:
    bool compute(const Problem& problem, const Layout& l) const override { return run_forward(problem, l); }
    Layout layout(const Problem& problem, Carver& carver) const override { return forward_layout(problem, carver); }
};

// States forwards, then all gradients backwards, one query/key head at a time; a thread saves the states of one head.
class OnePass : public ChunkImplementation {
  public:
    explicit OnePass(const Isa& isa) : ChunkImplementation(isa, "chunk.one_pass", Direction::backward) {}

    std::string yields(const Problem& problem) const override {
        if (problem.whole.sequences * problem.whole.heads < problem.threads) {
            return "fewer heads than threads: two passes share the chunks of a head";
        }
        return ChunkImplementation::yields(problem);
    }

  protected:
    bool compute(const Problem& problem, const Layout& l) const override {
        const std::int64_t slot = chunks(longest(problem), l.args.chunk) * l.args.walk * problem.group;
        const std::int64_t walks = problem.H / l.args.walk;
        parallel_for(problem.N * walks, problem.threads, [&](std::int64_t task, int thread) {
            const std::int64_t n = task / walks, head = task % walks * l.args.walk;
            kernels(problem).one_pass(l.args, n, head, thread * slot, l.scratch.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        store_parameter_gradients(problem, l.args);
        return *l.args.gate_refused == 0;
    }
    Layout layout(const Problem& problem, Carver& carver) const override {
        Layout l = ChunkImplementation::layout(problem, carver);
        l.args.walk = key_heads_walked(problem, l.args.chunk);
        l.scratch = take_scratch(carver, problem.threads, kernels(problem).backward_scratch(l.args));  // the same for any T
        // Saved states of a short sequence stay in the caches, where those of several heads would drive each other out.
        // For a longer one the pages that heads share save more (T 2048: 1 to 12 % of the time, T 4096: 5 to 14 %).
        const std::int64_t saved_bytes = chunks(longest(problem), l.args.chunk) * problem.group * state_bytes(problem);
        if (saved_bytes <= static_cast<std::int64_t>(cached_bytes / 4)) l.args.walk = 1;
        const std::int64_t tasks = std::max<std::int64_t>(1, problem.N * (problem.H / l.args.walk));
        const std::int64_t slots = std::min<std::int64_t>(problem.threads, tasks) * l.args.walk * problem.group;
        take_saved(problem, carver, l.args, slots * chunks(longest(problem), l.args.chunk), false);
        return l;
    }
};

// Pass 1: states forwards, adjoints (and d_v) backwards, all saved. Pass 2: the other gradients, chunks in any order.
class TwoPass : public ChunkImplementation {
  public:
    explicit TwoPass(const Isa& isa) : ChunkImplementation(isa, "chunk.two_pass", Direction::backward) {}

  protected:
    bool compute(const Problem& problem, const Layout& l) const override {
        const std::int64_t H = problem.H;
        compute_all_states(problem, l, true);
        // Parameter gradients are summed per sequence and head: with them, a task takes all chunks of one, as one pass
        // does.
        const bool sums = l.args.d_gamma != nullptr || l.args.d_rate != nullptr || l.args.d_bias != nullptr;
        const auto gradients = [&](std::int64_t n, std::int64_t head, std::int64_t chunk, int thread) {
            const std::int64_t first = l.first_chunk[n] * problem.HV + head * problem.group;
            kernels(problem).chunk_gradients(l.args, n, head, chunk, first, l.scratch.of(thread));
        };
        parallel_for((sums ? problem.N : l.first_chunk[problem.N]) * H, problem.threads, [&](std::int64_t task, int thread) {
            const std::int64_t head = task % H, item = task / H;
            if (sums) {
                for (std::int64_t c = l.first_chunk[item + 1] - l.first_chunk[item]; c-- > 0;) gradients(item, head, c, thread);
            } else {
                const std::int64_t n = std::upper_bound(l.first_chunk, l.first_chunk + problem.N + 1, item) - l.first_chunk - 1;
                gradients(n, head, item - l.first_chunk[n], thread);
            }
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        store_parameter_gradients(problem, l.args);
        return *l.args.gate_refused == 0;
    }
    Layout layout(const Problem& problem, Carver& carver) const override {
        return layout_of_all_states(problem, carver, true);
    }
};

// Additive rule: d_q needs only the states (forwards), d_k and d_v only the adjoints (backwards); nothing is saved.
class TwoSweep : public ChunkImplementation {
  public:
    explicit TwoSweep(const Isa& isa) : ChunkImplementation(isa, "chunk.two_sweep", Direction::backward) {}

    std::string refusal(const Problem& problem, const Machine& machine) const override {
        if (problem.rule == Rule::delta) return "the delta rule's gradients need states and adjoints together";
        if (wants_gate_gradient(problem)) {
            return "gate gradients need states and adjoints together";
        }
        return ChunkImplementation::refusal(problem, machine);
    }
  protected:
    bool compute(const Problem& problem, const Layout& l) const override {
        const std::int64_t walks = problem.H / l.args.walk;
        parallel_for(problem.N * walks, problem.threads, [&](std::int64_t task, int thread) {
            kernels(problem).two_sweeps(l.args, task / walks, task % walks * l.args.walk, l.scratch.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        return *l.args.gate_refused == 0;
    }
    Layout layout(const Problem& problem, Carver& carver) const override {
        Layout l = ChunkImplementation::layout(problem, carver);
        l.args.walk = key_heads_walked(problem, l.args.chunk);
        l.scratch = take_scratch(carver, problem.threads, kernels(problem).sweeps_scratch(l.args));
        return l;
    }
};

}  // namespace

std::vector<const Implementation*> chunk_implementations() {
    std::vector<const Implementation*> list;
    for (const Isa& isa : isas()) {
        list.push_back(new ChunkForward(isa));
        // Saves no states, so it needs less memory; as fast as one pass in fp32, 4 % less time in bf16
        // (linear_attention:bwd t4096 h16 k128 threads=2).
        list.push_back(new TwoSweep(isa));
        list.push_back(new OnePass(isa));
        list.push_back(new TwoPass(isa));
    }
    return list;
}

}  // namespace headrace::cpu
