// The recurrent form on a GPU: forward and step by blocks of a sequence, a head and 32 values; backward by blocks of a
// key head.
#include "cuda/implementations.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

RecurrentKernels kernels_of(const Problem& problem) {
    const bool delta = problem.rule == Rule::delta;
    const std::int64_t K = problem.K;
    if (computes_in_double(problem))
        return delta ? recurrent_kernels<double, true>(K) : recurrent_kernels<double, false>(K);
    return delta ? recurrent_kernels<float, true>(K) : recurrent_kernels<float, false>(K);
}

class Recurrent : public CudaImplementation {
  public:
    std::string name() const override { return "cuda.recurrent"; }
    bool serves(Direction) const override { return true; }
    std::string refusal(const Problem& problem, const Machine&) const override { return common_refusal(problem); }

  protected:
    std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const override {
        const RecurrentKernels kernels = kernels_of(problem);
        if (problem.runs_backward()) {
            const std::int64_t blocks = problem.N * problem.H;
            return {
                {kernels.backward, args, blocks, launched_threads, steps_along(problem, recurrent_segment, blocks)}};
        }
        const bool alone =
            problem.T == 1 && !args.cu_seqlens.given && args.per_token_rows == 0 && !args.num_accepted_tokens.given;
        return walks_of(problem, args, [&](const KernelArgs& walk) -> Launch {
            const std::int64_t value_blocks = (walk.V + kernels.columns - 1) / kernels.columns,
                               blocks = problem.N * problem.HV * value_blocks;
            return {alone ? kernels.step : kernels.forward, walk, blocks, launched_threads,
                    steps_along(problem, 1, blocks)};
        });
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        KernelArgs args = make_args(problem, carver);
        args.shared_limit = walk_shared_bytes;
        take_identity(problem, carver, args);
        if (!problem.runs_backward()) return args;
        args.spill = take_spill(carver, tiles_of(kernels(problem, args).front()));
        take_saved_states(problem, carver, args, recurrent_segment);
        return args;
    }
};

}  // namespace

std::vector<const Implementation*> recurrent_implementations() { return {new Recurrent}; }

}  // namespace headrace::cuda
