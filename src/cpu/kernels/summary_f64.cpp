// summary_f64: summaries in the chunk form in f64 arithmetic, compiled once per ISA.
#include "cpu/kernels/summary_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_summaries_f64(SummaryKernels (&kernels)[2][2]) { fill_summary_kernels<F64>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
