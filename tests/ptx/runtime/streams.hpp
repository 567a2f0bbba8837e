// Stream, Event, Graph, Capture: what the handles of the CUDA runtime stand for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/tasks.hpp"

namespace headrace::ptx {

// One piece of work of a stream or a graph. `at_launch` runs when the host issues it, `run` when the device gets there.
struct Work {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    std::function<void()> at_launch;
    std::function<void()> run;
};
using WorkPtr = std::shared_ptr<const Work>;

// cudaGraphNode_t points to one.
struct GraphNode {
    WorkPtr work;
    std::vector<GraphNode*> after;
};

// cudaGraph_t points to one. `memory`: what cudaMallocAsync handed out in the capture; lives as long as graph and
// executables.
struct Graph {
    std::vector<std::unique_ptr<GraphNode>> nodes;
    std::vector<std::shared_ptr<void>> memory;
};

// cudaGraphExec_t points to one: a copy of the graph, with edges as indices. Launches of the same one follow each
// other.
struct GraphExec {
    struct Node {
        WorkPtr work;
        std::vector<std::size_t> after;
    };
    std::vector<Node> nodes;
    std::vector<std::shared_ptr<void>> memory;
    TaskPtr last;
};

struct Stream;

// A capture that goes on: streams that take part hold it; it ends with cudaStreamEndCapture on `origin`.
struct Capture {
    unsigned long long number = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    Stream* origin = nullptr;
    std::thread::id thread;
    bool invalid = false;
    std::unique_ptr<Graph> graph = std::make_unique<Graph>();
};

// cudaStream_t points to one.
struct Stream {
    int device = 0, number = 0, priority = 0;
    bool legacy = false, blocking = true;  // blocking: ordered with the legacy stream
    TaskPtr last;
    std::shared_ptr<Capture> capture;
    std::vector<GraphNode*> capture_after; // what the next captured node comes after
};

// cudaEvent_t points to one. Recorded in a capture it stands for nodes until that capture ends.
struct Event {
    int device = 0;
    bool timing = true, recorded = false;
    TaskPtr task;
    std::weak_ptr<Capture> capture;
    std::vector<GraphNode*> nodes;
};

}  // namespace headrace::ptx
