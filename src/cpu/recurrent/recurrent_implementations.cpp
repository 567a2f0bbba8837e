// The recurrent form on every ISA: forward, backward and step, every option of the operators.
#include <algorithm>
#include <vector>

#include "core/debug_nan.hpp"
#include "core/threads.hpp"
#include "cpu/implementations.hpp"
#include "cpu/plumbing/blocking.hpp"
#include "cpu/plumbing/isa_implementation.hpp"

namespace headrace::cpu {

namespace {

class Recurrent : public IsaImplementation {
  public:
    explicit Recurrent(const Isa& isa) : IsaImplementation(isa, "recurrent") {}
    bool serves(Direction direction) const override {
        return direction == Direction::forward || direction == Direction::backward || direction == Direction::step;
    }
    std::string refusal(const Problem& problem, const Machine& machine) const override {
        return machine_refusal(problem, machine);
    }
    void carve(const Problem& problem, Carver& carver) const override { layout(problem, carver); }

    // A forward takes pairs of tokens unless it has value gates; a backward takes tokens one by one.
    std::string states(const Problem& problem) const override {
        const bool pairs = problem.direction != Direction::backward && !problem.value_gate;
        return isa_.name + (pairs ? " pairs" : " tokens") + (is_double(problem) ? " in double" : " in float");
    }

    bool compute_on(const Problem& problem, Carver& carver) const override {
        const Layout l = layout(problem, carver);
        if (wants_states(problem)) {
            run_forward(problem, l);
            return *l.args.gate_refused == 0;
        }
        if (problem.direction == Direction::backward) {
            const std::int64_t slot = segments(problem) * problem.group;
            parallel_for(problem.N * problem.H, problem.threads, [&](std::int64_t task, int thread) {
                kernels(problem).backward(l.args, task / problem.H, task % problem.H, thread * slot, l.scratch.of(thread));
            }, {Shares::dynamic, rough_nanoseconds(problem)});
            store_parameter_gradients(problem, l.args);
            report_states(problem);
            return *l.args.gate_refused == 0;
        }
        run_forward(problem, l);
        report_states(problem);
        return *l.args.gate_refused == 0;
    }

  private:
    struct Layout {
        KernelArgs args;
        Scratch scratch, rest;
    };
    static bool is_double(const Problem& problem) {
        // With few key channels every token of the delta rule erases much of a state's gradient through a difference:
        // with one channel all that is left is its product with a - beta k p; with two, one of 7,500 gradients of
        // initial states was off by 1.7e-5.
        const bool erases_much = problem.rule == Rule::delta && problem.K < fewest_delta_channels;
        // A head's parameter is one sum over all tokens. Where these reflect along one direction its terms keep what
        // states in fp32 round: up to 4 times the bar after 200 tokens.
        const Inputs& in = problem.in;
        const bool has_parameters = in.g_gamma.given() || in.A_log.given() || in.dt_bias.given();
        const bool may_reflect = problem.rule == Rule::delta && problem.options.beta_form != BetaForm::sigmoid;
        const bool may_cancel = problem.dtype == DType::f32 && has_parameters && may_reflect;
        return problem.wide ||
               (problem.direction == Direction::backward && (rests_on_few_sums(problem) || erases_much || may_cancel));
    }
    const RecurrentKernels& kernels(const Problem& problem) const {
        return isa_.kernels().recurrent[is_double(problem)][problem.rule == Rule::delta];
    }
    void run_forward(const Problem& problem, const Layout& l) const {
        const KernelArgs& args = l.args;
        const std::int64_t blocks = (problem.V + args.value_columns - 1) / args.value_columns;
        const Shares shares = problem.direction == Direction::step ? Shares::fixed : Shares::dynamic;
        for (int thread = 0; thread < problem.threads; ++thread) kernels(problem).start(l.scratch.of(thread));
        const auto one_block = [&](std::int64_t task, int thread) {
            const int first = static_cast<int>(task % blocks) * args.value_columns;
            const std::int64_t head = task / blocks % problem.HV, n = task / blocks / problem.HV;
            const int values = std::min(args.value_columns, args.V - first);
            Unfinished rest{};
            kernels(problem).forward(args, n, head, first, values, l.scratch.of(thread), &rest);
            finish(args, n, head, first, values, rest, l.rest.of(thread));
        };
        parallel_for(problem.N * problem.HV * blocks, problem.threads, one_block, {shares, rough_nanoseconds(problem)});
    }
    // HEADRACE_DEBUG_NAN: the states after the last tokens, computed once more unless the pool holds them.
    void report_states(const Problem& problem) const {
        if (!debug_nan_enabled()) return;
        if (problem.direction == Direction::step) return debug_stage("state", problem.pool.states);
        Carver measure;
        forward_layout(problem, measure);
        std::vector<char> memory(measure.size());
        Carver carver(memory.data());
        Layout l = forward_layout(problem, carver);
        std::vector<double> states(static_cast<std::size_t>(problem.N * problem.HV * problem.K * problem.V));
        const TensorView view(states.data(), DType::f64, {problem.N, problem.HV, problem.K, problem.V});
        l.args.final_state = strided(view);
        l.args.o.given = false;
        run_forward(problem, l);
        debug_stage("state", view);
    }
    std::int64_t segments(const Problem& problem) const {
        std::int64_t tokens = 0;
        for (const Sequence& s : problem.sequences) tokens = std::max(tokens, s.end - s.begin);
        return (tokens + kernels(problem).segment - 1) / kernels(problem).segment;
    }
    Layout forward_layout(const Problem& problem, Carver& carver) const {
        Layout l{make_args(problem, carver), {}, {}};
        l.args.value_columns = recurrent_value_columns(problem);
        l.args.by_tokens = wants_states(problem);
        l.args.fetching = fetching_of(problem);
        l.args.shares = problem.threads;
        l.scratch = take_scratch(carver, problem.threads, kernels(problem).forward_scratch(l.args));
        l.rest = take_rest_scratch(problem, carver, l.args);
        return l;
    }
    Layout layout(const Problem& problem, Carver& carver) const {
        if (problem.direction != Direction::backward || wants_states(problem)) return forward_layout(problem, carver);
        Layout l{make_args(problem, carver), {}, {}};
        const auto state = static_cast<std::int64_t>(kernels(problem).state_bytes(l.args) / 4);
        const std::int64_t slots = std::min<std::int64_t>(problem.threads, std::max<std::int64_t>(1, problem.N * problem.H));
        l.args.saved_states =
            static_cast<char*>(carver.take("saved states", DType::f32, {slots, segments(problem) * problem.group, state}));
        l.scratch = take_scratch(carver, problem.threads, kernels(problem).backward_scratch(l.args));
        return l;
    }
};

}  // namespace

std::vector<const Implementation*> recurrent_implementations() {
    std::vector<const Implementation*> list;
    for (const Isa& isa : isas()) {
        if (!isa.bf16_only) list.push_back(new Recurrent(isa));
    }
    return list;
}

}  // namespace headrace::cpu
