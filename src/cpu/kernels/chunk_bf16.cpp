// chunk_bf16: the chunk form with bf16 operands and fp32 sums, compiled for ISAs with a bf16 dot product.
#include "cpu/kernels/chunk_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_chunk_bf16(ChunkKernels (&kernels)[2][2]) { fill_chunk_kernels<Bf16>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
