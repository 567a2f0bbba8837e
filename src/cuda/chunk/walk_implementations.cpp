// The chunk form on a GPU as one walk: a block for each sequence, head and block of values.
#include <algorithm>

#include "cuda/implementations.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

class Walk : public CudaImplementation {
  public:
    explicit Walk(Direction direction) : direction_(direction) {}
    std::string name() const override { return "cuda.walk"; }
    bool serves(Direction direction) const override { return runs_as(direction) == direction_; }

    std::string refusal(const Problem& problem, const Machine&) const override { return chunk_refusal(problem); }
    std::string yields(const Problem& problem) const override {
        if (!in_double(problem)) return "in registers the state is read and written faster token by token";
        return {};
    }

  protected:
    bool in_double(const Problem& problem) const override { return chunks_in_double(problem); }
    bool takes_all_shared_memory(const Problem& problem) const override { return in_double(problem); }
    std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const override {
        return walks_of(problem, args, [&](KernelArgs walk) -> Launch {
            walk.value_columns = walk_value_columns(problem, walk.V);
            const std::int64_t all = blocks(problem, walk);
            return {kernel(problem), walk, all, chunk_threads(in_double(problem)),
                    steps_along(problem, walk.chunk, all)};
        });
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        KernelArgs args = make_args(problem, carver);
        args.chunk = walk_chunk(problem);
        take_identity(problem, carver, args);
        args.shared_limit = walk_shared_bytes;
        std::int64_t spill = 0;
        for (const Launch& each : kernels(problem, args)) spill = std::max(spill, tiles_of(each));
        args.spill = take_spill(carver, spill);
        if (direction_ == Direction::forward) return args;
        take_saved_states(problem, carver, args, args.chunk);
        if (args.delta)
            args.saved_residuals = take_saved(problem, carver, args, "saved residuals", args.state_dtype, args.chunk);
        return args;
    }

  private:
    Kernel kernel(const Problem& problem) const {
        const WalkKernels walk = select_kernels(problem, [&]<bool delta, bool channel_gate>() {
            return in_double(problem) ? walk_kernels<double, delta, channel_gate>()
                                      : walk_kernels<float, delta, channel_gate>();
        });
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
