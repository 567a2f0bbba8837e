// Summaries in the chunk form on every ISA: the map of a state over a piece of tokens, and the adjoint of it.
#include <algorithm>
#include <vector>

#include "core/threads.hpp"
#include "cpu/implementations.hpp"
#include "cpu/plumbing/blocking.hpp"
#include "cpu/plumbing/isa_implementation.hpp"

namespace headrace::cpu {

namespace {

class ChunkSummary : public IsaImplementation {
  public:
    ChunkSummary(const Isa& isa, Direction direction) : IsaImplementation(isa, "chunk.summary"), direction_(direction) {}
    bool serves(Direction direction) const override { return direction == direction_; }

    std::string refusal(const Problem& problem, const Machine& machine) const override { return chunk_refusal(problem, machine); }
    std::string yields(const Problem& problem) const override {
        const std::string narrow = yields_to_fp32();
        return narrow.empty() ? recurrent_summary_is_faster(problem) : narrow;
    }
    void carve(const Problem& problem, Carver& carver) const override { layout(problem, carver); }

    bool compute_on(const Problem& problem, Carver& carver) const override {
        const Layout l = layout(problem, carver);
        const KernelArgs& args = l.args;
        const std::int64_t blocks = l.columns == 0 ? 1 : (l.columns + args.value_columns - 1) / args.value_columns;
        const std::int64_t walks = problem.HV / args.walk;
        parallel_for(problem.N * walks * blocks, problem.threads, [&](std::int64_t task, int thread) {
            const int first = static_cast<int>(task % blocks) * args.value_columns;
            const std::int64_t head = task / blocks % walks * args.walk, n = task / blocks / walks;
            const int count = std::min(args.value_columns, l.columns - first);
            if (problem.direction == Direction::summarize_backward) {
                kernels(problem).adjoint(args, n, head, first, count, l.scratch.of(thread));
                return;
            }
            Unfinished rest[most_walked]{};
            kernels(problem).summarize(args, n, head, first, count, l.scratch.of(thread), rest);
            for (int j = 0; j < args.walk; ++j) finish_summary(args, n, head + j, first, count, rest[j], l.rest.of(thread));
        }, {Shares::dynamic, rough_nanoseconds(problem)});
        return *args.gate_refused == 0;
    }

  private:
    struct Layout {
        KernelArgs args;
        Scratch scratch, rest;  // rest: as of forwards
        int columns;            // that are walked, of the state and of the transition
    };

    const SummaryKernels& kernels(const Problem& problem) const {
        const Arithmetic arithmetic = problem.wide ? Arithmetic::f64 : isa_.bf16_only ? Arithmetic::bf16 : Arithmetic::f32;
        return isa_.kernels().summaries[static_cast<int>(arithmetic)][problem.rule == Rule::delta][problem.channel_gate];
    }
    static int round_up_16(std::int64_t size) { return static_cast<int>((size + 15) / 16 * 16); }

    Layout layout(const Problem& problem, Carver& carver) const {
        Layout l{make_args(problem, carver), {}, {}, 0};
        KernelArgs& args = l.args;
        const bool map = problem.direction == Direction::summarize;
        // The additive rule has no scores here that would ask for smaller chunks.
        const Direction like = map ? Direction::forward : Direction::backward;
        args.chunk = problem.rule == Rule::additive && problem.chunk == 0 ? default_chunk : chunk_of(problem, isa_.bf16_only, like);
        args.state_chunk = args.chunk;
        args.widens = false;
        args.state_columns = map ? (problem.summary.state.given() ? round_up_16(problem.V) : 0) : round_up_16(problem.V);
        l.columns = map ? args.state_columns : static_cast<int>(problem.V);
        if (args.delta && problem.summary.transition.given()) l.columns += round_up_16(problem.K);
        // Whether a chunk's gradients are computed once more in fp32 is decided for all of its columns.
        const bool whole = isa_.bf16_only && !map;
        args.value_columns = whole || l.columns == 0 ? l.columns : chunk_value_columns(problem, l.columns);
        if (!map) args.v.given = false;
        const std::int64_t bytes = problem.K * l.columns * static_cast<std::int64_t>(problem.wide ? 8 : 4);
        args.walk = heads_walked(problem, problem.HV, bytes, args.chunk);
        const auto scratch = map ? kernels(problem).summarize_scratch : kernels(problem).adjoint_scratch;
        l.scratch = take_scratch(carver, problem.threads, scratch(args));
        KernelArgs wider = args;
        wider.V = std::max(args.V, args.K);
        l.rest = take_rest_scratch(problem, carver, wider);
        return l;
    }
    // Of the columns of a block those of the state, then those of the transition, a state that nothing is written into.
    void finish_summary(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int count, const Unfinished& rest,
                        void* scratch) const {
        if (rest.state == nullptr) return;
        const int of_state = std::clamp(args.state_columns - first, 0, count);
        if (of_state > 0) finish(args, n, head, first, std::min(of_state, args.V - first), rest, scratch);
        if (of_state == count) return;
        KernelArgs transition = args;
        transition.V = args.K;
        transition.v.given = false;
        transition.final_state = args.transition;
        Unfinished behind = rest;
        behind.state += of_state * 4;
        const int first_of_transition = std::max(0, first - args.state_columns);
        finish(transition, n, head, first_of_transition, std::min(count - of_state, args.K - first_of_transition), behind, scratch);
    }

    Direction direction_;
};

}  // namespace

std::vector<const Implementation*> summary_implementations() {
    std::vector<const Implementation*> list;
    for (const Isa& isa : isas()) {
        list.push_back(new ChunkSummary(isa, Direction::summarize));
        list.push_back(new ChunkSummary(isa, Direction::summarize_backward));
    }
    return list;
}

}  // namespace headrace::cpu
