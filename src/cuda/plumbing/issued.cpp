// The instructions of kernels whose products are those of tensor cores: a table that `tests/cuda/issued.py --write`
// measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's, or of those with values, and what others compute for each of them,
// where others fetch: beside its steps (less than none where the last one does less); of a step; of a step more for
// each value head of the block, and for each 64 values of such a head. Of a block at a step: what its warps share. In
// code of compute capability 9.0, of whole tiles and of the numbers that problem lines have: more 16-bit parts, l2norm
// and gates that are computed first take more, and so does code for mma.sync.
struct Issued {
    const char *kernel, *rule;
    int K;          // the channels that it is compiled for; a walk's of a backward may be values
    bool backward;  // prepared for one; of most there is one row for both
    double beside, step, head, values, block;
};
constexpr Issued measured[] = {
    // begin
    {"channel_estimate", "delta", 64, false, 22, 15, 0, 0, 0},
    {"channel_estimate", "delta", 64, true, 44, 64, 0, 0, 0},
    {"channel_estimate", "delta", 128, false, 22, 19, 0, 0, 0},
    {"channel_estimate", "delta", 128, true, 41, 81, 0, 0, 0},
    {"channel_gradients", "additive", 64, true, 0, 4267, 553, 671, 0},
    {"channel_gradients", "additive", 128, true, 0, 4133, 591, 686, 0},
    {"channel_gradients", "delta", 64, true, 0, 4855, 553, 831, 0},
    {"channel_gradients", "delta", 128, true, 0, 4707, 591, 886, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 70, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 64, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 469, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 582, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1010, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1058, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1010, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1058, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 2623, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 3184, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 4589, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 5617, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 3450, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 4842, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 5338, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 8001, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 44, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 44, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 44, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 44, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 449, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 725, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 145, 684, 0, 0, 461},
    {"channel_sweeps", "additive", 128, true, 183, 901, 0, 0, 556},
    {"channel_sweeps", "delta", 64, true, 104, 1372, 0, 0, 1192},
    {"channel_sweeps", "delta", 128, true, 87, 1868, 0, 0, 1357},
    {"channel_walk", "additive", 64, false, 82, 629, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 61, 811, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 117, 926, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 149, 1275, 0, 0, 0},
    {"split_gradients", "additive channel f64", 64, true, 0, 510, 3289, 971, 0},
    {"split_gradients", "additive channel f64", 128, true, 0, 460, 6045, 1778, 0},
    {"split_gradients", "additive f64", 64, false, 0, 513, 5225, 1554, 0},
    {"split_gradients", "additive f64", 128, false, 0, 419, 6839, 2670, 0},
    {"split_gradients", "delta channel f64", 64, true, 0, 443, 4328, 1606, 0},
    {"split_gradients", "delta channel f64", 128, true, 0, 301, 7867, 2478, 0},
    {"split_gradients", "delta f64", 64, true, 0, 364, 7642, 3033, 0},
    {"split_gradients", "delta f64", 128, true, 0, 86, 10262, 4354, 0},
    {"split_sweeps", "additive channel f64", 64, true, -482, 1123, 0, 0, 0},
    {"split_sweeps", "additive channel f64", 128, true, -939, 1912, 0, 0, 0},
    {"split_sweeps", "additive f64", 64, false, -565, 1228, 0, 0, 0},
    {"split_sweeps", "additive f64", 128, false, -656, 1655, 0, 0, 0},
    {"split_sweeps", "delta channel f64", 64, true, -440, 1775, 0, 0, 0},
    {"split_sweeps", "delta channel f64", 128, true, -827, 2859, 0, 0, 0},
    {"split_sweeps", "delta f64", 64, true, -690, 2565, 0, 0, 0},
    {"split_sweeps", "delta f64", 128, true, -1088, 3581, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 94, 610, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 81, 697, 0, 0, 0},
    {"tensor_forward_gradient", "additive", 64, false, 191, 631, 0, 0, 0},
    {"tensor_forward_gradient", "additive", 128, false, 217, 706, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 121, 873, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 121, 993, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 116, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 133, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1254, 1775, 828, 0},
    {"tensor_gradients", "comba", 128, true, 0, 1863, 1877, 1122, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1137, 1311, 857, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1670, 1313, 1171, 0},
    {"tensor_join", "additive", 64, false, 0, 217, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 273, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2249, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7112, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2249, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7112, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 238, 48, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 236, 48, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1143, 1163, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1127, 1475, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1671, 1169, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1695, 1474, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1240, 1178, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 1896, 1178, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 849, 1031, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 833, 1343, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1192, 1036, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1217, 1342, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 914, 1046, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1352, 1046, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 369, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 454, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 119, 1457, 0, 0, 0},
    {"tensor_sweeps", "comba", 128, true, 305, 1855, 0, 0, 0},
    {"tensor_sweeps", "delta", 64, true, 119, 1425, 0, 0, 0},
    {"tensor_sweeps", "delta", 128, true, 305, 1808, 0, 0, 0},
    {"tensor_walk", "comba", 64, false, 130, 1361, 0, 0, 0},
    {"tensor_walk", "comba", 128, false, 229, 1649, 0, 0, 0},
    {"tensor_walk", "comba f16", 64, false, 131, 1954, 0, 0, 0},
    {"tensor_walk", "comba f16", 128, false, 247, 2240, 0, 0, 0},
    {"tensor_walk", "delta", 64, false, 71, 1349, 0, 0, 0},
    {"tensor_walk", "delta", 128, false, 141, 1636, 0, 0, 0},
    {"tensor_walk", "delta f16", 64, false, 53, 1951, 0, 0, 0},
    {"tensor_walk", "delta f16", 128, false, 140, 2237, 0, 0, 0},
    {"tensor_walk_states", "delta", 64, false, 0, 1714, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2170, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 2972, 0, 0, 0},
    {"walk_forward", "additive channel f64", 64, false, 417, 1331, 0, 0, 0},
    {"walk_forward", "additive channel f64", 128, false, 561, 2122, 0, 0, 0},
    {"walk_forward", "additive f64", 64, false, 425, 1287, 0, 0, 0},
    {"walk_forward", "additive f64", 128, false, 569, 1845, 0, 0, 0},
    {"walk_forward", "delta channel f64", 64, false, 431, 1734, 0, 0, 0},
    {"walk_forward", "delta channel f64", 128, false, 575, 2696, 0, 0, 0},
    {"walk_forward", "delta f64", 64, false, 443, 2170, 0, 0, 0},
    {"walk_forward", "delta f64", 128, false, 587, 3027, 0, 0, 0},
    // end
    {"", "", 0, false, 0, 0, 0, 0, 0}};

const char* rule_of(const KernelArgs& args, bool in_double) {
    if (in_double && args.channel_gate) return args.delta ? "delta channel f64" : "additive channel f64";
    if (in_double) return args.delta ? "delta f64" : "additive f64";
    const bool f16 = args.q.dtype == DType::f16;
    if (args.undecayed_error) return f16 ? "comba f16" : "comba";
    if (args.delta) return f16 ? "delta f16" : "delta";
    return "additive";  // of f16 a third more
}

const Issued* row_of(const Kernel& kernel, const KernelArgs& args, bool in_double, bool backward) {
    const auto found = std::find_if(std::begin(measured), std::end(measured), [&](const Issued& row) {
        return std::strcmp(row.kernel, kernel.name) == 0 && std::strcmp(row.rule, rule_of(args, in_double)) == 0 &&
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

void set_issued(BlockWork& work, const Kernel& kernel, const KernelArgs& args, bool in_double, int threads) {
    const Issued* found = row_of(kernel, args, in_double, args.prepared.of_backward);
    if (found == nullptr) found = row_of(kernel, args, in_double, !args.prepared.of_backward);
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
