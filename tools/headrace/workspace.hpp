// A call run by its direction, and the workspace for it.
#pragma once

#include <cstddef>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::cli {

// forward, backward or step, as the call says.
Status run_call(const Call& call, Workspace workspace);

// Memory of the size that the call asks for, every page touched, so that no timed call pays for it. Throws a Failure
// where the call is not valid.
class OwnedWorkspace {
  public:
    explicit OwnedWorkspace(const Call& call);
    Workspace get() const { return {const_cast<char*>(memory_.data()), memory_.size()}; }

  private:
    std::vector<char> memory_;
};

}  // namespace headrace::cli
