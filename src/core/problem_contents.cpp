// What make_problem asks of tensor contents: gates that are log decays, betas that are numbers, rows that exist.
#include <algorithm>
#include <vector>

#include "core/scan.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

bool check_values(const char* name, const TensorView& view, Refused refused, int threads, Fault& fault) {
    const std::int64_t number = find_refused(view, refused, threads);
    if (number < 0) return true;
    const char* expected = refused == Refused::nan               ? "no NaN"
                           : refused == Refused::nan_or_positive ? "values <= 0"
                                                                 : "finite values";
    return fault(name, ": expected ", expected, ", got ", element_at(view, offset_of(view, number)), " at ",
                 position_text(view, number));
}

Refused refused_decay(const Problem& problem) {
    return problem.options.allow_positive_gates ? Refused::nan : Refused::nan_or_positive;
}

// g is as large as k: only step, which changes states in place, looks at it before it runs.
bool check_gate_values(const Problem& problem, Fault& fault) {
    const Inputs& in = problem.in;
    const Refused decay = refused_decay(problem);
    return (problem.direction != Direction::step || check_gate(problem, fault)) &&
           check_values("gv", in.gv, decay, problem.threads, fault) &&
           check_values("g_gamma", in.g_gamma, decay, problem.threads, fault) &&
           check_values("A_log", in.A_log, Refused::nan, problem.threads, fault) &&
           check_values("dt_bias", in.dt_bias, Refused::nan, problem.threads, fault);
}

// A logit may be infinite: beta is then 0 or at its largest.
bool check_beta_values(const Problem& problem, Fault& fault) {
    const Refused refused = problem.options.beta_form == BetaForm::value ? Refused::nan_or_infinite : Refused::nan;
    return check_values("beta", problem.in.beta, refused, problem.threads, fault);
}

// Indices of a pool in host integers: [N] or [N, S].
struct Rows {
    const TensorView& view;
    std::int64_t slots() const { return view.rank == 2 ? view.shape[1] : 1; }
    std::int64_t at(std::int64_t n, std::int64_t slot) const {
        return integer_at(view, n * view.strides[0] + (view.rank == 2 ? slot * view.strides[1] : 0));
    }
    std::string position(std::int64_t n, std::int64_t slot) const { return position_text(view, n * slots() + slot); }
};

// A row, the sequence that writes it and in which slot.
struct Write {
    std::int64_t row, n, slot;
    bool operator<(const Write& other) const {
        return row != other.row ? row < other.row : n != other.n ? n < other.n : slot < other.slot;
    }
};

bool check_range(const Rows& rows, std::int64_t count, std::int64_t n, Fault& fault) {
    for (std::int64_t slot = 0; slot < rows.slots(); ++slot) {
        const std::int64_t row = rows.at(n, slot);
        if (row >= -1 && row < count) continue;
        return fault("pool.indices: expected -1 or a row below ", count, " of pool.states, got ", row, " at ",
                     rows.position(n, slot));
    }
    return true;
}

// Appends the rows that sequence n writes; padding writes none.
bool collect_writes(const Problem& problem, const Rows& rows, std::int64_t n, std::vector<Write>& writes,
                    Fault& fault) {
    const Sequence& sequence = problem.sequences[static_cast<std::size_t>(n)];
    const std::int64_t tokens = sequence.end - sequence.begin;
    if (rows.view.rank == 2 && tokens > rows.slots()) {
        return fault("pool.indices: expected an index for each of the ", tokens, " tokens of sequence ", n, ", got ",
                     rows.slots());
    }
    const std::int64_t written = rows.view.rank == 2 ? tokens : 1;
    const bool padding = rows.at(n, 0) < 0;
    for (std::int64_t slot = 0; slot < written; ++slot) {
        const std::int64_t row = rows.at(n, slot);
        if ((row < 0) != padding) {
            return fault("pool.indices: expected ", padding ? "-1 as at " : "a row as at ", rows.position(n, 0),
                         ", got ", row, " at ", rows.position(n, slot));
        }
        if (!padding) writes.push_back({row, n, slot});
    }
    return true;
}

bool check_distinct(const Rows& rows, std::vector<Write>& writes, Fault& fault) {
    std::sort(writes.begin(), writes.end());
    const auto same =
        std::adjacent_find(writes.begin(), writes.end(), [](const Write& a, const Write& b) { return a.row == b.row; });
    if (same == writes.end()) return true;
    return fault("pool.indices: expected different rows, got ", same->row, " at ", rows.position(same->n, same->slot),
                 " and ", rows.position(same[1].n, same[1].slot));
}

// The row that a sequence starts from exists, and no other sequence of the call overwrites it.
bool check_start(const Problem& problem, const Rows& rows, const std::vector<Write>& writes, std::int64_t n,
                 Fault& fault) {
    const TensorView& accepted = problem.pool.num_accepted_tokens;
    if (rows.at(n, 0) < 0) return true;
    std::int64_t slot = 0;
    if (accepted.given()) {
        const std::int64_t tokens = integer_at(accepted, n * accepted.strides[0]);
        if (tokens < 1 || tokens > rows.slots()) {
            return fault("pool.num_accepted_tokens: expected 1 to ", rows.slots(), ", got ", tokens, " at [", n, "]");
        }
        slot = tokens - 1;
    }
    const std::int64_t row = rows.at(n, slot);
    if (row < 0) return fault("pool.indices: expected a row to start from, got ", row, " at ", rows.position(n, slot));
    const auto write = std::lower_bound(writes.begin(), writes.end(), Write{row, 0, 0});
    if (write == writes.end() || write->row != row || write->n == n) return true;
    return fault("pool.indices: expected different rows, got ", row, ", from which sequence ", n, " starts, also at ",
                 rows.position(write->n, write->slot));
}

bool check_rows(const Problem& problem, Fault& fault) {
    if (!problem.pool.indices.given()) return true;
    const Rows rows{problem.pool.indices};
    std::vector<Write> writes;
    writes.reserve(static_cast<std::size_t>(problem.N));
    for (std::int64_t n = 0; n < problem.N; ++n) {
        if (!check_range(rows, problem.pool.states.shape[0], n, fault)) return false;
        if (!collect_writes(problem, rows, n, writes, fault)) return false;
    }
    if (!check_distinct(rows, writes, fault)) return false;
    for (std::int64_t n = 0; n < problem.N; ++n) {
        if (!check_start(problem, rows, writes, n, fault)) return false;
    }
    return true;
}

}  // namespace

bool check_gate(const Problem& problem, Fault& fault) {
    const bool raw = problem.options.gate_form != GateForm::log_decay;
    return check_values("g", problem.in.g, raw ? Refused::nan : refused_decay(problem), problem.threads, fault);
}

bool check_contents(const Problem& problem, Fault& fault) {
    return check_gate_values(problem, fault) && check_beta_values(problem, fault) && check_rows(problem, fault);
}

}  // namespace headrace
