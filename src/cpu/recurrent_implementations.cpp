// The recurrent form on every ISA: forward, backward and step, every option of the operators.
#include <algorithm>

#include "cpu/blocking.hpp"
#include "cpu/implementations.hpp"
#include "cpu/isa_implementation.hpp"
#include "cpu/threads.hpp"

namespace headrace::cpu {

namespace {

class Recurrent : public IsaImplementation {
  public:
    explicit Recurrent(const Isa& isa) : IsaImplementation(isa, "recurrent") {}
    bool serves(Direction) const override { return true; }
    std::string refusal(const Problem& problem, const Machine& machine) const override {
        return machine_refusal(problem, machine);
    }
    void carve(const Problem& problem, Carver& carver) const override { layout(problem, carver); }

    bool run(const Problem& problem, Carver& carver) const override {
        const Layout l = layout(problem, carver);
        if (problem.direction == Direction::backward) {
            const std::int64_t slot = segments(problem) * problem.group;
            parallel_for(problem.N * problem.H, problem.threads, [&](std::int64_t task, int thread) {
                kernels(problem).backward(l.args, task / problem.H, task % problem.H, thread * slot, l.scratch.of(thread));
            });
            store_parameter_gradients(problem, l.args);
            return *l.args.gate_refused == 0;
        }
        const std::int64_t strips = (problem.V + l.args.value_columns - 1) / l.args.value_columns;
        parallel_for(problem.N * problem.HV * strips, problem.threads, [&](std::int64_t task, int thread) {
            const int first = static_cast<int>(task % strips) * l.args.value_columns;
            const std::int64_t head = task / strips % problem.HV, n = task / strips / problem.HV;
            kernels(problem).forward(l.args, n, head, first, std::min(l.args.value_columns, l.args.V - first),
                                     l.scratch.of(thread));
        });
        return *l.args.gate_refused == 0;
    }

  private:
    struct Layout {
        KernelArgs args;
        Scratch scratch;
    };
    const RecurrentKernels& kernels(const Problem& problem) const {
        return isa_.kernels().recurrent[problem.wide][problem.rule == Rule::delta];
    }
    std::int64_t segments(const Problem& problem) const {
        std::int64_t tokens = 0;
        for (const Sequence& s : problem.sequences) tokens = std::max(tokens, s.end - s.begin);
        return (tokens + kernels(problem).segment - 1) / kernels(problem).segment;
    }
    Layout layout(const Problem& problem, Carver& carver) const {
        Layout l{make_args(problem, carver), {}};
        if (problem.direction == Direction::backward) {
            const auto state = static_cast<std::int64_t>(kernels(problem).state_bytes(l.args) / 4);
            const std::int64_t slots = std::min<std::int64_t>(problem.threads, std::max<std::int64_t>(1, problem.N * problem.H));
            l.args.saved_states = static_cast<char*>(
                carver.take("saved states", DType::f32, {slots, segments(problem) * problem.group, state}));
            l.scratch = take_scratch(carver, problem.threads, kernels(problem).backward_scratch(l.args));
        } else {
            l.args.value_columns = recurrent_value_columns(problem);
            l.scratch = take_scratch(carver, problem.threads, kernels(problem).forward_scratch(l.args));
        }
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
