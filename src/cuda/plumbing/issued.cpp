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
    {"channel_gradients", "delta", 128, true, 0, 4957, 681, 882, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 76, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 73, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1325, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2485, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1211, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1210, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1211, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1210, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4931, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5807, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 7965, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9562, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5284, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7212, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 7991, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11690, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 57, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 57, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 653, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 994, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 173, 778, 0, 0, 358},
    {"channel_sweeps", "additive", 128, true, 205, 1035, 0, 0, 459},
    {"channel_sweeps", "delta", 64, true, 184, 1483, 0, 0, 1162},
    {"channel_sweeps", "delta", 128, true, 154, 2059, 0, 0, 1324},
    {"channel_walk", "additive", 64, false, 155, 976, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 111, 1259, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 386, 1428, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 356, 1693, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 338, 975, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 379, 1129, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 277, 1226, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 277, 1442, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 152, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 165, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1519, 1857, 943, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2063, 1923, 1238, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1366, 1300, 907, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1819, 1301, 1199, 0},
    {"tensor_join", "additive", 64, false, 0, 608, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1127, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2287, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7149, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 465, 44, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 464, 44, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1356, 1239, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1294, 1558, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1973, 1241, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1929, 1559, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1464, 1250, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2179, 1253, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 999, 1106, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 938, 1426, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1362, 1109, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1319, 1427, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 1077, 1118, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1506, 1121, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 604, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 743, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 180, 1344, 0, 0, 1947},
    {"tensor_sweeps", "comba", 128, true, 144, 1865, 0, 0, 2110},
    {"tensor_sweeps", "delta", 64, true, 180, 1287, 0, 0, 1867},
    {"tensor_sweeps", "delta", 128, true, 147, 1803, 0, 0, 1966},
    {"tensor_walk", "comba", 64, false, 241, 1444, 0, 0, 1122},
    {"tensor_walk", "comba", 128, false, 245, 1755, 0, 0, 1314},
    {"tensor_walk", "comba f16", 64, false, 247, 1905, 0, 0, 1152},
    {"tensor_walk", "comba f16", 128, false, 247, 2409, 0, 0, 1344},
    {"tensor_walk", "delta", 64, false, 151, 1612, 0, 0, 493},
    {"tensor_walk", "delta", 128, false, 113, 2031, 0, 0, 349},
    {"tensor_walk", "delta f16", 64, false, 138, 2123, 0, 0, 399},
    {"tensor_walk", "delta f16", 128, false, 96, 2735, 0, 0, 256},
    {"tensor_walk_states", "delta", 64, false, 0, 2136, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2884, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2708, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 3693, 0, 0, 0},
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
