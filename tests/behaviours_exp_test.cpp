// N3: no exponential is taken of a number above 0 when gates are not, counted in a build that watches each argument.
#include <atomic>

#include "behaviours.hpp"
#include "layer_calls.hpp"

namespace {

std::atomic<long> above_zero{0};
std::atomic<long> exponentials{0};

}  // namespace

// The hook of src/cpu/simd/vec.hpp under HEADRACE_CHECK_EXP, called for each register lane. NaN counts as above 0.
extern "C" void headrace_exp_argument(double argument);
extern "C" void headrace_exp_argument(double argument) {
    exponentials.fetch_add(1, std::memory_order_relaxed);
    if (!(argument <= 0)) above_zero.fetch_add(1, std::memory_order_relaxed);
}

namespace headrace::test {
namespace {

// Runs a line in every implementation; says how many exponentials it took.
long expect_none_above_zero(const std::string& text) {
    long taken = 0;
    for (const ProblemLine& line : forced_lines(text)) {
        above_zero = exponentials = 0;
        expect_right(line);
        EXPECT_EQ(above_zero, 0) << harness::format(line);
        taken += exponentials;
    }
    return taken;
}

TEST(Numerics, N3_ExponentialsAreOfNumbersUpToZero) {
    for (const char* direction : {"fwd", "bwd", "step"}) {
        for (const std::string& text : operators_and_gates(direction)) {
            for (const char* gates : {"random", "zero", "strong", "reset", "minus_inf"}) {
                for (const char* sizes : {" b2 t70 h2 k16 v8 chunk=64", " varlen=0,3,3,40,90 h1 hv2 k20 v8 chunk=16"}) {
                    const std::string line = text + sizes + " threads=1 gates=" + gates;
                    const long taken = expect_none_above_zero(line);
                    EXPECT_TRUE(taken > 0 || text.find("gate=none") != std::string::npos)
                        << line << ": none was watched";
                }
            }
        }
    }
}

TEST(Numerics, N3_PreparationsToo) {
    for (const char* words :
         {"gated_delta_rule:fwd rawgate beta=sigmoid", "gated_delta_rule:bwd rawgate beta=two_sigmoid",
          "kda:fwd bound=-5", "kda:bwd bound=-1 l2norm", "simple_gla:bwd rawgate", "gla:step rawgate"}) {
        EXPECT_GT(expect_none_above_zero(std::string(words) + " b2 t40 h2 k16 v8 threads=1"), 0) << words;
        EXPECT_GT(expect_none_above_zero(std::string(words) + " b2 t40 h2 k16 v8 threads=1 gates=strong"), 0) << words;
    }
}

TEST(Numerics, N3_LayerFunctionsToo) {
    for (const double size : {1.0, 1e4}) {
        above_zero = exponentials = 0;
        EXPECT_TRUE(ConvolutionCall({}).run().ok());
        EXPECT_TRUE(RmsNormCall({.gate_size = size}).run().ok());
        EXPECT_TRUE(RmsNormCall({.activation = Activation::sigmoid, .gate_size = size}).run().ok());
        EXPECT_EQ(above_zero, 0);
        EXPECT_GT(exponentials, 0);
    }
}

// The watch works: positive gates, allowed by option, are seen.
TEST(Numerics, N3_TheWatchSeesPositiveGates) {
    CallTensors made = harness::make_tensors(line_of("simple_gla:fwd t20 h1 k16"));
    made.tensors.at("g").fill(0.01);
    made.call.options.allow_positive_gates = true;
    above_zero = 0;
    EXPECT_TRUE(run(made.call).ok());
    EXPECT_GT(above_zero, 0);
}

}  // namespace
}  // namespace headrace::test
