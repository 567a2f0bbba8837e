// ranks: a call cut into pieces of the token axis as several processes would run it, joined by summaries.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/problem_line.hpp"

namespace headrace::harness {

// The borders of line.ranks pieces of the tokens, from 0 to T. With seed 1 equal pieces, at multiples of 64 where there
// are tokens enough; other seeds draw uneven and empty pieces too.
std::vector<std::int64_t> borders_of(const ProblemLine& line);

// How the state that enters a piece is made of the summaries of those before it: handed on from one to the next, or
// applied to their composition.
enum class Folding { states, summaries };
Folding folding_of(const ProblemLine& line);

// Runs a forward or backward piece by piece, each from the state (and with the gradient of the state) that the
// summaries of the others give it, and leaves the results where the whole call would: sequences are cut where a border
// falls into them, gradients of gate parameters added up. A forced implementation serves the pieces that it accepts;
// workspaces are the library's. violation: given, all of it runs on copies of the tensors on a CUDA device
// (device_call.hpp).
Status run_in_ranks(const Call& call, const std::vector<std::int64_t>& borders, Folding folding,
                    std::string* violation = nullptr);

}  // namespace headrace::harness
