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
        const std::size_t shared = tensor.shared(args);
        const std::int64_t values = (problem.V + tensor_values - 1) / tensor_values;
        void* const stream = problem.options.stream;
        std::int64_t walks = problem.N;
        if (args.segments.tokens > 0) {
            walks = args.segments.slots;
            const std::int64_t joined = problem.N * problem.HV * ((problem.V + join_columns - 1) / join_columns);
            Status status = launch(tensor.states, "cuda.tensor: states of segments",
                                   walks * problem.HV * args.segments.blocks, tensor_threads, shared, &args, stream);
            if (status.ok()) {
                status = launch(tensor.join, "cuda.tensor: states between segments", joined, launched_threads,
                                tensor.join_shared(args), &args, stream);
            }
            if (!status.ok()) return status;
        }
        return launch(tensor.forward, "cuda.tensor", walks * problem.HV * values, tensor_threads, shared, &args,
                      stream);
    }
    KernelArgs layout(const Problem& problem, Carver& carver) const override {
        KernelArgs args = make_args(problem, carver);
        const int tokens = args.segments.tokens = segment_tokens(problem);
        if (tokens == 0) return args;
        const std::int64_t slots = problem.in.cu_seqlens.given() ? problem.T / tokens + problem.N
                                                                 : problem.N * ((problem.T + tokens - 1) / tokens);
        const auto blocks_of = [](std::int64_t columns) { return (columns + tensor_values - 1) / tensor_values; };
        args.segments.slots = slots;
        args.segments.blocks = blocks_of(problem.V) + (args.delta ? blocks_of(problem.K) : 0);
        args.segments.states =
            static_cast<float*>(carver.take("segment states", DType::f32, {slots, problem.HV, problem.K, problem.V}));
        if (args.delta) {
            args.segments.transitions = static_cast<float*>(
                carver.take("segment transitions", DType::f32, {slots, problem.HV, problem.K, problem.K}));
        } else {
            args.segments.decays = static_cast<double*>(carver.take("segment decays", DType::f64, {slots, problem.HV}));
        }
        return args;
    }

  private:
    static TensorKernels kernels(const Problem& problem) {
        return problem.rule == Rule::delta ? tensor_kernels<true>(problem.K) : tensor_kernels<false>(problem.K);
    }
};

}  // namespace

std::vector<const Implementation*> tensor_implementations() { return {new Tensor}; }

}  // namespace headrace::cuda
