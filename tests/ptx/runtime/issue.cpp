// How work enters streams and captures: Runtime::issue, the legacy stream's implicit order, and what captures forbid.
#include <algorithm>

#include "machine/fault.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// A GPU's queue is not endless either: the host waits when it is full.
constexpr std::size_t queue_length = 1024;

bool goes_on(const Capture& capture) { return !capture.invalid; }

}  // namespace

Stream* Runtime::stream(cudaStream_t handle) {
    if (handle == cudaStreamPerThread) die("cudaStreamPerThread: the per-thread default stream is not in the stand-in");
    if (handle == nullptr || handle == cudaStreamLegacy) {
        return legacy_streams[static_cast<std::size_t>(this_thread().device)].get();
    }
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second.get();
}

Event* Runtime::event(cudaEvent_t handle) {
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second.get();
}

// After the stream's last task; and between the legacy stream and blocking streams each after what the other was given
// before.
TaskPtr Runtime::add_task(Stream& stream, std::function<void()> run, std::vector<TaskPtr> after) {
    after.push_back(stream.last);
    if (stream.legacy) {
        for (const auto& [handle, other] : streams) {
            if (other->blocking && other->device == stream.device) after.push_back(other->last);
        }
        after.insert(after.end(), destroyed.begin(), destroyed.end());
        destroyed.clear();
    } else if (stream.blocking) {
        after.push_back(legacy_streams[static_cast<std::size_t>(stream.device)]->last);
    }
    stream.last = scheduler.add(stream.device, std::move(run), after);
    while (scheduler.waiting() > queue_length) scheduler.run_any();
    return stream.last;
}

cudaError_t Runtime::may_use_legacy(Stream& stream) {
    if (!stream.legacy) return cudaSuccess;
    cudaError_t result = cudaSuccess;
    for (const auto& [handle, other] : streams) {
        if (other->capture == nullptr || !other->blocking || other->device != stream.device) continue;
        other->capture->invalid = true;
        result = cudaErrorStreamCaptureImplicit;
    }
    return result;
}

cudaError_t Runtime::may_wait_for(Stream& stream) {
    if (stream.capture != nullptr) {
        stream.capture->invalid = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    return may_use_legacy(stream);
}

// The rule of cudaThreadExchangeStreamCaptureMode.
cudaError_t Runtime::may_be_unsafe() {
    const ThreadState& thread = this_thread();
    if (thread.capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t result = cudaSuccess;
    for (const auto& weak : captures) {
        const auto capture = weak.lock();
        if (capture == nullptr || !goes_on(*capture)) continue;
        const bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
        const bool global = capture->mode == cudaStreamCaptureModeGlobal &&
                            thread.capture_mode == cudaStreamCaptureModeGlobal;
        if (!own && !global) continue;
        capture->invalid = true;
        result = cudaErrorStreamCaptureUnsupported;
    }
    return result;
}

void Runtime::spoil_captures_of(int device) {
    for (const auto& weak : captures) {
        const auto capture = weak.lock();
        if (capture != nullptr && capture->origin->device == device) capture->invalid = true;
    }
}

cudaError_t Runtime::synchronize_device() {
    const int device = this_thread().device;
    for (const auto& weak : captures) {
        const auto capture = weak.lock();
        if (capture == nullptr || capture->origin->device != device) continue;
        spoil_captures_of(device);
        return cudaErrorStreamCaptureUnsupported;
    }
    scheduler.run_all(device);
    return cudaSuccess;
}

cudaError_t Runtime::issue(cudaStream_t handle, Work work, TaskPtr* task) {
    Stream* target = stream(handle);
    if (target == nullptr) return cudaErrorInvalidResourceHandle;
    if (target->capture != nullptr) {
        Capture& capture = *target->capture;
        if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
        auto node = std::make_unique<GraphNode>();
        node->work = std::make_shared<const Work>(std::move(work));
        node->after = target->capture_after;
        target->capture_after = {node.get()};
        capture.graph->nodes.push_back(std::move(node));
        return cudaSuccess;
    }
    if (const cudaError_t error = may_use_legacy(*target); error != cudaSuccess) return error;
    if (work.at_launch) work.at_launch();
    const TaskPtr added = add_task(*target, std::move(work.run));
    if (task != nullptr) *task = added;
    return cudaSuccess;
}

}  // namespace headrace::ptx
