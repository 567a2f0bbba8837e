// run_call: the function of the library that a call's direction names.
#pragma once

#include "headrace/summary.hpp"

namespace headrace::harness {

inline Status run_call(const Call& call, Workspace workspace = {}) {
    switch (call.direction) {
        case Direction::forward: return forward(call.op, call.in, call.out, call.options, workspace);
        case Direction::backward: return backward(call.op, call.in, call.d_out, call.grads, call.options, workspace);
        case Direction::step: return step(call.op, call.in, call.out, call.pool, call.options, workspace);
        case Direction::summarize: return summarize(call.op, call.in, call.summary, call.options, workspace);
        case Direction::summarize_backward:
            return summarize_backward(call.op, call.in, call.d_out, call.grads.d_initial_state, call.options, workspace);
    }
    return Status(Code::invalid_argument, "direction: none of the library's");
}

}  // namespace headrace::harness
