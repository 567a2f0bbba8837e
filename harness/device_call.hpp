// Calls on tensors of a CUDA device: copied there, run there and copied back.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "headrace/headrace.hpp"

namespace headrace::harness {

// The call as explain and workspace_size take it: its views say that they lie on a CUDA device. Every third number of
// sequences leaves cu_seqlens on the host.
Call seen_from_device(const Call& host);

// f(view) for every view that a call gives and that lies on a CUDA device.
void each_device_view(Call& call, const std::function<void(TensorView&)>& f);

// Bytes from the first to the last element of a view.
std::size_t extent_bytes(const TensorView& view);

// Copies every tensor with what lies between its elements to the device, runs the call on a stream of its own,
// synchronises it and copies back what the library may write. Around each tensor and the workspace (own_workspace: one
// that the caller gives, filled with NaN) lie bytes that nobody may write: *violation says where somebody did.
// Code::unsupported in a build without CUDA.
Status run_on_device(const Call& host, bool own_workspace, std::string* violation);

}  // namespace headrace::harness
