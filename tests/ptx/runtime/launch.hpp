// The sizes of the stand-in GPU that launches, occupancy and device attributes speak of: those of an H100.
#pragma once

#include <cstddef>

#include "machine/grid.hpp"
#include "runtime/modules.hpp"

namespace headrace::ptx {

inline constexpr std::size_t kib = 1024;
inline constexpr std::size_t shared_per_block = 48 * kib;  // unless a kernel asks for more: Environment::shared
inline constexpr std::size_t shared_per_multiprocessor = 228 * kib, shared_reserved_per_block = 1 * kib;
inline constexpr int multiprocessors = 132, threads_per_multiprocessor = 2048, blocks_per_multiprocessor = 32;
inline constexpr int threads_per_block = 1024, registers_per_multiprocessor = 65536;
inline constexpr int l2_bytes = 50 << 20, constant_bytes = 64 << 10;

// What a launch of the kernel on the calling thread's device may ask for: where cudaFuncSetAttribute was not called on
// that device, 48 KiB together with its static shared memory.
std::size_t dynamic_shared_limit(const Kernel& kernel, const Function& function);

}  // namespace headrace::ptx
