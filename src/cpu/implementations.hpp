// The implementations of the CPU backend, fastest first.
#pragma once

#include <vector>

#include "core/implementation.hpp"

namespace headrace::cpu {

std::vector<const Implementation*> chunk_implementations();      // "<isa>.chunk", and its backward variants
std::vector<const Implementation*> summary_implementations();    // "<isa>.chunk.summary"
std::vector<const Implementation*> recurrent_implementations();  // "<isa>.recurrent"
std::vector<const Implementation*> recurrent_summaries();        // the same name, of summaries
std::vector<const Implementation*> implementations();            // all of them, in order of preference

}  // namespace headrace::cpu
