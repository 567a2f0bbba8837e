// The instructions of kernels whose products are those of tensor cores, and of steps of one token: a table that
// `tests/cuda/issued.py --write` measures anew.
#include "cuda/plumbing/issued.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace headrace::cuda {
namespace {

// Instructions of a warp, on the mean of a block's, or of those with values, and what others compute for each of them,
// where others fetch; a third group always counts as others: beside its steps (less than none where the last one does
// less); of a step; of a step more for each value head of the block, and for each 64 values of such a head. In code of
// compute capability 9.0, of whole tiles and of the numbers that problem lines have: more 16-bit parts, l2norm and gates
// that are computed first take more, and so does code for mma.sync, and of tensor_gradients each 128 values behind the
// first.
struct Issued {
    const char *kernel, *rule;
    int K;          // the channels that it is compiled for; a walk's of a backward may be values
    bool backward;  // prepared for one; of most there is one row for both
    double beside, step, head, values;
};
constexpr Issued measured[] = {
    // begin
    {"channel_estimate", "delta", 64, false, 63, 46, 0, 0},
    {"channel_estimate", "delta", 64, true, 68, 45, 0, 0},
    {"channel_estimate", "delta", 128, false, 63, 59, 0, 0},
    {"channel_estimate", "delta", 128, true, 68, 58, 0, 0},
    {"channel_gradients", "additive", 64, true, 0, 4281, 328, 488},
    {"channel_gradients", "additive", 128, true, 0, 4148, 360, 506},
    {"channel_gradients", "delta", 64, true, 0, 4869, 328, 621},
    {"channel_gradients", "delta", 128, true, 0, 4716, 360, 619},
    {"channel_gradients_low", "delta", 64, true, 0, 67, 0, 0},
    {"channel_gradients_low", "delta", 128, true, 0, 61, 0, 0},
    {"channel_join", "additive", 64, false, 190, 83, 0, 0},
    {"channel_join", "additive", 64, true, 190, 83, 0, 0},
    {"channel_join", "additive", 128, false, 222, 121, 0, 0},
    {"channel_join", "additive", 128, true, 222, 121, 0, 0},
    {"channel_key_sums", "additive", 64, true, 0, 738, 0, 0},
    {"channel_key_sums", "additive", 128, true, 0, 779, 0, 0},
    {"channel_key_sums", "delta", 64, true, 0, 738, 0, 0},
    {"channel_key_sums", "delta", 128, true, 0, 779, 0, 0},
    {"channel_prepare", "additive", 64, false, 0, 2660, 0, 0},
    {"channel_prepare", "additive", 64, true, 0, 3353, 0, 0},
    {"channel_prepare", "additive", 128, false, 0, 4534, 0, 0},
    {"channel_prepare", "additive", 128, true, 0, 5690, 0, 0},
    {"channel_prepare", "delta", 64, false, 0, 3719, 0, 0},
    {"channel_prepare", "delta", 64, true, 0, 4501, 0, 0},
    {"channel_prepare", "delta", 128, false, 0, 5698, 0, 0},
    {"channel_prepare", "delta", 128, true, 0, 7169, 0, 0},
    {"channel_prepare_low", "delta", 64, false, 0, 46, 0, 0},
    {"channel_prepare_low", "delta", 64, true, 0, 46, 0, 0},
    {"channel_prepare_low", "delta", 128, false, 0, 46, 0, 0},
    {"channel_prepare_low", "delta", 128, true, 0, 46, 0, 0},
    {"channel_states", "additive", 64, false, 146, 220, 0, 0},
    {"channel_states", "additive", 128, false, 184, 358, 0, 0},
    {"channel_states", "delta", 64, false, 74, 359, 0, 0},
    {"channel_states", "delta", 128, false, 214, 425, 0, 0},
    {"channel_sweep_segments", "additive", 64, true, 276, 423, 0, 0},
    {"channel_sweep_segments", "additive", 128, true, 344, 607, 0, 0},
    {"channel_sweep_segments", "delta", 64, true, 468, 987, 0, 0},
    {"channel_sweep_segments", "delta", 128, true, 730, 1228, 0, 0},
    {"channel_sweeps", "additive", 64, true, 173, 570, 0, 0},
    {"channel_sweeps", "additive", 128, true, 169, 773, 0, 0},
    {"channel_sweeps", "delta", 64, true, 124, 1288, 0, 0},
    {"channel_sweeps", "delta", 128, true, 94, 1582, 0, 0},
    {"channel_walk", "additive", 64, false, 94, 514, 0, 0},
    {"channel_walk", "additive", 128, false, 77, 693, 0, 0},
    {"channel_walk", "delta", 64, false, 101, 498, 0, 0},
    {"channel_walk", "delta", 128, false, 101, 597, 0, 0},
    {"channel_walk_two", "delta", 128, false, 107, 991, 0, 0},
    {"recurrent_step", "additive", 64, false, 0, 391, 0, 0},
    {"recurrent_step", "additive", 128, false, 0, 484, 0, 0},
    {"recurrent_step", "additive", 256, false, 0, 484, 0, 0},
    {"recurrent_step", "additive channel", 64, false, 0, 412, 0, 0},
    {"recurrent_step", "additive channel", 128, false, 0, 552, 0, 0},
    {"recurrent_step", "additive channel", 256, false, 0, 651, 0, 0},
    {"recurrent_step", "comba", 64, false, 0, 498, 0, 0},
    {"recurrent_step", "comba", 128, false, 0, 610, 0, 0},
    {"recurrent_step", "comba", 256, false, 0, 610, 0, 0},
    {"recurrent_step", "delta", 64, false, 0, 491, 0, 0},
    {"recurrent_step", "delta", 128, false, 0, 609, 0, 0},
    {"recurrent_step", "delta", 256, false, 0, 610, 0, 0},
    {"recurrent_step", "delta channel", 64, false, 0, 512, 0, 0},
    {"recurrent_step", "delta channel", 128, false, 0, 677, 0, 0},
    {"recurrent_step", "delta channel", 256, false, 0, 777, 0, 0},
    {"split_gradients", "additive channel f64", 64, true, 0, 510, 3318, 933},
    {"split_gradients", "additive channel f64", 128, true, 0, 460, 6090, 1705},
    {"split_gradients", "additive f64", 64, false, 0, 513, 5248, 1487},
    {"split_gradients", "additive f64", 128, false, 0, 419, 6876, 2539},
    {"split_gradients", "delta channel f64", 64, true, 0, 438, 4349, 1566},
    {"split_gradients", "delta channel f64", 128, true, 0, 296, 7903, 2398},
    {"split_gradients", "delta f64", 64, true, 0, 359, 7652, 2970},
    {"split_gradients", "delta f64", 128, true, 0, 81, 10287, 4210},
    {"split_sweeps", "additive channel f64", 64, true, -466, 1147, 0, 0},
    {"split_sweeps", "additive channel f64", 128, true, -923, 1972, 0, 0},
    {"split_sweeps", "additive f64", 64, false, -546, 1249, 0, 0},
    {"split_sweeps", "additive f64", 128, false, -638, 1713, 0, 0},
    {"split_sweeps", "delta channel f64", 64, true, -444, 1796, 0, 0},
    {"split_sweeps", "delta channel f64", 128, true, -831, 2908, 0, 0},
    {"split_sweeps", "delta f64", 64, true, -692, 2149, 0, 0},
    {"split_sweeps", "delta f64", 128, true, -1090, 3193, 0, 0},
    {"tensor_add_outputs", "additive", 64, false, 0, 182, 53, 0},
    {"tensor_add_outputs", "additive", 128, false, 0, 186, 48, 0},
    {"tensor_forward", "additive", 64, false, 177, 474, 0, 0},
    {"tensor_forward", "additive", 128, false, 309, 469, 0, 0},
    {"tensor_forward_gradient", "additive", 64, false, 269, 499, 0, 0},
    {"tensor_forward_gradient", "additive", 128, false, 435, 474, 0, 0},
    {"tensor_forward_terms", "additive", 64, false, 215, 717, 0, 0},
    {"tensor_forward_terms", "additive", 128, false, 362, 738, 0, 0},
    {"tensor_gate", "additive", 64, false, 0, 129, 0, 0},
    {"tensor_gate", "additive", 128, false, 0, 142, 0, 0},
    {"tensor_gate", "comba", 256, true, 0, 83, 0, 0},
    {"tensor_gate", "delta", 256, true, 0, 83, 0, 0},
    {"tensor_gradients", "comba", 64, true, 0, 1297, 1297, 510},
    {"tensor_gradients", "comba", 128, true, 0, 1444, 1420, 311},
    {"tensor_gradients", "comba", 256, true, 0, 2489, 2803, 616},
    {"tensor_gradients", "delta", 64, true, 0, 1238, 1131, 513},
    {"tensor_gradients", "delta", 128, true, 0, 1243, 1301, 311},
    {"tensor_gradients", "delta", 256, true, 0, 2129, 2632, 616},
    {"tensor_join", "additive", 64, false, 0, 173, 0, 0},
    {"tensor_join", "additive", 128, false, 0, 221, 0, 0},
    {"tensor_join_transitions", "comba", 64, true, 206, 289, 0, 0},
    {"tensor_join_transitions", "comba", 128, true, 220, 431, 0, 0},
    {"tensor_join_transitions", "delta", 64, false, 206, 289, 0, 0},
    {"tensor_join_transitions", "delta", 64, true, 206, 289, 0, 0},
    {"tensor_join_transitions", "delta", 128, false, 220, 431, 0, 0},
    {"tensor_join_transitions", "delta", 128, true, 220, 431, 0, 0},
    {"tensor_join_transitions", "delta f16", 64, false, 206, 289, 0, 0},
    {"tensor_join_transitions", "delta f16", 128, false, 220, 431, 0, 0},
    {"tensor_prepare", "comba", 64, false, 0, 1048, 910, 0},
    {"tensor_prepare", "comba", 64, true, 0, 1057, 1146, 0},
    {"tensor_prepare", "comba", 128, false, 0, 1483, 911, 0},
    {"tensor_prepare", "comba", 128, true, 0, 1515, 1146, 0},
    {"tensor_prepare", "comba", 256, false, 0, 2374, 911, 0},
    {"tensor_prepare", "comba", 256, true, 0, 2383, 1146, 0},
    {"tensor_prepare", "comba f16", 64, false, 0, 1132, 997, 0},
    {"tensor_prepare", "comba f16", 128, false, 0, 1658, 990, 0},
    {"tensor_prepare", "delta", 64, false, 0, 519, 838, 0},
    {"tensor_prepare", "delta", 64, true, 0, 528, 1086, 0},
    {"tensor_prepare", "delta", 128, false, 0, 694, 838, 0},
    {"tensor_prepare", "delta", 128, true, 0, 705, 1086, 0},
    {"tensor_prepare", "delta", 256, false, 0, 996, 839, 0},
    {"tensor_prepare", "delta", 256, true, 0, 1006, 1086, 0},
    {"tensor_prepare", "delta f16", 64, false, 0, 522, 925, 0},
    {"tensor_prepare", "delta f16", 128, false, 0, 689, 918, 0},
    {"tensor_states", "additive", 64, false, 0, 263, 0, 0},
    {"tensor_states", "additive", 128, false, 0, 258, 0, 0},
    {"tensor_sweep_segments", "comba", 64, true, 907, 849, 0, 0},
    {"tensor_sweep_segments", "comba", 128, true, 1656, 1053, 0, 0},
    {"tensor_sweep_segments", "delta", 64, true, 907, 835, 0, 0},
    {"tensor_sweep_segments", "delta", 128, true, 1656, 1032, 0, 0},
    {"tensor_sweeps", "comba", 64, true, 271, 891, 0, 0},
    {"tensor_sweeps", "comba", 128, true, 612, 1091, 0, 0},
    {"tensor_sweeps", "comba", 256, true, 500, 1329, 0, 0},
    {"tensor_sweeps", "delta", 64, true, 271, 877, 0, 0},
    {"tensor_sweeps", "delta", 128, true, 612, 1070, 0, 0},
    {"tensor_sweeps", "delta", 256, true, 500, 1292, 0, 0},
    {"tensor_walk", "comba", 64, false, 122, 1024, 0, 0},
    {"tensor_walk", "comba", 128, false, 509, 1028, 0, 0},
    {"tensor_walk", "comba", 256, false, 496, 1348, 0, 0},
    {"tensor_walk", "comba f16", 64, false, 125, 1631, 0, 0},
    {"tensor_walk", "comba f16", 128, false, 528, 1733, 0, 0},
    {"tensor_walk", "delta", 64, false, 79, 1009, 0, 0},
    {"tensor_walk", "delta", 128, false, 458, 1023, 0, 0},
    {"tensor_walk", "delta", 256, false, 491, 1294, 0, 0},
    {"tensor_walk", "delta f16", 64, false, 75, 1622, 0, 0},
    {"tensor_walk", "delta f16", 128, false, 472, 1731, 0, 0},
    {"tensor_walk_states", "delta", 64, false, 13, 803, 0, 0},
    {"tensor_walk_states", "delta", 128, false, 341, 872, 0, 0},
    {"tensor_walk_states", "delta f16", 64, false, -35, 1112, 0, 0},
    {"tensor_walk_states", "delta f16", 128, false, 339, 1275, 0, 0},
    {"tensor_walk_two", "comba", 128, false, 352, 882, 0, 0},
    {"tensor_walk_two", "delta", 128, false, 340, 863, 0, 0},
    {"walk_forward", "additive channel f64", 64, false, 416, 1334, 0, 0},
    {"walk_forward", "additive channel f64", 128, false, 560, 2125, 0, 0},
    {"walk_forward", "additive f64", 64, false, 424, 1290, 0, 0},
    {"walk_forward", "additive f64", 128, false, 568, 1847, 0, 0},
    {"walk_forward", "delta channel f64", 64, false, 430, 1737, 0, 0},
    {"walk_forward", "delta channel f64", 128, false, 574, 2699, 0, 0},
    {"walk_forward", "delta f64", 64, false, 442, 2173, 0, 0},
    {"walk_forward", "delta f64", 128, false, 586, 3030, 0, 0},
    // end
    {"", "", 0, false, 0, 0, 0, 0}};

bool is_step(const Kernel& kernel) { return std::strcmp(kernel.name, "recurrent_step") == 0; }

const char* rule_of(const Kernel& kernel, const KernelArgs& args, bool in_double) {
    if (is_step(kernel) && args.channel_gate) return args.delta ? "delta channel" : "additive channel";
    if (in_double && args.channel_gate) return args.delta ? "delta channel f64" : "additive channel f64";
    if (in_double) return args.delta ? "delta f64" : "additive f64";
    const bool f16 = args.q.dtype == DType::f16 && !is_step(kernel);
    if (args.undecayed_error) return f16 ? "comba f16" : "comba";
    if (args.delta) return f16 ? "delta f16" : "delta";
    return "additive";  // of f16 a third more
}

const Issued* row_of(const Kernel& kernel, const KernelArgs& args, bool in_double, bool backward) {
    const auto of = [&](int K) {
        const auto found = std::find_if(std::begin(measured), std::end(measured), [&](const Issued& row) {
            return std::strcmp(row.kernel, kernel.name) == 0 &&
                   std::strcmp(row.rule, rule_of(kernel, args, in_double)) == 0 && row.K == K &&
                   row.backward == backward;
        });
        return found == std::end(measured) ? nullptr : found;
    };
    if (args.K <= 64) return of(64);
    const Issued* const wide = args.K > 128 ? of(256) : nullptr;  // few have code of their own for so many
    return wide != nullptr ? wide : of(128);
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
    const bool fetched = is("tensor_walk") || is("tensor_sweeps") || is("tensor_sweep_segments");
    const int others = (fetched ? fetching_threads(args.K) : 0) + (threads == three_groups ? launched_threads : 0);
    double warps = (threads - others) / 32.0;
    if (is("channel_estimate")) {  // a warp for each sequence and head
        const auto walks = static_cast<double>(args.N * args.HV);
        warps = walks / std::ceil(walks / warps);
    }
    const double heads = heads_of(kernel, args), blocks = (args.V + tensor_values - 1) / tensor_values;
    work.block.issued = warps * found->beside;
    double more = heads * (found->head + blocks * found->values);
    // A block has one value head, and stores gradients of keys where no other shares them.
    if (is("channel_gradients"))
        more = (args.group == 1 ? found->head : 0) + blocks * found->values;
    work.step.issued = warps * (found->step + more);
    // Of two groups that walk one has nothing to do, but what is fetched is as much.
    constexpr double of_a_pair = 0.57;
    if (is("tensor_walk_states") && threads == three_groups && args.segments.groups < 2)
        work.block.issued *= of_a_pair, work.step.issued *= of_a_pair;
}

}  // namespace headrace::cuda
