// sequences: cu_seqlens as kernels read them, wherever the caller's lie.
#pragma once

#include <vector>

#include "core/validation.hpp"
#include "core/workspace.hpp"
#include "cuda/plumbing/kernel_args.hpp"
#include "headrace/headrace.hpp"

namespace headrace::cuda {

// Whether they lie on the device, where no host has looked at them.
bool checked_on_device(const TensorView& cu_seqlens);

// Device memory for the boundaries of N sequences, [N + 1], and behind them a number: 1 where those that the caller has
// on the device do not ascend from 0 to T. All sequences are empty then.
Strided take_sequences(const TensorView& cu_seqlens, std::int64_t N, Carver& carver);

// What fills it on the stream, in so many launches. sequences: those of cu_seqlens on the host; refused: a number that
// becomes 0 along with what is found on the device, or null.
std::int64_t sequence_launches(const TensorView& cu_seqlens, std::int64_t N);
Status store_sequences(const TensorView& cu_seqlens, const std::vector<Sequence>& sequences, const Strided& taken,
                       std::int64_t N, std::int64_t T, std::int32_t* refused, void* stream);

// Behind all kernels of a call, where cu_seqlens are checked on the device: queues a launch that makes NaN of all
// outputs among the views, but for pools, if that number is 1. With HEADRACE_DEBUG_NAN=1 waits, and says so.
Status spoil_results(const std::vector<NamedView>& views, const TensorView& cu_seqlens, const Strided& taken,
                     std::int64_t N, std::int64_t T, void* stream);

}  // namespace headrace::cuda
