// chunk_f32: the chunk form in f32 arithmetic, compiled once per ISA.
#include "cpu/kernels/chunk_entry.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

void fill_chunk_f32(ChunkKernels (&kernels)[2][2]) { fill_chunk_kernels<F32>(kernels); }

}  // namespace headrace::cpu::inline HEADRACE_ISA
