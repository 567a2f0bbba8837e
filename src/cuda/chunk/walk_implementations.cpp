// The chunk form on a GPU as one walk: a block for each sequence, head and block of values.
#include "cuda/implementations.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

template <class T>
WalkKernels kernels_of(const Problem& problem) {
    if (problem.rule == Rule::delta)
        return problem.channel_gate ? walk_kernels<T, true, true>() : walk_kernels<T, true, false>();
    return problem.channel_gate ? walk_kernels<T, false, true>() : walk_kernels<T, false, false>();
}

class Walk : public CudaImplementation {
  public:
    explicit Walk(Direction direction) : direction_(direction) {}
    std::string name() const override { return "cuda.walk"; }
    bool serves(Direction direction) const override { return direction == direction_; }

    std::string refusal(const Problem& problem, const Machine&) const override {
        if (problem.value_gate) return "the chunk form has no value-side gate (gv)";
        if (problem.elementwise_beta) return "the chunk form needs one beta per token";
        return common_refusal(problem);
    }

  protected:
    std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const override {
        const std::int64_t all = blocks(problem, args);
        return {{kernel(problem), args, all, launched_threads, steps_along(problem, args.chunk, all)}};
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        KernelArgs args = make_args(problem, carver);
        args.chunk = walk_chunk(problem);
        args.value_columns = walk_value_columns(problem);
        args.shared_limit = walk_shared_bytes;
        take_spill(carver, args, kernel(problem).memory(args, args.shared_limit), blocks(problem, args));
        if (direction_ == Direction::forward) return args;
        const std::int64_t states = take_saved_states(problem, carver, args, args.chunk);
        if (!args.delta) return args;
        const std::int64_t V = (problem.V + 15) / 16 * 16;
        args.saved_residuals =
            static_cast<char*>(carver.take("saved residuals", args.state_dtype, {states, args.chunk, V}));
        return args;
    }

  private:
    Kernel kernel(const Problem& problem) const {
        const WalkKernels walk = computes_in_double(problem) ? kernels_of<double>(problem) : kernels_of<float>(problem);
        return direction_ == Direction::forward ? walk.forward : walk.backward;
    }
    std::int64_t blocks(const Problem& problem, const KernelArgs& args) const {
        if (direction_ == Direction::backward) return problem.N * problem.H;
        return problem.N * problem.HV * ((args.V + args.value_columns - 1) / args.value_columns);
    }
    Direction direction_;
};

}  // namespace

std::vector<const Implementation*> walk_implementations() {
    return {new Walk(Direction::forward), new Walk(Direction::backward)};
}

}  // namespace headrace::cuda
