// The kernels of this backend, as the portable code sees them: addresses to launch, parameters, the memory that a block
// needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/layers/layer_args.hpp"
#include "cuda/plumbing/kernel_args.hpp"

namespace headrace::cuda {

// Threads of a block of all kernels but the recurrent form's forward.
inline constexpr int launched_threads = 128;

// What a block takes of shared memory, and of the workspace where that has no room.
struct BlockMemory {
    std::size_t shared, spill;
};

// One form of an operator in one arithmetic: a kernel with KernelArgs as its parameter for each direction.
struct WalkKernels {
    const void *forward, *backward;
    BlockMemory (*forward_memory)(const KernelArgs& args, std::size_t shared_limit);
    BlockMemory (*backward_memory)(const KernelArgs& args, std::size_t shared_limit);
};
// The chunk form: a block walks the chunks of a sequence and head (forward: a block of its values; backward: of a key
// head).
template <class T, bool delta, bool channel_gate>
WalkKernels walk_kernels();

// The chunk form on tensor cores: bf16 tensors, a scalar gate, up to 128 key channels. A block of tensor_threads walks
// the chunks of a sequence, or of a segment (Segments), of a head and of 64 values.
inline constexpr int tensor_chunk = 64, tensor_threads = 256, tensor_values = 64;
// join: a block of launched_threads has join_columns values of a head.
inline constexpr int join_columns = 8;
struct TensorKernels {
    const void* forward;  // outputs; from segments[].states where there are segments
    const void* states;   // of segments that no state enters, and behind the values' blocks those of the transitions
    const void* gate;     // additive rule: the gradient of the gate of a chunk, of what the walks left (GateWalk)
    const void* join;     // from what leaves segments to what enters them
    std::size_t (*shared)(const KernelArgs& args);       // bytes of a block of forward or states, by args.stages
    std::size_t (*join_shared)(const KernelArgs& args);  // of join
    std::size_t (*gate_shared)(const KernelArgs& args);  // of gate
};
template <bool delta>
TensorKernels tensor_kernels(std::int64_t K);

// The backward of the chunk form in two launches. Sweeps: a block for each sequence, value head and value_columns walks
// the chunks, backwards for the gradients of states, forwards for the states, which only a launch of twice as many
// blocks has. Gradients: blocks, any number of them, share the parts and key heads.
struct SplitKernels {
    const void *sweeps, *gradients;
    BlockMemory (*sweeps_memory)(const KernelArgs& args, std::size_t shared_limit);
    BlockMemory (*gradients_memory)(const KernelArgs& args, std::size_t shared_limit);
};
template <class T, bool delta, bool channel_gate>
SplitKernels split_kernels();

// The recurrent form: a block walks the tokens of a sequence, a head and recurrent_columns values, a thread for each
// key channel, in multiples of 32. Forward and step.
inline constexpr int recurrent_columns = 32,
                     recurrent_segment = 16;  // segment: tokens from one saved state to the next
struct RecurrentKernels {
    const void *forward, *backward;  // backward: a block for each sequence and key head, as the chunk form's
    BlockMemory (*forward_memory)(const KernelArgs& args, std::size_t shared_limit);
    BlockMemory (*backward_memory)(const KernelArgs& args, std::size_t shared_limit);
};
template <class T, bool delta>
RecurrentKernels recurrent_kernels();

// The layer functions: a block for a group of windows, a sequence (states, step) or a group of rows, of convolutions
// with 32 channels.
struct LayerKernels {
    const void *convolution_forward, *convolution_state, *convolution_backward, *convolution_state_gradient,
        *convolution_step;
    const void *norm_forward, *norm_backward;
    BlockMemory (*convolution_memory)(const ConvolutionArgs& args);
    BlockMemory (*norm_memory)(const RmsNormArgs& args);
};
template <class T>
LayerKernels layer_kernels();

// target[head, channel] = sum of sums[n * step + head * channels + channel] over n < count; a warp has one of them
inline constexpr int totals_per_block = 4;
struct SumsArgs {
    const double* sums;
    Strided target;
    std::int64_t count, heads, channels, step;
};
const void* sums_kernel();

// to[i] = values[i]: integers that travel as parameters of the launch.
inline constexpr int most_numbers = 256;
struct NumbersArgs {
    std::int64_t* to;
    int count;
    std::int64_t values[most_numbers];
};
const void* numbers_kernel();

}  // namespace headrace::cuda
