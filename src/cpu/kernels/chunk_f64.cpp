// chunk_f64: the chunk form in f64 arithmetic, compiled once per ISA.
#include "cpu/kernels/chunk_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_chunk_f64(ChunkKernels (&kernels)[2][2]) { fill_chunk_kernels<F64>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
