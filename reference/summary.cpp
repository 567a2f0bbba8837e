// The oracle of summaries: a transition is what the tokens make of the identity, the adjoint lines of docs/math.md 3.
#include "reference/summary.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reference/recurrence.hpp"
#include "reference/state_terms.hpp"

namespace headrace::reference {
namespace {

// The same tokens, which write nothing, on K value channels.
Spec spec_of_transition(Spec spec) {
    spec.V = spec.K;
    return spec;
}
Arrays arrays_of_transition(const Spec& spec, Arrays arrays) {
    const std::int64_t K = spec.K, states = spec.sequences() * spec.HV;
    arrays.v.assign(static_cast<std::size_t>(spec.B * spec.T * spec.HV * K), 0.0);
    arrays.initial_state.assign(static_cast<std::size_t>(states * K * K), 0.0);
    for (std::int64_t i = 0; i < states * K; ++i) arrays.initial_state[static_cast<std::size_t>(i * K + i % K)] = 1.0;
    return arrays;
}

// Calls visit(recurrence, token) for the tokens of sequence n as they run, or backwards.
enum class Order { running, backwards };
template <typename Visit>
void for_tokens(const Spec& spec, Recurrence& recurrence, std::int64_t n, Order order, const Visit& visit) {
    const std::int64_t begin = spec.first_token(n), end = spec.first_token(n + 1);
    const bool descending = spec.reverse != (order == Order::backwards);
    for (std::int64_t i = 0; i < end - begin; ++i) {
        const std::int64_t token = descending ? end - 1 - i : begin + i;
        recurrence.load(token);
        visit(token);
    }
}

// Of one value head and sequence. A transition is the identity less what each token erases, beta k e^T M, all of it as
// the maps of the tokens behind leave it: these are its terms, each of which an implementation has within its relative
// error, independent of the others. Erasures are themselves sums over the channels. Of a prepared gate each log decay g
// has such an error, all in one direction: what becomes of M with g (1 + e) is another term, the derivative by e.
class TransitionTerms {
  public:
    explicit TransitionTerms(const Spec& spec)
        : K_(static_cast<std::size_t>(spec.K)), spec_(spec), terms_(K_ * K_), drift_(K_ * K_), log_decay_(K_) {}

    void start(const double* identity) {
        for (std::size_t i = 0; i < terms_.size(); ++i) terms_[i] = identity[i] * signs_.next();
    }
    // `before`: the transition up to the current token, which recurrence.advance() has gone past.
    void token(const Recurrence& now, const double* before) {
        // Zero where nothing can be off: of a log decay as it was given, and where nothing is left.
        const bool prepared = spec_.gate_form != GateForm::log_decay;
        for (std::size_t c = 0; c < K_; ++c) log_decay_[c] = prepared && now.decay[c] > 0.0 ? std::log(now.decay[c]) : 0.0;
        for (std::size_t j = 0; j < K_; ++j) {
            double read = 0.0, read_drift = 0.0, squares = 0.0;
            for (std::size_t c = 0; c < K_; ++c) {
                const std::size_t at = c * K_ + j;
                const double left = now.decay[c] * terms_[at], asked = spec_.erase_with_p ? before[at] : now.decayed[at];
                const double left_drift = now.decay[c] * drift_[at] + log_decay_[c] * now.decayed[at];
                read += now.erase_key[c] * (spec_.erase_with_p ? terms_[at] : left);
                read_drift += now.erase_key[c] * (spec_.erase_with_p ? drift_[at] : left_drift);
                squares += now.erase_key[c] * asked * now.erase_key[c] * asked;
                terms_[at] = left, drift_[at] = left_drift;
            }
            if (!spec_.delta) continue;
            read += signs_.next() * std::sqrt(squares);
            for (std::size_t c = 0; c < K_; ++c) {
                const double erased = now.k[c] * now.beta[j];
                terms_[c * K_ + j] -= erased * read, drift_[c * K_ + j] -= erased * read_drift;
            }
        }
    }
    double size(std::size_t element) const { return std::hypot(terms_[element], drift_[element]); }

  private:
    std::size_t K_;
    const Spec& spec_;
    std::vector<double> terms_, drift_, log_decay_;
    RandomSigns signs_;
};

// Whatever its terms, a transition is judged by no more than the identity that it began with: what reaches a state
// behind the piece through it is no larger.
void limit_to_identity(const Spec& spec, std::vector<double>& terms) {
    double squares = 0.0;
    for (double term : terms) squares += term * term;
    const double most = static_cast<double>(spec.sequences() * spec.HV * spec.K);
    if (!(squares > most)) return;
    for (double& term : terms) term *= std::sqrt(most / squares);
}

}  // namespace

Summary summarize(const Spec& spec, const Arrays& arrays) {
    Outputs outputs = forward(spec, arrays);
    Summary summary{{}, std::move(outputs.final_state), {}, std::move(outputs.final_state_terms)};
    const Spec square = spec_of_transition(spec);
    const Arrays identity = arrays_of_transition(spec, arrays);
    const Prepared prepared = prepare(square, identity);
    const auto K = static_cast<std::size_t>(spec.K), HV = static_cast<std::size_t>(spec.HV);
    summary.transition = identity.initial_state;
    summary.transition_terms.resize(summary.transition.size());
    std::vector<double> before(K * K);
    for (std::size_t head = 0; head < HV; ++head) {
        Recurrence recurrence(square, identity, prepared, static_cast<std::int64_t>(head));
        for (std::int64_t n = 0; n < spec.sequences(); ++n) {
            const std::size_t at = (static_cast<std::size_t>(n) * HV + head) * K * K;
            double* transition = &summary.transition[at];
            TransitionTerms terms(square);
            terms.start(transition);
            for_tokens(square, recurrence, n, Order::running, [&](std::int64_t) {
                std::copy_n(transition, K * K, before.data());
                recurrence.advance(transition, before.data());
                terms.token(recurrence, before.data());
            });
            for (std::size_t i = 0; i < K * K; ++i) summary.transition_terms[at + i] = terms.size(i);
        }
    }
    limit_to_identity(spec, summary.transition_terms);
    return summary;
}

StateGradient summarize_backward(const Spec& spec, const Arrays& arrays) {
    const auto K = static_cast<std::size_t>(spec.K), V = static_cast<std::size_t>(spec.V), HV = static_cast<std::size_t>(spec.HV);
    const auto N = static_cast<std::size_t>(spec.sequences());
    StateGradient gradient;
    gradient.d_initial_state.assign(N * HV * K * V, 0.0);
    gradient.terms = gradient.d_initial_state;
    if (!arrays.d_final_state.empty()) gradient.d_initial_state = arrays.d_final_state;
    const Prepared prepared = prepare(spec, arrays);
    std::vector<double> z(V);
    for (std::size_t head = 0; head < HV; ++head) {
        Recurrence now(spec, arrays, prepared, static_cast<std::int64_t>(head));
        StateTerms terms(spec, K, V);
        for (std::size_t n = 0; n < N; ++n) {
            const std::size_t at = (n * HV + head) * K * V;
            double* D = &gradient.d_initial_state[at];
            terms.start_sequence();
            for_tokens(spec, now, static_cast<std::int64_t>(n), Order::backwards, [&](std::int64_t token) {
                const double* d_o = arrays.d_o.empty() ? nullptr : &arrays.d_o[(static_cast<std::size_t>(token) * HV + head) * V];
                std::fill(z.begin(), z.end(), 0.0);
                for (std::size_t c = 0; c < K; ++c) {
                    for (std::size_t j = 0; j < V; ++j) {
                        if (d_o) D[c * V + j] += spec.scale * now.q[c] * d_o[j];
                        if (spec.delta) z[j] += now.beta[j] * now.k[c] * D[c * V + j];
                    }
                }
                terms.start_token(now, D);
                for (std::size_t c = 0; c < K; ++c) {
                    for (std::size_t j = 0; j < V; ++j) {
                        const double erased = now.erase_key[c] * z[j], decay = now.decay[c] * now.value_decay[j];
                        D[c * V + j] = spec.erase_with_p ? decay * D[c * V + j] - erased : decay * (D[c * V + j] - erased);
                    }
                }
                terms.end_token(now, D);
            });
            for (std::size_t i = 0; i < K * V; ++i) gradient.terms[at + i] = terms.size(i);
        }
    }
    return gradient;
}

std::vector<double> apply(const Spec& spec, const Summary& summary, const std::vector<double>& state, bool transposed) {
    const auto K = static_cast<std::size_t>(spec.K);
    const std::size_t states = static_cast<std::size_t>(spec.sequences() * spec.HV), V = states == 0 ? 0 : state.size() / states / K;
    std::vector<double> result = summary.state;
    result.resize(state.size());
    for (std::size_t s = 0; s < states; ++s) {
        for (std::size_t c = 0; c < K; ++c) {
            for (std::size_t i = 0; i < K; ++i) {
                const double factor = summary.transition[s * K * K + (transposed ? i * K + c : c * K + i)];
                for (std::size_t j = 0; j < V; ++j) result[(s * K + c) * V + j] += factor * state[(s * K + i) * V + j];
            }
        }
    }
    return result;
}

Summary compose(const Spec& spec, const Summary& second, const Summary& first) {
    return {apply(spec, {second.transition, {}, {}, {}}, first.transition, false), apply(spec, second, first.state, false), {}, {}};
}

}  // namespace headrace::reference
