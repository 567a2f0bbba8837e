// args: turns a Problem into KernelArgs, with the small arrays that the kernels read and the sums they leave.
#include "cpu/plumbing/args.hpp"

#include <algorithm>
#include <cmath>

#include "core/views.hpp"
#include "cpu/plumbing/blocking.hpp"

namespace headrace::cpu {

Strided strided(const TensorView& view) {
    const std::size_t bytes = static_cast<std::size_t>(view.numel()) * size_of(view.dtype);
    Strided result{static_cast<char*>(view.data), view.dtype, view.given(), bytes >= cached_bytes, {}};
    for (int i = 0; i < view.rank; ++i) result.stride[i] = view.strides[i];
    return result;
}

namespace {

double* take_doubles(Carver& carver, const char* name, std::int64_t count) {
    return static_cast<double*>(carver.take(name, DType::f64, {count}));
}

// The parameter as doubles, or null where it is absent.
const double* widen(Carver& carver, const char* name, const TensorView& view) {
    if (!view.given()) return nullptr;
    double* values = take_doubles(carver, name, view.numel());
    if (values != nullptr) {
        for (std::int64_t i = 0; i < view.numel(); ++i) values[i] = element_at(view, offset_of(view, i));
    }
    return values;
}

double* take_sums(Carver& carver, const char* name, bool wanted, std::int64_t count) {
    if (!wanted) return nullptr;
    double* sums = take_doubles(carver, name, count);
    if (sums != nullptr) std::fill_n(sums, count, 0.0);
    return sums;
}

void make_pool(const Problem& problem, Carver& carver, KernelArgs& args) {
    const TensorView& indices = problem.pool.indices;
    args.initial_state = args.final_state = strided(problem.pool.states);
    if (!indices.given()) return;
    const std::int64_t per_token = indices.rank == 2 ? indices.shape[1] : 0;
    auto* in = static_cast<std::int64_t*>(carver.take("pool rows read", DType::i64, {problem.N}));
    auto* out = static_cast<std::int64_t*>(
        carver.take("pool rows written", DType::i64, {problem.N, std::max<std::int64_t>(per_token, 1)}));
    args.state_in = in;
    args.state_out = out;
    args.per_token_rows = per_token;
    if (in == nullptr) return;
    for (std::int64_t n = 0; n < problem.N; ++n) {
        const std::int64_t row = n * indices.strides[0];
        if (per_token == 0) {
            in[n] = out[n] = integer_at(indices, row);
            continue;
        }
        const TensorView& accepted = problem.pool.num_accepted_tokens;
        const std::int64_t start = accepted.given() ? integer_at(accepted, n * accepted.strides[0]) - 1 : 0;
        in[n] = integer_at(indices, row + start * indices.strides[1]);
        for (std::int64_t t = 0; t < per_token; ++t) {
            out[n * per_token + t] = integer_at(indices, row + t * indices.strides[1]);
        }
    }
}

}  // namespace

KernelArgs make_args(const Problem& problem, Carver& carver) {
    KernelArgs args{};
    const Inputs& in = problem.in;
    const Gradients& grads = problem.grads;
    args.N = problem.N;
    args.HV = problem.HV;
    args.group = problem.group;
    args.K = static_cast<int>(problem.K);
    args.V = args.value_columns = static_cast<int>(problem.V);
    auto* ranges = static_cast<TokenRange*>(carver.take("sequences", DType::i64, {problem.N, 3}));
    args.sequences = ranges;
    if (ranges != nullptr) {
        for (const Sequence& s : problem.sequences) *ranges++ = {s.row, s.begin, s.end};
    }
    args.delta = problem.rule == Rule::delta;
    args.ends_early = reflections_may_add_up(problem);
    args.widens = args.delta && problem.dtype == DType::f32;
    args.undecayed_error = problem.erase_with_p;
    args.channel_gate = problem.channel_gate;
    args.l2norm = problem.options.qk_l2norm;
    args.reverse = problem.options.reverse;
    args.elementwise_beta = problem.elementwise_beta;
    args.gate_formula = static_cast<GateFormula>(problem.options.gate_form);
    args.beta_formula = static_cast<BetaFormula>(problem.options.beta_form);
    args.scale = problem.scale;
    args.lower_bound = problem.options.lower_bound;
    args.state_dtype = problem.state_dtype;

    args.gamma = widen(carver, "g_gamma", in.g_gamma);
    args.gate_rate = widen(carver, "exp(A_log)", in.A_log);
    if (args.gate_rate != nullptr) {
        for (std::int64_t h = 0; h < problem.HV; ++h) {
            double& rate = const_cast<double*>(args.gate_rate)[h];
            rate = std::exp(rate);
        }
    }
    args.dt_bias = widen(carver, "dt_bias", in.dt_bias);
    args.bias_per_channel = in.dt_bias.given() && problem.channel_gate && in.dt_bias.numel() == problem.HV * problem.K &&
                            (in.dt_bias.rank == 2 || problem.K > 1);

    args.positive_gates = problem.options.allow_positive_gates;
    args.gate_refused = static_cast<std::int32_t*>(carver.take("refused gates", DType::i32, {1}));
    if (args.gate_refused != nullptr) *args.gate_refused = 0;

    const auto take = [](Strided& tensor, const TensorView& view) {
        if (view.given()) tensor = strided(view);
    };
    take(args.q, in.q);
    take(args.k, in.k);
    take(args.p, in.p);
    take(args.v, in.v);
    take(args.g, in.g);
    take(args.gv, in.gv);
    take(args.beta, in.beta);
    take(args.o, problem.out.o);
    take(args.initial_state, in.initial_state);
    take(args.final_state, problem.out.final_state);
    take(args.final_state, problem.summary.state);
    take(args.transition, problem.summary.transition);
    take(args.d_o, problem.d_out.d_o);
    take(args.d_final_state, problem.d_out.d_final_state);
    take(args.d_q, grads.d_q);
    take(args.d_k, grads.d_k);
    take(args.d_p, grads.d_p);
    take(args.d_v, grads.d_v);
    take(args.d_g, grads.d_g);
    take(args.d_gv, grads.d_gv);
    take(args.d_beta, grads.d_beta);
    take(args.d_initial_state, grads.d_initial_state);
    args.piece = problem.is_piece;
    args.roundings = static_cast<int>(roundings_size(problem.K));
    take(args.initial_roundings, problem.whole.initial_roundings);
    take(args.final_roundings, problem.whole.final_roundings);
    take(args.d_final_roundings, problem.whole.d_final_roundings);
    take(args.d_initial_roundings, problem.whole.d_initial_roundings);
    const std::int64_t heads = problem.N * problem.HV;
    args.d_gamma = take_sums(carver, "d_g_gamma sums", grads.d_g_gamma.given(), heads);
    args.d_rate = take_sums(carver, "d_A_log sums", grads.d_A_log.given(), heads);
    args.d_bias = take_sums(carver, "d_dt_bias sums", grads.d_dt_bias.given(), heads * (args.bias_per_channel ? problem.K : 1));
    args.gate_gradient = wants_gate_gradient(problem);
    if (problem.direction == Direction::step) make_pool(problem, carver, args);
    return args;
}

void store_parameter_gradients(const Problem& problem, const KernelArgs& args) {
    const auto reduce = [&](const TensorView& target, const double* sums, std::int64_t count) {
        if (sums == nullptr) return;
        for (std::int64_t i = 0; i < count; ++i) {
            double total = 0;
            for (std::int64_t n = 0; n < problem.N; ++n) total += sums[n * count + i];
            set_element(target, offset_of(target, i), total);
        }
    };
    reduce(problem.grads.d_g_gamma, args.d_gamma, problem.HV);
    reduce(problem.grads.d_A_log, args.d_rate, problem.HV);
    reduce(problem.grads.d_dt_bias, args.d_bias, problem.HV * (args.bias_per_channel ? problem.K : 1));
}

}  // namespace headrace::cpu
