// The layer functions on a CUDA device: windows of tokens, rows and channels, and the blocks that take them.
#include "cuda/layers/layers.hpp"

#include <algorithm>

#include "core/workspace.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/args.hpp"
#include "cuda/plumbing/launch.hpp"
#include "cuda/plumbing/sequences.hpp"

namespace headrace::cuda {
namespace {

// Groups whose sums wait in memory until all are done, and groups that leave none.
constexpr std::int64_t most_sums = 64, most_groups = 4096;
constexpr std::int64_t strip = 32;  // channels of a block of a convolution

ActivationFormula formula_of(Activation activation) { return static_cast<ActivationFormula>(activation); }
static_assert(static_cast<int>(Activation::sigmoid) == static_cast<int>(ActivationFormula::sigmoid));

// Views of fewer dimensions get leading ones of size 1.
Strided strided_to(int rank, const TensorView& view) {
    Strided result = strided(view);
    for (int i = rank - 1; i >= 0 && view.given(); --i) {
        const int from = i - (rank - view.rank);
        result.stride[i] = from < 0 ? 0 : view.strides[from];
    }
    return result;
}

Groups grouped(std::int64_t items, bool with_sums) {
    return {items, std::min(items, with_sums ? most_sums : most_groups)};
}

double* take_sums(Carver& carver, bool wanted, std::initializer_list<std::int64_t> shape) {
    return wanted ? static_cast<double*>(carver.take("parameter sums", DType::f64, shape)) : nullptr;
}

// target = the sums of all groups; [rows, D] of each, the groups `step` numbers apart
Status store_sums(Strided target, const double* sums, const Groups& groups, std::int64_t rows, std::int64_t D,
                  std::int64_t step, void* stream) {
    if (!target.given) return {};
    SumsArgs reduced{sums, target, groups.count, rows, D, step};
    return launch(sums_kernel(), "parameter_sums", blocks_of(reduced), {launched_threads}, &reduced, stream);
}

ConvolutionArgs lay_out(const ConvolutionProblem& problem, Carver& carver) {
    ConvolutionArgs args{};
    const bool step = problem.direction == Direction::step;
    args.B = problem.B, args.T = problem.T, args.D = problem.D, args.N = problem.N, args.W = problem.W;
    args.activation = formula_of(problem.options.activation);
    const std::int64_t windows = problem.D == 0 ? 0 : problem.B * ((problem.T + window_tokens - 1) / window_tokens);
    args.groups = grouped(step ? problem.N : windows, problem.direction == Direction::backward);
    args.x = strided(problem.in.x), args.weight = strided(problem.in.weight), args.bias = strided(problem.in.bias);
    args.initial_state = strided(problem.in.initial_state), args.final_state = strided(problem.out.final_state);
    args.y = strided(problem.out.y);
    args.d_y = strided(problem.d_out.d_y), args.d_final_state = strided(problem.d_out.d_final_state);
    args.d_x = strided(problem.grads.d_x), args.d_initial_state = strided(problem.grads.d_initial_state);
    args.states = strided(problem.pool.states), args.indices = strided(problem.pool.indices);
    args.pool_rows = step ? problem.pool.states.shape[0] : 0;
    args.cu_seqlens = take_sequences(problem.in.cu_seqlens, problem.N, carver);
    args.sums = take_sums(carver, problem.grads.d_weight.given() || problem.grads.d_bias.given(),
                          {args.groups.count, problem.W + 1, problem.D});
    return args;
}

RmsNormArgs lay_out(const RmsNormProblem& problem, Carver& carver) {
    RmsNormArgs args{};
    const TensorView& x = problem.in.x;
    for (int i = 0; i < 2; ++i) args.shape[i] = x.rank >= 3 - i ? x.shape[x.rank - 3 + i] : 1;
    args.rows = problem.rows, args.D = problem.D;
    args.eps = problem.options.eps;
    args.activation = formula_of(problem.options.activation);
    args.x = strided_to(4, x), args.gate = strided_to(4, problem.in.gate), args.weight = strided(problem.in.weight);
    args.y = strided_to(4, problem.y), args.d_y = strided_to(4, problem.d_y);
    args.d_x = strided_to(4, problem.grads.d_x), args.d_gate = strided_to(4, problem.grads.d_gate);
    args.groups = grouped(problem.D == 0 ? 0 : problem.rows,
                          problem.direction == Direction::backward && problem.grads.d_weight.given());
    args.sums = take_sums(carver, problem.grads.d_weight.given(), {args.groups.count, problem.D});
    return args;
}

// Lays the call out in memory of its own and hands it to body(args).
template <class Problem, class Body>
Status with_layout(const Problem& problem, const Body& body) {
    if (problem.options.force != nullptr && *problem.options.force != '\0') {
        return {Code::invalid_argument,
                std::string("force: expected none with CUDA tensors, got ") + problem.options.force};
    }
    const OnDevice device(named_views(problem));
    if (!device.status().ok()) return device.status();
    Carver measure;
    lay_out(problem, measure);
    Block memory;
    if (Status status = allocate(measure.size(), problem.options.stream, &memory); !status.ok()) return status;
    Carver carver(memory.get());
    return body(lay_out(problem, carver));
}

std::size_t shared_bytes(const LayerKernels& kernels, const ConvolutionArgs& args) {
    return kernels.convolution_memory(args).shared;
}

Status queue_convolution(const ConvolutionProblem& problem, ConvolutionArgs args) {
    const LayerKernels kernels = problem.wide ? layer_kernels<double>() : layer_kernels<float>();
    void* const stream = problem.options.stream;
    const std::int64_t strips = (args.D + strip - 1) / strip;
    const std::size_t shared = shared_bytes(kernels, args);
    const auto queue = [&](const void* kernel, const char* name, std::int64_t count) {
        return launch(kernel, name, count * strips, {launched_threads, shared}, &args, stream);
    };
    if (problem.direction == Direction::step) return queue(kernels.convolution_step, "short convolution step", args.N);
    Status status = store_sequences(problem.in.cu_seqlens, problem.sequences, args.cu_seqlens, problem.N, problem.T,
                                    nullptr, stream);
    if (problem.direction == Direction::forward) {
        if (status.ok()) status = queue(kernels.convolution_forward, "short convolution", args.groups.count);
        if (status.ok() && args.final_state.given)
            status = queue(kernels.convolution_state, "short convolution state", args.N);
        return status;
    }
    const bool of_tokens = args.d_x.given || args.sums != nullptr;
    if (status.ok() && of_tokens)
        status = queue(kernels.convolution_backward, "short convolution backward", args.groups.count);
    if (status.ok() && args.d_initial_state.given) {
        status = queue(kernels.convolution_state_gradient, "short convolution state gradient", args.N);
    }
    const std::int64_t step = (args.W + 1) * args.D;
    Strided d_weight = strided(problem.grads.d_weight), d_bias = strided(problem.grads.d_bias);
    std::swap(d_weight.stride[0], d_weight.stride[1]);  // [W,D] of [D,W]
    d_bias.stride[1] = d_bias.stride[0], d_bias.stride[0] = 0;
    if (status.ok()) status = store_sums(d_weight, args.sums, args.groups, args.W, args.D, step, stream);
    if (status.ok()) status = store_sums(d_bias, args.sums + args.W * args.D, args.groups, 1, args.D, step, stream);
    return status;
}

Status run_convolution(const ConvolutionProblem& problem, const ConvolutionArgs& args) {
    Status status = queue_convolution(problem, args);
    if (!status.ok()) return status;
    return spoil_results(named_views(problem), problem.in.cu_seqlens, args.cu_seqlens, problem.N, problem.T,
                         problem.options.stream);
}

Status run_norm(const RmsNormProblem& problem, RmsNormArgs args) {
    const LayerKernels kernels = problem.wide ? layer_kernels<double>() : layer_kernels<float>();
    const void* const kernel = problem.direction == Direction::forward ? kernels.norm_forward : kernels.norm_backward;
    void* const stream = problem.options.stream;
    Status status = launch(kernel, "gated norm", args.groups.count,
                           {launched_threads, kernels.norm_memory(args).shared}, &args, stream);
    Strided d_weight = strided(problem.grads.d_weight);
    d_weight.stride[1] = d_weight.stride[0], d_weight.stride[0] = 0;
    return status.ok() ? store_sums(d_weight, args.sums, args.groups, 1, args.D, args.D, stream) : status;
}

}  // namespace

Status run(const ConvolutionProblem& problem) {
    return with_layout(problem, [&](const ConvolutionArgs& args) { return run_convolution(problem, args); });
}
Status run(const RmsNormProblem& problem) {
    return with_layout(problem, [&](const RmsNormArgs& args) { return run_norm(problem, args); });
}

}  // namespace headrace::cuda
