// The chunk form on tensor cores: the additive rule with a scalar gate.
#include "cuda/kernels/tensor_entry.hpp"

namespace headrace::cuda {
namespace {

template <int K, class Format>
TensorKernels additive_kernels() {
    static_assert(tensor_threads == 2 * block_threads);
    using Block = AdditiveKernel<K, AdditiveWalk::forward, ByGroup<Format>>;
    using Gradient = AdditiveKernel<K, AdditiveWalk::gradient, ByGroup<Format>>;
    using WithTerms = AdditiveKernel<K, AdditiveWalk::gradient_with_terms, ByGroup<Format>>;
    const auto walk = [](const char* name, const void* function, auto memory, auto work) {
        constexpr int more_threads = fetching_threads(K);
        return Kernel{name, function, registers_allowed(tensor_threads + more_threads, 1), memory, work, more_threads};
    };
    TensorKernels kernels{};
    kernels.forward = walk("tensor_forward", reinterpret_cast<const void*>(&tensor_forward<Block>),
                           &shared_memory_of<Block>, &tensor_forward_work<K>);
    kernels.forward_of_gradient =
        walk("tensor_forward_gradient", reinterpret_cast<const void*>(&tensor_forward_gradient<Gradient>),
             &shared_memory_of<Gradient>, &tensor_forward_work<K>);
    kernels.forward_with_terms =
        walk("tensor_forward_terms", reinterpret_cast<const void*>(&tensor_forward_terms<WithTerms>),
             &shared_memory_of<WithTerms>, &tensor_forward_work<K>);
    // Of forwards and of gradients' walks alike.
    kernels.states = walk("tensor_states", reinterpret_cast<const void*>(&tensor_states<Gradient>),
                          &shared_memory_of<Gradient>, &tensor_states_work<K>);
    kernels.gate = {"tensor_gate", reinterpret_cast<const void*>(&tensor_gate<GateTermsKernel>),
                    registers_allowed(block_threads, gate_blocks), &shared_memory_of<GateTermsKernel>,
                    &tensor_gate_work};
    using Adding = AddedOutputsKernel<K, Format>;
    static_assert(Adding::threads == adding_threads(K));
    kernels.add_outputs = {"tensor_add_outputs", reinterpret_cast<const void*>(&tensor_add_outputs<Adding>),
                           registers_allowed(adding_threads_at_once, 1), &shared_memory_of<Adding>,
                           &tensor_add_outputs_work<K>};
    kernels.join = {"tensor_join", reinterpret_cast<const void*>(&tensor_join<DecayJoin<false>>),
                    registers_allowed(join_threads(false), 1), &shared_memory_of<DecayJoin<false>>, &decay_join_work};
    return kernels;
}

}  // namespace

template <>
TensorKernels tensor_kernels<false>(std::int64_t K, DType dtype) {
    if (dtype == DType::f16) return K <= 64 ? additive_kernels<64, F16>() : additive_kernels<128, F16>();
    return K <= 64 ? additive_kernels<64, Bf16>() : additive_kernels<128, Bf16>();
}

}  // namespace headrace::cuda
