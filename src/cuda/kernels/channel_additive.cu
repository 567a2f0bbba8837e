// The chunk form on tensor cores: the additive rule with channel gates, in segments too.
#include "cuda/chunk/segment_join.hpp"
#include "cuda/kernels/channel_entry.hpp"

namespace headrace::cuda {
namespace {

// As registers let onto a multiprocessor.
inline constexpr int states_blocks = 2;

template <class Block>
__global__ void __launch_bounds__(Block::threads, states_blocks) channel_states(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    Block block(args, arena);
    const std::int64_t blocks = args.segments.blocks;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    block.states(task.place, task.head, task.part * args.value_columns);
}

__global__ void __launch_bounds__(join_threads(false)) channel_join(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    DecayJoin<true> join(args, arena);
    const std::int64_t blocks = (args.V + DecayJoin<true>::columns - 1) / DecayJoin<true>::columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    join.join(task.place, task.head, task.part * DecayJoin<true>::columns);
}

template <int K>
ChannelSegmentKernels segment_kernels_of() {
    using Walk = ChannelWalk<K, false, false>;
    return {{"channel_states", reinterpret_cast<const void*>(&channel_states<Walk>),
             registers_allowed(Walk::threads, states_blocks), &shared_memory_of<Walk>, &channel_states_work<K>},
            {"channel_join", reinterpret_cast<const void*>(&channel_join), registers_allowed(join_threads(false), 1),
             &shared_memory_of<DecayJoin<true>>, &channel_join_work}};
}

}  // namespace

template ChannelKernels channel_kernels<false>(std::int64_t K);

ChannelSegmentKernels channel_segment_kernels(std::int64_t K) {
    return K <= 64 ? segment_kernels_of<64>() : segment_kernels_of<128>();
}

}  // namespace headrace::cuda
