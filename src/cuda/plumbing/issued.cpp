// The instructions of kernels on tensor cores: a table that `tests/cuda/issued.py --write` measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's, or of those with values, and what others compute for each of them,
// where others fetch: beside its steps; of a step; of a step more for each value head of the block, and for each 64
// values of such a head. Of a block at a step: what its warps share, or the others do. Of whole tiles and of the numbers
// that problem lines have: more 16-bit parts, l2norm and gates that are computed first take more.
struct Issued {
    const char *kernel, *rule;
    int K;          // the channels that it is compiled for; a walk's of a backward may be values
    bool backward;  // prepared for one; of most there is one row for both
    double beside, step, head, values, block;
};
constexpr Issued measured[] = {
    // begin
    {"channel_estimate", "delta", 64, false, 25, 16, 0, 0, 0},
    {"channel_estimate", "delta", 64, true, 49, 64, 0, 0, 0},
    {"channel_estimate", "delta", 128, false, 25, 19, 0, 0, 0},
    {"channel_estimate", "delta", 128, true, 46, 81, 0, 0, 0},
    {"channel_gradients", "additive", 64, true, 0, 4477, 641, 736, 0},
    {"channel_gradients", "additive", 128, true, 0, 4336, 641, 719, 0},
    {"channel_gradients", "delta", 64, true, 0, 5137, 641, 904, 0},
    {"channel_gradients", "delta", 128, true, 0, 4894, 641, 919, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 72, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 64, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1297, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2456, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1152, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1151, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1152, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1151, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4829, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5677, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 7811, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9348, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5260, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7100, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8010, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11540, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 47, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 630, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 938, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 183, 738, 0, 0, 394},
    {"channel_sweeps", "additive", 128, true, 194, 1008, 0, 0, 488},
    {"channel_sweeps", "delta", 64, true, 149, 1464, 0, 0, 1134},
    {"channel_sweeps", "delta", 128, true, 137, 2016, 0, 0, 1298},
    {"channel_walk", "additive", 64, false, 96, 916, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 77, 1187, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 93, 1108, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 74, 1556, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 218, 844, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 267, 999, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 129, 1101, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 131, 1314, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 124, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 138, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1401, 1871, 943, 0},
    {"tensor_gradients", "comba", 128, true, 0, 1932, 1937, 1235, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1296, 1292, 909, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1737, 1294, 1195, 0},
    {"tensor_join", "additive", 64, false, 0, 597, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1117, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 342, 48, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 340, 48, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1316, 1223, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1245, 1522, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1923, 1225, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1852, 1525, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1413, 1235, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2128, 1236, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 970, 1091, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 899, 1391, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1321, 1092, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1250, 1393, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1035, 1103, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1464, 1105, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 442, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 559, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 136, 1409, 0, 0, 1762},
    {"tensor_sweeps", "comba", 128, true, 570, 1343, 0, 0, 3803},
    {"tensor_sweeps", "delta", 64, true, 136, 1360, 0, 0, 1674},
    {"tensor_sweeps", "delta", 128, true, 570, 1344, 0, 0, 3439},
    {"tensor_walk", "comba", 64, false, 169, 1520, 0, 0, 1131},
    {"tensor_walk", "comba", 128, false, 396, 1355, 0, 0, 3123},
    {"tensor_walk", "comba f16", 64, false, 170, 1958, 0, 0, 1161},
    {"tensor_walk", "comba f16", 128, false, 412, 1855, 0, 0, 3189},
    {"tensor_walk", "delta", 64, false, 109, 1623, 0, 0, 652},
    {"tensor_walk", "delta", 128, false, 301, 1601, 0, 0, 2140},
    {"tensor_walk", "delta f16", 64, false, 90, 2111, 0, 0, 558},
    {"tensor_walk", "delta f16", 128, false, 298, 2151, 0, 0, 2082},
    {"tensor_walk_states", "delta", 64, false, 0, 2171, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2877, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2753, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 3685, 0, 0, 0},
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
