// The layer functions on tensors of a CUDA device: the oracle, in every type, layout, width and length; steps;
// prefixes; errors.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cuda/device_layers.hpp"

namespace headrace::test {
namespace {

constexpr DType all_types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
const std::vector<std::int64_t> ragged = {0, 0, 1, 3, 3, 67, 150, 150};

template <class LayerCall>
void expect_right(LayerCall& call, const std::string& text, std::vector<TensorView*> more = {}) {
    {
        const MovedToDevice moved(call, more);
        const Status status = call.run();
        EXPECT_TRUE(status.ok()) << status.message();
    }
    EXPECT_EQ(misses(call), "") << text;
}
void expect_right(const ConvolutionCase& c) {
    ConvolutionCall call(c);
    expect_right(call, c.text());
    if (c.cu_seqlens.empty()) return;
    ConvolutionCase other = c;  // and with cu_seqlens on the device
    other.of_lengths = DType::i32;
    ConvolutionCall again(other);
    expect_right(again, c.text() + ", cu_seqlens on the device", {&again.in.cu_seqlens});
}

TEST(CudaLayers, ConvolutionInEveryTypeAndLayout) {
    for (const DType dtype : all_types) {
        for (const Layout layout : {Layout::contiguous, Layout::strided}) {
            for (const DType others : all_types)
                expect_right({.T = 2, .D = 35, .dtype = dtype, .others = others, .layout = layout});
            expect_right(
                {.B = 1, .T = 150, .D = 35, .cu_seqlens = ragged, .dtype = dtype, .others = dtype, .layout = layout});
        }
    }
}

TEST(CudaLayers, ConvolutionOfEveryWidthAndLength) {
    for (const std::int64_t W : {1, 2, 3, 5, 33, 64}) {
        for (const bool state : {true, false}) {
            expect_right({.B = 1, .T = 70, .D = 5, .W = W, .bias = state, .state = state});
            expect_right({.B = 1, .T = 150, .D = 3, .W = W, .cu_seqlens = ragged, .state = state});
        }
    }
    for (const std::int64_t T : {1, 2, 3, 31, 32, 33, 65}) {
        for (const Activation activation : {Activation::none, Activation::silu})
            expect_right({.T = T, .D = 33, .activation = activation});
    }
}

// More windows than groups of sums.
TEST(CudaLayers, ConvolutionSumsManyWindows) { expect_right({.B = 3, .T = 1000, .D = 4}); }

TEST(CudaLayers, ConvolutionOfNothing) {
    for (const ConvolutionCase& c :
         {ConvolutionCase{.T = 0}, {.D = 0}, {.B = 0}, {.B = 1, .T = 0, .cu_seqlens = {0, 0, 0}}}) {
        ConvolutionCall call(c);
        {
            const MovedToDevice moved(call);
            const Status status = call.run();
            EXPECT_TRUE(status.ok()) << status.message() << c.text();
        }
        for (const char* name : {"d_weight", "d_bias"}) {
            for (const double value : call.tensors.values(name)) EXPECT_EQ(value, 0) << c.text();
        }
        EXPECT_EQ(call.tensors.values("final_state"), call.tensors.values("initial_state")) << c.text();
        EXPECT_EQ(call.tensors.values("d_initial_state"), call.tensors.values("d_final_state")) << c.text();
    }
}

// A step whose pool is final_state. Sequence n has row rows[n] of it; without rows, row n; where that is no row of the
// pool it has none, and its output is zero.
void expect_step(const ConvolutionCase& c, const std::vector<std::int64_t>& rows = {}, DType of_rows = DType::i64) {
    ConvolutionCall call(c);
    auto expected = call.expected();
    const std::vector<double> entering = call.tensors.values("initial_state"), leaving = expected["final_state"];
    std::vector<double>&after = expected["final_state"], &y = expected["y"], before = entering;
    TensorView indices;
    if (!rows.empty()) {
        indices = call.tensors.add("indices", of_rows, {c.B});
        after = entering;
        for (std::int64_t n = 0; n < c.B; ++n) {
            const std::int64_t row = rows[static_cast<std::size_t>(n)], size = c.D * c.W;
            call.tensors.at("indices").set(n, static_cast<double>(row));
            if (row < 0 || row >= c.B) {
                std::fill_n(y.begin() + n * c.D, c.D, 0.0);
                continue;
            }
            std::copy_n(entering.begin() + n * size, size, before.begin() + row * size);
            std::copy_n(leaving.begin() + n * size, size, after.begin() + row * size);
        }
    }
    call.tensors.at("final_state").write(0, static_cast<std::int64_t>(before.size()), before.data());
    {
        const MovedToDevice moved(call, {&indices});
        const auto rows_of = [](TensorView view) {
            view.rank = 2;
            view.shape[1] = view.shape[2], view.strides[1] = view.strides[2];
            return view;
        };
        ConvolutionInputs token = call.in;
        token.x = rows_of(call.in.x), token.initial_state = {};
        const Status status =
            short_convolution_step(token, {rows_of(call.out.y), {}}, {call.out.final_state, indices}, call.options);
        EXPECT_TRUE(status.ok()) << status.message();
    }
    for (std::size_t n = 0; n < rows.size(); ++n) {  // of a row that there is not: NaN
        if (rows[n] >= -1 && rows[n] < c.B) continue;
        for (std::int64_t i = 0; i < c.D; ++i) {
            const std::int64_t at = static_cast<std::int64_t>(n) * c.D + i;
            EXPECT_TRUE(std::isnan(call.tensors.at("y").get(at))) << c.text();
            call.tensors.at("y").set(at, 0);
        }
    }
    EXPECT_EQ(misses(call, expected, {"y", "final_state"}), "") << c.text() << (rows.empty() ? "" : " indices");
}

TEST(CudaLayers, StepsAreForwardsOfOneToken) {
    for (const std::int64_t W : {1, 2, 4, 7}) expect_step({.B = 5, .T = 1, .D = 40, .W = W});
    expect_step({.B = 5, .T = 1, .D = 3, .bias = false});
    for (const DType dtype : all_types) {
        for (const DType others : all_types) {
            const bool plain = dtype == DType::f32;
            expect_step({.B = 5,
                         .T = 1,
                         .D = 3,
                         .activation = plain ? Activation::none : Activation::silu,
                         .dtype = dtype,
                         .others = others,
                         .layout = plain ? Layout::strided : Layout::contiguous});
        }
    }
}

TEST(CudaLayers, StepsFindTheirRows) {
    for (const DType of_rows : {DType::i32, DType::i64}) {
        for (const DType dtype : {DType::f32, DType::f64})
            expect_step({.B = 5, .T = 1, .D = 3, .dtype = dtype, .others = dtype}, {2, -1, 4, 5, 0}, of_rows);
    }
}

TEST(CudaLayers, NormInEveryTypeAndLayout) {
    for (const DType dtype : all_types) {
        for (const Layout layout : {Layout::contiguous, Layout::strided}) {
            for (const DType others : all_types) {
                RmsNormCall call({.shape = {5, 3, 40}, .dtype = dtype, .others = others, .layout = layout});
                expect_right(call, name_of(dtype) + (std::string(" beside ") + name_of(others)));
            }
            RmsNormCall call({.gate = false, .weight = false, .dtype = dtype, .layout = layout});
            expect_right(call, name_of(dtype));
        }
    }
}

TEST(CudaLayers, NormOfEverySize) {
    for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
             {1, 1}, {3, 2}, {128}, {5, 129}, {200, 7}, {2, 3, 300}, {4, 3000}, {0, 5}, {3, 0}}) {
        for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
            RmsNormCall call({.shape = shape, .activation = activation});
            expect_right(call, std::to_string(shape.back()));
        }
    }
}

// Up to those whose exponential is a subnormal double, and beyond.
TEST(CudaLayers, ActivationsOfHugeNumbers) {
    for (const DType dtype : {DType::f32, DType::f64}) {
        expect_right({.T = 5, .D = 64, .dtype = dtype, .others = dtype, .x_size = 500});
        expect_step({.B = 8, .T = 1, .D = 64, .dtype = dtype, .others = dtype, .x_size = 500});
        for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
            RmsNormCall call(
                {.shape = {20, 40}, .activation = activation, .dtype = dtype, .others = dtype, .gate_size = 500});
            expect_right(call, name_of(dtype));
        }
    }
}

TEST(CudaLayers, SameBitsWithEachOrderOfBlocks) {
    std::map<std::string, LayerTensors::Bytes> first;
    for (int run = 0; run < 3; ++run) {
        ConvolutionCall call({.B = 1, .T = 150, .D = 70, .cu_seqlens = ragged, .dtype = DType::bf16});
        {
            const MovedToDevice moved(call);
            EXPECT_TRUE(call.run().ok());
        }
        if (run == 0) first = call.tensors.bytes(call.outputs);
        EXPECT_EQ(call.tensors.bytes(call.outputs), first);
    }
}

// As of operators: NaN, and nothing out of bounds.
TEST(CudaLayers, SequencesThatAreNone) {
    const std::vector<std::int64_t> good = {0, 0, 20, 50},
                                    lists[] = {good,           {1, 1, 20, 50},      {0, 30, 20, 50}, {0, 0, 20, 49},
                                               {0, 0, 20, 51}, {0, 0, 1 << 30, 50}, {0, -9, 20, 50}};
    for (const std::vector<std::int64_t>& list : lists) {
        ConvolutionCall call({.B = 1, .T = 50, .D = 35, .cu_seqlens = good});
        for (std::size_t i = 0; i < list.size(); ++i)
            call.tensors.at("cu_seqlens").set(static_cast<std::int64_t>(i), static_cast<double>(list[i]));
        for (const char* name : call.outputs) call.tensors.at(name).fill(1);
        {
            const MovedToDevice moved(call, {&call.in.cu_seqlens});
            const Status status = call.run();
            EXPECT_TRUE(status.ok()) << status.message();
        }
        for (const char* name : call.outputs)
            for (const double value : call.tensors.values(name)) ASSERT_EQ(std::isnan(value), list != good) << name;
    }
}

TEST(CudaLayers, Errors) {
    ConvolutionCall call({});
    {
        const MovedToDevice moved(call);
        call.options.force = "avx2";
        EXPECT_EQ(call.forward().message(), "force: expected none with CUDA tensors, got avx2");
        call.options.force = nullptr;
        ConvolutionInputs in = call.in;
        in.weight.device = Device::cpu;
        EXPECT_EQ(short_convolution_forward(in, call.out, call.options).message(),
                  "weight: expected a CUDA tensor as x, got a CPU one");
    }
    RmsNormCall norm({});
    for (TensorView* view : views_of(norm)) view->device = Device::cuda;  // host memory that says it is not
    EXPECT_EQ(norm.forward().message(), "x: expected memory of a CUDA device, got an address of the host");
}

}  // namespace
}  // namespace headrace::test
