// The kernels of this backend, as the portable code sees them: addresses to launch, parameters, the memory that a block
// needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/factor.hpp"
#include "cuda/layers/layer_args.hpp"
#include "cuda/plumbing/kernel_args.hpp"
#include "headrace/launches.hpp"

namespace headrace::cuda {

// Threads of a block of all kernels but those on tensor cores; there, of a group of warps, and of the most groups.
inline constexpr int launched_threads = 128, three_groups = 3 * launched_threads;

// What a block takes of shared memory, and of the workspace where that has no room.
struct BlockMemory {
    std::size_t shared, spill;
};

// What a block does at a step of full length, and beside its steps.
struct BlockWork {
    KernelWork block, step;
};

// The registers that a thread may take so that so many blocks fit on a multiprocessor, which all have 65536.
constexpr int registers_allowed(int threads, int blocks) {
    const int most = 65536 / (threads * blocks) / 8 * 8;
    return most < 255 ? most : 255;
}

// Of a thread of three groups, before these share them (ptx.hpp): a multiple of 8.
inline constexpr int group_registers = registers_allowed(three_groups, 1);

// A kernel with KernelArgs as its parameter.
struct Kernel {
    const char* name;
    const void* function;
    int registers;  // of a thread at most, on the mean where there are more threads
    BlockMemory (*memory)(const KernelArgs& args, std::size_t shared_limit);
    BlockWork (*work)(const KernelArgs& args, std::size_t shared_limit);
    // More than a launch says, where groups of warps share registers (ptx.hpp): of a third group.
    int more_threads = 0;
    std::size_t more_shared = 0;
};

// One form of an operator in one arithmetic; backwards are in double.
struct WalkKernels {
    Kernel forward, backward;
};
// The chunk form: a block walks the chunks of a sequence and head (forward: a block of its values; backward: of a key
// head). Blocks in double, of which shared memory lets in one, have more threads.
constexpr int chunk_threads(bool in_double) { return in_double ? 2 * launched_threads : launched_threads; }
// The least of blocks on a multiprocessor, of which shared memory lets in no more: else ptxas saves registers for a
// fourth, and spills (docs/cuda-kernels.md).
constexpr int chunk_blocks(bool in_double) { return in_double ? 1 : 3; }
template <class T, bool delta, bool channel_gate>
WalkKernels walk_kernels();
template <class T, bool delta, bool channel_gate>
BlockWork walk_forward_work(const KernelArgs& args, std::size_t shared_limit);
template <bool delta, bool channel_gate>
BlockWork walk_backward_work(const KernelArgs& args, std::size_t shared_limit);

// The chunk form on tensor cores: tensors of 16 bits, a scalar gate, up to 128 key channels (of the additive rule as
// many of more: chunk/key_parts.hpp), of the delta rule in bf16 up to 256. A block walks the chunks of a sequence, or
// of a segment (Segments), of a head and 64 or 128 values (args.value_columns): of the delta rule with a thread for
// every half, of the additive one with tensor_threads.
inline constexpr int tensor_chunk = 64, tensor_threads = 256, tensor_values = 64;
// add_outputs: a block has a chunk of a head, 64 or 128 columns and so many threads.
constexpr int adding_threads(std::int64_t K) { return K <= 64 ? launched_threads : 2 * launched_threads; }
// Walks of the delta rule with a scalar gate, but those that leave the states of segments: threads beside two for each of
// the block's values, which fetch and compute what states do not wait for. With few channels a multiprocessor has two
// blocks, which hide what they wait for from each other.
constexpr int fetching_threads(std::int64_t K) { return K <= 64 ? 0 : launched_threads; }
// prepare: a block of launched_threads has a chunk of so many value heads of a key head.
inline constexpr int prepared_heads = 4;
// join: a block has so many values of a head and goes through the segments one by one, by so many threads.
inline constexpr int decay_columns = 16, transition_columns = 8;
constexpr int join_columns(bool delta) { return delta ? transition_columns : decay_columns; }
constexpr int join_threads(bool delta, std::int64_t K = 0) {
    return !delta ? 4 * launched_threads : K <= 64 ? launched_threads : 2 * launched_threads;
}
struct TensorKernels {
    Kernel prepare,  // delta rule: what no state enters of each chunk and value head
        forward,     // outputs; from segments[].states where there are segments; its memory depends on args.stages
        forward_of_two,  // delta rule: the same of 128 values, where groups of warps share registers, if there is one
        forward_of_gradient,  // additive rule: the same in a backward (KeyGradient)
        forward_with_terms,   // and where it leaves terms of a gate's gradient, too (GateWalk)
        states,       // of segments that no state enters, and behind the values' blocks those of the transitions
        gate,         // the gradient of the gate of a chunk, from what walks left (GateWalk) or d_log_decays
        add_outputs,  // additive rule: rows of a chunk, of what walks left of them (AddedOutputs)
        join;         // from what leaves segments to what enters them
};
template <bool delta>
TensorKernels tensor_kernels(std::int64_t K, DType dtype);
template <>
TensorKernels tensor_kernels<false>(std::int64_t K, DType dtype);
template <>
TensorKernels tensor_kernels<true>(std::int64_t K, DType dtype);
template <int K>
BlockWork tensor_forward_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork tensor_states_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork tensor_prepare_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork tensor_walk_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork tensor_walk_states_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork tensor_gate_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork tensor_add_outputs_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork decay_join_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork transition_join_work(const KernelArgs& args, std::size_t shared_limit);

// The same under channel gates, up to 128 key channels, in launches one behind the other; what they leave each other is
// KernelArgs::prepared. A backward has all of them but the walk.
struct ChannelKernels {
    Kernel prepare,   // a block for each chunk (part_at) and value head
        estimate,     // delta rule: a warp for each sequence and head finds the chunks that need 16 bits of their rows
        prepare_low,  // delta rule: their other 8; blocks as prepare's, most with nothing to do
        walk,         // channel_walk_threads; its memory depends on args.stages and value_columns
        walk_of_two;  // delta rule: as TensorKernels::forward_of_two
};
// Two for each of tensor_values; of the delta rule as many again, which fetch and compute outputs. Of walks with
// outputs there is another group where groups of warps share registers.
constexpr int channel_walk_threads(bool delta) { return (delta ? 4 : 2) * tensor_values; }
constexpr int third_group(bool delta) { return delta ? launched_threads : 0; }
template <bool delta>
ChannelKernels channel_kernels(std::int64_t K);
// Of segments, between prepare and walk, which then takes segments: as the same of TensorKernels, states with the
// threads of walks.
struct ChannelSegmentKernels {
    Kernel states, join;
};
template <bool delta>
ChannelSegmentKernels channel_segment_kernels(std::int64_t K);
template <>
ChannelSegmentKernels channel_segment_kernels<false>(std::int64_t K);
template <>
ChannelSegmentKernels channel_segment_kernels<true>(std::int64_t K);
template <int K, bool delta>
BlockWork channel_prepare_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork channel_estimate_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork channel_prepare_low_work(const KernelArgs& args, std::size_t shared_limit);
template <int K, bool delta>
BlockWork channel_walk_work(const KernelArgs& args, std::size_t shared_limit);
template <int K, bool delta>
BlockWork channel_states_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork channel_join_work(const KernelArgs& args, std::size_t shared_limit);

// Before and behind kernels on tensor cores (plumbing/staging.hpp): a block has so many rows of a copy, and
// tensor_chunk tokens of a head's log decays.
inline constexpr int copied_rows = 32;
Kernel staged_copy_kernel();
Kernel log_decays_kernel(bool of_channels);
BlockWork staged_copy_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork log_decays_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork token_log_decays_work(const KernelArgs& args, std::size_t shared_limit);

// The backward of the delta rule on tensor cores. Prepare: as TensorKernels'. Sweeps: blocks as of SplitKernels, of
// args.value_columns values, 64, with a warp for each 16 and fetching_threads. Gradients: a block for each chunk and key
// head.
inline constexpr int most_sweep_threads = 128;
// Of shared memory beside what the others need, in which those that walk leave a third group states and rows of values.
constexpr std::size_t left_to_third_group(std::int64_t K) {
    return fetching_threads(K) == 0 ? 0 : static_cast<std::size_t>(2 * tensor_values * (K + tensor_chunk));
}
struct TensorBackwardKernels {
    Kernel prepare, sweeps, gradients;
};
TensorBackwardKernels tensor_backward_kernels(std::int64_t K, bool comba);
// Blocks of args.segments.blocks of a slot and head, threads as of sweeps.
Kernel tensor_sweep_segments_kernel(std::int64_t K);
template <int K>
BlockWork tensor_sweeps_work(const KernelArgs& args, std::size_t shared_limit);
template <int K, bool comba>
BlockWork tensor_gradients_work(const KernelArgs& args, std::size_t shared_limit);

// The backward under channel gates on tensor cores, behind ChannelKernels' launches that prepare: sweeps and gradients
// as those above; sweeps of up to 128 values, as more arrives of a chunk for all of them, gradients of a chunk and value
// head with a warp for each 16 channels, of chunks whose keys overlap in another launch. Where value heads share keys, a
// last launch with a block for each chunk and key head adds up what they have left of d_q and d_k.
inline constexpr int most_channel_sweep_threads = 256;
constexpr int channel_gradient_threads(std::int64_t K) { return K <= 64 ? 128 : 256; }
Kernel channel_sweeps_kernel(std::int64_t K, bool delta);
Kernel channel_sweep_segments_kernel(std::int64_t K, bool delta);
Kernel channel_gradients_kernel(std::int64_t K, bool delta);
Kernel channel_gradients_low_kernel(std::int64_t K);
Kernel channel_key_sums_kernel(std::int64_t K);
template <int K, bool delta>
BlockWork channel_sweeps_work(const KernelArgs& args, std::size_t shared_limit);
template <int K, bool delta>
BlockWork channel_gradients_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork channel_gradients_low_work(const KernelArgs& args, std::size_t shared_limit);
template <int K>
BlockWork channel_key_sums_work(const KernelArgs& args, std::size_t shared_limit);

// The backward of the chunk form in two launches. Sweeps: a block for each sequence, value head and value_columns walks
// the chunks, backwards for the gradients of states, forwards for the states, which only a launch of twice as many
// blocks has. Gradients: blocks, any number of them, share the parts and key heads.
struct SplitKernels {
    Kernel sweeps, gradients;
};
template <bool delta, bool channel_gate>
SplitKernels split_kernels();
template <bool delta, bool channel_gate>
BlockWork split_sweeps_work(const KernelArgs& args, std::size_t shared_limit);
template <bool delta, bool channel_gate>
BlockWork split_gradients_work(const KernelArgs& args, std::size_t shared_limit);

// The recurrent form: a block walks the tokens of a sequence, a head and `columns` values, each of its warps a few of
// them alone. Forward and step.
inline constexpr int recurrent_segment = 16;  // tokens from one saved state to the next
struct RecurrentKernels {
    // step: of a token alone and one state for each sequence; backward: a block for each sequence and key head, as the
    // chunk form's.
    Kernel forward, step, backward;
    int columns;  // of a block of the first two
};
template <class T, bool delta>
RecurrentKernels recurrent_kernels(std::int64_t K);
template <class T, bool delta>
BlockWork recurrent_forward_work(const KernelArgs& args, std::size_t shared_limit);
template <class T, bool delta>
BlockWork recurrent_step_work(const KernelArgs& args, std::size_t shared_limit);
template <class T, bool delta>
BlockWork recurrent_backward_work(const KernelArgs& args, std::size_t shared_limit);

// Summaries: the product of the decays of a sequence and head, by blocks of 32 channels if gates are theirs; the unit
// matrix, with which walks to the delta rule's transition begin, a row for each block.
inline constexpr int decay_product_threads = 512, decay_product_channels = 32;
inline constexpr int decay_product_at_once = 4;  // tokens that a thread asks for before it waits
Kernel decay_product_kernel(bool in_double);
Kernel unit_matrix_kernel();
BlockWork decay_product_work(const KernelArgs& args, std::size_t shared_limit);
BlockWork unit_matrix_work(const KernelArgs& args, std::size_t shared_limit);

// dst = a b + c of each sequence and head (core/product_problem.hpp); a block has so many columns.
inline constexpr int product_columns = 32;
struct ProductArgs {
    Strided dst, a, b, c;
    std::int64_t HV;
    Factor factor;
    int rows, columns;
};
const void* product_kernel();

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

// cu_seqlens that lie on the device, [N + 1]: to[0] to to[N] take them where they ascend from 0 to T, and zeros where
// they do not; to[N + 1] says which, 0 or 1. One block, which also makes *refused 0, unless it is null.
inline constexpr int checking_threads = 1024;
struct SequencesArgs {
    Strided from;
    std::int64_t* to;
    std::int64_t N, T;
    std::int32_t* refused;
};
const void* sequences_kernel();

// NaN in all elements of the results where *wrong is not 0.
inline constexpr int most_results = 20, most_rank = 4;
inline constexpr int spoiling_blocks = 264;  // two for each multiprocessor of an H200
struct SpoilArgs {
    struct Result {
        Strided tensor;
        std::int64_t shape[most_rank];
    };
    const std::int64_t* wrong;
    int count;
    Result results[most_results];
};
const void* spoil_kernel();

}  // namespace headrace::cuda
