// device_loops: kernels that do nothing but multiply and add.
#pragma once

#include <cstdint>

namespace headrace::harness {

enum class LoopKind { f32_fma, f64_fma, bf16_mma };

constexpr int loop_threads = 256;  // of a block

// Launches `blocks` blocks of `rounds` rounds on the default stream; `sums`: loop_threads blocks doubles of the
// device. FLOP done, or 0 if the launch failed (cudaGetLastError says why).
double launch_loop(LoopKind kind, int blocks, std::int64_t rounds, double* sums);

}  // namespace headrace::harness
