// recurrent: the recurrent form in f32 and f64, compiled once per ISA.
#include <new>

#include "cpu/plumbing/kernel_table.hpp"
#include "cpu/recurrent/adjoint_kernel.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T, bool delta>
struct RecurrentEntry {
    using Kernel = RecurrentKernel<T, delta>;

    // At the begin of a thread's scratch: its kernel, once a task of the call has built it.
    struct Built {
        std::int64_t stands;  // RecurrentKernels::start: 0
        alignas(Kernel) char kernel[sizeof(Kernel)];
    };
    static Built* built_in(Arena& arena) { return reinterpret_cast<Built*>(arena.take<char>(sizeof(Built))); }

    static std::size_t forward_scratch(const KernelArgs& args) {
        Arena arena;
        built_in(arena);
        Kernel(args, arena, Kernel::forward_only);
        return arena.used;
    }
    static std::size_t backward_scratch(const KernelArgs& args) {
        Arena arena;
        Kernel(args, arena, Kernel::with_backward);
        return arena.used;
    }
    static void forward(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int values, void* scratch, Unfinished* rest) {
        Arena arena{static_cast<char*>(scratch)};
        Built& built = *built_in(arena);
        if (built.stands == 0) ::new (static_cast<void*>(built.kernel)) Kernel(args, arena, Kernel::forward_only);
        built.stands = 1;
        std::launder(reinterpret_cast<Kernel*>(built.kernel))->forward(n, head, first, values, rest);
    }
    static void start(void* scratch) { static_cast<Built*>(scratch)->stands = 0; }
    static void backward(const KernelArgs& args, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        Kernel(args, arena, Kernel::with_backward).backward(n, key_head, first);
    }
    static std::size_t adjoint_scratch(const KernelArgs& args) {
        Arena arena;
        AdjointKernel<T, delta>(args, arena);
        return arena.used;
    }
    static void adjoint(const KernelArgs& args, std::int64_t n, std::int64_t head, int first, int count, void* scratch) {
        Arena arena{static_cast<char*>(scratch)};
        AdjointKernel<T, delta>(args, arena).adjoint(n, head, first, count);
    }
    static std::size_t state_bytes(const KernelArgs& args) {
        Arena arena;
        arena.tile<T>(round_up(args.K, 16), round_up(args.V, 16));
        return arena.used;
    }
    static RecurrentKernels entries() {
        return {forward_scratch, backward_scratch, start, forward, backward, state_bytes, Kernel::saved_segment, adjoint_scratch, adjoint};
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
