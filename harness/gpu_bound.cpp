// gpu_bound: what a call on a GPU has to compute and to move, and what others publish for the shape.
#include "harness/gpu_bound.hpp"

#include <algorithm>
#include <cassert>

#include "harness/measure.hpp"

namespace headrace::harness {
namespace {

constexpr double chunk = 64;

// [C,C] products with K and with V terms (or columns) of a chunk, beside those with the state: docs/math.md, 4 and 5.
struct ScoreProducts {
    double keys, values;
};
ScoreProducts score_products(const ProblemLine& line) {
    const bool delta = has_delta_rule(line.op);
    if (line.direction == Direction::forward) return delta ? ScoreProducts{2, 2} : ScoreProducts{1, 1};
    // P; P^T d_o, d_P; d_P k, d_P^T q
    if (!delta) return {3, 2};
    // The states' sweep: l and its solve. The adjoint's: P, l; P^T d_o, the transposed solve. The gradients: P, l, what
    // d_P and d_l add to d_q, d_k (twice) and d_e; d_P, d_l. Of channel gates two more are allowed for.
    return {has_channel(line.gate) ? 11.0 : 9.0, 5};
}

const char *flashqla = "QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt",
           *cula = "inclusionAI/cuLA, BENCHMARK_H200.md", *tileops = "tile-ai/TileOPs, its benchmark of GLA";

#define GDN_FWD "gated_delta_rule:fwd "
#define GDN_BWD "gated_delta_rule:bwd "
#define D128 " k128 bf16"
#define FOUR_LONG "varlen=0,8192,16384,24576,32768"
#define EIGHT_SHORT "varlen=0,1024,2048,3072,4096,5120,6144,7168,8192"
const std::vector<PeerTime> published = {
    {GDN_FWD "t8192 h16 hv64" D128, "h200", "FlashInfer", 0.392e-3, flashqla},
    {GDN_FWD "t8192 h16 hv64" D128, "h200", "FlashQLA", 0.397e-3, flashqla},
    {GDN_FWD "t8192 h16 hv64" D128, "h200", "FLA", 0.814e-3, flashqla},
    {GDN_FWD "t8192 h8 hv32" D128, "h200", "FlashQLA", 0.280e-3, flashqla},
    {GDN_FWD "t8192 h8 hv32" D128, "h200", "FLA", 0.466e-3, flashqla},
    {GDN_FWD "t8192 h2 hv8" D128, "h200", "FlashQLA", 0.119e-3, flashqla},
    {GDN_FWD "t8192 h2 hv8" D128, "h200", "FLA", 0.234e-3, flashqla},
    {GDN_FWD FOUR_LONG " h16 hv64" D128, "h200", "FlashInfer", 0.827e-3, flashqla},
    {GDN_FWD FOUR_LONG " h16 hv64" D128, "h200", "FLA", 3.362e-3, flashqla},
    {GDN_BWD "t8192 h16 hv32" D128, "h200", "FlashQLA", 0.789e-3, flashqla},
    {GDN_BWD "t8192 h16 hv32" D128, "h200", "FLA", 1.444e-3, flashqla},
    {GDN_BWD EIGHT_SHORT " h16 hv32" D128, "h200", "FlashQLA", 0.759e-3, flashqla},
    {GDN_BWD EIGHT_SHORT " h16 hv32" D128, "h200", "FLA", 1.500e-3, flashqla},
    {GDN_BWD "t32768 h16 hv32" D128, "h200", "FlashQLA", 2.515e-3, flashqla},
    {GDN_BWD "t32768 h16 hv32" D128, "h200", "FLA", 5.697e-3, flashqla},
    {"kda:fwd t8192 h64" D128, "h200", "cuLA", 1.283e-3, cula},
    {"kda:fwd t8192 h64" D128, "h200", "FLA", 1.777e-3, cula},
    {"kda:fwd b2 t8192 h64" D128, "h200", "cuLA", 1.781e-3, cula},
    {"kda:fwd b2 t8192 h64" D128, "h200", "FLA", 3.487e-3, cula},
    {"gla:fwd t32768 h16" D128, "h200", "TileOPs", 1.12e-3, tileops},
    {"gla:fwd t32768 h16" D128, "h200", "FLA", 1.99e-3, tileops},
};

// What decides a time, and no more.
bool same_shape(const ProblemLine& a, const ProblemLine& b) {
    return a.op == b.op && a.direction == b.direction && a.B == b.B && a.T == b.T && a.H == b.H && a.HV == b.HV &&
           a.K == b.K && a.V == b.V && a.dtype == b.dtype && a.gate == b.gate && a.varlen == b.varlen;
}

ProblemLine parsed(const std::string& text) {
    ProblemLine line;
    [[maybe_unused]] const Status status = parse(text, &line);
    assert(status.ok());
    return line;
}

}  // namespace

double chunk_flop(const ProblemLine& line) {
    if (line.direction != Direction::forward && line.direction != Direction::backward) return useful_flop(line);
    const double K = static_cast<double>(line.K), V = static_cast<double>(line.V);
    const double tokens = static_cast<double>(line.B * line.T * line.HV);
    const bool delta = has_delta_rule(line.op), forward = line.direction == Direction::forward;
    const ScoreProducts products = score_products(line);
    const double with_state = forward ? (delta ? 6 : 4) * K * V : (delta ? 16 : 10) * K * V;
    const double inverse = delta && forward ? 2.0 / 3 * chunk * chunk : 0;  // of I + l diag(beta), by blocks
    return tokens * (with_state + 2 * chunk * (products.keys * K + products.values * V) + inverse);
}

Bound bound_of(const ProblemLine& line, double bytes, const Gpu& gpu) {
    Bound bound{chunk_flop(line), bytes, 0};
    bound.seconds = std::max(bound.flop / gpu.matrix_flop, bound.bytes / gpu.bandwidth);
    return bound;
}

const std::vector<PeerTime>& peer_times() { return published; }

const std::vector<std::string>& peer_problems() {
    static const std::vector<std::string> problems = [] {
        std::vector<std::string> list;
        for (const PeerTime& time : published) {
            if (list.empty() || list.back() != time.problem) list.emplace_back(time.problem);
        }
        for (const char* more :
             {"kda:bwd t8192 h64" D128, "simple_gla:fwd t8192 h64" D128, "simple_gla:bwd t8192 h64" D128})
            list.emplace_back(more);
        return list;
    }();
    return problems;
}

std::vector<PeerTime> peers_of(const ProblemLine& line, const Gpu& gpu) {
    std::vector<PeerTime> result;
    for (const PeerTime& time : published) {
        if (std::string(time.gpu) == gpu.name && same_shape(parsed(time.problem), line)) result.push_back(time);
    }
    return result;
}

}  // namespace headrace::harness
