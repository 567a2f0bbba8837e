// Prints for kernel_table.py what a block of each kernel takes of shared memory, and of L2 beyond, at three sizes.
#include <cstdio>
#include <string>
#include <type_traits>

#include "cuda/chunk/additive_kernel.hpp"
#include "cuda/chunk/channel_gradient.hpp"
#include "cuda/chunk/channel_prepare.hpp"
#include "cuda/chunk/channel_sweep.hpp"
#include "cuda/chunk/channel_walk.hpp"
#include "cuda/chunk/gate_terms.hpp"
#include "cuda/chunk/gradient_kernel.hpp"
#include "cuda/chunk/prepare_kernel.hpp"
#include "cuda/chunk/segment_join.hpp"
#include "cuda/chunk/split_kernel.hpp"
#include "cuda/chunk/walker_kernel.hpp"
#include "cuda/layers/convolution_kernel.hpp"
#include "cuda/layers/rms_norm_kernel.hpp"
#include "cuda/plumbing/blocking.hpp"
#include "cuda/recurrent/adjoint_kernel.hpp"

namespace headrace::cuda {
namespace {

struct Size {
    int K, V;
};
constexpr Size sizes[] = {{64, 64}, {128, 128}, {256, 512}};

KernelArgs arguments(Size size, bool delta, bool channel_gate, bool in_double = false) {
    Problem problem;
    problem.rule = delta ? Rule::delta : Rule::additive;
    problem.channel_gate = channel_gate, problem.wide = in_double;
    problem.K = size.K, problem.V = size.V;
    KernelArgs args{};
    args.group = 1, args.K = size.K, args.V = size.V;
    args.delta = delta, args.channel_gate = channel_gate, args.gate_gradient = true;
    args.chunk = walk_chunk(problem);
    args.value_columns = walk_value_columns(problem, problem.V);
    args.shared_limit = in_double ? most_shared_bytes : walk_shared_bytes;
    return args;
}

// One line: the name, then "shared+beyond" of each size.
template <class Carve>
void print(const char* name, bool delta, bool channel_gate, Carve carve, bool in_double = false) {
    std::printf("%s", name);
    for (const Size size : sizes) {
        const KernelArgs args = arguments(size, delta, channel_gate, in_double);
        Arena arena{nullptr, nullptr, args.shared_limit};
        carve(args, arena);
        std::printf(" %zu+%zu", arena.shared_used, arena.spill_used);
    }
    std::printf("\n");
}

template <class T, bool delta, bool channel_gate>
void print_walk() {
    using Gate = std::conditional_t<channel_gate, ChannelGate<T>, ScalarGate<T>>;
    using Kernel = ChunkKernel<Gate, delta>;
    char name[64];
    const auto name_of = [&](const char* direction) {
        std::snprintf(name, sizeof name, "walk_%s,%s,%s,%s", direction, sizeof(T) == 8 ? "f64" : "f32",
                      delta ? "delta" : "additive", channel_gate ? "channel" : "scalar");
        return name;
    };
    constexpr bool in_double = sizeof(T) == 8;
    const auto forward = [](auto& args, auto& arena) { Kernel(args, arena, Use::forward); };
    const auto backward = [](auto& args, auto& arena) { Kernel(args, arena, Use::backward); };
    print(name_of("forward"), delta, channel_gate, forward, in_double);
    if (in_double) print(name_of("backward"), delta, channel_gate, backward, in_double);
}

template <bool delta, bool channel_gate>
void print_split() {
    using Gate = std::conditional_t<channel_gate, ChannelGate<double>, ScalarGate<double>>;
    char name[64];
    const auto name_of = [&](const char* launch) {
        std::snprintf(name, sizeof name, "split_%s,f64,%s,%s", launch, delta ? "delta" : "additive",
                      channel_gate ? "channel" : "scalar");
        return name;
    };
    print(
        name_of("sweeps"), delta, channel_gate,
        [](auto& args, auto& arena) { SplitKernel<Gate, delta, ChunkOps<Gate, few_values>>(args, arena, Use::sweeps); },
        true);
    print(
        name_of("gradients"), delta, channel_gate,
        [](auto& args, auto& arena) { SplitKernel<Gate, delta, ChunkOps<Gate>>(args, arena, Use::gradients); }, true);
}

// All in shared memory, two chunks' rows in it, or one's; the same at any size that K channels serve.
template <class Block>
void print_tensor(const char* name, bool delta, bool outputs, int value_columns = tensor_values, int stages = 2) {
    print(name, delta, false, [=](const KernelArgs& args, Arena& arena) {
        KernelArgs of_block = args;
        of_block.stages = stages, of_block.o.given = outputs, of_block.value_columns = value_columns;
        arena.shared_size = ~std::size_t{0};
        Block(of_block, arena);
    });
}

// With one gate per token.
template <int K, class Format>
void print_scalar(const std::string& size) {
    const auto print_walk = [&]<AdditiveWalk walk>(const char* name) {
        print_tensor<AdditiveKernel<K, walk, Format>>((name + size).c_str(), false, true);
    };
    print_walk.template operator()<AdditiveWalk::forward>("tensor_forward,");
    print_walk.template operator()<AdditiveWalk::gradient>("tensor_forward_gradient,");
    print_walk.template operator()<AdditiveWalk::gradient_with_terms>("tensor_forward_terms,");
    print_walk.template operator()<AdditiveWalk::gradient>("tensor_states,");
    print_tensor<PrepareKernel<K, Format, false>>(("tensor_prepare," + size).c_str(), true, true);
    print_tensor<WalkerKernel<K, Format>>(("tensor_walk," + size).c_str(), true, true);
    print_tensor<WalkerKernel<K, Format, WalkTo::states>>(("tensor_walk_states," + size).c_str(), true, false);
}
// Under channel gates, and of the delta rule's backward.
template <int K>
void print_channel(const char* size) {
    const auto print_rule = [&]<bool delta>() {
        const std::string rest = std::string(",") + size + (delta ? ",delta" : ",additive");
        print_tensor<ChannelPrepare<K, delta>>(("channel_prepare" + rest).c_str(), delta, true);
        if (delta) print_tensor<ChannelPrepare<K, delta>>(("channel_prepare_low" + rest).c_str(), delta, true);
        print_tensor<ChannelWalk<K, delta>>(("channel_walk" + rest).c_str(), delta, true);
        print_tensor<ChannelWalk<K, delta, WalkTo::states>>(("channel_states" + rest).c_str(), delta, false);
        constexpr int most_swept = most_channel_sweep_threads / 2;
        print_tensor<ChannelSweep<K, delta, false>>(("channel_sweeps" + rest).c_str(), delta, true, most_swept);
        print_tensor<ChannelSweep<K, delta, true>>(("channel_sweep_segments" + rest).c_str(), delta, true, most_swept);
        print_tensor<ChannelGradient<K, delta, false>>(("channel_gradients" + rest).c_str(), delta, true);
        if (delta)
            print_tensor<ChannelGradient<K, delta, delta>>(("channel_gradients_low," + std::string(size)).c_str(),
                                                           delta, true);
    };
    print_rule.template operator()<false>();
    print_rule.template operator()<true>();
    print_tensor<ChannelKeySums<K>>((std::string("channel_key_sums,") + size).c_str(), true, true);
    print_tensor<TransitionJoin<K>>((std::string("tensor_join_transitions,") + size).c_str(), true, true);
}
template <int K>
void print_backward(const char* size) {
    print_tensor<PrepareKernel<K, Bf16, true>>((std::string("tensor_prepare,") + size + ",backward").c_str(), true,
                                               true);
    print_tensor<SweepKernel<K, Bf16, false>>((std::string("tensor_sweeps,") + size).c_str(), true, true);
    print_tensor<SweepKernel<K, Bf16, true>>((std::string("tensor_sweep_segments,") + size).c_str(), true, true);
    print_tensor<GradientKernel<K, false>>((std::string("tensor_gradients,") + size).c_str(), true, true);
    print_tensor<GradientKernel<K, true>>((std::string("tensor_gradients,") + size + ",comba").c_str(), true, true);
}

// Of the delta rule: blocks of 128 values; with one gate per token more than 128 channels.
void print_wide() {
    print_tensor<WalkerKernel<128, Bf16, WalkTo::outputs_of_two>>("tensor_walk_two,k128", true, true,
                                                                  2 * tensor_values);
    print_tensor<ChannelWalk<128, true, WalkTo::outputs_of_two>>("channel_walk_two,k128,delta", true, true,
                                                                 2 * tensor_values);
    print_tensor<PrepareKernel<256, Bf16, false>>("tensor_prepare,k256", true, true);
    print_tensor<PrepareKernel<256, Bf16, true>>("tensor_prepare,k256,backward", true, true);
    print_tensor<WalkerKernel<256, Bf16>>("tensor_walk,k256", true, true);
    print_tensor<SweepKernel<256, Bf16, false>>("tensor_sweeps,k256", true, true, tensor_values, 1);
    print_tensor<GradientKernel<128, false, 2>>("tensor_gradients,k256", true, true);
    print_tensor<GradientKernel<128, true, 2>>("tensor_gradients,k256,comba", true, true);
}

template <class T, bool delta>
void print_recurrent() {
    char name[64];
    std::snprintf(name, sizeof name, "recurrent_backward,%s,%s", sizeof(T) == 8 ? "f64" : "f32",
                  delta ? "delta" : "additive");
    print(name, delta, true, [](auto& args, auto& arena) { AdjointKernel<T, delta>(args, arena); });
}

// What does not depend on the size: a convolution of four tokens, a norm.
template <class T>
void print_layers() {
    const bool wide = sizeof(T) == 8;
    ConvolutionArgs convolution{};
    convolution.W = 4;
    const RmsNormArgs norm{};
    print(wide ? "convolution,f64" : "convolution,f32", false, false,
          [&](auto&, auto& arena) { Convolution<T>(convolution, arena, 0); });
    print(wide ? "norm,f64" : "norm,f32", false, false, [&](auto&, auto& arena) { RmsNorm<T>(norm, arena); });
}

template <class T, bool delta>
void print_all() {
    print_walk<T, delta, false>();
    print_walk<T, delta, true>();
    if (sizeof(T) == 8) {
        print_split<delta, false>();
        print_split<delta, true>();
    }
    print_recurrent<T, delta>();
}

}  // namespace
}  // namespace headrace::cuda

int main() {
    using namespace headrace::cuda;
    print_all<float, false>();
    print_all<float, true>();
    print_all<double, false>();
    print_all<double, true>();
    print_scalar<64, Bf16>("k64");
    print_scalar<128, Bf16>("k128");
    print_scalar<64, F16>("k64,f16");
    print_scalar<128, F16>("k128,f16");
    print_channel<64>("k64");
    print_channel<128>("k128");
    print_backward<64>("k64");
    print_backward<128>("k128");
    print_wide();
    print_layers<float>();
    print_layers<double>();
}
