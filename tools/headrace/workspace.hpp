// The workspace for a call, and what runs it.
#pragma once

#include <cstddef>
#include <vector>

#include "harness/run_call.hpp"

namespace headrace::cli {

using harness::run_call;

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
