// The instructions of kernels on tensor cores: a table that `tests/cuda/issued.py --write` measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's, or of those with values, and what others compute for each of them,
// where others fetch: beside its steps; of a step; of a step more for each value head of the block, and for each 64
// values of such a head. Of a block at a step: what its warps share. In code of compute capability 9.0, of whole tiles
// and of the numbers that problem lines have: more 16-bit parts, l2norm and gates that are computed first take more,
// and so does code for mma.sync.
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
    {"channel_gradients", "additive", 64, true, 0, 4493, 683, 706, 0},
    {"channel_gradients", "additive", 128, true, 0, 4390, 771, 759, 0},
    {"channel_gradients", "delta", 64, true, 0, 5168, 683, 874, 0},
    {"channel_gradients", "delta", 128, true, 0, 4978, 771, 838, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 72, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 64, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1297, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2456, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1184, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1291, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1184, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1291, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4994, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5843, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 8036, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9574, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5374, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7234, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8125, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11735, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 47, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 476, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 711, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 215, 724, 0, 0, 540},
    {"channel_sweeps", "additive", 128, true, 224, 973, 0, 0, 636},
    {"channel_sweeps", "delta", 64, true, 177, 1383, 0, 0, 1472},
    {"channel_sweeps", "delta", 128, true, 161, 1880, 0, 0, 1636},
    {"channel_walk", "additive", 64, false, 107, 766, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 85, 948, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 108, 1023, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 89, 1398, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 249, 688, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 265, 775, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 123, 949, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 123, 1076, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 124, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 138, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1476, 1875, 961, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2188, 1977, 1274, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1366, 1292, 927, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1968, 1294, 1242, 0},
    {"tensor_join", "additive", 64, false, 0, 597, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1117, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 372, 48, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 370, 48, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1326, 1225, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1255, 1525, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 2149, 1227, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 2095, 1527, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1423, 1237, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2383, 1239, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 968, 1093, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 897, 1393, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1414, 1095, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1360, 1395, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1033, 1105, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1566, 1107, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 380, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 462, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 175, 1489, 0, 0, 0},
    {"tensor_sweeps", "comba", 128, true, 414, 1916, 0, 0, 0},
    {"tensor_sweeps", "delta", 64, true, 175, 1456, 0, 0, 0},
    {"tensor_sweeps", "delta", 128, true, 414, 1869, 0, 0, 0},
    {"tensor_walk", "comba", 64, false, 174, 1473, 0, 0, 0},
    {"tensor_walk", "comba", 128, false, 321, 1756, 0, 0, 0},
    {"tensor_walk", "comba f16", 64, false, 176, 2061, 0, 0, 0},
    {"tensor_walk", "comba f16", 128, false, 339, 2346, 0, 0, 0},
    {"tensor_walk", "delta", 64, false, 114, 1463, 0, 0, 0},
    {"tensor_walk", "delta", 128, false, 230, 1745, 0, 0, 0},
    {"tensor_walk", "delta f16", 64, false, 96, 2059, 0, 0, 0},
    {"tensor_walk", "delta f16", 128, false, 229, 2344, 0, 0, 0},
    {"tensor_walk_states", "delta", 64, false, 0, 1689, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2144, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2261, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 2947, 0, 0, 0},
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
