// headrace plan with ranks=P: what each way to cut a problem sends and computes, and how well it would scale: a model.
#include "tools/headrace/plan_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

constexpr double scored_tokens = 32;  // a chunk, whose scores are counted

// Per token and value head (docs/math.md 4, 5, 9).
struct Flops {
    double whole, summary;
};

Flops flops_of(const ProblemLine& line) {
    const double K = static_cast<double>(line.K), V = static_cast<double>(line.V);
    const bool delta = harness::has_delta_rule(line.op), backward = line.direction == Direction::backward;
    const double scores = scored_tokens * (K + V);
    const double forward = delta ? 6 * K * V + 2 * scores : 4 * K * V + scores;
    const double of_map = delta ? 4 * K * (V + K) + scores : 2 * K * V;
    const double of_adjoint = delta ? forward : 2 * K * V;
    // A backward recomputes states; the forward before it has left the maps to their owners.
    return backward ? Flops{(delta ? 16 : 10) * K * V + 3 * scores, of_adjoint} : Flops{forward, of_map};
}

struct Sizes {
    double state, map;  // of one message: R or Dx; M beside it
    double tokens;      // what a rank holds of the token tensors that change owners with the heads
};

Sizes sizes_of(const ProblemLine& line) {
    const double K = static_cast<double>(line.K), V = static_cast<double>(line.V), HV = static_cast<double>(line.HV);
    const double states = static_cast<double>(line.sequences()) * HV, number = line.dtype == DType::f64 ? 8 : 4;
    const bool delta = harness::has_delta_rule(line.op), backward = line.direction == Direction::backward;
    const double of_map = delta                                  ? K * K
                          : harness::has_channel(line.gate)      ? K
                          : line.gate == harness::GateKind::none ? 0
                                                                 : 1;
    const double element = static_cast<double>(size_of(line.dtype)), keys = line.op == Operator::comba ? 3 : 2;
    const double gate = harness::has_channel(line.gate) ? K : harness::has_step(line.gate) ? 1 : 0;
    const double read =
        (keys * static_cast<double>(line.H) * K + HV * V) * element + HV * (gate + (delta ? 1 : 0)) * number;
    const double written = HV * V * element;  // o; backward: d_o is read, and a gradient of all that is read is written
    const double per_token = backward ? 2 * read + written : read + written;
    const double tokens = static_cast<double>(line.B * line.T) / line.ranks;
    return {states * K * V * number, backward ? 0 : states * of_map * number, tokens * per_token};
}

}  // namespace

std::vector<Strategy> strategies_of(const ProblemLine& line, double gbits, double gflops) {
    const double P = line.ranks, heads = static_cast<double>(line.HV),
                 tokens = static_cast<double>(line.B * line.T) / P;
    const Flops flops = flops_of(line);
    const Sizes sizes = sizes_of(line);
    const double alone = flops.whole * tokens * heads;  // what a rank computes of the undivided problem
    const auto seconds = [&](double flop) { return flop / gflops * 1e-9; };
    const auto sending = [&](double bytes) { return bytes * 8 / gbits * 1e-9; };
    const auto made = [&](const char* name, double bytes, double messages, double more_flop, double waiting,
                          bool possible) {
        const double time = seconds(alone + more_flop) + waiting;
        return Strategy{name, bytes, messages, alone + more_flop, time, possible ? seconds(alone) / time : 0};
    };
    const double message = sizes.state + sizes.map;
    const double doubling = std::ceil(std::log2(P)), exchanged = std::min(P - 1, doubling);
    const double more = P > 1 ? flops.summary * tokens * heads : 0;
    // A wavefront over the heads: the last rank begins when the first head has passed all others.
    const double fill = (P - 1) * (seconds(alone) + sending(sizes.state)) / heads;
    const double moved = sizes.tokens * (P - 1) / P;
    const bool divides = line.HV % line.ranks == 0 && line.H % line.ranks == 0;
    return {made("summary", message, exchanged, more, exchanged * sending(message), true),
            made("ring", sizes.state, std::min(1.0, P - 1), 0, fill, true),
            made("heads", moved / std::max(1.0, P - 1), P - 1, 0, sending(moved), divides)};
}

void print_strategies(const ProblemLine& line, double gbits, double gflops) {
    std::printf("\nmodel, not measured: %d ranks, %s GFLOP/s each, a link of %s Gbit/s\n", line.ranks,
                figure(gflops).c_str(), figure(gbits).c_str());
    Table table({"strategy", ">MiB per message", ">messages", ">GFLOP per rank", ">ms", ">efficiency"});
    for (const Strategy& s : strategies_of(line, gbits, gflops)) {
        const bool possible = s.efficiency > 0;
        table.add({s.name, mebibytes(s.message_bytes), fixed(s.messages, 0), figure(s.flop * 1e-9),
                   possible ? figure(s.seconds * 1e3) : "-",
                   possible ? fixed(100 * s.efficiency, 1) + " %" : "heads do not divide"});
    }
    table.print();
}

json to_json(const Strategy& s) {
    return {{"name", s.name}, {"message_bytes", s.message_bytes}, {"messages", s.messages}, {"flop", s.flop},
            {"seconds", s.seconds}, {"efficiency", s.efficiency}};
}

}  // namespace headrace::cli
