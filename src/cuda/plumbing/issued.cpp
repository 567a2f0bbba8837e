// The instructions of kernels on tensor cores: a table that `tests/cuda/issued.py --write` measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's: beside its steps; of a step; of a step more for each value head of
// the block, and for each 64 values of such a head. Of a block at a step: what its warps share. Of whole tiles and of
// the numbers that problem lines have: more 16-bit parts, l2norm, gates that are computed first and rows that are not
// copied by 16 bytes take more.
struct Issued {
    const char *kernel, *rule;
    int K;          // the channels that it is compiled for; a walk's of a backward may be values
    bool backward;  // prepared for one; of most there is one row for both
    double beside, step, head, values, block;
};
constexpr Issued measured[] = {
    // begin
    {"channel_estimate", "delta", 64, false, 20, 16, 0, 0, 0},
    {"channel_estimate", "delta", 64, true, 41, 66, 0, 0, 0},
    {"channel_estimate", "delta", 128, false, 20, 20, 0, 0, 0},
    {"channel_estimate", "delta", 128, true, 40, 82, 0, 0, 0},
    {"channel_gradients", "additive", 64, true, 0, 4560, 687, 728, 0},
    {"channel_gradients", "additive", 128, true, 0, 4464, 681, 672, 0},
    {"channel_gradients", "delta", 64, true, 0, 5148, 681, 951, 0},
    {"channel_gradients", "delta", 128, true, 0, 4987, 681, 875, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 76, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 73, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1325, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2485, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1211, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1210, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1211, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1210, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4873, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5736, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 7899, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9483, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5337, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7302, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8053, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11788, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 57, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 709, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 1088, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 255, 668, 0, 0, 266},
    {"channel_sweeps", "additive", 128, true, 256, 951, 0, 0, 368},
    {"channel_sweeps", "delta", 64, true, 278, 1323, 0, 0, 867},
    {"channel_sweeps", "delta", 128, true, 243, 1916, 0, 0, 1027},
    {"channel_walk", "additive", 64, false, 427, 666, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 406, 955, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 349, 972, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 424, 1406, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 458, 833, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 465, 1021, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 406, 1166, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 415, 1381, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 169, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 182, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1541, 1911, 1019, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2081, 1977, 1382, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1340, 1488, 983, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1789, 1489, 1339, 0},
    {"tensor_join", "additive", 64, false, 0, 608, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1127, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 454, 44, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 453, 44, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1613, 1869, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1305, 2593, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 2646, 1837, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 2339, 2560, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1714, 2189, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2859, 2147, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 1258, 1709, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 998, 2386, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 2035, 1688, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1773, 2366, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1327, 2042, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 2186, 2000, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 584, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 722, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 279, 1243, 0, 0, 1473},
    {"tensor_sweeps", "comba", 128, true, 254, 1765, 0, 0, 1635},
    {"tensor_sweeps", "delta", 64, true, 273, 1194, 0, 0, 1393},
    {"tensor_sweeps", "delta", 128, true, 250, 1712, 0, 0, 1491},
    {"tensor_walk", "comba", 64, false, 443, 1205, 0, 0, 888},
    {"tensor_walk", "comba", 128, false, 444, 1515, 0, 0, 1080},
    {"tensor_walk", "comba f16", 64, false, 447, 1698, 0, 0, 918},
    {"tensor_walk", "comba f16", 128, false, 444, 2197, 0, 0, 1110},
    {"tensor_walk", "delta", 64, false, 349, 1385, 0, 0, 245},
    {"tensor_walk", "delta", 128, false, 308, 1803, 0, 0, 99},
    {"tensor_walk", "delta f16", 64, false, 353, 1876, 0, 0, 279},
    {"tensor_walk", "delta f16", 128, false, 308, 2484, 0, 0, 133},
    {"tensor_walk_states", "delta", 64, false, 0, 1943, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2691, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2959, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 4186, 0, 0, 0},
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
    const Issued* found = row_of(kernel, args, args.prepared.scores_low != nullptr);
    if (found == nullptr) found = row_of(kernel, args, args.prepared.scores_low == nullptr);
    if (found == nullptr) return;
    const double warps = threads / 32.0, heads = heads_of(kernel, args),
                 blocks = (args.V + tensor_values - 1) / tensor_values;
    work.block.issued = warps * found->beside;
    double more = heads * (found->head + blocks * found->values);
    // A block has one value head, and stores gradients of keys where no other shares them.
    if (std::strcmp(kernel.name, "channel_gradients") == 0)
        more = (args.group == 1 ? found->head : 0) + blocks * found->values;
    work.step.issued = warps * (found->step + more) + found->block;
}

}  // namespace headrace::cuda
