// What make_problem asks of the tensors together: which are required or refused, and how their sizes agree.
#include <string>

#include "core/expectations.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"
#include "operators.hpp"

namespace headrace {
namespace {

// Kernels count the elements of a head in int; a state of this size squared would take 16 GiB.
constexpr std::int64_t max_head_dim = 65536;

// What the operator does not take; the message is made where it is needed.
bool refuse(const char* name, const TensorView& view, const OperatorInfo& info, Fault& fault) {
    return !view.given() || headrace::refuse(name, view, (std::string(info.name) + " does not take it").c_str(), fault);
}

bool check_gates(const OperatorInfo& info, Problem& problem, Fault& fault) {
    const Inputs& in = problem.in;
    problem.step_gate = in.g.given() && in.g.rank == 3;
    problem.channel_gate = in.g.given() && !problem.step_gate;
    problem.head_gate = in.g_gamma.given();
    problem.value_gate = in.gv.given();
    if (info.step == Gate::refused && info.channel == Gate::refused && !refuse("g", in.g, info, fault)) return false;
    if (problem.channel_gate && info.channel == Gate::refused) {
        return fault("g: expected 3 dimensions [B, T, HV], the step gate of ", info.name, ", got ", in.g.rank, ": ",
                     shape_text(in.g));
    }
    if (problem.step_gate && info.step == Gate::refused) {
        return fault("g: expected 4 dimensions [B, T, HV, K], the channel gate of ", info.name,
                     ", got 3: ", shape_text(in.g));
    }
    if (info.head == Gate::refused && !refuse("g_gamma", in.g_gamma, info, fault)) return false;
    return info.head != Gate::required || require("g_gamma", in.g_gamma, info.name, fault);
}

bool check_forms(const Problem& problem, Fault& fault) {
    const Inputs& in = problem.in;
    switch (problem.options.gate_form) {
        case GateForm::log_decay:
            if (!refuse("A_log", in.A_log, "gate_form log_decay does not take it", fault) ||
                !refuse("dt_bias", in.dt_bias, "gate_form log_decay does not take it", fault)) {
                return false;
            }
            break;
        case GateForm::softplus:
        case GateForm::bounded: {
            const bool bounded = problem.options.gate_form == GateForm::bounded;
            const char* by = bounded ? "gate_form bounded" : "gate_form softplus";
            if (!require("g", in.g, by, fault) || !require("A_log", in.A_log, by, fault)) return false;
            break;
        }
        default:
            return fault("gate_form: expected log_decay, softplus or bounded, got number ",
                         static_cast<int>(problem.options.gate_form));
    }
    switch (problem.options.beta_form) {
        case BetaForm::value: return true;
        case BetaForm::sigmoid: return require("beta", in.beta, "beta_form sigmoid", fault);
        case BetaForm::two_sigmoid: return require("beta", in.beta, "beta_form two_sigmoid", fault);
    }
    return fault("beta_form: expected value, sigmoid or two_sigmoid, got number ",
                 static_cast<int>(problem.options.beta_form));
}

// A summary is a K x K matrix that all value channels share.
bool check_map(const Problem& problem, Fault& fault) {
    return refuse("gv", problem.in.gv, "a summary's transition is one K x K matrix for all value channels", fault) &&
           (problem.in.beta.rank != 4 ||
            fault("beta: expected 3 dimensions [B, T, HV], a summary's transition is one K x K matrix for all value channels, "
                  "got 4: ",
                  shape_text(problem.in.beta)));
}

bool check_direction(const Problem& problem, Fault& fault) {
    switch (problem.direction) {
        case Direction::forward: return require("o", problem.out.o, "forward", fault);
        case Direction::backward:
            return problem.d_out.d_o.given() || problem.d_out.d_final_state.given() ||
                   fault("d_o: expected d_o or d_final_state or both, got neither");
        case Direction::step:
            return require("o", problem.out.o, "step", fault) &&
                   require("pool.states", problem.pool.states, "step", fault) &&
                   refuse("initial_state", problem.in.initial_state, "step takes it from the pool", fault) &&
                   refuse("final_state", problem.out.final_state, "step leaves it in the pool", fault);
        case Direction::summarize:
            return check_map(problem, fault) &&
                   (problem.summary.transition.given() || problem.summary.state.given() ||
                    fault("transition: expected transition or state or both, got neither"));
        case Direction::summarize_backward:
            return check_map(problem, fault) &&
                   (problem.d_out.d_o.given() || problem.d_out.d_final_state.given() ||
                    fault("d_o: expected d_o or d_final_state or both, got neither")) &&
                   require("d_initial_state", problem.grads.d_initial_state, "summarize_backward", fault);
    }
    return fault("direction: expected forward, backward, step, summarize or summarize_backward, got number ",
                 static_cast<int>(problem.direction));
}

struct GradientPair {
    const char *name, *input_name;
    TensorView Gradients::*gradient;
    TensorView Inputs::*input;
};

// d_initial_state is not among them: it exists without an initial state, which is then zero.
constexpr GradientPair gradient_pairs[] = {
    {"d_q", "q", &Gradients::d_q, &Inputs::q},
    {"d_k", "k", &Gradients::d_k, &Inputs::k},
    {"d_v", "v", &Gradients::d_v, &Inputs::v},
    {"d_p", "p", &Gradients::d_p, &Inputs::p},
    {"d_g", "g", &Gradients::d_g, &Inputs::g},
    {"d_gv", "gv", &Gradients::d_gv, &Inputs::gv},
    {"d_g_gamma", "g_gamma", &Gradients::d_g_gamma, &Inputs::g_gamma},
    {"d_beta", "beta", &Gradients::d_beta, &Inputs::beta},
    {"d_A_log", "A_log", &Gradients::d_A_log, &Inputs::A_log},
    {"d_dt_bias", "dt_bias", &Gradients::d_dt_bias, &Inputs::dt_bias},
};

bool check_gradients(const Problem& problem, Fault& fault) {
    for (const GradientPair& pair : gradient_pairs) {
        const TensorView &gradient = problem.grads.*pair.gradient, &input = problem.in.*pair.input;
        if (gradient.given() && !input.given()) {
            return fault(pair.name, ": expected none without ", pair.input_name, ", got shape ", shape_text(gradient));
        }
        if (!expect_same_shape(pair.name, gradient, pair.input_name, input, fault)) return false;
    }
    return true;
}

// [HV]; channel gates also [HV, K] or [HV * K].
bool check_bias(const Problem& problem, const Dim& value_heads, const Dim& key_dim, Fault& fault) {
    const TensorView& bias = problem.in.dt_bias;
    if (!bias.given()) return true;
    if (!problem.channel_gate) return expect_shape("dt_bias", bias, {value_heads}, fault);
    if (bias.rank == 2) return expect_shape("dt_bias", bias, {value_heads, key_dim}, fault);
    const std::int64_t heads = value_heads.size, channels = heads * key_dim.size;
    if (bias.rank == 1 && (bias.shape[0] == heads || bias.shape[0] == channels)) return true;
    return fault("dt_bias: expected shape [", heads, "], [", heads, ", ", key_dim.size, "] or [", channels,
                 "] with a channel gate, got ", shape_text(bias));
}

// Of a piece; those of gradients in a backward only, which takes no others' final ones but to hand states on.
bool check_roundings(const Problem& problem, const Dim& sequences, const Dim& value_heads, Fault& fault) {
    const Piece& piece = problem.whole;
    const Dim numbers = {"R", "numbers", roundings_size(problem.K), "roundings_size(K)"};
    const bool backward = problem.direction == Direction::backward;
    const auto expect = [&](const char* name, const TensorView& view, const TensorView& state, const char* state_name) {
        if (view.given() && !state.given()) return fault(name, ": expected none without ", state_name, ", got shape ", shape_text(view));
        return expect_shape(name, view, {sequences, value_heads, numbers}, fault);
    };
    if (!backward && !(refuse("d_final_roundings", piece.d_final_roundings, "forward does not take it", fault) &&
                       refuse("d_initial_roundings", piece.d_initial_roundings, "forward does not take it", fault))) {
        return false;
    }
    return expect("initial_roundings", piece.initial_roundings, problem.in.initial_state, "initial_state") &&
           expect("final_roundings", piece.final_roundings, problem.out.final_state, "final_state") &&
           expect("d_final_roundings", piece.d_final_roundings, problem.d_out.d_final_state, "d_final_state") &&
           expect("d_initial_roundings", piece.d_initial_roundings, problem.grads.d_initial_state, "d_initial_state");
}

bool check_pool(const Problem& problem, const Dim& sequences, const Dim& value_heads, const Dim& key_dim,
                const Dim& value_dim, Fault& fault) {
    const StatePool& pool = problem.pool;
    if (!pool.states.given()) return true;
    const Dim rows = {"rows", "rows", pool.states.shape[0], "pool.states"};
    if (!expect_shape("pool.states", pool.states, {rows, value_heads, key_dim, value_dim}, fault)) return false;
    if (!pool.indices.given() && rows.size < problem.N) {
        return fault("pool.states: expected at least ", problem.N, " rows, one for each sequence, got ", rows.size);
    }
    if (pool.indices.given() && pool.indices.rank != 2 &&
        !expect_shape("pool.indices", pool.indices, {sequences}, fault)) {
        return false;
    }
    if (pool.indices.rank == 2) {
        const Dim slots = {"S", "slots", pool.indices.shape[1], "pool.indices"};
        if (!expect_shape("pool.indices", pool.indices, {sequences, slots}, fault)) return false;
        if (slots.size < 1) return fault("pool.indices: expected at least 1 index for each sequence, got 0");
        return expect_shape("pool.num_accepted_tokens", pool.num_accepted_tokens, {sequences}, fault);
    }
    return refuse("pool.num_accepted_tokens", pool.num_accepted_tokens, "it needs indices [N, S]", fault);
}

bool check_transition(const Problem& problem, const Dim& sequences, const Dim& value_heads, const Dim& key_dim, Fault& fault) {
    const TensorView& transition = problem.summary.transition;
    if (problem.rule == Rule::delta) return expect_shape("transition", transition, {sequences, value_heads, key_dim, key_dim}, fault);
    if (problem.channel_gate) return expect_shape("transition", transition, {sequences, value_heads, key_dim}, fault);
    return expect_shape("transition", transition, {sequences, value_heads}, fault);
}

bool fix_sizes(Problem& problem, Fault& fault) {
    const TensorView &q = problem.keys(), &v = problem.in.v, &cu_seqlens = problem.in.cu_seqlens;
    const char* const name = problem.keys_name();
    if (q.rank != 4) return fault(name, ": expected 4 dimensions [B, T, H, K], got ", q.rank, ": ", shape_text(q));
    if (v.rank != 4) return fault("v: expected 4 dimensions [B, T, HV, V], got ", v.rank, ": ", shape_text(v));
    problem.B = q.shape[0], problem.T = q.shape[1], problem.H = q.shape[2], problem.K = q.shape[3];
    problem.HV = v.shape[2], problem.V = v.shape[3];
    if (problem.H < 1) return fault(name, ": expected at least 1 head, got 0");
    if (problem.K < 1) return fault(name, ": expected key_dim of at least 1, got 0");
    if (problem.V < 1) return fault("v: expected value_dim of at least 1, got 0");
    if (problem.K > max_head_dim) return fault(name, ": expected key_dim of at most ", max_head_dim, ", got ", problem.K);
    if (problem.V > max_head_dim) return fault("v: expected value_dim of at most ", max_head_dim, ", got ", problem.V);
    if (problem.HV < 1 || problem.HV % problem.H != 0) {
        return fault("v: expected value_heads that are a multiple of heads ", problem.H, " of ", name, ", got ", problem.HV);
    }
    problem.group = problem.HV / problem.H;
    return count_sequences(&problem.N, cu_seqlens, problem.B, fault);
}

}  // namespace

bool check_presence(Problem& problem, Fault& fault) {
    const Inputs& in = problem.in;
    const OperatorInfo* info = find_operator(problem.op);
    if (info == nullptr) return fault("op: expected an operator, got number ", static_cast<int>(problem.op));
    problem.rule = info->rule;
    problem.erase_with_p = info->erase_key == 'p';
    problem.elementwise_beta = in.beta.rank == 4;
    const bool reads_q = problem.direction != Direction::summarize;
    if ((reads_q && !require("q", in.q, info->name, fault)) || !require("k", in.k, info->name, fault) ||
        !require("v", in.v, info->name, fault)) {
        return false;
    }
    if (problem.erase_with_p ? !require("p", in.p, info->name, fault) : !refuse("p", in.p, *info, fault)) return false;
    if (info->rule == Rule::additive && !refuse("beta", in.beta, *info, fault)) return false;
    return check_gates(*info, problem, fault) && check_forms(problem, fault) && check_direction(problem, fault);
}

bool check_shapes(Problem& problem, Fault& fault) {
    if (!fix_sizes(problem, fault)) return false;
    const Inputs& in = problem.in;
    const char *keys = problem.keys_name(), *count = in.cu_seqlens.given() ? "cu_seqlens" : keys;
    const Dim B = {"B", "batch", problem.B, keys}, T = {"T", "tokens", problem.T, keys},
              H = {"H", "heads", problem.H, keys}, K = {"K", "key_dim", problem.K, keys},
              HV = {"HV", "value_heads", problem.HV, "v"}, V = {"V", "value_dim", problem.V, "v"},
              N = {"N", "sequences", problem.N, count};
    const bool channels = problem.channel_gate;
    return expect_shape("k", in.k, {B, T, H, K}, fault) && expect_shape("v", in.v, {B, T, HV, V}, fault) &&
           expect_shape("p", in.p, {B, T, H, K}, fault) &&
           (channels ? expect_shape("g", in.g, {B, T, HV, K}, fault) : expect_shape("g", in.g, {B, T, HV}, fault)) &&
           expect_shape("gv", in.gv, {B, T, HV, V}, fault) && expect_shape("g_gamma", in.g_gamma, {HV}, fault) &&
           (problem.elementwise_beta ? expect_shape("beta", in.beta, {B, T, HV, V}, fault)
                                     : expect_shape("beta", in.beta, {B, T, HV}, fault)) &&
           expect_shape("A_log", in.A_log, {HV}, fault) && check_bias(problem, HV, K, fault) &&
           expect_shape("initial_state", in.initial_state, {N, HV, K, V}, fault) &&
           expect_shape("o", problem.out.o, {B, T, HV, V}, fault) &&
           expect_shape("final_state", problem.out.final_state, {N, HV, K, V}, fault) &&
           check_transition(problem, N, HV, K, fault) &&
           expect_shape("state", problem.summary.state, {N, HV, K, V}, fault) &&
           expect_shape("d_o", problem.d_out.d_o, {B, T, HV, V}, fault) &&
           expect_shape("d_final_state", problem.d_out.d_final_state, {N, HV, K, V}, fault) &&
           check_gradients(problem, fault) &&
           expect_shape("d_initial_state", problem.grads.d_initial_state, {N, HV, K, V}, fault) &&
           check_roundings(problem, N, HV, fault) && check_pool(problem, N, HV, K, V, fault);
}

}  // namespace headrace
