// What the blocks of the kernels do, counted on the host: no kernel is compiled here, the pages run on the host.
#define HEADRACE_PAGES_ON_HOST
#include "cuda/chunk/counted_additive.hpp"
#include "cuda/chunk/counted_backward.hpp"
#include "cuda/chunk/counted_channel.hpp"
#include "cuda/chunk/counted_channel_gradients.hpp"
#include "cuda/chunk/counted_split.hpp"
#include "cuda/chunk/counted_staging.hpp"
#include "cuda/chunk/counted_walk.hpp"
#include "cuda/chunk/counted_walker.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/recurrent/counted_tokens.hpp"

namespace headrace::cuda {

template <class T, bool delta, bool channel_gate>
BlockWork walk_forward_work(const KernelArgs& args, std::size_t shared_limit) {
    return walk_work<T, delta, channel_gate, Use::forward>(args, shared_limit);
}
template <bool delta, bool channel_gate>
BlockWork walk_backward_work(const KernelArgs& args, std::size_t shared_limit) {
    return walk_work<double, delta, channel_gate, Use::backward>(args, shared_limit);
}
template <bool delta, bool channel_gate>
BlockWork split_sweeps_work(const KernelArgs& args, std::size_t shared_limit) {
    return split_work<delta, channel_gate, Use::sweeps>(args, shared_limit);
}
template <bool delta, bool channel_gate>
BlockWork split_gradients_work(const KernelArgs& args, std::size_t shared_limit) {
    return split_work<delta, channel_gate, Use::gradients>(args, shared_limit);
}

#define HEADRACE_BACKWARD_WORK(delta, channel_gate)                                                  \
    template BlockWork walk_backward_work<delta, channel_gate>(const KernelArgs& args, std::size_t); \
    template BlockWork split_sweeps_work<delta, channel_gate>(const KernelArgs& args, std::size_t);  \
    template BlockWork split_gradients_work<delta, channel_gate>(const KernelArgs& args, std::size_t)
HEADRACE_BACKWARD_WORK(false, false);
HEADRACE_BACKWARD_WORK(false, true);
HEADRACE_BACKWARD_WORK(true, false);
HEADRACE_BACKWARD_WORK(true, true);
#define HEADRACE_WORK(T, delta)                                                                 \
    template BlockWork walk_forward_work<T, delta, false>(const KernelArgs& args, std::size_t); \
    template BlockWork walk_forward_work<T, delta, true>(const KernelArgs& args, std::size_t);  \
    template BlockWork recurrent_forward_work<T, delta>(const KernelArgs& args, std::size_t);   \
    template BlockWork recurrent_step_work<T, delta>(const KernelArgs& args, std::size_t);      \
    template BlockWork recurrent_backward_work<T, delta>(const KernelArgs& args, std::size_t)
HEADRACE_WORK(float, false);
HEADRACE_WORK(float, true);
HEADRACE_WORK(double, false);
HEADRACE_WORK(double, true);

#define HEADRACE_TENSOR_WORK(K)                                                         \
    template BlockWork tensor_forward_work<K>(const KernelArgs& args, std::size_t);     \
    template BlockWork tensor_states_work<K>(const KernelArgs& args, std::size_t);      \
    template BlockWork tensor_add_outputs_work<K>(const KernelArgs& args, std::size_t); \
    template BlockWork tensor_prepare_work<K>(const KernelArgs& args, std::size_t);     \
    template BlockWork tensor_walk_work<K>(const KernelArgs& args, std::size_t);        \
    template BlockWork tensor_walk_states_work<K>(const KernelArgs& args, std::size_t); \
    template BlockWork transition_join_work<K>(const KernelArgs& args, std::size_t)
HEADRACE_TENSOR_WORK(64);
HEADRACE_TENSOR_WORK(128);
template BlockWork tensor_prepare_work<256>(const KernelArgs& args, std::size_t);
template BlockWork tensor_walk_work<256>(const KernelArgs& args, std::size_t);
template BlockWork tensor_sweeps_work<64>(const KernelArgs& args, std::size_t);
template BlockWork tensor_sweeps_work<128>(const KernelArgs& args, std::size_t);
template BlockWork tensor_sweeps_work<256>(const KernelArgs& args, std::size_t);
#define HEADRACE_GRADIENTS_WORK(K)                                                           \
    template BlockWork tensor_gradients_work<K, false>(const KernelArgs& args, std::size_t); \
    template BlockWork tensor_gradients_work<K, true>(const KernelArgs& args, std::size_t)
HEADRACE_GRADIENTS_WORK(64);
HEADRACE_GRADIENTS_WORK(128);
HEADRACE_GRADIENTS_WORK(256);

#define HEADRACE_CHANNEL_WORK(K)                                                              \
    template BlockWork channel_prepare_work<K, false>(const KernelArgs& args, std::size_t);   \
    template BlockWork channel_prepare_work<K, true>(const KernelArgs& args, std::size_t);    \
    template BlockWork channel_estimate_work<K>(const KernelArgs& args, std::size_t);         \
    template BlockWork channel_prepare_low_work<K>(const KernelArgs& args, std::size_t);      \
    template BlockWork channel_states_work<K, false>(const KernelArgs& args, std::size_t);    \
    template BlockWork channel_states_work<K, true>(const KernelArgs& args, std::size_t);     \
    template BlockWork channel_walk_work<K, false>(const KernelArgs& args, std::size_t);      \
    template BlockWork channel_walk_work<K, true>(const KernelArgs& args, std::size_t);       \
    template BlockWork channel_sweeps_work<K, false>(const KernelArgs& args, std::size_t);    \
    template BlockWork channel_sweeps_work<K, true>(const KernelArgs& args, std::size_t);     \
    template BlockWork channel_gradients_work<K, false>(const KernelArgs& args, std::size_t); \
    template BlockWork channel_gradients_work<K, true>(const KernelArgs& args, std::size_t);  \
    template BlockWork channel_gradients_low_work<K>(const KernelArgs& args, std::size_t);    \
    template BlockWork channel_key_sums_work<K>(const KernelArgs& args, std::size_t)
HEADRACE_CHANNEL_WORK(64);
HEADRACE_CHANNEL_WORK(128);

}  // namespace headrace::cuda
