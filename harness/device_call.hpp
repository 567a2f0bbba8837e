// Calls on tensors of a CUDA device: copied there, run there and copied back.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::harness {

// The call as explain and workspace_size take it: its views say that they lie on a CUDA device. Every third number of
// sequences leaves cu_seqlens on the host.
Call seen_from_device(const Call& host);

// f(view) for every view that a call gives and that lies on a CUDA device.
void each_device_view(Call& call, const std::function<void(TensorView&)>& f);

// Bytes from the first to the last element of a view.
std::size_t extent_bytes(const TensorView& view);

// The tensors of a call in the memory of the current CUDA device, and a stream of their own. Around each of them and
// around each workspace lie bytes that nobody may write.
class CallOnDevice {
  public:
    virtual ~CallOnDevice() = default;
    // The host's call with the views and the stream of the device.
    virtual const Call& call() const = 0;
    // Adds a workspace of the size that a call on these tensors asks for, filled with NaN; it lives as long as this.
    virtual Status add_workspace(const Call& call, Workspace* workspace) = 0;
    // Queues copies of the host's tensors as they now are, outputs too, with what lies between their elements.
    virtual Status upload() = 0;
    virtual Status synchronize() = 0;
    // Copies everything back to the host, after what the stream holds; *violation says where somebody wrote around a
    // tensor or a workspace.
    virtual Status download(std::string* violation) = 0;
};

// Code::unsupported in a build without CUDA. The host's tensors must outlive the result.
Status copy_to_device(const Call& host, std::unique_ptr<CallOnDevice>* result);

// Copies the call's tensors to the device, runs it there (own_workspace: with a workspace of the caller's) and copies
// back what the library may write. Errors and *violation as above.
Status run_on_device(const Call& host, bool own_workspace, std::string* violation);

// The same of views that are no call's, which are then those of device memory: body(stream) while it lives.
Status run_on_device(const std::vector<TensorView*>& views, const std::function<Status(void* stream)>& body,
                     std::string* violation);

}  // namespace headrace::harness
