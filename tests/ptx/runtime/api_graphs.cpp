// Capture of streams into graphs, and graphs: what cudaStreamBeginCapture to cudaGraphLaunch do.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

cudaError_t begin_capture(Runtime& runtime, cudaStream_t handle, cudaStreamCaptureMode mode) {
    Stream* stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
    if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    auto capture = std::make_shared<Capture>();
    capture->number = ++runtime.captures_begun;
    capture->mode = mode;
    capture->origin = stream;
    capture->thread = std::this_thread::get_id();
    stream->capture = capture;
    stream->capture_after.clear();
    std::erase_if(runtime.captures, [](const auto& weak) { return weak.expired(); });
    runtime.captures.push_back(capture);
    return cudaSuccess;
}

// Whether what other streams were given in the capture comes before where the origin stream stands.
bool is_joined(const Capture& capture) {
    const std::vector<GraphNode*>& last = capture.origin->capture_after;
    std::unordered_set<const GraphNode*> found(last.begin(), last.end());
    std::vector<const GraphNode*> open(found.begin(), found.end());
    while (!open.empty()) {
        const GraphNode* node = open.back();
        open.pop_back();
        for (const GraphNode* earlier : node->after) {
            if (found.insert(earlier).second) open.push_back(earlier);
        }
    }
    return found.size() == capture.graph->nodes.size();
}

void leave_capture(Runtime& runtime, const std::shared_ptr<Capture>& capture) {
    for (const auto& [handle, stream] : runtime.streams) {
        if (stream->capture != capture) continue;
        stream->capture.reset();
        stream->capture_after.clear();
    }
}

cudaError_t end_capture(Runtime& runtime, cudaStream_t handle, cudaGraph_t* graph) {
    Stream* stream = runtime.stream(handle);
    if (graph != nullptr) *graph = nullptr;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph == nullptr) return cudaErrorInvalidValue;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr) return cudaErrorIllegalState;
    if (capture->origin != stream) {
        capture->invalid = true;
        return cudaErrorStreamCaptureUnmatched;
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
        capture->invalid = true;
        return cudaErrorStreamCaptureWrongThread;
    }
    const bool joined = is_joined(*capture);
    leave_capture(runtime, capture);
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *graph = handle_of<cudaGraph_t>(capture->graph.get());
    runtime.graphs[capture->graph.get()] = std::move(capture->graph);
    return cudaSuccess;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
    if (stream.capture == nullptr) return cudaStreamCaptureStatusNone;
    return stream.capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

// Asking about the legacy stream while a blocking stream captures is an error, but spoils nothing.
cudaError_t ask_status(Runtime& runtime, cudaStream_t handle, cudaStreamCaptureStatus& status, Stream*& stream) {
    stream = runtime.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    status = status_of(*stream);
    if (!stream->legacy) return cudaSuccess;
    for (const auto& [other_handle, other] : runtime.streams) {
        if (other->blocking && other->capture != nullptr) return cudaErrorStreamCaptureImplicit;
    }
    return cudaSuccess;
}

std::shared_ptr<GraphExec> executable_of(const Graph& graph) {
    auto executable = std::make_shared<GraphExec>();
    executable->memory = graph.memory;
    std::unordered_map<const GraphNode*, std::size_t> position;
    for (const auto& node : graph.nodes) position.emplace(node.get(), position.size());
    for (const auto& node : graph.nodes) {
        GraphExec::Node copy{node->work, {}};
        for (const GraphNode* earlier : node->after) copy.after.push_back(position.at(earlier));
        executable->nodes.push_back(std::move(copy));
    }
    return executable;
}

cudaError_t instantiate(Runtime& runtime, cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long flags) {
    const auto found = runtime.graphs.find(graph);
    if (handle == nullptr || found == runtime.graphs.end()) return cudaErrorInvalidValue;
    if ((flags & ~static_cast<unsigned long long>(cudaGraphInstantiateFlagAutoFreeOnLaunch)) != 0) {
        return cudaErrorNotSupported;
    }
    auto executable = executable_of(*found->second);
    *handle = handle_of<cudaGraphExec_t>(executable.get());
    runtime.executables[executable.get()] = std::move(executable);
    return cudaSuccess;
}

// Into a stream that captures: the nodes themselves, in place of one node that stands for the graph.
cudaError_t embed(Stream& stream, const GraphExec& executable) {
    if (stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
    Graph& graph = *stream.capture->graph;
    const std::vector<GraphNode*> before = stream.capture_after;
    std::vector<GraphNode*> made;
    for (const GraphExec::Node& node : executable.nodes) {
        auto copy = std::make_unique<GraphNode>();
        copy->work = node.work;
        for (const std::size_t earlier : node.after) copy->after.push_back(made[earlier]);
        if (node.after.empty()) copy->after = before;
        made.push_back(copy.get());
        graph.nodes.push_back(std::move(copy));
    }
    graph.memory.insert(graph.memory.end(), executable.memory.begin(), executable.memory.end());
    if (!made.empty()) stream.capture_after = made;
    return cudaSuccess;
}

cudaError_t launch(Runtime& runtime, cudaGraphExec_t handle, cudaStream_t stream_handle) {
    Stream* stream = runtime.stream(stream_handle);
    const auto found = runtime.executables.find(handle);
    if (found == runtime.executables.end()) return cudaErrorInvalidValue;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    const std::shared_ptr<GraphExec> executable = found->second;
    if (stream->capture != nullptr) return embed(*stream, *executable);
    if (const cudaError_t error = runtime.may_use_legacy(*stream); error != cudaSuccess) return error;

    const TaskPtr start = runtime.add_task(*stream, {}, {executable->last});
    std::vector<TaskPtr> tasks;
    for (const GraphExec::Node& node : executable->nodes) {
        std::vector<TaskPtr> after{start};
        for (const std::size_t earlier : node.after) after.push_back(tasks[earlier]);
        if (node.work->at_launch) node.work->at_launch();
        tasks.push_back(runtime.scheduler.add(stream->device, node.work->run, after));
    }
    executable->last = runtime.add_task(*stream, [keep = executable->memory] {}, tasks);
    return cudaSuccess;
}

cudaError_t give_nodes(Runtime& runtime, cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
    const auto found = runtime.graphs.find(graph);
    if (found == runtime.graphs.end() || count == nullptr) return cudaErrorInvalidValue;
    const auto& all = found->second->nodes;
    if (nodes != nullptr) {
        for (std::size_t i = 0; i < *count; ++i) {
            nodes[i] = i < all.size() ? handle_of<cudaGraphNode_t>(all[i].get()) : nullptr;
        }
        *count = std::min(*count, all.size());
    } else {
        *count = all.size();
    }
    return cudaSuccess;
}

// Nodes that a program holds are live: anything else is an error.
cudaError_t give_type(Runtime& runtime, cudaGraphNode_t node, cudaGraphNodeType* type) {
    for (const auto& [handle, graph] : runtime.graphs) {
        for (const auto& known : graph->nodes) {
            if (handle_of<cudaGraphNode_t>(known.get()) != node) continue;
            *type = known->work->type;
            return cudaSuccess;
        }
    }
    return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace headrace::ptx

using namespace headrace::ptx;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return Runtime::call(__func__, [&](Runtime& r) { return begin_capture(r, stream, mode); });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return Runtime::call(__func__, [&](Runtime& r) { return end_capture(r, stream, graph); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return Runtime::call(__func__, [&](Runtime& r) {
        Stream* found = nullptr;
        return ask_status(r, stream, *status, found);
    });
}

// The dependencies are valid until the stream is used again, as in CUDA; edges have no data.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
    return Runtime::call(__func__, [&](Runtime& r) {
        Stream* found = nullptr;
        if (const cudaError_t error = ask_status(r, stream, *status, found); error != cudaSuccess) return error;
        if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
        if (number != nullptr) *number = found->capture->number;
        if (graph != nullptr) *graph = handle_of<cudaGraph_t>(found->capture->graph.get());
        if (dependencies != nullptr) {
            *dependencies = reinterpret_cast<const cudaGraphNode_t*>(found->capture_after.data());
        }
        if (edges != nullptr) *edges = nullptr;
        if (count != nullptr) *count = found->capture_after.size();
        return cudaSuccess;
    });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return Runtime::call(__func__, [&](Runtime&) {
        if (mode == nullptr || *mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
            return cudaErrorInvalidValue;
        }
        std::swap(*mode, this_thread().capture_mode);
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return Runtime::call(__func__, [&](Runtime& r) { return instantiate(r, executable, graph, flags); });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return Runtime::call(__func__, [&](Runtime& r) { return instantiate(r, executable, graph, flags); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return Runtime::call(__func__, [&](Runtime& r) { return launch(r, executable, stream); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return r.executables.erase(executable) == 0 ? cudaErrorInvalidValue : cudaSuccess;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return Runtime::call(__func__, [&](Runtime& r) {
        return r.graphs.erase(graph) == 0 ? cudaErrorInvalidValue : cudaSuccess;
    });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
    return Runtime::call(__func__, [&](Runtime& r) { return give_nodes(r, graph, nodes, count); });
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
    return Runtime::call(__func__, [&](Runtime& r) { return give_type(r, node, type); });
}

}  // extern "C"
