// Summaries in the recurrent form on every ISA: a transition is what becomes of the identity, walked as states are.
#include <algorithm>
#include <vector>

#include "core/threads.hpp"
#include "cpu/implementations.hpp"
#include "cpu/plumbing/blocking.hpp"
#include "cpu/plumbing/isa_implementation.hpp"

namespace headrace::cpu {

namespace {

class RecurrentSummary : public IsaImplementation {
  public:
    explicit RecurrentSummary(const Isa& isa) : IsaImplementation(isa, "recurrent") {}
    bool serves(Direction direction) const override {
        return direction == Direction::summarize || direction == Direction::summarize_backward;
    }
    std::string refusal(const Problem& problem, const Machine& machine) const override { return machine_refusal(problem, machine); }
    void carve(const Problem& problem, Carver& carver) const override { layout(problem, carver); }

    bool compute_on(const Problem& problem, Carver& carver) const override {
        const Layout l = layout(problem, carver);
        if (problem.direction == Direction::summarize_backward) {
            walk(problem, l.state, l, [&](const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, int thread) {
                kernels(problem).adjoint(args, n, head, first, values, l.scratch.of(thread));
            });
        }
        const auto forward = [&](const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, int thread) {
            Unfinished rest{};
            kernels(problem).forward(args, n, head, first, values, l.scratch.of(thread), &rest);
            finish(args, n, head, first, values, rest, l.rest.of(thread));
        };
        if (problem.summary.state.given()) walk(problem, l.state, l, forward);
        if (problem.summary.transition.given()) walk(problem, l.transition, l, forward);
        return *l.state.gate_refused == 0;
    }

  private:
    struct Layout {
        KernelArgs state, transition;  // the latter: of the identity, [K,K], or for the additive rule its diagonal, [K,1]
        Scratch scratch, rest;
    };

    // With few key channels every token of the delta rule erases much through a difference: of a transition, which no
    // write fills up again, as of a gradient.
    static bool in_double(const Problem& problem) {
        const bool erases_much = problem.rule == Rule::delta && problem.K < fewest_delta_channels;
        return problem.wide || erases_much || (problem.runs_backward() && rests_on_few_sums(problem));
    }
    const RecurrentKernels& kernels(const Problem& problem) const {
        return isa_.kernels().recurrent[in_double(problem)][problem.rule == Rule::delta];
    }
    template <class Body>
    void walk(const Problem& problem, const KernelArgs& args, const Layout& l, const Body& body) const {
        const std::int64_t blocks = (args.V + args.value_columns - 1) / args.value_columns;
        for (int thread = 0; thread < problem.threads; ++thread) kernels(problem).start(l.scratch.of(thread));
        parallel_for(problem.N * problem.HV * blocks, problem.threads, [&](std::int64_t task, int thread) {
            const int first = static_cast<int>(task % blocks) * args.value_columns;
            body(args, task / blocks / problem.HV, task / blocks % problem.HV, first, std::min(args.value_columns, args.V - first), thread);
        }, {Shares::dynamic, rough_nanoseconds(problem)});
    }
    Layout layout(const Problem& problem, Carver& carver) const {
        Layout l{make_args(problem, carver), {}, {}, {}};
        l.state.value_columns = recurrent_value_columns(problem);
        if (in_double(problem)) l.state.ends_early = false;  // in double it need not
        l.state.shares = problem.threads;
        if (problem.direction == Direction::summarize_backward) {
            l.state.v.given = false;
            l.scratch = take_scratch(carver, problem.threads, kernels(problem).adjoint_scratch(l.state));
            return l;
        }
        l.transition = transition_of(problem, l.state, carver);
        std::size_t bytes = 0;
        for (const KernelArgs* args : {&l.state, &l.transition}) bytes = std::max(bytes, kernels(problem).forward_scratch(*args));
        l.scratch = take_scratch(carver, problem.threads, bytes);
        KernelArgs wider = l.state;
        wider.V = std::max(l.state.V, l.transition.V);
        l.rest = take_rest_scratch(problem, carver, wider);
        return l;
    }
    static KernelArgs transition_of(const Problem& problem, const KernelArgs& state, Carver& carver) {
        const std::int64_t K = problem.K, columns = state.delta ? K : 1;
        KernelArgs args = state;
        auto* identity = static_cast<float*>(carver.take("identity", DType::f32, {K, columns}));
        for (std::int64_t i = 0; identity != nullptr && i < K * columns; ++i) identity[i] = columns == 1 || i / K == i % K ? 1.0f : 0.0f;
        Problem narrow = problem;
        narrow.V = columns;
        args.V = static_cast<int>(columns);
        args.value_columns = recurrent_value_columns(narrow);
        args.v.given = false;
        args.initial_state = {reinterpret_cast<char*>(identity), DType::f32, true, false, {0, 0, columns, 1}};
        // Of the additive rule without a channel gate all rows are one number, and stored in one place.
        args.final_state = state.transition;
        return args;
    }
};

}  // namespace

std::vector<const Implementation*> recurrent_summaries() {
    std::vector<const Implementation*> list;
    for (const Isa& isa : isas()) {
        if (!isa.bf16_only) list.push_back(new RecurrentSummary(isa));
    }
    return list;
}

}  // namespace headrace::cpu
