// What a build without CUDA says to calls of headrace.jax on XLA's CUDA platform: never a number, and why.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/sample_call.hpp"
#include "tests/xla_calls.hpp"

struct headrace::python::xla::ExecutionContext {};

namespace headrace::test {
namespace {

xla::Api device_api() {
    xla::Api api = host_api();
    api.get_stream = [](xla::StreamQuery* query) -> xla::Error* {
        query->stream = nullptr;
        return nullptr;
    };
    return api;
}

void expect_refusal(XlaCall& call, const char* name) {
    xla::ExecutionContext context;
    const xla::Api api = device_api();
    const xla::Error* error = call.run(handler_named(name, Device::cuda), api, &context);
    ASSERT_NE(error, nullptr) << name;
    EXPECT_EQ(static_cast<int>(error->code), static_cast<int>(xla::ErrorCode::unimplemented)) << name;
    EXPECT_NE(error->message.find("compiled in (HEADRACE_CUDA)"), std::string::npos) << error->message;
}

TEST(NoCuda, OperatorsAreRefused) {
    for (const auto& [direction, name] :
         {std::pair(Direction::forward, "forward"), {Direction::backward, "backward"}, {Direction::step, "step"}}) {
        SampleCall sample(Operator::kda, direction);
        sample.call.pool.states.shape[0] = sample.B;
        XlaCall call = xla_call(sample.call);
        expect_refusal(call, name);
    }
}

TEST(NoCuda, LayerFunctionsAreRefused) {
    SampleCall memory(Operator::kda, Direction::forward);
    const TensorView x = memory.tensor(DType::f32, {2, 5, 3}), weight = memory.tensor(DType::f32, {3, 4});
    XlaCall convolution, norm;
    convolution.arguments({x, weight});
    convolution.results({memory.tensor(DType::f32, {2, 5, 3})});
    convolution.attribute("activation", "silu");
    expect_refusal(convolution, "convolution_forward");
    norm.arguments({x});
    norm.results({memory.tensor(DType::f32, {2, 5, 3})});
    norm.attribute("activation", "silu");
    norm.attribute("eps", 1e-5);
    expect_refusal(norm, "norm_forward");
}

}  // namespace
}  // namespace headrace::test
