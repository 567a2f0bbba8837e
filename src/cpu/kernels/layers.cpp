// layers: the layer functions in f32 and f64, compiled once per ISA.
#include "cpu/layers/convolution_kernel.hpp"
#include "cpu/layers/rms_norm_kernel.hpp"
#include "cpu/plumbing/kernel_table.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct LayerEntry {
    static std::size_t convolution_scratch(const ConvolutionArgs& args) {
        Arena arena;
        Convolution<T>(args, arena);
        return arena.used;
    }
    static void convolution_forward(const ConvolutionArgs& args, std::int64_t group, std::int64_t first,
                                    void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Convolution<T>(args, arena).forward(group, first);
    }
    static void convolution_backward(const ConvolutionArgs& args, std::int64_t group, std::int64_t first,
                                     void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Convolution<T>(args, arena).backward(group, first);
    }
    static void convolution_step(const ConvolutionArgs& args, std::int64_t group, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Convolution<T>(args, arena).step(group, first);
    }
    static std::size_t rms_norm_scratch(const RmsNormArgs& args) {
        Arena arena;
        RmsNorm<T>(args, arena);
        return arena.used;
    }
    static void rms_norm_forward(const RmsNormArgs& args, std::int64_t group, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        RmsNorm<T>(args, arena).forward(group);
    }
    static void rms_norm_backward(const RmsNormArgs& args, std::int64_t group, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        RmsNorm<T>(args, arena).backward(group);
    }
    static LayerKernels entries() {
        return {convolution_scratch, convolution_forward, convolution_backward, convolution_step,
                rms_norm_scratch,    rms_norm_forward,    rms_norm_backward};
    }
};

void fill_layers(LayerKernels (&kernels)[2]);
void fill_layers(LayerKernels (&kernels)[2]) {
    kernels[0] = LayerEntry<float>::entries();
    kernels[1] = LayerEntry<double>::entries();
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
