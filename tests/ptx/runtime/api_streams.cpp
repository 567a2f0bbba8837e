// Streams and events: queues that run late, and the points where something has to be done.
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

// One task is as long as one microsecond: a time that exists and grows.
constexpr float milliseconds_per_task = 1e-3F;

cudaError_t make_stream(Runtime& runtime, cudaStream_t* handle, unsigned flags, int priority) {
    if (handle == nullptr || (flags & ~static_cast<unsigned>(cudaStreamNonBlocking)) != 0) return cudaErrorInvalidValue;
    auto stream = std::make_unique<Stream>();
    stream->device = this_thread().device;
    stream->number = ++runtime.streams_made;
    stream->blocking = (flags & cudaStreamNonBlocking) == 0;
    stream->priority = priority;
    *handle = handle_of<cudaStream_t>(stream.get());
    runtime.streams[stream.get()] = std::move(stream);
    return cudaSuccess;
}

// The work that it still has is done nevertheless.
cudaError_t destroy_stream(Runtime& runtime, cudaStream_t handle) {
    const auto found = runtime.streams.find(handle);
    if (found == runtime.streams.end()) return cudaErrorInvalidResourceHandle;
    Stream& stream = *found->second;
    if (stream.capture != nullptr) {
        stream.capture->invalid = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    if (stream.blocking && stream.last != nullptr && !stream.last->done) runtime.destroyed.push_back(stream.last);
    runtime.streams.erase(found);
    return cudaSuccess;
}

// A stream's work is done when its last task is; what the legacy stream waits for comes with a new task.
cudaError_t wait_for_stream(Runtime& runtime, cudaStream_t handle) {
    Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.may_wait_for(*stream); error != cudaSuccess) return error;
    runtime.scheduler.run_until(stream->legacy ? runtime.add_task(*stream, {}) : stream->last);
    return cudaSuccess;
}

cudaError_t query_stream(Runtime& runtime, cudaStream_t handle) {
    Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.may_wait_for(*stream); error != cudaSuccess) return error;
    const TaskPtr asked = stream->legacy ? runtime.add_task(*stream, {}) : stream->last;
    runtime.scheduler.run_some();
    return asked == nullptr || asked->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t record(Runtime& runtime, Event& event, cudaStream_t handle) {
    Stream* stream = runtime.stream(handle);
    if (stream == nullptr || stream->device != event.device) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
        if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
        event.capture = stream->capture;
        event.nodes = stream->capture_after;
        return cudaSuccess;
    }
    if (const cudaError_t error = runtime.may_use_legacy(*stream); error != cudaSuccess) return error;
    event.capture.reset();
    event.recorded = true;
    event.task = runtime.add_task(*stream, {});
    return cudaSuccess;
}

cudaError_t spoil(Capture& capture, cudaError_t error) {
    capture.invalid = true;
    return error;
}

// An event of a capture draws the stream into it: what the stream is given next comes after the event's nodes.
cudaError_t wait_in_capture(Stream& stream, const Event& event, const std::shared_ptr<Capture>& capture) {
    if (stream.legacy) return spoil(*capture, cudaErrorStreamCaptureImplicit);
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (stream.capture != nullptr && stream.capture != capture) {
        spoil(*stream.capture, cudaErrorStreamCaptureMerge);
        return spoil(*capture, cudaErrorStreamCaptureMerge);
    }
    stream.capture = capture;
    for (GraphNode* node : event.nodes) {
        bool known = false;
        for (const GraphNode* other : stream.capture_after) known = known || other == node;
        if (!known) stream.capture_after.push_back(node);
    }
    return cudaSuccess;
}

cudaError_t wait_for_event(Runtime& runtime, cudaStream_t handle, const Event& event) {
    Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const auto capture = event.capture.lock()) return wait_in_capture(*stream, event, capture);
    if (stream->capture != nullptr) {
        if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
        return event.recorded ? spoil(*stream->capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
    }
    if (const cudaError_t error = runtime.may_use_legacy(*stream); error != cudaSuccess) return error;
    runtime.add_task(*stream, {}, {event.task});
    return cudaSuccess;
}

// For calls that ask whether an event has come to pass.
cudaError_t may_ask(Runtime& runtime, const Event& event) {
    if (const auto capture = event.capture.lock()) return spoil(*capture, cudaErrorCapturedEvent);
    return runtime.may_be_unsafe();
}

cudaError_t elapsed(const Event& start, const Event& end, float& milliseconds) {
    if (!start.timing || !end.timing || !start.recorded || !end.recorded) return cudaErrorInvalidResourceHandle;
    if (start.capture.lock() != nullptr || end.capture.lock() != nullptr) return cudaErrorCapturedEvent;
    if (!start.task->done || !end.task->done) return cudaErrorNotReady;
    const auto tasks = static_cast<std::int64_t>(end.task->finished) - static_cast<std::int64_t>(start.task->finished);
    milliseconds = milliseconds_per_task * static_cast<float>(tasks);
    return cudaSuccess;
}

cudaError_t make_event(Runtime& runtime, cudaEvent_t* handle, unsigned flags) {
    constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming;
    if (handle == nullptr || (flags & ~known) != 0) return cudaErrorInvalidValue;
    auto event = std::make_unique<Event>();
    event->device = this_thread().device;
    event->timing = (flags & cudaEventDisableTiming) == 0;
    *handle = handle_of<cudaEvent_t>(event.get());
    runtime.events[event.get()] = std::move(event);
    return cudaSuccess;
}

// f(event) for a live event.
template <class F>
cudaError_t with_event(Runtime& runtime, cudaEvent_t handle, F f) {
    Event* event = runtime.event(handle);
    return event == nullptr ? cudaErrorInvalidResourceHandle : f(*event);
}

template <class F>
cudaError_t with_stream(Runtime& runtime, cudaStream_t handle, F f) {
    Stream* stream = runtime.stream(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : f(*stream);
}

cudaError_t issue_host_function(Runtime& runtime, cudaStream_t stream, cudaHostFn_t function, void* data) {
    if (function == nullptr) return cudaErrorInvalidValue;
    Work work;
    work.type = cudaGraphNodeTypeHost;
    work.run = [function, data] {
        this_thread().in_host_function = true;
        function(data);
        this_thread().in_host_function = false;
    };
    return runtime.issue(stream, std::move(work));
}

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return make_stream(r, stream, cudaStreamDefault, 0); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    return Runtime::call(__func__, [&](Runtime& r) { return make_stream(r, stream, flags, 0); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
    return Runtime::call(__func__, [&](Runtime& r) { return make_stream(r, stream, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return destroy_stream(r, stream); });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return wait_for_stream(r, stream); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return query_stream(r, stream); });
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int* flags) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_stream(r, stream, [&](const Stream& s) {
            *flags = s.blocking ? cudaStreamDefault : cudaStreamNonBlocking;
            return cudaSuccess;
        });
    });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_stream(r, stream, [&](const Stream& s) {
            *priority = s.priority;
            return cudaSuccess;
        });
    });
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_stream(r, stream, [&](const Stream& s) {
            *device = s.device;
            return cudaSuccess;
        });
    });
}

// cudaEventWaitExternal would make a node that waits for an event outside of the graph.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    return Runtime::call(__func__, [&](Runtime& r) {
        if (flags != 0) return cudaErrorNotSupported;
        return with_event(r, event, [&](const Event& e) { return wait_for_event(r, stream, e); });
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return Runtime::call(__func__, [&](Runtime& r) { return issue_host_function(r, stream, function, data); });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return Runtime::call(__func__, [&](Runtime& r) { return make_event(r, event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
    return Runtime::call(__func__, [&](Runtime& r) { return make_event(r, event, flags); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_event(r, event, [&](Event& e) { return record(r, e, stream); });
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_event(r, event, [&](const Event& e) {
            const cudaError_t error = may_ask(r, e);
            if (error == cudaSuccess) r.scheduler.run_until(e.task);
            return error;
        });
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return with_event(r, event, [&](const Event& e) {
            if (const cudaError_t error = may_ask(r, e); error != cudaSuccess) return error;
            r.scheduler.run_some();
            return e.task == nullptr || e.task->done ? cudaSuccess : cudaErrorNotReady;
        });
    });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return Runtime::call(__func__, [&](Runtime& r) {
        const Event *first = r.event(start), *last = r.event(end);
        if (first == nullptr || last == nullptr) return cudaErrorInvalidResourceHandle;
        return elapsed(*first, *last, *milliseconds);
    });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return r.events.erase(event) == 0 ? cudaErrorInvalidResourceHandle : cudaSuccess;
    });
}

}  // extern "C"
