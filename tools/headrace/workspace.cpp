// The workspace for a call.
#include "tools/headrace/workspace.hpp"

#include "tools/headrace/common.hpp"

namespace headrace::cli {

OwnedWorkspace::OwnedWorkspace(const Call& call) {
    std::size_t bytes = 0;
    require(workspace_size(call, &bytes));
    memory_.assign(bytes, 0);
}

}  // namespace headrace::cli
