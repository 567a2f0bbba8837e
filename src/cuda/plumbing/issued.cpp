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
    {"channel_gradients", "additive", 64, true, 0, 4538, 687, 722, 0},
    {"channel_gradients", "additive", 128, true, 0, 4445, 681, 670, 0},
    {"channel_gradients", "delta", 64, true, 0, 5131, 681, 942, 0},
    {"channel_gradients", "delta", 128, true, 0, 4956, 681, 882, 0},
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
    {"channel_prepare", "delta", 128, true, 0, 11787, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 57, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 727, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 1104, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 252, 678, 0, 0, 247},
    {"channel_sweeps", "additive", 128, true, 252, 962, 0, 0, 349},
    {"channel_sweeps", "delta", 64, true, 277, 1333, 0, 0, 848},
    {"channel_sweeps", "delta", 128, true, 242, 1921, 0, 0, 1008},
    {"channel_walk", "additive", 64, false, 359, 697, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 291, 1006, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 448, 1274, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 422, 1514, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 460, 854, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 467, 1042, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 409, 1194, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 418, 1409, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 169, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 182, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1523, 1911, 940, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2066, 1977, 1235, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1366, 1324, 904, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1819, 1326, 1196, 0},
    {"tensor_join", "additive", 64, false, 0, 608, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1127, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 454, 44, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 453, 44, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1611, 1724, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1356, 2361, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 2646, 1697, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 2391, 2334, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1714, 2063, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2859, 2032, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 1256, 1571, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 1047, 2162, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 2035, 1543, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1826, 2133, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1327, 1913, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 2186, 1882, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 605, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 743, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 268, 1273, 0, 0, 1470},
    {"tensor_sweeps", "comba", 128, true, 244, 1793, 0, 0, 1632},
    {"tensor_sweeps", "delta", 64, true, 265, 1217, 0, 0, 1390},
    {"tensor_sweeps", "delta", 128, true, 244, 1732, 0, 0, 1489},
    {"tensor_walk", "comba", 64, false, 429, 1234, 0, 0, 888},
    {"tensor_walk", "comba", 128, false, 433, 1544, 0, 0, 1080},
    {"tensor_walk", "comba f16", 64, false, 431, 1727, 0, 0, 918},
    {"tensor_walk", "comba f16", 128, false, 431, 2226, 0, 0, 1110},
    {"tensor_walk", "delta", 64, false, 338, 1406, 0, 0, 247},
    {"tensor_walk", "delta", 128, false, 300, 1825, 0, 0, 102},
    {"tensor_walk", "delta f16", 64, false, 341, 1897, 0, 0, 281},
    {"tensor_walk", "delta f16", 128, false, 298, 2505, 0, 0, 136},
    {"tensor_walk_states", "delta", 64, false, 0, 1968, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2716, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2984, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 4212, 0, 0, 0},
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
