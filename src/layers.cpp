// C++ entry of the layer functions: check the arguments, run them where the tensors lie.
#include "headrace/layers.hpp"

#include "core/guarded.hpp"
#include "core/layer_problem.hpp"
#include "core/machine.hpp"
#include "cpu/layers/layers.hpp"
#include "cuda/layers/layers.hpp"

namespace headrace {
namespace {

template <typename Problem>
Status execute(Problem& problem) {
    return guarded([&]() -> Status {
        if (Status status = validate(problem); !status.ok()) return status;
        return problem.device == Device::cuda ? cuda::run(problem) : cpu::run(problem, machine());
    });
}

ConvolutionProblem convolution(Direction direction, const ConvolutionInputs& in, const ConvolutionOptions& options) {
    ConvolutionProblem problem{};
    problem.direction = direction;
    problem.in = in;
    problem.options = options;
    return problem;
}

RmsNormProblem rms_norm(Direction direction, const RmsNormInputs& in, const RmsNormOptions& options) {
    RmsNormProblem problem{};
    problem.direction = direction;
    problem.in = in;
    problem.options = options;
    return problem;
}

}  // namespace

Status short_convolution_forward(const ConvolutionInputs& in, const ConvolutionOutputs& out,
                                 const ConvolutionOptions& options) {
    ConvolutionProblem problem = convolution(Direction::forward, in, options);
    problem.out = out;
    return execute(problem);
}

Status short_convolution_backward(const ConvolutionInputs& in, const ConvolutionOutputGradients& d_out,
                                  const ConvolutionGradients& grads, const ConvolutionOptions& options) {
    ConvolutionProblem problem = convolution(Direction::backward, in, options);
    problem.d_out = d_out;
    problem.grads = grads;
    return execute(problem);
}

Status short_convolution_step(const ConvolutionInputs& in, const ConvolutionOutputs& out, const ConvolutionPool& pool,
                              const ConvolutionOptions& options) {
    ConvolutionProblem problem = convolution(Direction::step, in, options);
    problem.out = out;
    problem.pool = pool;
    return execute(problem);
}

Status rms_norm_gated_forward(const RmsNormInputs& in, const TensorView& y, const RmsNormOptions& options) {
    RmsNormProblem problem = rms_norm(Direction::forward, in, options);
    problem.y = y;
    return execute(problem);
}

Status rms_norm_gated_backward(const RmsNormInputs& in, const TensorView& d_y, const RmsNormGradients& grads,
                               const RmsNormOptions& options) {
    RmsNormProblem problem = rms_norm(Direction::backward, in, options);
    problem.d_y = d_y;
    problem.grads = grads;
    return execute(problem);
}

}  // namespace headrace
