// The oracle of summaries: what a piece of tokens does to a state and its gradient, in double, token by token.
#pragma once

#include "reference/oracle.hpp"

namespace headrace::reference {

// S_out = transition S_in + state for every sequence and value head (docs/math.md 9). `state` takes the initial state
// up.
struct Summary {
    std::vector<double> transition;  // [N,HV,K,K], for the additive rule too
    std::vector<double> state;       // [N,HV,K,V]
    // How large the terms are that each element sums; state_terms is empty where the tensor rests on many sums.
    std::vector<double> transition_terms, state_terms;
};
Summary summarize(const Spec& spec, const Arrays& arrays);

// D_in = transition^T d_final_state + what d_o adds (absent: zero), [N,HV,K,V].
struct StateGradient {
    std::vector<double> d_initial_state, terms;
};
StateGradient summarize_backward(const Spec& spec, const Arrays& arrays);

// The summary of `first` and then `second`; terms are left out.
Summary compose(const Spec& spec, const Summary& second, const Summary& first);

// transition state + summary.state, or transition^T state + summary.state; an empty summary.state is zero.
std::vector<double> apply(const Spec& spec, const Summary& summary, const std::vector<double>& state, bool transposed);

}  // namespace headrace::reference
