// The handlers of headrace.jax on XLA's CUDA platform, called as XLA does: numbers, stream, scratch memory, errors.
#include <gtest/gtest.h>

#include <functional>

#include "tests/cuda/device_layers.hpp"
#include "tests/xla_calls.hpp"

// What a handler meets of XLA: the stream, and memory that the next work on it overwrites once it was given back.
struct headrace::python::xla::ExecutionContext {
    cudaStream_t stream = nullptr;
    const headrace::test::DeviceMemory& memory;
    std::size_t taken = 0;  // bytes that were asked for, and not given back
    int allocations = 0;
    const char* failing = nullptr;
};

namespace headrace::test {
namespace {

using xla::ExecutionContext;

xla::Error* failure_of(const char* function, const ExecutionContext* context) {
    static xla::Error error = {"the device is gone", xla::ErrorCode::internal};
    return context->failing != nullptr && std::string(context->failing) == function ? &error : nullptr;
}

xla::Error* get_stream(xla::StreamQuery* query) {
    query->stream = query->context->stream;
    return failure_of("get_stream", query->context);
}
// No better aligned than XLA promises.
constexpr std::size_t scratch_offset = 16;
void* scratch_of(const ExecutionContext& context) {
    return static_cast<char*>(context.memory.data()) + scratch_offset;
}
xla::Error* allocate(xla::Allocation* allocation) {
    ExecutionContext& context = *allocation->context;
    if (xla::Error* error = failure_of("allocate", &context)) return error;
    EXPECT_EQ(context.taken, 0u);
    EXPECT_LE(allocation->bytes, context.memory.bytes() - scratch_offset);
    EXPECT_LE(allocation->alignment, 16u);  // or XLA refuses
    context.taken = allocation->bytes, ++context.allocations;
    allocation->data = scratch_of(context);
    return nullptr;
}
xla::Error* deallocate(xla::Deallocation* deallocation) {
    ExecutionContext& context = *deallocation->context;
    EXPECT_EQ(deallocation->data, scratch_of(context));
    EXPECT_EQ(deallocation->bytes, context.taken);
    expect_cuda(cudaMemsetAsync(deallocation->data, 0xff, deallocation->bytes, context.stream), "cudaMemsetAsync");
    context.taken = 0;
    return nullptr;
}

const xla::Api& device_api() {
    static const xla::Api api = [] {
        xla::Api made = host_api();
        made.get_stream = get_stream, made.allocate = allocate, made.deallocate = deallocate;
        return made;
    }();
    return api;
}

const DeviceMemory& scratch() {
    static const DeviceMemory memory(std::size_t{1} << 22);
    return memory;
}

void expect_none(const xla::Error* error, const std::string& what) {
    EXPECT_EQ(error, nullptr) << what << ": " << error->message;
}
void expect_said(const xla::Error* error, xla::ErrorCode code, const std::string& text) {
    ASSERT_NE(error, nullptr) << text;
    EXPECT_EQ(static_cast<int>(error->code), static_cast<int>(code)) << error->message;
    EXPECT_NE(error->message.find(text), std::string::npos) << error->message;
}

// Rows of states in order, all offsets on the device.
const char* const lines[] = {
    "linear_attention:fwd t20 h2 k16 v8 bf16 seed=1",
    "retention:bwd t20 h1 hv2 k16 v8 state=inout",
    "simple_gla:fwd b2 t33 h1 hv2 k16 v24 state=inout vfirst",
    "gla:bwd varlen=0,9,9,30 h1 k16 v16 state=inout vfirst",
    "gla:fwd t12 h1 k16 v16 gv bound=-5 f16",
    "delta_rule:fwd t20 h1 k16 v16 f64 reverse",
    "gated_delta_rule:bwd t33 h1 hv2 k16 v16 l2norm rawgate beta=sigmoid state=inout",
    "comba:bwd t20 h1 k16 v16 bf16",
    "kda:fwd varlen=0,9,9,30 h1 hv2 k16 v16 state=inout scale=0.5 chunk=16",
    "kda:bwd t20 h1 k16 v16 rawgate state=inout",
    "simple_gla:step b3 t1 h1 hv2 k32 v16",
    "gated_delta_rule:step b3 t1 h1 hv2 k32 v16 vfirst",
    "kda:step b2 t2 h1 k32 v16 l2norm",
};

class EachXlaCall : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CudaXla, EachXlaCall, testing::ValuesIn(lines));

// What `queue` puts into a stream, and nothing that it puts elsewhere, runs when this is called.
template <class Queue>
std::function<void()> captured(cudaStream_t stream, const Queue& queue) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    queue();
    expect_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    expect_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    expect_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return [stream, executable] {
        expect_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        expect_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    };
}

// The bits of the library's own call, from XLA's memory alone, and before anything of it has run.
TEST_P(EachXlaCall, IsTheCallOfTheLibrary) {
    const ProblemLine line = line_of(GetParam());
    const char* const name = name_of(line.direction);
    DeviceTensors plain(GetParam()), tensors(GetParam());
    ASSERT_TRUE(!tensors.call.in.cu_seqlens.given() || tensors.call.in.cu_seqlens.device == Device::cuda);
    const auto expected = plain.run_and_read();
    ExecutionContext context = {tensors.stream, scratch()};
    const std::size_t before = free_memory();
    Gate gate(tensors.stream);
    XlaCall made = xla_call(tensors.call, line.vfirst);
    expect_none(made.run(handler_named(name, Device::cuda), device_api(), &context), GetParam());
    EXPECT_EQ(free_memory(), before);
    EXPECT_EQ(context.allocations, 1);
    EXPECT_EQ(context.taken, 0u);
    gate.open();
    expect_same_bits(expected, tensors.written(), GetParam());
    EXPECT_FALSE(gate.early());
}

TEST_P(EachXlaCall, IsQueuedOnXlasStream) {
    const ProblemLine line = line_of(GetParam());
    DeviceTensors plain(GetParam()), tensors(GetParam());
    const auto expected = plain.run_and_read();
    ExecutionContext context = {tensors.stream, scratch()};
    const auto run = captured(tensors.stream, [&] {
        XlaCall made = xla_call(tensors.call, line.vfirst);
        expect_none(made.run(handler_named(name_of(line.direction), Device::cuda), device_api(), &context), GetParam());
    });
    tensors.upload();
    run();
    expect_same_bits(expected, tensors.written(), GetParam());
}

// The handler of the same name on a CPU computes the same within the bars of the oracle, which judges both.
TEST_P(EachXlaCall, IsThatOfTheCpu) {
    const ProblemLine line = line_of(GetParam());
    const char* const name = name_of(line.direction);
    const CallTensors host = harness::make_tensors(line);
    DeviceTensors tensors(GetParam());
    const harness::Expected expected = harness::expect(host.call);
    ExecutionContext context = {tensors.stream, scratch()};
    XlaCall on_device = xla_call(tensors.call, line.vfirst), on_host = xla_call(host.call, line.vfirst);
    expect_none(on_device.run(handler_named(name, Device::cuda), device_api(), &context), GetParam());
    expect_none(on_host.run(handler_named(name, Device::cpu), host_api()), GetParam());
    tensors.written();
    expect_within_bars(tensors.host.call, expected.outputs, GetParam(), expected.terms);
    expect_within_bars(host.call, expected.outputs, GetParam(), expected.terms);
}

std::vector<TensorView*> outputs_of(ConvolutionCall& call) {
    return {&call.out.y,          &call.out.final_state, &call.grads.d_x,
            &call.grads.d_weight, &call.grads.d_bias,    &call.grads.d_initial_state};
}
std::vector<TensorView*> outputs_of(RmsNormCall& call) {
    return {&call.y, &call.grads.d_x, &call.grads.d_gate, &call.grads.d_weight};
}

xla::Error* run_convolution(ConvolutionCall& call, ExecutionContext* context) {
    XlaCall forward, backward;
    forward.arguments({call.in.x, call.in.weight, call.in.bias, call.in.initial_state, call.in.cu_seqlens});
    backward.arguments({call.in.x, call.in.weight, call.in.bias, call.in.initial_state, call.in.cu_seqlens,
                        call.d_out.d_y, call.d_out.d_final_state});
    forward.results({call.out.y, call.out.final_state});
    backward.results({call.grads.d_x, call.grads.d_weight, call.grads.d_bias, call.grads.d_initial_state});
    for (XlaCall* made : {&forward, &backward}) made->attribute("activation", "silu");
    if (xla::Error* error = forward.run(handler_named("convolution_forward", Device::cuda), device_api(), context))
        return error;
    return backward.run(handler_named("convolution_backward", Device::cuda), device_api(), context);
}

xla::Error* run_norm(RmsNormCall& call, ExecutionContext* context) {
    XlaCall forward, backward;
    forward.arguments({call.in.x, call.in.gate, call.in.weight});
    backward.arguments({call.in.x, call.in.gate, call.in.weight, call.d_y});
    forward.results({call.y});
    backward.results({call.grads.d_x, call.grads.d_gate, call.grads.d_weight});
    for (XlaCall* made : {&forward, &backward}) {
        made->attribute("activation", "silu");
        made->attribute("eps", call.options.eps);
    }
    if (xla::Error* error = forward.run(handler_named("norm_forward", Device::cuda), device_api(), context))
        return error;
    return backward.run(handler_named("norm_backward", Device::cuda), device_api(), context);
}

// With what the stream brings, and nothing else.
template <class LayerCall, class Run>
void expect_layer(LayerCall& call, const Run& run, std::vector<TensorView*> more = {}) {
    {
        const MovedToDevice moved(call, more);
        ExecutionContext context = {static_cast<cudaStream_t>(call.options.stream), scratch()};
        const auto launch = captured(context.stream, [&] { expect_none(run(call, &context), "layer function"); });
        for (TensorView* output : outputs_of(call)) {
            expect_cuda(cudaMemset(output->data, 0xff, extent_bytes(*output)), "cudaMemset");
        }
        expect_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        launch();
    }
    EXPECT_EQ(misses(call), "");
}

TEST(CudaXla, LayerFunctions) {
    ConvolutionCall dense({.T = 37, .D = 40}), ragged({.B = 1, .T = 50, .D = 5, .cu_seqlens = {0, 0, 3, 50}});
    expect_layer(dense, run_convolution);
    expect_layer(ragged, run_convolution, {&ragged.in.cu_seqlens});
    RmsNormCall norm({.dtype = DType::bf16});
    expect_layer(norm, run_norm);
}

TEST(CudaXla, ErrorsOfXlaAreReturnedToIt) {
    for (const char* failing : {"get_stream", "allocate"}) {
        DeviceTensors tensors(lines[0]);
        const auto before = tensors.written();
        ExecutionContext context = {tensors.stream, scratch(), 0, 0, failing};
        XlaCall made = xla_call(tensors.call);
        expect_said(made.run(handler_named("forward", Device::cuda), device_api(), &context), xla::ErrorCode::internal,
                    "the device is gone");
        expect_same_bits(before, tensors.written(), failing);
    }
}

TEST(CudaXla, ErrorsOfTheLibraryAreErrorsOfXla) {
    DeviceTensors tensors(lines[0]);
    ExecutionContext context = {tensors.stream, scratch()};
    XlaCall of_host = xla_call(tensors.host.call);
    expect_said(of_host.run(handler_named("forward", Device::cuda), device_api(), &context),
                xla::ErrorCode::invalid_argument, "q: expected memory of a CUDA device, got an address of the host");
    EXPECT_EQ(context.taken, 0u);
    Call wrong = tensors.call;
    wrong.in.k.shape[0] = 3;
    XlaCall of_wrong = xla_call(wrong);
    expect_said(of_wrong.run(handler_named("forward", Device::cuda), device_api(), &context),
                xla::ErrorCode::invalid_argument, "k: ");
    EXPECT_EQ(context.allocations, 1);
}

// Their handlers look at values, which lie on the device.
TEST(CudaXla, PiecesAreRefused) {
    const std::string reason = "in JAX sequences are cut over ranks on the CPU only";
    DeviceTensors tensors(lines[0]);
    ExecutionContext context = {tensors.stream, scratch()};
    const DeviceMemory numbers(1024);
    const TensorView words(numbers.data(), DType::i32, {1, 2, 32}), span(numbers.data(), DType::i32, {2});
    XlaCall with_words = xla_call(tensors.call), with_span = xla_call(tensors.call), agreed;
    with_words.results({words});
    with_span.arguments({span});
    agreed.attribute("ranks", std::int64_t{1});
    agreed.arguments({tensors.call.in.q, words});
    agreed.results({tensors.call.in.q});
    const auto run = [&](XlaCall& call, const char* name) {
        return call.run(handler_named(name, Device::cuda), device_api(), &context);
    };
    expect_said(run(with_words, "forward"), xla::ErrorCode::unimplemented, reason);
    expect_said(run(with_span, "forward"), xla::ErrorCode::unimplemented, reason);
    expect_said(run(agreed, "agree"), xla::ErrorCode::unimplemented, reason);
}

}  // namespace
}  // namespace headrace::test
