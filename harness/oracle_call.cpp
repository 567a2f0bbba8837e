// A Call handed to the oracle: views into doubles, and the expected outputs, gradients and pool rows.
#include "harness/oracle_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "harness/convert.hpp"

namespace headrace::harness {
namespace {

// Calls visit(pointer to first element, stride in elements, count) for each innermost row, in row-major order.
template <typename Visit>
void for_each_row(const TensorView& view, Visit visit) {
    if (!view.given()) return;
    constexpr int rank = TensorView::max_rank;
    std::int64_t shape[rank] = {1, 1, 1, 1}, strides[rank] = {};
    for (int i = 0; i < view.rank; ++i) {
        shape[rank - view.rank + i] = view.shape[i];
        strides[rank - view.rank + i] = view.strides[i];
    }
    const auto* base = static_cast<const unsigned char*>(view.data);
    const auto size = static_cast<std::int64_t>(size_of(view.dtype));
    for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
        for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
            for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
                visit(base + size * (i0 * strides[0] + i1 * strides[1] + i2 * strides[2]), strides[3], shape[3]);
            }
        }
    }
}

bool is_delta(Operator op) {
    return op == Operator::delta_rule || op == Operator::gated_delta_rule || op == Operator::comba ||
           op == Operator::kda;
}

// The rows of the pool that one sequence of a step call uses.
struct PoolUse {
    std::int64_t start = -1;            // -1: the sequence is padding
    std::vector<std::int64_t> written;  // one row (the last state), or one for each token in memory order
    bool every_token = false;
};

std::vector<PoolUse> pool_uses(const Call& call, std::int64_t sequences) {
    const std::vector<std::int64_t> indices = read_integers(call.pool.indices);
    const std::vector<std::int64_t> accepted = read_integers(call.pool.num_accepted_tokens);
    std::vector<PoolUse> uses(static_cast<std::size_t>(sequences));
    for (std::size_t n = 0; n < uses.size(); ++n) {
        PoolUse& use = uses[n];
        if (call.pool.indices.rank == 2) {
            const auto width = call.pool.indices.shape[1];
            const auto first = indices.begin() + static_cast<std::int64_t>(n) * width;
            use.every_token = true;
            use.written.assign(first, first + width);
            use.start = use.written[accepted.empty() ? 0 : static_cast<std::size_t>(accepted[n] - 1)];
        } else {
            use.start = call.pool.indices.given() ? indices[n] : static_cast<std::int64_t>(n);
            use.written = {use.start};
        }
    }
    return uses;
}

std::size_t state_size(const reference::Spec& spec) { return static_cast<std::size_t>(spec.HV * spec.K * spec.V); }

std::vector<double> initial_states_from_pool(const Call& call, const reference::Spec& spec) {
    const std::size_t size = state_size(spec);
    const std::vector<double> pool = read_values(call.pool.states);
    std::vector<double> states(static_cast<std::size_t>(spec.sequences()) * size, 0.0);
    const std::vector<PoolUse> uses = pool_uses(call, spec.sequences());
    for (std::size_t n = 0; n < uses.size(); ++n) {
        if (uses[n].start < 0) continue;
        std::copy_n(pool.begin() + uses[n].start * static_cast<std::int64_t>(size), size,
                    states.begin() + static_cast<std::int64_t>(n * size));
    }
    return states;
}

struct Answer {
    reference::Outputs outputs;      // forward, step
    reference::Gradients gradients;  // backward
    reference::Summary summary;      // summarize
    reference::StateGradient d_initial_state;  // summarize_backward
};

// A conformance test asks for the same problem once per implementation: the last small one is kept.
Answer ask_oracle(Direction direction, const reference::Spec& spec, const reference::Arrays& arrays) {
    struct Remembered {
        bool valid = false;
        Direction direction = Direction::forward;
        reference::Spec spec;
        reference::Arrays arrays;
        Answer answer;
    };
    constexpr std::size_t largest = 1 << 20;  // elements of v
    thread_local Remembered last;
    if (last.valid && last.direction == direction && last.spec == spec && last.arrays == arrays) return last.answer;
    last = {};
    Answer answer;
    switch (direction) {
        case Direction::forward:
        case Direction::step: answer.outputs = reference::forward(spec, arrays); break;
        case Direction::backward: answer.gradients = reference::backward(spec, arrays); break;
        case Direction::summarize: answer.summary = reference::summarize(spec, arrays); break;
        case Direction::summarize_backward: answer.d_initial_state = reference::summarize_backward(spec, arrays); break;
    }
    if (arrays.v.size() <= largest) last = {true, direction, spec, arrays, answer};
    return answer;
}

void expect_pool_rows(Expected& expected, const Call& call, const reference::Spec& spec,
                      const reference::Outputs& outputs) {
    const std::size_t size = state_size(spec), token_size = static_cast<std::size_t>(spec.HV * spec.V);
    const std::vector<PoolUse> uses = pool_uses(call, spec.sequences());
    const auto row_of = [&](const std::vector<double>& states, std::int64_t index) {
        const auto first = states.begin() + index * static_cast<std::int64_t>(size);
        return std::vector<double>(first, first + static_cast<std::int64_t>(size));
    };
    const auto expect_row = [&](std::int64_t row, const std::vector<double>& states, const std::vector<double>& terms,
                                std::int64_t index) {
        expected.pool_rows[row] = row_of(states, index);
        if (!terms.empty()) expected.pool_row_terms[row] = row_of(terms, index);
    };
    for (std::size_t n = 0; n < uses.size(); ++n) {
        const auto sequence = static_cast<std::int64_t>(n);
        const std::int64_t begin = spec.first_token(sequence), end = spec.first_token(sequence + 1);
        if (begin == end) continue;
        if (uses[n].start < 0) {
            for (std::vector<double>* o : {&expected.outputs["o"], &expected.terms["o"]}) {
                if (o->empty()) continue;
                std::fill(o->begin() + begin * static_cast<std::int64_t>(token_size),
                          o->begin() + end * static_cast<std::int64_t>(token_size), 0.0);
            }
        } else if (!uses[n].every_token) {
            expect_row(uses[n].start, outputs.final_state, outputs.final_state_terms, sequence);
        } else {
            for (std::int64_t token = begin; token < end; ++token) {
                const std::int64_t row = uses[n].written[static_cast<std::size_t>(token - begin)];
                if (row >= 0) expect_row(row, outputs.states, outputs.states_terms, token);
            }
        }
    }
}

// Transitions [N,HV,K,K] as the library gives them: of the additive rule the diagonal, or the one number on it.
std::vector<double> in_form(const std::vector<double>& matrices, const reference::Spec& spec) {
    if (spec.delta) return matrices;
    const auto K = static_cast<std::size_t>(spec.K), step = spec.channel_gate ? K + 1 : K * K;
    std::vector<double> diagonals;
    for (std::size_t matrix = 0; matrix < matrices.size(); matrix += K * K) {
        for (std::size_t at = 0; at < K * K; at += step) diagonals.push_back(matrices[matrix + at]);
    }
    return diagonals;
}

void keep_given(std::vector<NamedView>& views) {
    views.erase(std::remove_if(views.begin(), views.end(), [](const NamedView& v) { return !v.view.given(); }),
                views.end());
}

}  // namespace

std::vector<double> read_values(const TensorView& view) {
    std::vector<double> values(static_cast<std::size_t>(view.numel()));
    double* next = values.data();
    for_each_row(view, [&](const unsigned char* row, std::int64_t stride, std::int64_t count) {
        load_elements(row, view.dtype, stride, count, next);
        next += count;
    });
    return values;
}

std::vector<std::int64_t> read_integers(const TensorView& view) {
    std::vector<std::int64_t> values;
    for (double value : read_values(view)) values.push_back(static_cast<std::int64_t>(value));
    return values;
}

std::vector<unsigned char> read_bytes(const TensorView& view) {
    const std::size_t size = size_of(view.dtype);
    std::vector<unsigned char> bytes(static_cast<std::size_t>(view.numel()) * size);
    unsigned char* next = bytes.data();
    for_each_row(view, [&](const unsigned char* row, std::int64_t stride, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i, next += size) {
            std::memcpy(next, row + i * stride * static_cast<std::int64_t>(size), size);
        }
    });
    return bytes;
}

std::vector<NamedView> input_views(const Call& call) {
    const Inputs& in = call.in;
    std::vector<NamedView> views = {
        {"q", in.q},
        {"k", in.k},
        {"v", in.v},
        {"p", in.p},
        {"g", in.g},
        {"gv", in.gv},
        {"g_gamma", in.g_gamma},
        {"beta", in.beta},
        {"A_log", in.A_log},
        {"dt_bias", in.dt_bias},
        {"initial_state", in.initial_state},
        {"cu_seqlens", in.cu_seqlens},
        {"d_o", call.d_out.d_o},
        {"d_final_state", call.d_out.d_final_state},
        {"indices", call.pool.indices},
        {"num_accepted_tokens", call.pool.num_accepted_tokens},
    };
    keep_given(views);
    return views;
}

std::vector<NamedView> output_views(const Call& call) {
    const Gradients& grads = call.grads;
    std::vector<NamedView> views;
    if (call.direction == Direction::summarize) {
        views = {{"transition", call.summary.transition}, {"state", call.summary.state}};
    } else if (call.direction == Direction::backward || call.direction == Direction::summarize_backward) {
        views = {{"d_q", grads.d_q},
                 {"d_k", grads.d_k},
                 {"d_v", grads.d_v},
                 {"d_p", grads.d_p},
                 {"d_g", grads.d_g},
                 {"d_gv", grads.d_gv},
                 {"d_g_gamma", grads.d_g_gamma},
                 {"d_beta", grads.d_beta},
                 {"d_A_log", grads.d_A_log},
                 {"d_dt_bias", grads.d_dt_bias},
                 {"d_initial_state", grads.d_initial_state}};
    } else {
        views = {{"o", call.out.o}, {"final_state", call.out.final_state}};
    }
    keep_given(views);
    return views;
}

reference::Spec to_spec(const Call& call) {
    const Inputs& in = call.in;
    reference::Spec spec;
    spec.B = in.k.shape[0], spec.T = in.k.shape[1], spec.H = in.k.shape[2], spec.K = in.k.shape[3];
    spec.HV = in.v.shape[2], spec.V = in.v.shape[3];
    spec.cu_seqlens = read_integers(in.cu_seqlens);
    spec.delta = is_delta(call.op);
    spec.erase_with_p = call.op == Operator::comba;
    spec.step_gate = in.g.rank == 3;
    spec.channel_gate = in.g.rank == 4;
    spec.head_gate = in.g_gamma.given();
    spec.value_gate = in.gv.given();
    spec.has_beta = spec.delta && in.beta.given();
    spec.elementwise_beta = spec.has_beta && in.beta.rank == 4;
    spec.scale = call.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(spec.K)));
    spec.reverse = call.options.reverse;
    spec.l2norm = call.options.qk_l2norm;
    if (in.g.given() && call.options.gate_form == GateForm::softplus) spec.gate_form = reference::GateForm::softplus;
    if (in.g.given() && call.options.gate_form == GateForm::bounded) spec.gate_form = reference::GateForm::bounded;
    spec.has_dt_bias = in.dt_bias.given();
    spec.dt_bias_per_channel = spec.channel_gate && in.dt_bias.numel() == spec.HV * spec.K;
    spec.lower_bound = call.options.lower_bound;
    if (call.options.beta_form == BetaForm::sigmoid) spec.beta_form = reference::BetaForm::sigmoid;
    if (call.options.beta_form == BetaForm::two_sigmoid) spec.beta_form = reference::BetaForm::two_sigmoid;
    spec.keep_states = call.direction == Direction::step && call.pool.indices.rank == 2;
    return spec;
}

reference::Arrays to_arrays(const Call& call) {
    const Inputs& in = call.in;
    reference::Arrays arrays;
    arrays.q = read_values(in.q);
    arrays.k = read_values(in.k);
    if (call.direction == Direction::summarize) arrays.q.assign(arrays.k.size(), 0.0);  // of which it does not depend
    arrays.v = read_values(in.v);
    arrays.p = read_values(in.p);
    arrays.g = read_values(in.g);
    arrays.gv = read_values(in.gv);
    arrays.g_gamma = read_values(in.g_gamma);
    arrays.beta = read_values(in.beta);
    arrays.A_log = read_values(in.A_log);
    arrays.dt_bias = read_values(in.dt_bias);
    arrays.initial_state = call.direction == Direction::step ? initial_states_from_pool(call, to_spec(call))
                                                             : read_values(in.initial_state);
    if (call.direction == Direction::backward || call.direction == Direction::summarize_backward) {
        arrays.d_o = read_values(call.d_out.d_o);
        arrays.d_final_state = read_values(call.d_out.d_final_state);
    }
    return arrays;
}

Expected expect(const Call& call) {
    const reference::Spec spec = to_spec(call);
    const Answer answer = ask_oracle(call.direction, spec, to_arrays(call));
    Expected expected;
    if (call.direction == Direction::backward) {
        const reference::Gradients& grads = answer.gradients;
        expected.outputs = {{"d_q", grads.d_q},
                            {"d_k", grads.d_k},
                            {"d_v", grads.d_v},
                            {"d_p", grads.d_p},
                            {"d_g", grads.d_g},
                            {"d_gv", grads.d_gv},
                            {"d_g_gamma", grads.d_g_gamma},
                            {"d_beta", grads.d_beta},
                            {"d_A_log", grads.d_A_log},
                            {"d_dt_bias", grads.d_dt_bias},
                            {"d_initial_state", grads.d_initial_state}};
        expected.terms = {{"d_v", grads.d_v_terms},
                          {"d_p", grads.d_p_terms},
                          {"d_g", grads.d_g_terms},
                          {"d_gv", grads.d_gv_terms},
                          {"d_beta", grads.d_beta_terms},
                          {"d_g_gamma", grads.d_g_gamma_terms},
                          {"d_A_log", grads.d_A_log_terms},
                          {"d_dt_bias", grads.d_dt_bias_terms},
                          {"d_initial_state", grads.d_initial_state_terms}};
        expected.underflow = {{"d_g", grads.d_g_underflow},
                              {"d_A_log", grads.d_A_log_underflow},
                              {"d_dt_bias", grads.d_dt_bias_underflow}};
        return expected;
    }
    if (call.direction == Direction::summarize) {
        const reference::Summary& summary = answer.summary;
        const auto form = [&](const std::vector<double>& matrices) { return in_form(matrices, spec); };
        expected.outputs = {{"transition", form(summary.transition)}, {"state", summary.state}};
        expected.terms = {{"transition", form(summary.transition_terms)}, {"state", summary.state_terms}};
        return expected;
    }
    if (call.direction == Direction::summarize_backward) {
        expected.outputs = {{"d_initial_state", answer.d_initial_state.d_initial_state}};
        expected.terms = {{"d_initial_state", answer.d_initial_state.terms}};
        return expected;
    }
    expected.outputs = {{"o", answer.outputs.o}, {"final_state", answer.outputs.final_state}};
    expected.terms = {{"o", answer.outputs.o_terms}, {"final_state", answer.outputs.final_state_terms}};
    if (call.direction == Direction::step) expect_pool_rows(expected, call, spec, answer.outputs);
    return expected;
}

}  // namespace headrace::harness
