// The chunk form on tensor cores: the delta rule with a scalar gate.
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {
namespace {

template <int K, class Format>
TensorKernels delta_kernels() {
    using Chunk = PrepareKernel<K, Format, false>;
    using Block = WalkerKernel<K, ByGroup<Format>>;
    using States = WalkerKernel<K, ByGroup<Format>, WalkTo::states>;
    TensorKernels kernels{};
    kernels.prepare = {"tensor_prepare", reinterpret_cast<const void*>(&tensor_prepare<Chunk>),
                       registers_allowed(block_threads, prepare_blocks<Chunk>), &shared_memory_of<Chunk>,
                       &tensor_prepare_work<K>};
    kernels.forward = {"tensor_walk",
                       reinterpret_cast<const void*>(&tensor_walk<Block>),
                       registers_allowed(walk_threads<K> + fetching_threads(K), 1),
                       &shared_memory_of<Block>,
                       &tensor_walk_work<K>,
                       fetching_threads(K)};
    if constexpr (K == 128 && !Format::splits_scores) {
        using Blocks = WalkerKernel<K, ByGroup<Format>, WalkTo::outputs_of_two>;
        kernels.forward_of_two = {"tensor_walk_two", reinterpret_cast<const void*>(&tensor_walk_two<Blocks>),
                                  registers_allowed(three_groups, 1), &shared_memory_of<Blocks>, &tensor_walk_work<K>};
    }
    if constexpr (K <= 128) {  // in segments
        kernels.states = {"tensor_walk_states", reinterpret_cast<const void*>(&tensor_walk_states<States>),
                          K <= 64 ? registers_allowed(walker_threads, states_blocks<K>)
                                  : registers_allowed(three_groups, states_blocks<K>),
                          &shared_memory_of<States>, &tensor_walk_states_work<K>};
        kernels.join = {"tensor_join_transitions", reinterpret_cast<const void*>(&tensor_join_transitions<K>),
                        registers_allowed(join_threads(true, K), 1), &shared_memory_of<TransitionJoin<K>>,
                        &transition_join_work<K>};
    }
    return kernels;
}

}  // namespace

template <>
TensorKernels tensor_kernels<true>(std::int64_t K, DType dtype) {
    if (dtype == DType::f16) return K <= 64 ? delta_kernels<64, F16>() : delta_kernels<128, F16>();
    if (K > 128) return delta_kernels<256, Bf16>();
    return K <= 64 ? delta_kernels<64, Bf16>() : delta_kernels<128, Bf16>();
}

}  // namespace headrace::cuda
