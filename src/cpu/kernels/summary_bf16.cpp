// summary_bf16: summaries in the chunk form with bf16 operands and fp32 sums, for ISAs with a bf16 dot product.
#include "cpu/kernels/summary_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_summaries_bf16(SummaryKernels (&kernels)[2][2]) { fill_summary_kernels<Bf16>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
