// The interface of calls on CUDA tensors: streams, workspaces, nothing that waits, graphs, ragged batches, pools, bad values, sizes.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

// Each direction, each form, with what the drivers queue beside the kernels: numbers of sequences, sums of gradients.
const char* const lines[] = {
    "gated_delta_rule:fwd t40 h1 hv2 k32 v16 state=inout force=cuda.walk",
    "gla:fwd varlen=0,21,21,40,44 h1 k32 v16 state=inout force=cuda.recurrent",
    "kda:bwd varlen=0,17,40,44,50 h1 k16 v16 rawgate state=inout force=cuda.walk",
    "simple_gla:bwd t24 h1 k32 v16 gate=step+head force=cuda.recurrent",
    "gated_delta_rule:step b3 t1 h1 hv2 k32 v16 pool=5 bf16",
};

// Holds a stream from where it is made until it is opened; `early` says that the stream went on without that.
class Gate {
  public:
    explicit Gate(cudaStream_t stream) { expect_cuda(cudaLaunchHostFunc(stream, &Gate::hold, this), "cudaLaunchHostFunc"); }
    void open() { open_ = true; }
    bool early() const { return early_; }

  private:
    static void hold(void* gate) {
        auto& self = *static_cast<Gate*>(gate);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (!self.open_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        self.early_ = !self.open_;
    }
    std::atomic<bool> open_ = false, early_ = false;
};

class EachLine : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CudaInterface, EachLine, testing::ValuesIn(lines));

// Inputs that come on a stream, a call behind an event on another, a copy of the results behind it: what is not ordered by the two
// streams is not ordered at all. Several times, since an interpreter draws the order.
TEST_P(EachLine, IsQueuedOnTheGivenStream) {
    DeviceTensors plain(GetParam()), other(GetParam());
    const auto expected = plain.run_and_read();
    cudaEvent_t ready = nullptr;
    expect_cuda(cudaEventCreate(&ready), "cudaEventCreate");
    for (int repetition = 0; repetition < 4; ++repetition) {
        DeviceTensors tensors(GetParam());
        tensors.spoil();
        tensors.upload_in_stream(other.stream);
        expect_cuda(cudaEventRecord(ready, other.stream), "cudaEventRecord");
        expect_cuda(cudaStreamWaitEvent(tensors.stream, ready, 0), "cudaStreamWaitEvent");
        expect_same_bits(expected, tensors.run_and_read(), GetParam());
    }
    expect_cuda(cudaEventDestroy(ready), "cudaEventDestroy");
}

// The default stream, which other blocking streams wait for.
TEST_P(EachLine, IsQueuedOnTheDefaultStreamWithoutOne) {
    DeviceTensors plain(GetParam()), tensors(GetParam());
    const auto expected = plain.run_and_read();
    tensors.spoil();
    tensors.upload_in_stream(nullptr);
    tensors.call.options.stream = nullptr;
    ASSERT_TRUE(run(tensors.call).ok());
    expect_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    expect_same_bits(expected, tensors.written(), GetParam());
}

TEST_P(EachLine, UsesTheCallersWorkspaceAlone) {
    DeviceTensors plain(GetParam()), tensors(GetParam());
    const auto expected = plain.run_and_read();
    const DeviceMemory workspace(tensors.workspace_bytes());
    expect_cuda(cudaMemset(workspace.data(), 0xff, workspace.bytes()), "cudaMemset");
    expect_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const std::size_t before = free_memory();
    Gate gate(tensors.stream);
    EXPECT_TRUE(run(tensors.call, {workspace.data(), workspace.bytes()}).ok());
    EXPECT_EQ(free_memory(), before);
    gate.open();
    expect_same_bits(expected, tensors.written(), GetParam());
    EXPECT_FALSE(gate.early());
    expect_error(run(tensors.call, {workspace.data(), workspace.bytes() - 1}), Code::out_of_memory,
                 {"workspace: expected at least " + std::to_string(workspace.bytes())});
}

// One allocation in the stream, given back behind the kernels; the call returns before anything has run.
TEST_P(EachLine, WaitsForNothing) {
    DeviceTensors plain(GetParam()), tensors(GetParam());
    const auto expected = plain.run_and_read();
    const std::size_t before = free_memory();
    Gate gate(tensors.stream);
    EXPECT_TRUE(run(tensors.call).ok());
    EXPECT_EQ(free_memory(), before - tensors.workspace_bytes());
    gate.open();
    expect_same_bits(expected, tensors.written(), GetParam());
    EXPECT_FALSE(gate.early()) << "the call ran the stream";
    EXPECT_EQ(free_memory(), before);
}

// The bits of calls, for inputs that change between the replays.
TEST_P(EachLine, IsCapturedInAGraph) {
    for (const bool own_workspace : {false, true}) {
        DeviceTensors tensors(GetParam());
        const DeviceMemory workspace(tensors.workspace_bytes());
        tensors.spoil();  // a capture must not read
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        expect_cuda(cudaStreamBeginCapture(tensors.stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        const Status status = run(tensors.call, own_workspace ? Workspace{workspace.data(), workspace.bytes()} : Workspace{});
        EXPECT_TRUE(status.ok()) << status.message();
        expect_cuda(cudaStreamEndCapture(tensors.stream, &graph), "cudaStreamEndCapture");
        expect_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        for (const char* seed : {" seed=1", " seed=3", " seed=5"}) {
            DeviceTensors called(GetParam());
            CallTensors fresh = harness::make_tensors(line_of(GetParam() + std::string(" cuda")));
            ProblemLine line = line_of(GetParam() + std::string(" cuda"));
            for (auto& [name, tensor] : called.host.tensors) {  // the values of another seed in the layout of this one
                if (name != "q" && name != "k" && name != "v") continue;
                for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, (seed[6] - '0') * tensor.get(i) / 4);
            }
            called.upload();
            for (auto& [name, tensor] : tensors.host.tensors) tensor = called.host.tensors.at(name);
        }
        expect_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        expect_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
}
