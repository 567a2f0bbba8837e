// The layer functions on every instruction set: the oracle, the same bits, steps, strong gates.
#include <algorithm>
#include <set>

#include "behaviours.hpp"
#include "core/machine.hpp"
#include "cpu/plumbing/isa_list.hpp"
#include "layer_calls.hpp"

namespace headrace::test {
namespace {

constexpr DType all_types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
const std::vector<std::int64_t> ragged = {0, 0, 1, 3, 3, 131, 400, 400};

// The instruction sets that layers are compiled for and that this machine has.
std::vector<const char*> isas() {
    std::vector<const char*> names;
    for (const cpu::Isa& isa : cpu::isas())
        if (!isa.bf16_only && isa.available(detect_machine())) names.push_back(isa.name.c_str());
    return names;
}

template <typename LayerCall>
void expect_runs(const LayerCall& call) {
    const Status status = call.run();
    EXPECT_TRUE(status.ok()) << status.message();
}

void expect_right_everywhere(const ConvolutionCase& c) {
    ConvolutionCall call(c);
    for (const char* isa : isas()) {
        call.options.force = isa;
        call.forget_outputs();
        expect_runs(call);
        EXPECT_EQ(misses(call), "") << c.text() << " on " << isa;
    }
}

TEST(Layers, ConvolutionIsRightInEveryTypeAndLayout) {
    for (const DType dtype : all_types) {
        for (const DType others : {dtype, dtype == DType::f64 ? DType::f64 : DType::f32}) {
            for (const Layout layout : {Layout::contiguous, Layout::strided}) {
                expect_right_everywhere({.dtype = dtype, .others = others, .layout = layout});
                expect_right_everywhere(
                    {.B = 1, .T = 400, .cu_seqlens = ragged, .dtype = dtype, .others = others, .layout = layout});
            }
        }
    }
}

TEST(Layers, ConvolutionIsRightForEveryWidth) {
    for (const std::int64_t W : {1, 2, 3, 4, 5, 9, 33, 64}) {
        for (const bool state : {true, false}) {
            expect_right_everywhere({.T = 150, .W = W, .bias = state, .state = state});
            expect_right_everywhere({.B = 1, .T = 400, .D = 5, .W = W, .cu_seqlens = ragged, .state = state});
        }
    }
}

TEST(Layers, ConvolutionIsRightForEveryLength) {
    for (const std::int64_t T : {1, 2, 3, 4, 127, 128, 129, 131, 256, 300}) {
        for (const Activation activation : {Activation::none, Activation::silu}) {
            expect_right_everywhere({.T = T, .D = 17, .activation = activation});
        }
    }
}

TEST(Layers, ConvolutionIsRightForEveryNumberOfChannels) {
    for (const std::int64_t D : {1, 2, 15, 16, 63, 64, 65, 511, 512, 513, 1100})
        expect_right_everywhere({.T = 9, .D = D});
}

TEST(Layers, ConvolutionOfNothing) {
    for (const ConvolutionCase& c :
         {ConvolutionCase{.T = 0}, {.D = 0}, {.B = 0}, {.B = 1, .T = 0, .cu_seqlens = {0, 0, 0}}}) {
        ConvolutionCall call(c);
        expect_runs(call);
        for (const char* name : {"d_weight", "d_bias"}) {
            for (const double value : call.tensors.values(name)) EXPECT_EQ(value, 0) << c.text();
        }
        EXPECT_EQ(call.tensors.values("final_state"), call.tensors.values("initial_state")) << c.text();
        EXPECT_EQ(call.tensors.values("d_initial_state"), call.tensors.values("d_final_state")) << c.text();
    }
}

TEST(Layers, ConvolutionHasTheSameBitsOnAnyNumberOfThreads) {
    for (const char* isa : isas()) {
        ConvolutionCall call({.B = 1, .T = 400, .D = 1100, .cu_seqlens = ragged, .dtype = DType::bf16});
        call.options.force = isa;
        call.options.threads = 1;
        expect_runs(call);
        const auto expected = call.tensors.bytes(call.outputs);
        for (const int threads : {2, 3, 7}) {
            call.forget_outputs();
            call.options.threads = threads;
            expect_runs(call);
            expect_same_bits(expected, call.tensors.bytes(call.outputs), std::to_string(threads) + " threads");
        }
    }
}

TEST(Layers, ConvolutionOfAPrefixHasTheSameBits) {
    ConvolutionCall call({.B = 1, .T = 300});
    expect_runs(call);
    const std::vector<double> whole = call.tensors.values("y");
    for (const std::int64_t T : {1, 2, 127, 130, 299}) {
        call.forget_outputs();
        ConvolutionInputs in = call.in;
        ConvolutionOutputs out = call.out;
        in.x = tokens_of(in.x, 0, T), out.y = tokens_of(out.y, 0, T);
        ASSERT_TRUE(short_convolution_forward(in, out, call.options).ok());
        const std::vector<double> prefix = call.tensors.values("y");
        EXPECT_TRUE(std::equal(whole.begin(), whole.begin() + T * 70, prefix.begin())) << T;
    }
}

TEST(Layers, ConvolutionContinuesFromItsFinalState) {
    for (const std::int64_t T : {1, 2, 5, 150}) {
        ConvolutionCall call({.B = 2, .T = 300, .D = 33, .W = 5});
        expect_runs(call);
        const auto whole = call.tensors.bytes({"y", "final_state"});
        call.forget_outputs();
        const TensorView between = call.tensors.add("between", DType::f32, {2, 33, 5});
        ASSERT_TRUE(short_convolution_forward({.x = tokens_of(call.in.x, 0, T),
                                               .weight = call.in.weight,
                                               .bias = call.in.bias,
                                               .initial_state = call.in.initial_state,
                                               .cu_seqlens = {}},
                                              {tokens_of(call.out.y, 0, T), between}, call.options)
                        .ok());
        ASSERT_TRUE(short_convolution_forward({.x = tokens_of(call.in.x, T, 300),
                                               .weight = call.in.weight,
                                               .bias = call.in.bias,
                                               .initial_state = between,
                                               .cu_seqlens = {}},
                                              {tokens_of(call.out.y, T, 300), call.out.final_state}, call.options)
                        .ok());
        expect_same_bits(whole, call.tensors.bytes({"y", "final_state"}), "after " + std::to_string(T));
    }
}

TEST(Layers, ConvolutionComputesTheGradientsThatAreAskedFor) {
    ConvolutionCall call({.B = 1, .T = 400, .cu_seqlens = ragged});
    expect_runs(call);
    const auto all = call.tensors.bytes(call.outputs);
    const ConvolutionGradients wanted = call.grads;
    for (const auto& [name, field] : {std::pair{"d_x", &ConvolutionGradients::d_x},
                                      {"d_weight", &ConvolutionGradients::d_weight},
                                      {"d_bias", &ConvolutionGradients::d_bias},
                                      {"d_initial_state", &ConvolutionGradients::d_initial_state}}) {
        call.forget_outputs();
        call.grads = {};
        call.grads.*field = wanted.*field;
        ASSERT_TRUE(call.backward().ok());
        EXPECT_TRUE(call.tensors.bytes(name) == all.at(name)) << name;
    }
}

TEST(Layers, ConvolutionWithoutOneOfTheGradientsOfOutputs) {
    for (const char* absent : {"d_y", "d_final_state"}) {
        ConvolutionCall call({.B = 1, .T = 400, .cu_seqlens = ragged});
        call.tensors.at(absent).fill(0);
        expect_runs(call);
        const auto expected = call.tensors.bytes(call.outputs);
        (absent[2] == 'y' ? call.d_out.d_y : call.d_out.d_final_state) = {};
        ASSERT_TRUE(call.backward().ok());
        expect_same_bits(expected, call.tensors.bytes(call.outputs), absent);
    }
}

// Steps from rows of a pool, token by token, are the forward call bit by bit; other rows stay as they are.
TEST(Layers, StepsAreTheForwardConvolution) {
    for (const char* isa : isas()) {
        for (const Layout layout : {Layout::contiguous, Layout::strided}) {
            for (const std::int64_t W : {1, 4, 9}) {
                ConvolutionCall call({.B = 3, .T = 6, .W = W, .layout = layout});
                call.options.force = isa;
                expect_runs(call);
                const std::int64_t rows[] = {4, 0, 3};
                const TensorView states = call.tensors.draw("states", DType::f32, {6, 70, W});
                harness::Tensor& pool = call.tensors.at("states");
                for (std::int64_t i = 0; i < 3 * 70 * W; ++i) {
                    pool.set(rows[i / (70 * W)] * 70 * W + i % (70 * W), call.tensors.at("initial_state").get(i));
                }
                const std::vector<double> before = pool.values();
                const TensorView indices = call.tensors.integers("indices", {rows[0], rows[1], -1, rows[2]});
                const TensorView x = call.tensors.add("x1", DType::f32, {4, 70}),
                                 y = call.tensors.add("y1", DType::f32, {4, 70});
                for (std::int64_t t = 0; t < 6; ++t) {
                    for (std::int64_t i = 0; i < 4 * 70; ++i) {
                        const std::int64_t n = i < 140 ? i / 70 : 2;  // place 2 is padding, which reads no input
                        call.tensors.at("x1").set(i, call.tensors.at("x").get((n * 6 + t) * 70 + i % 70));
                    }
                    ASSERT_TRUE(short_convolution_step({.x = x,
                                                        .weight = call.in.weight,
                                                        .bias = call.in.bias,
                                                        .initial_state = {},
                                                        .cu_seqlens = {}},
                                                       {y, {}}, {states, indices}, call.options)
                                    .ok());
                    for (std::int64_t i = 0; i < 4 * 70; ++i) {
                        const std::int64_t n = i < 140 ? i / 70 : 2;
                        const double expected = i / 70 == 2 ? 0 : call.tensors.at("y").get((n * 6 + t) * 70 + i % 70);
                        ASSERT_EQ(call.tensors.at("y1").get(i), expected) << t << " " << i;
                    }
                }
                for (std::int64_t i = 0; i < 6 * 70 * W; ++i) {
                    const auto n = std::find(rows, rows + 3, i / (70 * W)) - rows;
                    ASSERT_EQ(pool.get(i), n == 3 ? before[static_cast<std::size_t>(i)]
                                                  : call.tensors.at("final_state").get(n * 70 * W + i % (70 * W)));
                }
                EXPECT_EQ(call.tensors.spoiled_guards(), "") << isa;
            }
        }
    }
}

void expect_right_everywhere(const RmsNormCase& c, const std::string& what) {
    RmsNormCall call(c);
    for (const char* isa : isas()) {
        call.options.force = isa;
        for (const char* name : call.outputs) {
            if (name != std::string("d_gate") || c.gate)
                call.tensors.at(name).fill(std::numeric_limits<double>::quiet_NaN());
        }
        expect_runs(call);
        EXPECT_EQ(misses(call), "") << what << " on " << isa;
    }
}

TEST(Layers, NormIsRightInEveryTypeAndLayout) {
    for (const DType dtype : all_types) {
        for (const DType others : {dtype, dtype == DType::f64 ? DType::f64 : DType::f32}) {
            for (const Layout layout : {Layout::contiguous, Layout::strided}) {
                for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
                    expect_right_everywhere(
                        {.activation = activation, .dtype = dtype, .others = others, .layout = layout},
                        std::string(name_of(dtype)) + " " + name_of(others));
                }
            }
        }
    }
}

TEST(Layers, NormIsRightForEveryShape) {
    for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
             {1}, {7, 1}, {128}, {3, 17}, {2, 3, 64}, {1, 1, 1, 1000}, {300, 128}, {2, 700, 4, 65}}) {
        for (const bool gate : {true, false}) {
            for (const bool weight : {true, false}) {
                // A row of one channel has y = x / |x| but for eps: its d_x is proportional to eps.
                const double eps = shape.back() == 1 ? 0.5 : 1e-5;
                expect_right_everywhere(
                    {.shape = shape, .gate = gate, .weight = weight, .eps = eps},
                    "D " + std::to_string(shape.back()) + (gate ? " gate" : "") + (weight ? " weight" : ""));
            }
        }
    }
}

TEST(Layers, NormOfNothing) {
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{0, 5}, {3, 0}, {2, 0, 4, 8}}) {
        RmsNormCall call({.shape = shape});
        expect_runs(call);
        for (const double value : call.tensors.values("d_weight")) EXPECT_EQ(value, 0);
    }
}

// Gates far beyond where e^x overflows: sigmoid is 0 or 1, and its slope 0.
TEST(Layers, NormStandsStrongGates) {
    for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
        for (const double size : {100.0, 1e4, 1e30}) {
            expect_right_everywhere({.activation = activation, .gate_size = size}, std::to_string(size));
        }
    }
}

TEST(Layers, NormHasTheSameBitsOnAnyNumberOfThreads) {
    for (const char* isa : isas()) {
        RmsNormCall call({.shape = {3, 1000, 4, 65}});
        call.options.force = isa;
        call.options.threads = 1;
        expect_runs(call);
        const auto expected = call.tensors.bytes(call.outputs);
        for (const int threads : {7, 3, 2}) {
            call.options.threads = threads;
            for (const char* name : call.outputs) call.tensors.at(name).fill(std::numeric_limits<double>::quiet_NaN());
            expect_runs(call);
            expect_same_bits(expected, call.tensors.bytes(call.outputs), std::to_string(threads) + " threads");
        }
    }
}

// All of the gradient lies along the one channel but for eps.
TEST(Layers, NormOfOneChannel) {
    for (const std::int64_t rows : {1, 3, 7, 50}) {
        for (const Activation activation : {Activation::silu, Activation::sigmoid}) {
            for (const char* isa : isas()) {
                RmsNormCall call({.shape = {rows, 1}, .activation = activation});
                call.options.force = isa;
                expect_runs(call);
                EXPECT_EQ(misses(call), "") << rows << " rows on " << isa;
            }
        }
    }
}

// Sums over the lanes of a register differ in their last bits: what is forced is what runs.
TEST(Layers, InstructionSetsAreForced) {
    std::set<std::vector<double>> results;
    for (const char* isa : isas()) {
        RmsNormCall call({.shape = {50, 1000}});
        call.options.force = isa;
        expect_runs(call);
        results.insert(call.tensors.values("y"));
    }
    EXPECT_EQ(results.size(), isas().size());
}

}  // namespace
}  // namespace headrace::test
