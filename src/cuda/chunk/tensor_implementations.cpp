// The chunk form on tensor cores, for bf16 tensors: the walk with its products in bf16 and sums in fp32.
#include "cuda/implementations.hpp"
#include "cuda/plumbing/cuda_implementation.hpp"

namespace headrace::cuda {
namespace {

class Tensor : public CudaImplementation {
  public:
    std::string name() const override { return "cuda.tensor"; }
    bool serves(Direction direction) const override { return direction == Direction::forward; }

    std::string refusal(const Problem& problem, const Machine&) const override {
        if (problem.dtype != DType::bf16) return "the tensor cores' products are in bf16";
        if (problem.value_gate) return "the chunk form has no value-side gate (gv)";
        if (problem.elementwise_beta) return "the chunk form needs one beta per token";
        if (problem.channel_gate) return "serves one gate per token, not gates of channels";
        if (problem.options.allow_positive_gates) return "takes no positive gates";
        if (problem.K > 128) return "takes up to 128 key channels";
        const bool delta = problem.rule == Rule::delta;
        if (problem.K < (delta ? 64 : 32) || problem.V < 32 || problem.whole.longest < 32)
            return "fewer than 32 tokens, values or key channels, 64 of the delta rule, are too few to average bf16 "
                   "roundings";
        KernelArgs args{};
        args.undecayed_error = problem.erase_with_p;
        args.stages = 1;
        if (kernels(problem).shared(args) > shared_memory_limit(named_views(problem)))
            return "needs more shared memory than the GPU has";
        return common_refusal(problem);
    }

  protected:
    Status queue(const Problem& problem, KernelArgs& args) const override {
        const TensorKernels tensor = kernels(problem);
        args.stages = 2;
        if (tensor.shared(args) > shared_memory_limit(named_views(problem))) args.stages = 1;
        args.shared_limit = tensor.shared(args);
        const std::int64_t blocks = problem.N * problem.HV * ((problem.V + tensor_values - 1) / tensor_values);
        return launch(tensor.forward, "cuda.tensor", blocks, tensor_threads, args.shared_limit, &args,
                      problem.options.stream);
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override { return make_args(problem, carver); }

  private:
    static TensorKernels kernels(const Problem& problem) {
        return problem.rule == Rule::delta ? tensor_kernels<true>(problem.K) : tensor_kernels<false>(problem.K);
    }
};

}  // namespace

std::vector<const Implementation*> tensor_implementations() { return {new Tensor}; }

}  // namespace headrace::cuda
