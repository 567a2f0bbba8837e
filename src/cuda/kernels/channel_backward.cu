// The kernels that sweep over chunks for the backward under channel gates on tensor cores.
#include "cuda/chunk/channel_sweep.hpp"
#include "cuda/kernels/tensor_memory.hpp"

namespace headrace::cuda {

// As tensor_sweeps: first the blocks of the gradients of states, then those of states.
template <int K, bool delta>
__global__ void __launch_bounds__(most_channel_sweep_threads, 1)
    channel_sweeps(const __grid_constant__ KernelArgs args) {
    Arena arena = block_arena();
    ChannelSweep<K, delta> sweep(args, arena);
    const Task task = task_of(blockIdx.x, args.HV, (args.V + args.value_columns - 1) / args.value_columns);
    const bool back = task.place < args.N;
    const std::int64_t n = back ? task.place : task.place - args.N, head = task.head;
    const int first = task.part * args.value_columns;
    back ? sweep.adjoints(n, head, first) : sweep.states(n, head, first);
}

template <int K, bool delta>
Kernel sweeps_kernel_of() {
    return {"channel_sweeps", reinterpret_cast<const void*>(&channel_sweeps<K, delta>),
            registers_allowed(most_channel_sweep_threads, 1), &shared_memory_of<ChannelSweep<K, delta>>,
            &channel_sweeps_work<K, delta>};
}

Kernel channel_sweeps_kernel(std::int64_t K, bool delta) {
    if (K <= 64) return delta ? sweeps_kernel_of<64, true>() : sweeps_kernel_of<64, false>();
    return delta ? sweeps_kernel_of<128, true>() : sweeps_kernel_of<128, false>();
}

}  // namespace headrace::cuda
