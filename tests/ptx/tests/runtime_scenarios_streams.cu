// Streams, events, captures and graphs: the second part of the scenarios.
#include "runtime_scenarios.hpp"

namespace {

// Streams.

// The host looks at what an asynchronous copy has not yet brought.
int missing_synchronization() {
    int* a = device_array();
    cudaStream_t stream = make_stream();
    launch_fill(a, 3, stream);
    std::vector<int> host(count, 3);
    GOOD(cudaMemcpyAsync(host.data(), a, bytes, cudaMemcpyDeviceToHost, stream));
    const bool stale = host[0] != 3;
    GOOD(cudaStreamSynchronize(stream));
    EXPECT(host[0] == 3);
    return stale ? hazard_shows : 0;
}

int two_streams(bool with_event) {
    int *a = device_array(), *b = device_array();
    GOOD(cudaMemset(a, 0, bytes));
    GOOD(cudaDeviceSynchronize());
    cudaStream_t producer = make_stream(), consumer = make_stream();
    cudaEvent_t event = make_event();
    launch_fill(a, 3, producer);
    if (with_event) {
        GOOD(cudaEventRecord(event, producer));
        GOOD(cudaStreamWaitEvent(consumer, event, 0));
    }
    launch_add(b, a, 1, consumer);
    GOOD(cudaStreamDestroy(producer));
    GOOD(cudaEventDestroy(event));
    GOOD(cudaStreamSynchronize(consumer));
    return all_are(b, 4) ? 0 : hazard_shows;
}
int missing_event() { return two_streams(/*with_event=*/false); }
int with_event() { return two_streams(/*with_event=*/true); }

int legacy_order(unsigned flags) {
    int *a = device_array(), *b = device_array();
    GOOD(cudaMemset(a, 0, bytes));
    GOOD(cudaDeviceSynchronize());
    cudaStream_t stream = make_stream(flags);
    launch_fill(a, 3, stream);
    launch_add(b, a, 1, nullptr);  // after the blocking stream
    launch_add(b, b, 1, stream);   // after the legacy stream
    GOOD(cudaStreamSynchronize(stream));
    return all_are(b, 5) ? 0 : hazard_shows;
}
int blocking_stream() { return legacy_order(cudaStreamDefault); }
int non_blocking_stream() { return legacy_order(cudaStreamNonBlocking); }

// A pinned source is read when the stream gets there; a pageable one, by a coin, at once or then.
int changed_source(bool pinned) {
    int* a = device_array();
    int* host = static_cast<int*>(std::malloc(bytes));
    if (pinned) GOOD(cudaMallocHost(&host, bytes));
    for (int i = 0; i < count; ++i) host[i] = 1;
    cudaStream_t stream = make_stream();
    GOOD(cudaMemcpyAsync(a, host, bytes, cudaMemcpyHostToDevice, stream));
    for (int i = 0; i < count; ++i) host[i] = 2;
    GOOD(cudaStreamSynchronize(stream));
    return all_are(a, 1) ? 0 : hazard_shows;
}
int changed_pinned_source() { return changed_source(/*pinned=*/true); }
int changed_pageable_source() { return changed_source(/*pinned=*/false); }

int events() {
    int* a = device_array();
    cudaStream_t stream = make_stream(cudaStreamDefault);
    cudaEvent_t start = nullptr, end = nullptr;
    GOOD(cudaEventCreate(&start));
    GOOD(cudaEventCreate(&end));
    GOOD(cudaEventQuery(start));  // never recorded
    float milliseconds = -1;
    EXPECT_ERROR(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
    GOOD(cudaEventRecord(start, stream));
    for (int i = 0; i < 100; ++i) launch_fill(a, i, stream);
    GOOD(cudaEventRecord(end, stream));
    EXPECT_ERROR(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
    int asked = 0;
    while (cudaEventQuery(end) == cudaErrorNotReady) ++asked;
    EXPECT(asked > 0 && asked < 10000);
    GOOD(cudaEventElapsedTime(&milliseconds, start, end));
    EXPECT(milliseconds > 0);
    launch_fill(a, 1, stream);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) ++asked;
    GOOD(cudaEventSynchronize(start));
    GOOD(cudaEventDestroy(start));
    EXPECT_ERROR(cudaEventRecord(start, stream), cudaErrorInvalidResourceHandle);
    return 0;
}

void set_to_one(void* flag) {
    *static_cast<int*>(flag) = 1;
    EXPECT_ERROR(cudaGetDevice(static_cast<int*>(flag)), cudaErrorNotPermitted);
}

int host_function() {
    int flag = 0;
    cudaStream_t stream = make_stream();
    GOOD(cudaLaunchHostFunc(stream, set_to_one, &flag));
    EXPECT(flag == 0);
    GOOD(cudaStreamSynchronize(stream));
    EXPECT(flag == 1);
    return 0;
}

// Capture and graphs.

int graphs() {
    int *a = device_array(), *b = device_array(), *c = device_array();
    cudaStream_t stream = make_stream(), side = make_stream();
    cudaEvent_t fork = make_event(), join = make_event();
    GOOD(cudaMemset(a, 0, bytes));
    GOOD(cudaDeviceSynchronize());
    int value = 1;
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launch_add(a, a, value, stream);
    value = 100;  // the graph has a copy
    GOOD(cudaEventRecord(fork, stream));
    GOOD(cudaStreamWaitEvent(side, fork, 0));
    launch_add(b, a, 10, side);
    launch_add(c, a, 20, stream);
    GOOD(cudaEventRecord(join, side));
    GOOD(cudaStreamWaitEvent(stream, join, 0));
    launch_add(c, b, 1, stream);
    launch_add(a, b, -10, stream);  // as it was, unless another launch came between
    cudaStreamCaptureStatus status;
    GOOD(cudaStreamIsCapturing(side, &status));
    EXPECT(status == cudaStreamCaptureStatusActive);
    unsigned long long number = 0;
    std::size_t dependencies = 0;
    GOOD(cudaStreamGetCaptureInfo(stream, &status, &number, nullptr, nullptr, nullptr, &dependencies));
    EXPECT(number != 0 && dependencies == 1);
    cudaGraph_t graph = nullptr;
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaStreamIsCapturing(side, &status));
    EXPECT(status == cudaStreamCaptureStatusNone);
    std::size_t nodes = 0;
    GOOD(cudaGraphGetNodes(graph, nullptr, &nodes));
    EXPECT(nodes == 5);
    cudaGraphExec_t executable = nullptr;
    GOOD(cudaGraphInstantiate(&executable, graph, 0));
    GOOD(cudaGraphDestroy(graph));
    EXPECT(all_are(a, 0));  // nothing of the capture ran
    for (int i = 0; i < 3; ++i) GOOD(cudaGraphLaunch(executable, i == 1 ? side : stream));
    GOOD(cudaGraphExecDestroy(executable));
    GOOD(cudaDeviceSynchronize());
    EXPECT(all_are(a, 3) && all_are(c, 14));
    return 0;
}

int capture_errors() {
    int *a = device_array(), *other = nullptr;
    std::vector<int> host(count);
    cudaStream_t stream = make_stream(), side = make_stream(), blocking = make_stream(cudaStreamDefault);
    cudaEvent_t event = make_event(), outside = make_event();
    cudaGraph_t graph = nullptr;
    const auto begin = [&](cudaStream_t s, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
        (void)cudaGetLastError();
        GOOD(cudaStreamBeginCapture(s, mode));
        launch_fill(a, 1, s);
        GOOD(cudaGetLastError());
    };
    const auto expect_spoilt = [&](cudaStream_t s) {
        launch_fill(a, 1, s);
        EXPECT_ERROR(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
        EXPECT_ERROR(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
        EXPECT(graph == nullptr);
        (void)cudaGetLastError();
    };
    begin(stream);
    EXPECT_ERROR(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    expect_spoilt(stream);
    begin(stream);
    EXPECT_ERROR(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    expect_spoilt(stream);
    begin(stream);
    EXPECT_ERROR(cudaMalloc(&other, bytes), cudaErrorStreamCaptureUnsupported);
    expect_spoilt(stream);
    begin(stream);
    EXPECT_ERROR(cudaMemcpy(host.data(), a, bytes, cudaMemcpyDeviceToHost), cudaErrorStreamCaptureUnsupported);
    expect_spoilt(stream);
    begin(blocking);
    launch_fill(a, 1, nullptr);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorStreamCaptureImplicit);
    expect_spoilt(blocking);
    begin(stream);
    GOOD(cudaEventRecord(event, stream));
    EXPECT_ERROR(cudaEventQuery(event), cudaErrorCapturedEvent);
    expect_spoilt(stream);
    begin(stream);
    GOOD(cudaEventRecord(outside, side));
    EXPECT_ERROR(cudaStreamWaitEvent(stream, outside, 0), cudaErrorStreamCaptureIsolation);
    expect_spoilt(stream);

    begin(stream);
    GOOD(cudaEventRecord(event, stream));
    GOOD(cudaStreamWaitEvent(side, event, 0));
    launch_fill(a, 1, side);
    EXPECT_ERROR(cudaStreamEndCapture(side, &graph), cudaErrorStreamCaptureUnmatched);
    expect_spoilt(stream);
    begin(stream);
    GOOD(cudaEventRecord(event, stream));
    GOOD(cudaStreamWaitEvent(side, event, 0));
    launch_fill(a, 1, side);
    EXPECT_ERROR(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);

    EXPECT_ERROR(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
    EXPECT_ERROR(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
    begin(stream, cudaStreamCaptureModeRelaxed);
    GOOD(cudaMalloc(&other, bytes));
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphDestroy(graph));
    begin(stream);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    GOOD(cudaThreadExchangeStreamCaptureMode(&mode));
    GOOD(cudaMalloc(&other, bytes));
    GOOD(cudaThreadExchangeStreamCaptureMode(&mode));
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaDeviceSynchronize());
    return 0;
}

// Copies and memsets are nodes too; the graph reads and writes the host's memory in each launch.
int graph_copies() {
    int* a = device_array();
    std::vector<int> in(count, 1), out(count, 1);
    cudaStream_t stream = make_stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    GOOD(cudaMemsetAsync(a, 0, bytes, stream));
    GOOD(cudaMemcpyAsync(a, in.data(), bytes / 2, cudaMemcpyHostToDevice, stream));
    GOOD(cudaMemcpyAsync(out.data(), a, bytes, cudaMemcpyDeviceToHost, stream));
    GOOD(cudaStreamEndCapture(stream, &graph));
    EXPECT(out[0] == 1);
    cudaGraphNode_t nodes[4] = {};
    std::size_t room = 4;
    GOOD(cudaGraphGetNodes(graph, nodes, &room));
    EXPECT(room == 3);
    cudaGraphNodeType type;
    GOOD(cudaGraphNodeGetType(nodes[0], &type));
    EXPECT(type == cudaGraphNodeTypeMemset);
    GOOD(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 2; i < 5; ++i) {
        in.assign(count, i);
        GOOD(cudaGraphLaunch(executable, stream));
        EXPECT(static_cast<unsigned>(out[0]) == 0xA5A5A5A5U);  // not there yet
        GOOD(cudaStreamSynchronize(stream));
        EXPECT(out[0] == i && out[count - 1] == 0);
    }
    // A graph inside a graph.
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launch_fill(a, 9, stream);
    GOOD(cudaGraphLaunch(executable, stream));
    launch_add(a, a, 1, stream);
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphExecDestroy(executable));
    GOOD(cudaGraphInstantiate(&executable, graph, 0));
    GOOD(cudaGraphLaunch(executable, stream));
    GOOD(cudaStreamSynchronize(stream));
    EXPECT(out[0] == 4 && out[count - 1] == 0);
    GOOD(cudaMemcpy(out.data(), a, bytes, cudaMemcpyDeviceToHost));
    EXPECT(out[0] == 5 && out[count - 1] == 1);
    return 0;
}

// Memory of a graph is unwritten in each launch, and lives while the executable does.
int captured_memory(bool fills) {
    int *a = device_array(), *temporary = nullptr;
    cudaStream_t stream = make_stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    GOOD(cudaMallocAsync(reinterpret_cast<void**>(&temporary), bytes, stream));
    if (fills) launch_fill(temporary, 6, stream);
    launch_add(a, temporary, 1, stream);
    GOOD(cudaFreeAsync(temporary, stream));
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&executable, graph, 0));
    GOOD(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; ++i) GOOD(cudaGraphLaunch(executable, stream));
    GOOD(cudaStreamSynchronize(stream));
    EXPECT(all_are(a, 7));
    GOOD(cudaGraphExecDestroy(executable));
    return 0;
}
int written_graph_memory() { return captured_memory(/*fills=*/true); }
int unwritten_graph_memory() { return captured_memory(/*fills=*/false); }

}  // namespace

Scenarios scenarios_of_streams() {
#define SCENARIO(name) {#name, name}
    return {
        SCENARIO(missing_synchronization), SCENARIO(missing_event), SCENARIO(with_event), SCENARIO(blocking_stream),
        SCENARIO(non_blocking_stream), SCENARIO(changed_pinned_source), SCENARIO(changed_pageable_source),
        SCENARIO(events), SCENARIO(host_function), SCENARIO(graphs), SCENARIO(graph_copies), SCENARIO(capture_errors),
        SCENARIO(written_graph_memory), SCENARIO(unwritten_graph_memory),
    };
#undef SCENARIO
}
