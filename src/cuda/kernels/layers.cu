// The layer functions in f32 and f64.
#include "cuda/kernels/kernels.hpp"
#include "cuda/layers/convolution_kernel.hpp"
#include "cuda/layers/rms_norm_kernel.hpp"

namespace headrace::cuda {

extern __shared__ __align__(16) char layer_memory[];

constexpr std::size_t shared_limit = std::size_t{96} << 10;

enum class LayerPart { forward, state, backward, state_gradient, step };

// Left alone, ptxas takes 40 or 64 registers for some of them and spills.
inline constexpr int convolution_blocks = 6;
// A block of a group of windows, or of a sequence, and 32 channels.
template <class T, LayerPart part>
__global__ void __launch_bounds__(block_threads, convolution_blocks) convolution(ConvolutionArgs args) {
    Arena arena{layer_memory, nullptr, shared_limit};
    const std::int64_t strips = (args.D + warp_lanes - 1) / warp_lanes, item = quotient(blockIdx.x, strips);
    Convolution<T> kernel(args, arena, (blockIdx.x - item * strips) * warp_lanes);
    if constexpr (part == LayerPart::forward) kernel.forward(item);
    if constexpr (part == LayerPart::state) kernel.leave_state(item);
    if constexpr (part == LayerPart::backward) kernel.backward(item);
    if constexpr (part == LayerPart::state_gradient) kernel.leave_state_gradient(item);
    if constexpr (part == LayerPart::step) kernel.step(item);
}

template <class T, LayerPart part>
__global__ void __launch_bounds__(block_threads) norm(RmsNormArgs args) {
    Arena arena{layer_memory, nullptr, shared_limit};
    const RmsNorm<T> kernel(args, arena);
    part == LayerPart::forward ? kernel.forward(blockIdx.x) : kernel.backward(blockIdx.x);
}

template <class T, LayerPart part>
const void* convolution_kernel() {
    return reinterpret_cast<const void*>(&convolution<T, part>);
}

template <class T>
BlockMemory convolution_memory(const ConvolutionArgs& args) {
    Arena arena{nullptr, nullptr, shared_limit};
    Convolution<T>(args, arena, 0);
    return {arena.shared_used, arena.spill_used};
}

template <class T>
BlockMemory norm_memory(const RmsNormArgs& args) {
    Arena arena{nullptr, nullptr, shared_limit};
    RmsNorm<T>(args, arena);
    return {arena.shared_used, arena.spill_used};
}

template <class T>
LayerKernels layer_kernels() {
    return {convolution_kernel<T, LayerPart::forward>(),
            convolution_kernel<T, LayerPart::state>(),
            convolution_kernel<T, LayerPart::backward>(),
            convolution_kernel<T, LayerPart::state_gradient>(),
            convolution_kernel<T, LayerPart::step>(),
            reinterpret_cast<const void*>(&norm<T, LayerPart::forward>),
            reinterpret_cast<const void*>(&norm<T, LayerPart::backward>),
            &convolution_memory<T>,
            &norm_memory<T>};
}

template LayerKernels layer_kernels<float>();
template LayerKernels layer_kernels<double>();

}  // namespace headrace::cuda
