// recurrent: the recurrent form in f32 and f64, compiled once per ISA.
#include "cpu/plumbing/kernel_table.hpp"
#include "cpu/recurrent/recurrent_kernel.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T, bool delta>
struct RecurrentEntry {
    using Kernel = RecurrentKernel<T, delta>;

    static std::size_t forward_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::forward_only);
        return arena.used;
    }
    static std::size_t backward_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::with_backward);
        return arena.used;
    }
    static void forward(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::forward_only).forward(n, head, first, values);
    }
    static void backward(const KernelArgs& args, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward).backward(n, key_head, first);
    }
    static std::size_t state_bytes(const KernelArgs& args) {
        Arena arena;
        arena.tile<T>(round_up(args.K, 16), round_up(args.V, 16));
        return arena.used;
    }
    static RecurrentKernels entries() {
        return {forward_scratch, backward_scratch, forward, backward, state_bytes, Kernel::saved_segment};
    }
};

void fill_recurrent(RecurrentKernels (&kernels)[2][2]);
void fill_recurrent(RecurrentKernels (&kernels)[2][2]) {
    kernels[0][0] = RecurrentEntry<float, false>::entries();
    kernels[0][1] = RecurrentEntry<float, true>::entries();
    kernels[1][0] = RecurrentEntry<double, false>::entries();
    kernels[1][1] = RecurrentEntry<double, true>::entries();
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
