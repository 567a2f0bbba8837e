// Calls on tensors of a CUDA device: copied there, run there and copied back.
#pragma once

#include <string>

#include "headrace/headrace.hpp"

namespace headrace::harness {

// The call as explain and workspace_size take it: its views say that they lie on a CUDA device. Every third number of
// sequences leaves cu_seqlens on the host.
Call seen_from_device(const Call& host);

// Copies every tensor with what lies between its elements to the device, runs the call on a stream of its own,
// synchronises it and copies back what the library may write. Around each tensor and the workspace (own_workspace: one
// that the caller gives, filled with NaN) lie bytes that nobody may write: *violation says where somebody did.
// Code::unsupported in a build without CUDA.
Status run_on_device(const Call& host, bool own_workspace, std::string* violation);

}  // namespace headrace::harness
