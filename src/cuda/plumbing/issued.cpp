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
    {"channel_gradients", "additive", 64, true, 0, 4488, 641, 736, 0},
    {"channel_gradients", "additive", 128, true, 0, 4346, 641, 719, 0},
    {"channel_gradients", "delta", 64, true, 0, 5148, 641, 904, 0},
    {"channel_gradients", "delta", 128, true, 0, 4904, 641, 919, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 78, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 73, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1325, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2485, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1163, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1160, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1163, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1160, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4799, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5687, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 7741, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9358, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5270, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7110, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8020, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11551, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 57, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 650, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 980, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 211, 738, 0, 0, 394},
    {"channel_sweeps", "additive", 128, true, 219, 1005, 0, 0, 488},
    {"channel_sweeps", "delta", 64, true, 177, 1464, 0, 0, 1134},
    {"channel_sweeps", "delta", 128, true, 165, 2016, 0, 0, 1298},
    {"channel_walk", "additive", 64, false, 97, 911, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 49, 1195, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 114, 1108, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 95, 1558, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 253, 860, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 298, 1009, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 170, 1106, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 171, 1322, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 130, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 143, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1512, 1835, 966, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2039, 1901, 1261, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1370, 1265, 933, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1813, 1266, 1225, 0},
    {"tensor_join", "additive", 64, false, 0, 608, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1127, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 353, 44, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 352, 44, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1339, 1226, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1274, 1541, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1956, 1228, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1910, 1546, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1447, 1238, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2162, 1240, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 991, 1094, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 925, 1409, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1354, 1096, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1307, 1414, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1069, 1106, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1498, 1108, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 472, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 614, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 174, 1443, 0, 0, 1766},
    {"tensor_sweeps", "comba", 128, true, 690, 1293, 0, 0, 4000},
    {"tensor_sweeps", "delta", 64, true, 175, 1395, 0, 0, 1678},
    {"tensor_sweeps", "delta", 128, true, 690, 1292, 0, 0, 3640},
    {"tensor_walk", "comba", 64, false, 206, 1474, 0, 0, 1136},
    {"tensor_walk", "comba", 128, false, 453, 1319, 0, 0, 3236},
    {"tensor_walk", "comba f16", 64, false, 209, 1902, 0, 0, 1166},
    {"tensor_walk", "comba f16", 128, false, 467, 1820, 0, 0, 3298},
    {"tensor_walk", "delta", 64, false, 118, 1648, 0, 0, 483},
    {"tensor_walk", "delta", 128, false, 302, 1711, 0, 0, 1891},
    {"tensor_walk", "delta f16", 64, false, 102, 2126, 0, 0, 390},
    {"tensor_walk", "delta f16", 128, false, 297, 2262, 0, 0, 1830},
    {"tensor_walk_states", "delta", 64, false, 0, 2185, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2908, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2763, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 3723, 0, 0, 0},
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
