// The instructions of kernels on tensor cores: a table that `tests/cuda/issued.py --write` measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's, or of those with values where others fetch for them: beside its
// steps; of a step; of a step more for each value head of the block, and for each 64 values of such a head. Of a block
// at a step: what its warps share, or the others do. Of whole tiles and of the numbers that problem lines have: more
// 16-bit parts, l2norm, gates that are computed first and rows that are not copied by 16 bytes take more.
struct Issued {
    const char *kernel, *rule;
    int K;          // the channels that it is compiled for; a walk's of a backward may be values
    bool backward;  // prepared for one; of most there is one row for both
    double beside, step, head, values, block;
};
constexpr Issued measured[] = {
    // begin
    {"channel_estimate", "delta", 64, false, 23, 15, 0, 0, 0},
    {"channel_estimate", "delta", 64, true, 52, 65, 0, 0, 0},
    {"channel_estimate", "delta", 128, false, 23, 19, 0, 0, 0},
    {"channel_estimate", "delta", 128, true, 51, 81, 0, 0, 0},
    {"channel_gradients", "additive", 64, true, 0, 4588, 683, 727, 0},
    {"channel_gradients", "additive", 128, true, 0, 4446, 683, 701, 0},
    {"channel_gradients", "delta", 64, true, 0, 5249, 683, 926, 0},
    {"channel_gradients", "delta", 128, true, 0, 5010, 683, 896, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 79, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 74, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1325, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2485, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1227, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1224, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1227, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1224, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4994, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5869, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 8062, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9658, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5345, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7273, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8087, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11786, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 57, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 645, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 990, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 186, 806, 0, 0, 346},
    {"channel_sweeps", "additive", 128, true, 204, 1064, 0, 0, 453},
    {"channel_sweeps", "delta", 64, true, 162, 1550, 0, 0, 1157},
    {"channel_sweeps", "delta", 128, true, 149, 2112, 0, 0, 1311},
    {"channel_walk", "additive", 64, false, 151, 951, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 127, 1216, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 149, 1142, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 130, 1591, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 321, 863, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 332, 1033, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 191, 1132, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 199, 1351, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 130, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 143, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1583, 1835, 962, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2128, 1901, 1257, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1419, 1265, 929, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1874, 1266, 1221, 0},
    {"tensor_join", "additive", 64, false, 0, 608, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1127, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 465, 44, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 464, 44, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1374, 1226, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1308, 1541, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1991, 1228, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1944, 1546, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1482, 1238, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2197, 1240, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 1013, 1094, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 947, 1409, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1376, 1096, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1329, 1414, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1091, 1106, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1520, 1108, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 475, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 612, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 131, 1516, 0, 0, 1851},
    {"tensor_sweeps", "comba", 128, true, 581, 1248, 0, 0, 4045},
    {"tensor_sweeps", "delta", 64, true, 131, 1454, 0, 0, 1763},
    {"tensor_sweeps", "delta", 128, true, 581, 1248, 0, 0, 3637},
    {"tensor_walk", "comba", 64, false, 272, 1538, 0, 0, 1144},
    {"tensor_walk", "comba", 128, false, 553, 1241, 0, 0, 3560},
    {"tensor_walk", "comba f16", 64, false, 279, 2010, 0, 0, 1178},
    {"tensor_walk", "comba f16", 128, false, 538, 1897, 0, 0, 3574},
    {"tensor_walk", "delta", 64, false, 188, 1691, 0, 0, 509},
    {"tensor_walk", "delta", 128, false, 408, 1617, 0, 0, 2203},
    {"tensor_walk", "delta f16", 64, false, 175, 2214, 0, 0, 420},
    {"tensor_walk", "delta f16", 128, false, 374, 2322, 0, 0, 2097},
    {"tensor_walk_states", "delta", 64, false, 0, 2223, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2969, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2805, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 3789, 0, 0, 0},
    // end
    {"", "", 0, false, 0, 0, 0, 0, 0}};

const char* rule_of(const KernelArgs& args) {
    const bool f16 = args.q.dtype == DType::f16;
    if (args.undecayed_error) return f16 ? "comba f16" : "comba";
    if (args.delta) return f16 ? "delta f16" : "delta";
    return "additive";  // of f16 a third more
}

const Issued* row_of(const Kernel& kernel, const KernelArgs& args, bool backward) {
    const auto found = std::find_if(std::begin(measured), std::end(measured), [&](const Issued& row) {
        return std::strcmp(row.kernel, kernel.name) == 0 && std::strcmp(row.rule, rule_of(args)) == 0 &&
               row.K == (args.K <= 64 ? 64 : 128) && row.backward == backward;
    });
    return found == std::end(measured) ? nullptr : found;
}

// Value heads of a block at a step, on the mean.
double heads_of(const Kernel& kernel, const KernelArgs& args) {
    const bool prepares = std::strcmp(kernel.name, "tensor_prepare") == 0;
    const int parts = prepares ? (args.group + prepared_heads - 1) / prepared_heads : 1;
    return static_cast<double>(args.group) / parts;
}

}  // namespace

void set_issued(BlockWork& work, const Kernel& kernel, const KernelArgs& args, int threads) {
    const Issued* found = row_of(kernel, args, args.prepared.of_backward);
    if (found == nullptr) found = row_of(kernel, args, !args.prepared.of_backward);
    if (found == nullptr) return;
    const auto is = [&](const char* name) { return std::strcmp(kernel.name, name) == 0; };
    const bool fetched = is("tensor_walk") || is("tensor_sweeps");
    const double warps = (threads - (fetched ? fetching_threads(args.K) : 0)) / 32.0, heads = heads_of(kernel, args),
                 blocks = (args.V + tensor_values - 1) / tensor_values;
    work.block.issued = warps * found->beside;
    double more = heads * (found->head + blocks * found->values);
    // A block has one value head, and stores gradients of keys where no other shares them.
    if (is("channel_gradients"))
        more = (args.group == 1 ? found->head : 0) + blocks * found->values;
    work.step.issued = warps * (found->step + more) + found->block;
}

}  // namespace headrace::cuda
