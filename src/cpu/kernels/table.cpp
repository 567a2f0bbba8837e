// table: the entry points of one ISA, compiled once per ISA.
#include "cpu/kernels/chunk_entry.hpp"
#include "cpu/kernels/summary_entry.hpp"
#include "cpu/plumbing/kernel_table.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

const KernelTable& kernels();
void fill_layers(LayerKernels (&kernels)[2]);
void fill_products(ProductKernels (&kernels)[2]);

const KernelTable& kernels() {
    static const KernelTable table = [] {
        KernelTable filled{};
#ifdef HEADRACE_HAS_BF16_DOT
        fill_chunk_bf16(filled.chunk[static_cast<int>(Arithmetic::bf16)]);
        fill_summaries_bf16(filled.summaries[static_cast<int>(Arithmetic::bf16)]);
#else
        fill_chunk_f32(filled.chunk[static_cast<int>(Arithmetic::f32)]);
        fill_chunk_f64(filled.chunk[static_cast<int>(Arithmetic::f64)]);
        fill_summaries_f32(filled.summaries[static_cast<int>(Arithmetic::f32)]);
        fill_summaries_f64(filled.summaries[static_cast<int>(Arithmetic::f64)]);
        fill_recurrent(filled.recurrent);
        fill_products(filled.products);
        fill_layers(filled.layers);
#endif
        return filled;
    }();
    return table;
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
