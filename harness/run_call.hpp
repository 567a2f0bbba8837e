// run_call: the function of the library that a call's direction names; and which implementation serves a call.
#pragma once

#include <string>
#include <vector>

#include "headrace/summary.hpp"

namespace headrace::harness {

inline Status run_call(const Call& call, Workspace workspace = {}) {
    switch (call.direction) {
        case Direction::forward: return forward(call.op, call.in, call.out, call.options, workspace);
        case Direction::backward: return backward(call.op, call.in, call.d_out, call.grads, call.options, workspace);
        case Direction::step: return step(call.op, call.in, call.out, call.pool, call.options, workspace);
        case Direction::summarize: return summarize(call.op, call.in, call.summary, call.options, workspace);
        case Direction::summarize_backward:
            return summarize_backward(call.op, call.in, call.d_out, call.grads.d_initial_state, call.options,
                                      workspace);
    }
    return Status(Code::invalid_argument, "direction: none of the library's");
}

// Empty if none serves it; an error where the call is not valid.
inline Status find_serving(const Call& call, std::string* implementation) {
    implementation->clear();
    std::vector<Candidate> candidates;
    Status status = explain(call, &candidates);
    for (const Candidate& candidate : candidates) {
        if (!status.ok() || !candidate.refusal.empty() || !candidate.yields.empty()) continue;
        *implementation = candidate.name;
        break;
    }
    return status;
}

}  // namespace headrace::harness
