// IsaImplementation: what the implementations of one ISA share: name, availability, per-thread scratch.
#pragma once

#include <algorithm>

#include "core/machine.hpp"
#include "cpu/plumbing/args.hpp"
#include "cpu/plumbing/blocking.hpp"
#include "cpu/plumbing/isa_list.hpp"

namespace headrace::cpu {

class IsaImplementation : public Implementation {
  public:
    IsaImplementation(const Isa& isa, const char* algorithm) : isa_(isa), name_(isa.name + "." + algorithm) {}
    std::string name() const override { return name_; }
    Status run(const Problem& problem, Carver& carver) const final {
        return compute_on(problem, carver) ? Status() : gate_error(problem);
    }

  protected:
    // Whether every value of g was acceptable.
    virtual bool compute_on(const Problem& problem, Carver& carver) const = 0;

    std::string machine_refusal(const Problem& problem, const Machine& machine) const {
        if (!isa_.available(machine)) return "needs " + isa_.needs + ", which this machine lacks";
        if (isa_.bf16_only && problem.dtype != DType::bf16) {
            return std::string("computes bf16 inputs, these are ") + name_of(problem.dtype);
        }
        return {};
    }

    // Of the chunk form, which summaries share.
    std::string chunk_refusal(const Problem& problem, const Machine& machine) const {
        if (rests_on_few_sums(problem)) {
            return "so few tokens and heads rest on single sums, which the recurrent form computes in double";
        }
        // A chunk erases the state through differences. With few key channels next to nothing remains, and what remains
        // would be rounding errors: a chunk of 32 random unit keys leaves about e^{-24 / K} of the state.
        if (problem.rule == Rule::delta && problem.K < fewest_delta_channels) {
            return "the delta rule in chunks needs at least 16 key channels to stay accurate";
        }
        // Operands rounded to bf16 stay within the bars because long sums average the roundings.
        const int channels = problem.rule == Rule::delta ? 64 : 32;
        if (isa_.bf16_only && (problem.K < channels || problem.V < 32 || problem.whole.longest < 32)) {
            return "bf16 dot products need at least " + std::to_string(channels) +
                   " key channels, 32 value channels and 32 tokens, to average their roundings";
        }
        if (isa_.bf16_only && problem.runs_backward() && !problem.d_out.d_o.given()) {
            return "a gradient through the final state alone may rest on a few tokens, too few to average bf16 roundings";
        }
        return machine_refusal(problem, machine);
    }

    // Why the fp32 kernels behind this one serve its bf16 tensors better.
    std::string yields_to_fp32() const {
        const bool yields = isa_.bf16_only && machine().slow_bf16_dot;
        return yields ? "the bf16 dot product of this processor is slower than fp32" : "";
    }

    // Scratch memory of every thread in one block.
    struct Scratch {
        char* base;
        std::size_t bytes;
        void* of(int thread) const { return base + static_cast<std::size_t>(thread) * bytes; }
    };
    static Scratch take_scratch(Carver& carver, int threads, std::size_t bytes_per_thread) {
        const std::size_t bytes = (bytes_per_thread + 127) / 128 * 128;
        void* base = carver.take("scratch of threads", DType::f32, {threads, static_cast<std::int64_t>(bytes / 4)});
        return {static_cast<char*>(base), bytes};
    }

    // Forwards in fp32 that may end early: room for their rest in double.
    Scratch take_rest_scratch(const Problem& problem, Carver& carver, const KernelArgs& args) const {
        return args.ends_early ? take_scratch(carver, problem.threads, rest_bytes(args)) : Scratch{};
    }
    std::size_t rest_bytes(KernelArgs args) const {
        if (!args.ends_early) return 0;
        args.value_columns = std::min(args.V, rest_columns);
        args.ends_early = false;
        return isa_.kernels().recurrent[1][1].forward_scratch(args);
    }
    // What is left of the values [first, first + values) of a head, if anything is.
    void finish(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, const Unfinished& rest,
                void* scratch) const {
        if (rest.state == nullptr) return;
        const RecurrentKernels& in_double = isa_.kernels().recurrent[1][1];
        TokenRange tokens = args.sequences[n];
        (args.reverse ? tokens.end : tokens.begin) += args.reverse ? -rest.tokens : rest.tokens;
        KernelArgs left = args;
        left.ends_early = false;
        left.value_columns = std::min(args.V, rest_columns);
        left.sequences = &tokens;
        left.final_roundings.given = false;
        left.done = static_cast<int>(rest.tokens % cut_tokens);
        left.outputs = rest.outputs;
        if (!rest.unbegun) {
            left.initial_state = {const_cast<char*>(rest.state) - first * 4, DType::f32, true, false, {0, 0, rest.row, 1}};
        } else if (args.initial_state.given) {
            left.initial_state.data += n * args.initial_state.stride[0] * static_cast<std::int64_t>(size_of(args.initial_state.dtype));
        }
        if (args.final_state.given) {
            left.final_state.data += n * args.final_state.stride[0] * static_cast<std::int64_t>(size_of(args.final_state.dtype));
        }
        in_double.start(scratch);
        for (int done = 0; done < values; done += left.value_columns) {
            in_double.forward(left, 0, head, first + done, std::min(left.value_columns, values - done), scratch, nullptr);
        }
    }

    const Isa& isa_;

  private:
    static constexpr int rest_columns = 64;  // of a state in double, at once

    std::string name_;
};

}  // namespace headrace::cpu
