// headrace plan with ranks=P: what each way to cut a problem sends and computes, and how well it would scale: a model.
#pragma once

#include <string>
#include <vector>

#include "tools/headrace/common.hpp"

namespace headrace::cli {

// One way to run line.ranks pieces of the tokens: by summaries that all compute and exchange; handing states on in a
// ring, a wavefront over the heads; or whole sequences of some heads on each rank, exchanged all to all.
struct Strategy {
    std::string name;
    double message_bytes = 0, messages = 0;  // that one rank sends
    double flop = 0, seconds = 0;            // of one rank
    double efficiency = 0;                   // of the ranks; 0: the heads do not divide
};

// With a link of `gbits` per second between any two ranks, each of which computes `gflops`.
std::vector<Strategy> strategies_of(const ProblemLine& line, double gbits, double gflops);

void print_strategies(const ProblemLine& line, double gbits, double gflops);
json to_json(const Strategy& strategy);

}  // namespace headrace::cli
