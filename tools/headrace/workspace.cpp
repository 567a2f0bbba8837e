// A call run by its direction, and the workspace for it.
#include "tools/headrace/workspace.hpp"

#include "tools/headrace/common.hpp"

namespace headrace::cli {

Status run_call(const Call& call, Workspace workspace) {
    switch (call.direction) {
        case Direction::forward: return forward(call.op, call.in, call.out, call.options, workspace);
        case Direction::backward: return backward(call.op, call.in, call.d_out, call.grads, call.options, workspace);
        case Direction::step: return step(call.op, call.in, call.out, call.pool, call.options, workspace);
    }
    return Status(Code::invalid_argument, "direction: not forward, backward or step");
}

OwnedWorkspace::OwnedWorkspace(const Call& call) {
    std::size_t bytes = 0;
    require(workspace_size(call, &bytes));
    memory_.assign(bytes, 0);
}

}  // namespace headrace::cli
