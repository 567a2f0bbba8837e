// Dispatch: the first implementation of a list that accepts a problem; keeps the refusals of the others.
//
// Options.force, or else the environment variable HEADRACE_FORCE, names the only implementation that may serve. A name
// that is not in the list is an error in both. One that serves another direction than the call's is an error in
// Options.force and ignored in HEADRACE_FORCE, so that a forced forward can be followed by any backward.
// HEADRACE_VERBOSE=1 prints who serves each call and why those before it do not.
#pragma once

#include <vector>

#include "core/implementation.hpp"

namespace headrace {

using ImplementationList = std::vector<const Implementation*>;

// The implementation that serves `problem`. Code::unsupported, with all reasons, where there is none.
Status select(const Problem& problem, const ImplementationList& list, const Machine& machine,
              const Implementation** selected);

// Every implementation of the problem's direction with its refusal; where one is forced, all others refuse.
Status judge(const Problem& problem, const ImplementationList& list, const Machine& machine,
             std::vector<Candidate>* candidates);

}  // namespace headrace
