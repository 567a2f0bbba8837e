// args: turns a Problem into KernelArgs, with the sums that the kernels leave.
#include "cuda/plumbing/args.hpp"

#include "core/debug_nan.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/launch.hpp"

namespace headrace::cuda {
namespace {

double* take_sums(Carver& carver, const char* name, bool wanted, std::int64_t count) {
    return wanted ? static_cast<double*>(carver.take(name, DType::f64, {count})) : nullptr;
}

// dt_bias [HV,K] or [HV * K] as two strides, of heads and of channels.
Strided bias_of(const TensorView& bias, std::int64_t K) {
    Strided result = strided(bias);
    if (bias.rank == 1) result.stride[1] = bias.strides[0], result.stride[0] = bias.strides[0] * K;
    return result;
}

void take_tensors(const Problem& problem, KernelArgs& args) {
    const Inputs& in = problem.in;
    const Gradients& grads = problem.grads;
    const auto take = [](Strided& tensor, const TensorView& view) { tensor = strided(view); };
    take(args.q, in.q), take(args.k, in.k), take(args.p, in.p), take(args.v, in.v), take(args.g, in.g),
        take(args.gv, in.gv);
    take(args.beta, in.beta), take(args.g_gamma, in.g_gamma), take(args.A_log, in.A_log),
        take(args.dt_bias, in.dt_bias);
    take(args.o, problem.out.o);
    take(args.initial_state, in.initial_state), take(args.final_state, problem.out.final_state);
    take(args.d_o, problem.d_out.d_o), take(args.d_final_state, problem.d_out.d_final_state);
    take(args.d_q, grads.d_q), take(args.d_k, grads.d_k), take(args.d_p, grads.d_p), take(args.d_v, grads.d_v);
    take(args.d_g, grads.d_g), take(args.d_gv, grads.d_gv), take(args.d_beta, grads.d_beta);
    take(args.d_initial_state, grads.d_initial_state);
    if (problem.direction == Direction::summarize) {
        args.q = args.k;  // outputs are not wanted, any queries will do
        take(args.final_state, problem.summary.state), take(args.transition, problem.summary.transition);
    }
    if (problem.direction == Direction::step) {
        args.initial_state = args.final_state = strided(problem.pool.states);
        take(args.indices, problem.pool.indices), take(args.num_accepted_tokens, problem.pool.num_accepted_tokens);
        args.pool_rows = problem.pool.states.shape[0];
        args.per_token_rows = problem.pool.indices.rank == 2 ? problem.pool.indices.shape[1] : 0;
    }
}

}  // namespace

Strided strided(const TensorView& view) {
    Strided result{static_cast<char*>(view.data), {}, view.dtype, view.given()};
    for (int i = 0; i < view.rank; ++i) result.stride[i] = view.strides[i];
    return result;
}

KernelArgs make_args(const Problem& problem, Carver& carver, std::int64_t sums) {
    KernelArgs args{};
    const Gradients& grads = problem.grads;
    args.N = problem.N, args.T = problem.T, args.H = problem.H, args.HV = problem.HV;
    args.group = static_cast<int>(problem.group);
    args.K = static_cast<int>(problem.K), args.V = args.value_columns = static_cast<int>(problem.V);
    args.delta = problem.rule == Rule::delta;
    args.undecayed_error = problem.erase_with_p;
    args.channel_gate = problem.channel_gate;
    args.l2norm = problem.options.qk_l2norm;
    args.reverse = problem.options.reverse;
    args.elementwise_beta = problem.elementwise_beta;
    args.positive_gates = problem.options.allow_positive_gates;
    args.gate_formula = static_cast<GateFormula>(problem.options.gate_form);
    args.beta_formula = static_cast<BetaFormula>(problem.options.beta_form);
    args.rounded_state = problem.is_piece && problem.in.initial_state.given();
    args.rounded_gradient = problem.is_piece && problem.d_out.d_final_state.given();
    args.scale = problem.scale;
    args.write_scale = 1;
    args.lower_bound = problem.options.lower_bound;
    take_tensors(problem, args);
    const TensorView& bias = problem.in.dt_bias;
    args.bias_per_channel = bias.given() && problem.channel_gate && bias.numel() == problem.HV * problem.K &&
                            (bias.rank == 2 || problem.K > 1);
    if (args.bias_per_channel) args.dt_bias = bias_of(bias, problem.K);
    args.refused = static_cast<std::int32_t*>(carver.take("refused values", DType::i32, {1}));
    args.sums = sums >= 0 ? sums : problem.N;
    const std::int64_t heads = args.sums * problem.HV;
    args.d_gamma = take_sums(carver, "d_g_gamma sums", grads.d_g_gamma.given(), heads);
    args.d_rate = take_sums(carver, "d_A_log sums", grads.d_A_log.given(), heads);
    args.d_bias =
        take_sums(carver, "d_dt_bias sums", grads.d_dt_bias.given(), heads * (args.bias_per_channel ? problem.K : 1));
    args.gate_gradient = wants_gate_gradient(problem);
    args.cu_seqlens = take_sequences(problem.in.cu_seqlens, problem.N, carver);
    return args;
}

Status prepare(const Problem& problem, const KernelArgs& args) {
    void* const stream = problem.options.stream;
    const TensorView& cu_seqlens = problem.in.cu_seqlens;
    Status status;
    if (!checked_on_device(cu_seqlens)) status = clear(args.refused, sizeof *args.refused, stream);
    if (!status.ok()) return status;
    return store_sequences(cu_seqlens, problem.sequences, args.cu_seqlens, problem.N, problem.T, args.refused, stream);
}

std::vector<SumsArgs> parameter_sums(const Problem& problem, const KernelArgs& args) {
    std::vector<SumsArgs> all;
    const auto reduce = [&](const TensorView& target, const double* sums, std::int64_t channels) {
        if (!target.given()) return;
        const bool flat = channels > 1 && target.rank == 1;
        all.push_back({sums, flat ? bias_of(target, problem.K) : strided(target), args.sums, problem.HV, channels,
                       problem.HV * channels});
    };
    reduce(problem.grads.d_g_gamma, args.d_gamma, 1);
    reduce(problem.grads.d_A_log, args.d_rate, 1);
    reduce(problem.grads.d_dt_bias, args.d_bias, args.bias_per_channel ? problem.K : 1);
    return all;
}

std::int64_t blocks_of(const SumsArgs& sums) {
    return (sums.heads * sums.channels + totals_per_block - 1) / totals_per_block;
}

Status store_parameter_gradients(const Problem& problem, const KernelArgs& args) {
    Status status;
    for (SumsArgs& sums : parameter_sums(problem, args)) {
        if (status.ok())
            status = launch(sums_kernel(), "parameter_sums", blocks_of(sums), {launched_threads}, &sums,
                            problem.options.stream);
    }
    return status;
}

Status check_refused(const Problem& problem, const KernelArgs& args) {
    if (!debug_nan_enabled()) return {};
    std::int32_t refused = 0;
    if (Status status = read_back(&refused, args.refused, sizeof refused, problem.options.stream); !status.ok())
        return status;
    if ((refused & refused_gate) != 0)
        return {Code::invalid_argument, "g: expected log decays <= 0, got a NaN or a positive value"};
    if ((refused & refused_beta) != 0)
        return {Code::invalid_argument, "beta: expected finite values, got a NaN or an infinity"};
    if ((refused & refused_index) != 0)
        return {Code::invalid_argument, "pool.indices: expected rows of pool.states, got others"};
    return {};
}

}  // namespace headrace::cuda
