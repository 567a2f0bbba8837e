// The interface of calls on CUDA tensors: streams, workspaces, nothing that waits, graphs, threads, ragged batches,
// sizes; values are in interface_values_test.cpp.
#include <thread>

#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

// Each direction, each form, with what the drivers queue beside the kernels: numbers of sequences, sums of gradients.
const char* const lines[] = {
    "gated_delta_rule:fwd t40 h1 hv2 k32 v16 state=inout force=cuda.walk",
    "gla:fwd varlen=0,21,21,40,44 h1 k32 v16 state=inout force=cuda.recurrent",
    "kda:bwd varlen=0,17,40,44,50 h1 k16 v16 rawgate state=inout force=cuda.walk",
    "gla:bwd varlen=0,17,40,44 h1 hv2 k16 v16 gate=channel+head state=inout force=cuda.split",
    "simple_gla:bwd t24 h1 k32 v16 gate=step+head force=cuda.recurrent",
    "comba:fwd varlen=0,0,70,100 h1 k64 v32 bf16 state=inout force=cuda.tensor",
    "simple_gla:fwd t600 h1 k32 v32 bf16 state=inout force=cuda.tensor",
    "simple_gla:bwd t70 h8 k32 v32 gate=step+head bf16 state=inout force=cuda.tensor",
    "kda:bwd varlen=0,40,70 h8 k64 v32 rawgate gate=channel+head bf16 state=inout force=cuda.tensor",
    "gated_delta_rule:step b3 t1 h1 hv2 k32 v16 pool=5 bf16",
    "kda:summary varlen=0,40,70,75 h2 k64 v32 rawgate bf16 state=in force=cuda.tensor",
    "gla:summary varlen=0,21,21,40,44 h2 k32 v16 state=in force=cuda.walk",
    "gated_delta_rule:summary t30 h2 k32 v16 bf16 force=cuda.recurrent",
    "gated_delta_rule:summary_bwd t70 h2 k64 v32 bf16 force=cuda.tensor",
};

class EachLine : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CudaInterface, EachLine, testing::ValuesIn(lines));

// Inputs that come on a stream, a call behind an event on another, a copy of the results behind it: what is not ordered
// by the two streams is not ordered at all. Several times, since an interpreter draws the order.
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

// The inputs of the line, queries times `factor`; outputs NaN. For tensors that other values have been in.
void set_values(DeviceTensors& tensors, const char* line, double factor) {
    const CallTensors fresh = harness::make_tensors(line_of(line));
    for (auto& [name, tensor] : tensors.host.tensors) {
        if (tensor.dtype() == DType::i32 || tensor.dtype() == DType::i64) continue;
        for (std::int64_t i = 0; i < tensor.numel(); ++i) {
            tensor.set(i, fresh.tensors.at(name).get(i) * (name == "v" ? factor : 1));
        }
    }
    tensors.upload();
}

// The bits of calls, for inputs that change between the replays.
TEST_P(EachLine, IsCapturedInAGraph) {
    for (const bool own_workspace : {false, true}) {
        DeviceTensors tensors(GetParam());
        const DeviceMemory workspace(tensors.workspace_bytes());
        tensors.spoil();  // what a capture must not read
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        expect_cuda(cudaStreamBeginCapture(tensors.stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        const Status status =
            run(tensors.call, own_workspace ? Workspace{workspace.data(), workspace.bytes()} : Workspace{});
        EXPECT_TRUE(status.ok()) << status.message();
        expect_cuda(cudaStreamEndCapture(tensors.stream, &graph), "cudaStreamEndCapture");
        expect_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        for (const double factor : {1.0, 2.0, -0.75}) {
            DeviceTensors called(GetParam());
            set_values(called, GetParam(), factor);
            set_values(tensors, GetParam(), factor);
            expect_cuda(cudaGraphLaunch(executable, tensors.stream), "cudaGraphLaunch");
            expect_same_bits(called.run_and_read(), tensors.written(), GetParam());
        }
        expect_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        expect_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
}

TEST_P(EachLine, IsQueuedByThreadsWithStreamsOfTheirOwn) {
    DeviceTensors plain(GetParam()), first(GetParam()), second(GetParam());
    const auto expected = plain.run_and_read();
    Status statuses[2];
    std::thread one([&] { statuses[0] = run(first.call); }), two([&] { statuses[1] = run(second.call); });
    one.join(), two.join();
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
    expect_same_bits(expected, second.written(), GetParam());
    expect_same_bits(expected, first.written(), GetParam());
}

// Threads whose calls launch the same kernel with different amounts of shared memory, all more than every GPU gives
// unasked: neither's launch depends on when the other says how much it wants. In captures, which run nothing.
TEST(CudaInterface, ThreadsWantDifferentAmountsOfSharedMemory) {
    struct Caller {
        DeviceTensors tensors;
        DeviceMemory workspace{tensors.workspace_bytes()};
        std::vector<Status> failed;

        explicit Caller(const char* line) : tensors(line) {}
        void capture() {
            expect_cuda(cudaStreamBeginCapture(tensors.stream, cudaStreamCaptureModeThreadLocal),
                        "cudaStreamBeginCapture");
            for (int i = 0; i < 5000; ++i) {
                if (Status status = run(tensors.call, {workspace.data(), workspace.bytes()}); !status.ok())
                    failed.push_back(status);
            }
            cudaGraph_t graph = nullptr;
            expect_cuda(cudaStreamEndCapture(tensors.stream, &graph), "cudaStreamEndCapture");
            expect_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
        }
    };
    Caller small("kda:fwd t3 h1 k64 v16 force=cuda.walk"), large("kda:fwd t3 h1 k128 v16 force=cuda.walk");
    std::thread one([&] { small.capture(); }), two([&] { large.capture(); });
    one.join(), two.join();
    for (const Caller* caller : {&small, &large})
        EXPECT_EQ(caller->failed.size(), 0U) << caller->failed.front().message();
}

// ---- ragged batches ----

// Sequence n of a batch of rows cut out of a ragged one: tokens [begin, end), state n.
Call sequence_of(const Call& ragged, std::int64_t n, std::int64_t begin, std::int64_t end) {
    Call call = tokens_of(ragged, begin, end);
    call.in.cu_seqlens = {};
    for (TensorView* view :
         {&call.in.initial_state, &call.out.final_state, &call.d_out.d_final_state, &call.grads.d_initial_state}) {
        if (!view->given()) continue;
        view->data =
            static_cast<char*>(view->data) + n * view->strides[0] * static_cast<std::int64_t>(size_of(view->dtype));
        view->shape[0] = 1;
    }
    return call;
}

TEST(CudaInterface, CuSeqlensOnTheHostOnTheDeviceAndPlainCallsGiveTheSameBits) {
    for (const std::string call :
         {"kda:fwd force=cuda.walk", "kda:fwd force=cuda.recurrent", "gated_delta_rule:bwd force=cuda.walk",
          "gated_delta_rule:bwd force=cuda.split", "gated_delta_rule:bwd force=cuda.recurrent"}) {
        for (const char* reverse : {"", " reverse"}) {
            const std::string line = call + " varlen=0,9,9,50,67 h1 hv2 k32 v16 state=inout" + reverse;
            DeviceTensors on_device(line), on_host(line), cut(line);
            const DeviceMemory memory(5 * sizeof(std::int64_t));
            const std::int64_t ends[] = {0, 9, 9, 50, 67};
            transfer(memory.data(), ends, sizeof ends);
            on_device.call.in.cu_seqlens = TensorView(memory.data(), DType::i64, {5});
            on_device.call.in.cu_seqlens.device = Device::cuda;
            on_host.call.in.cu_seqlens = on_host.host.call.in.cu_seqlens;
            const auto expected = on_device.run_and_read();
            expect_same_bits(expected, on_host.run_and_read(), line);
            for (int n = 0; n < 4; ++n) {
                const Status status = run(sequence_of(cut.call, n, ends[n], ends[n + 1]));
                EXPECT_TRUE(status.ok()) << status.message();
            }
            expect_same_bits(expected, cut.written(), line);
        }
    }
}

// ---- sizes ----

// What blocks keep beyond shared memory is theirs, not the sequences'.
TEST(CudaInterface, TilesInTheWorkspaceDoNotGrowWithSequences) {
    const auto tiles = [](const std::string& line) {
        const CallTensors shapes = harness::make_shapes(line_of(line));
        std::size_t bytes = 0;
        for (const PlanEntry& entry : plan_of(shapes.call))
            if (entry.name == "tiles beyond shared memory") bytes += entry.bytes;
        return bytes;
    };
    for (const char* call : {"kda:bwd force=cuda.walk", "kda:bwd force=cuda.split", "kda:bwd force=cuda.recurrent",
                             "comba:fwd force=cuda.walk", "comba:summary_bwd force=cuda.split"}) {
        const std::string line = std::string(call) + " t40 h8 k256 v256 cuda b";
        EXPECT_GT(tiles(line + "1000"), 0U) << call;
        EXPECT_EQ(tiles(line + "1000"), tiles(line + "100000")) << call;
    }
}

// The call without its sequences.
Call without_sequences(Call call) {
    const TensorView* const whole[] = {&call.in.g_gamma,      &call.in.A_log,      &call.in.dt_bias,
                                       &call.grads.d_g_gamma, &call.grads.d_A_log, &call.grads.d_dt_bias,
                                       &call.pool.states};
    each_device_view(call, [&](TensorView& view) {
        if (std::find(std::begin(whole), std::end(whole), &view) == std::end(whole)) view.shape[0] = 0;
    });
    return call;
}

std::vector<double> values_of(DeviceTensors& tensors, const char* name) {
    return tensors.host.tensors.at(name).values();
}

// Runs it, and waits for nothing.
void expect_queued(DeviceTensors& tensors, const Call& call) {
    Gate gate(tensors.stream);
    const Status status = run(call);
    EXPECT_TRUE(status.ok()) << status.message();
    gate.open();
    tensors.written();
    EXPECT_FALSE(gate.early());
}

const char* const backward_forms[] = {" force=cuda.split", " force=cuda.walk", " force=cuda.recurrent"};

TEST(CudaInterface, WithoutTokensStatesStayAndSumsAreZero) {
    for (const std::string form : {" force=cuda.walk", " force=cuda.recurrent"}) {
        DeviceTensors tensors("kda:fwd b2 t4 h1 hv2 k32 v16 state=inout" + form);
        const std::vector<double> all = values_of(tensors, "initial_state");
        expect_queued(tensors, tokens_of(tensors.call, 0, 0));
        EXPECT_EQ(values_of(tensors, "final_state"), all);
        EXPECT_TRUE(std::isnan(values_of(tensors, "o")[0])) << "written where there is no token";
    }
    for (const std::string form : backward_forms) {
        DeviceTensors backward("simple_gla:bwd b2 t4 h1 hv2 k32 v16 gate=step+head state=inout" + form);
        expect_queued(backward, tokens_of(backward.call, 0, 0));
        EXPECT_EQ(values_of(backward, "d_initial_state"), values_of(backward, "d_final_state"));
        EXPECT_EQ(values_of(backward, "d_g_gamma"), std::vector<double>(2, 0.0));
    }
}

TEST(CudaInterface, WithoutSequencesSumsAreZero) {
    for (const std::string form : {" force=cuda.walk", " force=cuda.recurrent"}) {
        DeviceTensors forward("kda:fwd t4 h1 hv2 k32 v16 state=inout" + form);
        expect_queued(forward, without_sequences(forward.call));
        EXPECT_TRUE(std::isnan(values_of(forward, "o")[0]));
    }
    for (const std::string form : backward_forms) {
        DeviceTensors backward("simple_gla:bwd t4 h1 hv2 k32 v16 gate=step+head state=inout" + form);
        expect_queued(backward, without_sequences(backward.call));
        EXPECT_EQ(values_of(backward, "d_g_gamma"), std::vector<double>(2, 0.0));
    }
    DeviceTensors step("gated_delta_rule:step b3 t1 h1 hv2 k32 v16 pool=5");
    const std::vector<double> pool = values_of(step, "pool");
    expect_queued(step, without_sequences(step.call));
    EXPECT_EQ(values_of(step, "pool"), pool);
}

TEST(CudaInterface, TakesEmptySequences) {
    for (const char* line :
         {"kda:fwd varlen=0,0,20,20 h2 k32 v16 state=inout", "kda:bwd varlen=0,0,20,20 h2 k32 v16 rawgate state=inout",
          "kda:bwd varlen=0,0,20,20 h2 k32 v16 rawgate state=inout force=cuda.walk",
          "gla:bwd varlen=0,0,20,20,20 h2 k32 v16 gate=channel+head force=cuda.recurrent"}) {
        expect_right(std::string(line) + " cuda");
    }
}

// Final states are initial ones, gradients of these those of final ones, parameters' gradients zero: where outputs are
// added up, of parts of keys and of value heads that share them, too.
TEST(CudaInterface, TakesNoTokens) {
    for (const char* sizes : {"t0 h2 hv4 k64 v32", "b2 t0 h2 k100 v130 f16", "t0 h2 k256 v512 bf16",
                              "t0 h2 hv4 k128 v200 bf16", "varlen=0,0,0 h2 hv4 k128 v64 bf16"}) {
        for (const char* operation : {"gla:fwd", "gla:bwd", "simple_gla:fwd", "simple_gla:bwd", "kda:fwd", "kda:bwd",
                                      "gated_delta_rule:fwd", "gated_delta_rule:bwd", "comba:bwd"})
            expect_right(std::string(operation) + " " + sizes + " state=inout cuda");
    }
}

// Ranks' pieces of a sequence, of which that seed leaves one no tokens.
TEST(CudaInterface, TakesPiecesWithoutTokens) {
    for (const char* line : {"gla:fwd t100 h2 k256 v64", "gla:bwd t100 h2 k256 v64", "simple_gla:bwd t100 h8 k128 v200",
                             "retention:bwd t100 h2 hv4 k64", "kda:bwd t100 h2 hv4 k64",
                             "gated_delta_rule:bwd t100 h4 hv8 k64"})
        expect_right(std::string(line) + " bf16 ranks=5 seed=3 cuda");
}

TEST(CudaInterface, RefusesWhatIsTooWide) {
    for (const char* line : {"gla:fwd t4 h1 k257 v16", "gla:fwd t4 h1 k16 v513", "gated_delta_rule:bwd t4 h1 k272 v16",
                             "kda:step t1 h1 k16 v528"}) {
        DeviceTensors tensors(line);
        expect_error(run(tensors.call), Code::unsupported, {"up to 256 key and 512 value channels", "cuda."});
    }
}

}  // namespace
}  // namespace headrace::test
