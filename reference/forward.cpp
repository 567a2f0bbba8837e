// The oracle's forward: each sequence and value head, token after token.
#include <algorithm>

#include "reference/oracle.hpp"
#include "reference/recurrence.hpp"
#include "reference/state_terms.hpp"

namespace headrace::reference {

Outputs forward(const Spec& spec, const Arrays& arrays) {
    const auto K = static_cast<std::size_t>(spec.K), V = static_cast<std::size_t>(spec.V);
    const auto HV = static_cast<std::size_t>(spec.HV), tokens = static_cast<std::size_t>(spec.B * spec.T);
    const auto N = static_cast<std::size_t>(spec.sequences());
    const std::size_t state_size = K * V;
    Outputs out;
    out.o.assign(tokens * HV * V, 0.0);
    out.final_state.assign(N * HV * state_size, 0.0);
    if (!arrays.initial_state.empty()) out.final_state = arrays.initial_state;
    if (spec.keep_states) out.states.assign(tokens * HV * state_size, 0.0);
    const bool with_terms = rests_on_few_sums(spec);
    if (with_terms) {
        out.o_terms.assign(out.o.size(), 0.0);
        out.final_state_terms.assign(out.final_state.size(), 0.0);
        out.states_terms.assign(out.states.size(), 0.0);
    }

    const Prepared prepared = prepare(spec, arrays);
    for (std::size_t head = 0; head < HV; ++head) {
        Recurrence recurrence(spec, arrays, prepared, static_cast<std::int64_t>(head));
        WriteTerms terms(spec, K, V);
        const auto store_state = [&](double* to) {
            for (std::size_t i = 0; i < state_size; ++i) to[i] = terms.size_of_state(i);
        };
        for (std::size_t n = 0; n < N; ++n) {
            const std::int64_t begin = spec.first_token(static_cast<std::int64_t>(n));
            const std::int64_t end = spec.first_token(static_cast<std::int64_t>(n) + 1);
            double* state = out.final_state.data() + (n * HV + head) * state_size;
            if (with_terms) terms.start_sequence(state);
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t token = spec.reverse ? end - 1 - (i - begin) : i;
                const std::size_t at = static_cast<std::size_t>(token) * HV + head;
                recurrence.load(token);
                recurrence.advance(state, state);
                recurrence.read_out(&out.o[at * V], state);
                if (spec.keep_states) std::copy(state, state + state_size, &out.states[at * state_size]);
                if (!with_terms) continue;
                terms.token(recurrence);
                for (std::size_t j = 0; j < V; ++j) out.o_terms[at * V + j] = terms.size_of_output(recurrence, j);
                if (spec.keep_states) store_state(&out.states_terms[at * state_size]);
            }
            if (with_terms) store_state(&out.final_state_terms[(n * HV + head) * state_size]);
        }
    }
    return out;
}

}  // namespace headrace::reference
