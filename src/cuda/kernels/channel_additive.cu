// The chunk form on tensor cores: the additive rule with channel gates, in segments too.
#include "cuda/chunk/segment_join.hpp"
#include "cuda/kernels/channel_entry.hpp"

namespace headrace::cuda {
namespace {

__global__ void __launch_bounds__(join_threads(false)) channel_join(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    DecayJoin<true> join(args, arena);
    const std::int64_t blocks = (args.V + DecayJoin<true>::columns - 1) / DecayJoin<true>::columns;
    const Task task = task_of(blockIdx.x, args.HV, blocks);
    join.join(task.place, task.head, task.part * DecayJoin<true>::columns);
}

template <int K>
ChannelSegmentKernels segment_kernels_of() {
    return {states_kernel<K, false>(),
            {"channel_join", reinterpret_cast<const void*>(&channel_join), registers_allowed(join_threads(false), 1),
             &shared_memory_of<DecayJoin<true>>, &channel_join_work}};
}

}  // namespace

template ChannelKernels channel_kernels<false>(std::int64_t K);

template <>
ChannelSegmentKernels channel_segment_kernels<false>(std::int64_t K) {
    return K <= 64 ? segment_kernels_of<64>() : segment_kernels_of<128>();
}

}  // namespace headrace::cuda
