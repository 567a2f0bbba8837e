// Problem: one validated call; nothing below this layer checks user input again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace {

enum class Rule { additive, delta };

// Tokens [begin, end) of batch row `row` form one sequence with one state.
struct Sequence {
    std::int64_t row, begin, end;
};

struct Problem {
    Operator op{};
    Direction direction{};
    Rule rule{};
    bool erase_with_p = false;      // comba: the error term uses p and the undecayed state
    bool step_gate = false;         // g is [B,T,HV]
    bool channel_gate = false;      // g is [B,T,HV,K]
    bool head_gate = false;         // g_gamma
    bool value_gate = false;        // gv
    bool elementwise_beta = false;  // beta is [B,T,HV,V]

    std::int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0, N = 0;
    std::int64_t group = 0;  // HV / H
    DType dtype{};           // of q, k, v, p, o
    Device device{};         // of all tensors; cu_seqlens may lie on the host in any case
    bool wide = false;       // dtype is f64: everything is computed in double
    double scale = 0;        // resolved
    int chunk = 0;           // hint: 0, 16, 32, 64, 128, 256
    DType state_dtype{};     // of states saved for the backward
    int threads = 0;         // >= 1, resolved
    std::vector<Sequence> sequences;  // empty where cu_seqlens lies on another device: only N and T are known
    Piece whole;             // what choices follow: sizes of the undivided problem, resolved; the views that are given
    bool is_piece = false;

    Inputs in;
    Outputs out;
    OutputGradients d_out;
    Gradients grads;
    StatePool pool;
    Summary summary;
    Options options;

    // Which tensor gives B, T, H, K and the dtype: q, or k where q is not read.
    const TensorView& keys() const { return direction == Direction::summarize ? in.k : in.q; }
    const char* keys_name() const { return direction == Direction::summarize ? "k" : "q"; }
    // A summary runs as a forward that leaves no outputs, or as the adjoint of a backward.
    bool runs_forward() const { return direction == Direction::forward || direction == Direction::summarize; }
    bool runs_backward() const { return direction == Direction::backward || direction == Direction::summarize_backward; }
};

// Tokens of the longest sequence of this call, which may be a piece of a longer one; where they lie on another device
// all that is known is that there are no more.
inline std::int64_t own_longest(const Problem& problem) {
    if (problem.sequences.size() != static_cast<std::size_t>(problem.N)) return problem.T;
    std::int64_t longest = 0;
    for (const Sequence& s : problem.sequences) longest = std::max(longest, s.end - s.begin);
    return longest;
}
// A backward whose states alone are wanted: backward_states.
inline bool wants_states(const Problem& problem) {
    return problem.direction == Direction::backward && problem.out.final_state.given();
}
// Of g, or of a parameter that it is made from.
inline bool wants_gate_gradient(const Problem& problem) {
    const Gradients& g = problem.grads;
    return g.d_g.given() || g.d_g_gamma.given() || g.d_A_log.given() || g.d_dt_bias.given();
}
// A gate's gradient is an inner product of states; that of few heads may cancel far below its terms, so that states it
// is made of are kept in more than 16 bits (decision 3).
inline bool has_few_gate_sums(const Problem& problem) {
    return wants_gate_gradient(problem) && problem.whole.sequences * problem.whole.heads * problem.group < 8;
}
// The same of so few tokens that gate gradients do not average the roundings of products in 16 bits, either
// (docs/numerics.md, "Gates of few heads").
inline bool gates_rest_on_few_tokens(const Problem& problem) {
    return has_few_gate_sums(problem) && problem.whole.tokens * problem.whole.heads * problem.group < 256;
}

// Whether make_problem also reads tensor contents (gates, beta, pool indices), which explain and plan must not.
enum class Contents { check, ignore };

// The error of a problem whose implementation met a bad value in g: names the first one.
Status gate_error(const Problem& problem);

// The only validation: shapes, dtypes, strides, devices, aliasing, offsets, options and, with Contents::check, values
// of gates and beta and pool rows. *problem is a new one.
Status make_problem(const Call& call, Contents contents, Problem* problem);

}  // namespace headrace
