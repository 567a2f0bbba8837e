// What a build without CUDA says to calls of headrace.jax on XLA's CUDA platform, and to products of summaries: never a
// number, and why.
#include <gtest/gtest.h>

#include <cmath>

#include "headrace/summary.hpp"
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

TEST(NoCuda, ProductsOfSummariesAreRefused) {
    SampleCall memory(Operator::kda, Direction::forward);
    const auto there = [&](std::initializer_list<std::int64_t> shape) {
        TensorView view = memory.tensor(DType::f32, shape);
        view.device = Device::cuda;
        return view;
    };
    const TensorView M = there({1, 2, 3, 3}), R = there({1, 2, 3, 4}), S = there({1, 2, 3, 4}),
                     out = there({1, 2, 3, 4});
    for (const Status& status : {apply({M, R}, S, false, out), compose({M, R}, {{}, S}, {{}, out})}) {
        EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(Code::unsupported));
        EXPECT_EQ(status.message(), "out: expected a CPU tensor, CUDA is not compiled in (HEADRACE_CUDA)");
    }
}

}  // namespace
}  // namespace headrace::test
