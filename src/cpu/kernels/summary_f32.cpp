// summary_f32: summaries in the chunk form in f32 arithmetic, compiled once per ISA.
#include "cpu/kernels/summary_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_summaries_f32(SummaryKernels (&kernels)[2][2]) { fill_summary_kernels<F32>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
