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
    {"channel_gradients", "additive", 64, true, 0, 4458, 663, 700, 0},
    {"channel_gradients", "additive", 128, true, 0, 4380, 771, 759, 0},
    {"channel_gradients", "delta", 64, true, 0, 5127, 663, 861, 0},
    {"channel_gradients", "delta", 128, true, 0, 4947, 771, 858, 0},
    {"channel_gradients_low", "delta", 64, true, 0, 72, 0, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 64, 0, 0, 0},
    {"channel_join", "additive", 64, false, 0, 1297, 0, 0, 0},
    {"channel_join", "additive", 128, false, 0, 2456, 0, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 1164, 0, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 1291, 0, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 1164, 0, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 1291, 0, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 4831, 0, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 5679, 0, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 7893, 0, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 9430, 0, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 5260, 0, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 7100, 0, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 8011, 0, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 11621, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 47, 0, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 47, 0, 0, 0},
    {"channel_states", "additive", 64, false, 0, 476, 0, 0, 0},
    {"channel_states", "additive", 128, false, 0, 710, 0, 0, 0},
    {"channel_sweeps", "additive", 64, true, 210, 713, 0, 0, 507},
    {"channel_sweeps", "additive", 128, true, 226, 962, 0, 0, 602},
    {"channel_sweeps", "delta", 64, true, 173, 1381, 0, 0, 1373},
    {"channel_sweeps", "delta", 128, true, 172, 1851, 0, 0, 1530},
    {"channel_walk", "additive", 64, false, 102, 737, 0, 0, 0},
    {"channel_walk", "additive", 128, false, 80, 919, 0, 0, 0},
    {"channel_walk", "delta", 64, false, 102, 1010, 0, 0, 0},
    {"channel_walk", "delta", 128, false, 85, 1384, 0, 0, 0},
    {"tensor_forward", "additive", 64, false, 234, 662, 0, 0, 0},
    {"tensor_forward", "additive", 128, false, 250, 749, 0, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 125, 924, 0, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 126, 1050, 0, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 126, 0, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 140, 0, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1396, 1838, 930, 0},
    {"tensor_gradients", "comba", 128, true, 0, 2150, 1943, 1268, 0},
    {"tensor_gradients", "delta", 64, true, 0, 1284, 1255, 857, 0},
    {"tensor_gradients", "delta", 128, true, 0, 1922, 1257, 1197, 0},
    {"tensor_join", "additive", 64, false, 0, 597, 0, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 1117, 0, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 0, 2259, 0, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 0, 7121, 0, 0, 0},
    {"tensor_key_gradient", "additive", 64, false, 0, 342, 48, 0, 0},
    {"tensor_key_gradient", "additive", 128, false, 0, 340, 48, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1260, 1217, 0, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1189, 1517, 0, 0},
    {"tensor_prepare", "comba", 128, false, 0, 2149, 1222, 0, 0},
    {"tensor_prepare", "comba", 128, true, 0, 2095, 1522, 0, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1357, 1229, 0, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 2383, 1234, 0, 0},
    {"tensor_prepare", "delta", 64, false, 0, 934, 1085, 0, 0},
    {"tensor_prepare", "delta", 64, true, 0, 863, 1385, 0, 0},
    {"tensor_prepare", "delta", 128, false, 0, 1414, 1089, 0, 0},
    {"tensor_prepare", "delta", 128, true, 0, 1360, 1390, 0, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 999, 1097, 0, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 1566, 1101, 0, 0},
    {"tensor_states", "additive", 64, false, 0, 366, 0, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 452, 0, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 167, 1475, 0, 0, 0},
    {"tensor_sweeps", "comba", 128, true, 395, 1891, 0, 0, 0},
    {"tensor_sweeps", "delta", 64, true, 167, 1443, 0, 0, 0},
    {"tensor_sweeps", "delta", 128, true, 395, 1843, 0, 0, 0},
    {"tensor_walk", "comba", 64, false, 167, 1446, 0, 0, 0},
    {"tensor_walk", "comba", 128, false, 307, 1728, 0, 0, 0},
    {"tensor_walk", "comba f16", 64, false, 169, 2034, 0, 0, 0},
    {"tensor_walk", "comba f16", 128, false, 325, 2318, 0, 0, 0},
    {"tensor_walk", "delta", 64, false, 106, 1436, 0, 0, 0},
    {"tensor_walk", "delta", 128, false, 216, 1717, 0, 0, 0},
    {"tensor_walk", "delta f16", 64, false, 89, 2032, 0, 0, 0},
    {"tensor_walk", "delta f16", 128, false, 215, 2316, 0, 0, 0},
    {"tensor_walk_states", "delta", 64, false, 0, 1690, 0, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 0, 2145, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, 0, 2262, 0, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 0, 2948, 0, 0, 0},
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
