// The chunk form's backward on a GPU in two launches: sweeps that save what lies between chunks, then the chunks in any
// order.
#include <algorithm>

#include "cuda/implementations.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

class Split : public CudaImplementation {
  public:
    std::string name() const override { return "cuda.split"; }
    bool serves(Direction direction) const override { return runs_as(direction) == Direction::backward; }
    std::string refusal(const Problem& problem, const Machine&) const override { return chunk_refusal(problem); }
    std::string yields(const Problem& problem) const override {
        if (problem.whole.longest <= walk_chunk(problem)) return "sequences of one chunk have nothing to share";
        return {};
    }

  protected:
    bool in_double(const Problem&) const override { return true; }
    bool takes_all_shared_memory(const Problem&) const override { return true; }
    std::vector<Launch> kernels(const Problem& problem, const KernelArgs& args) const override {
        std::vector<Launch> launches{sweeps(problem, args)};
        if (wants_gradients(problem)) launches.push_back(gradients(problem, args));
        return launches;
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        const int chunk = walk_chunk(problem);
        KernelArgs args = make_args(problem, carver, parts_of(problem, chunk));
        args.chunk = chunk;
        args.value_columns = walk_value_columns(problem, problem.V);
        args.shared_limit = walk_shared_bytes;
        choose_types(problem, args);
        if (wants_gradients(problem)) take_saved_states(problem, carver, args);
        args.spill = take_spill(carver, std::max(tiles_of(sweeps(problem, args)), tiles_of(gradients(problem, args))));
        return args;
    }

  private:
    static SplitKernels split(const Problem& problem) {
        return select_kernels(problem,
                              []<bool delta, bool channel_gate>() { return split_kernels<delta, channel_gate>(); });
    }
    static Launch sweeps(const Problem& problem, const KernelArgs& args) {
        const std::int64_t value_blocks = (args.V + args.value_columns - 1) / args.value_columns,
                           blocks = problem.N * problem.HV * value_blocks * (wants_gradients(problem) ? 2 : 1);
        return {split(problem).sweeps, args, blocks, chunk_threads(true), steps_along(problem, args.chunk, blocks)};
    }
    static Launch gradients(const Problem& problem, const KernelArgs& args) {
        const std::int64_t parts = args.parts * problem.H, blocks = std::min(parts, most_tiled_blocks);
        const Steps steps{blocks > 0 ? (parts + blocks - 1) / blocks : 0,
                          steps_along(problem, args.chunk, problem.N * problem.H).all};
        return {split(problem).gradients, args, blocks, chunk_threads(true), steps};
    }

    // All but that of the initial state.
    static bool wants_gradients(const Problem& problem) {
        const Gradients& g = problem.grads;
        return g.d_q.given() || g.d_k.given() || g.d_p.given() || g.d_v.given() || g.d_beta.given() ||
               wants_gate_gradient(problem);
    }
    // As on the CPU: where few sums rest on saved states there is nothing to average their roundings, and what keys of
    // few directions read in the gradient of a state of the delta rule is far below its roundings.
    static void choose_types(const Problem& problem, KernelArgs& args) {
        const bool exact = !problem.d_out.d_o.given() || has_few_gate_sums(problem);
        args.state_dtype = computes_in_double(problem) ? DType::f64 : exact ? DType::f32 : problem.state_dtype;
        args.adjoint_dtype = args.delta && !computes_in_double(problem) ? DType::f32 : args.state_dtype;
    }
    static void take_saved_states(const Problem& problem, Carver& carver, KernelArgs& args) {
        const std::int64_t K = round_up_16(problem.K), blocks = (args.V + args.value_columns - 1) / args.value_columns;
        args.parts = parts_of(problem, args.chunk);
        const auto factors = [&](const char* name, DType dtype) {
            if (dtype != DType::f16) return static_cast<float*>(nullptr);
            return static_cast<float*>(carver.take(name, DType::f32, {args.parts * problem.HV, blocks}));
        };
        args.saved_states = take_saved(problem, carver, args, "saved states", args.state_dtype, K);
        args.saved_adjoints = take_saved(problem, carver, args, "saved adjoints", args.adjoint_dtype, K);
        args.state_factors = factors("saved factors", args.state_dtype);
        args.adjoint_factors = factors("saved adjoint factors", args.adjoint_dtype);
        if (args.delta)
            args.saved_residuals = take_saved(problem, carver, args, "saved residuals", DType::f64, args.chunk);
    }
};

}  // namespace

std::vector<const Implementation*> split_implementations() { return {new Split}; }

}  // namespace headrace::cuda
