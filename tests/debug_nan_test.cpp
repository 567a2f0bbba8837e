// N5: HEADRACE_DEBUG_NAN reports each stage with counts, range and first bad index, and blames the right one.
#include "core/debug_nan.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "sample_call.hpp"

namespace headrace::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

class DebugNan : public testing::Test {
  protected:
    DebugNan() { setenv("HEADRACE_DEBUG_NAN", "1", 1); }
    ~DebugNan() override { unsetenv("HEADRACE_DEBUG_NAN"); }
};

// What `body` printed to stderr.
template <typename Body>
std::string printed(const Body& body) {
    testing::internal::CaptureStderr();
    body();
    return testing::internal::GetCapturedStderr();
}

void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in\n" << text;
}

TEST_F(DebugNan, N5DescribesATensor) {
    float values[] = {1, -2, 3, nan, infinity, -infinity};
    bool has_nan = false;
    EXPECT_EQ(describe_stage("state", TensorView(values, DType::f32, {2, 3}), &has_nan),
              "state f32 [2, 3] nan 1 inf 2 min -2 max 3 first bad [1, 0]");
    EXPECT_TRUE(has_nan);
    EXPECT_EQ(describe_stage("x", TensorView(values, DType::f32, {3}), &has_nan), "x f32 [3] nan 0 inf 0 min -2 max 3");
    EXPECT_FALSE(has_nan);
    EXPECT_EQ(describe_stage("x", TensorView(values, DType::f32, {0, 3}), &has_nan), "x f32 [0, 3] nan 0 inf 0");
}

TEST_F(DebugNan, N5BlamesTheFirstStage) {
    SampleCall sample(Operator::simple_gla, Direction::forward);
    Problem problem;
    ASSERT_TRUE(make_problem(sample.call, Contents::check, &problem).ok());
    float state[] = {1, nan};
    const std::string text = printed([&] {
        DebugReport report(problem);
        debug_stage("state", TensorView(state, DType::f32, {2}));
        static_cast<float*>(sample.call.out.o.data)[7] = nan;
        report.finish();
    });
    expect_contains(text, "headrace: nan: q f32 [2, 5, 2, 3] nan 0 inf 0 min 0.5 max 0.5\n");
    expect_contains(text, "headrace: nan: state f32 [2] nan 1 inf 0 min 1 max 1 first bad [1]\n");
    expect_contains(text, "headrace: nan: o f32 [2, 5, 4, 6] nan 1 inf 0 min 0 max 0 first bad [0, 0, 1, 1]\n");
    expect_contains(text, "headrace: nan: simple_gla forward b2 t5 h2 hv4 k3 v6 f32: first NaN in state\n");
}

TEST_F(DebugNan, N5FollowsAForwardCall) {
    SampleCall sample(Operator::simple_gla, Direction::forward);
    Outputs out = sample.call.out;
    out.final_state = sample.tensor(DType::f32, {2, 4, 3, 6});
    const auto run = [&] { EXPECT_TRUE(simple_gla_forward(sample.call.in, out).ok()); };
    std::string text = printed(run);
    expect_contains(text, "nan: o f32 [2, 5, 4, 6] nan 0 inf 0 min ");
    expect_contains(text, "nan: final_state f32 [2, 4, 3, 6] nan 0 inf 0 min ");
    expect_contains(text, ": no NaN\n");
    static_cast<float*>(sample.call.in.v.data)[((0 * 5 + 2) * 4 + 1) * 6 + 5] = nan;
    text = printed(run);
    expect_contains(text, "nan: v f32 [2, 5, 4, 6] nan 1 inf 0 min 1 max 1 first bad [0, 2, 1, 5]\n");
    expect_contains(text, "nan: o f32 [2, 5, 4, 6] nan 3 inf 0 ");  // tokens 2, 3, 4 of one head and value column
    expect_contains(text, ": first NaN in v\n");
    unsetenv("HEADRACE_DEBUG_NAN");
    EXPECT_EQ(printed(run), "");
}

TEST_F(DebugNan, N5FollowsABackwardCall) {
    SampleCall sample(Operator::gated_delta_rule, Direction::backward);
    sample.call.grads.d_v = sample.tensor(DType::f32, {2, 5, 4, 6});
    static_cast<float*>(sample.call.d_out.d_o.data)[0] = nan;
    const std::string text = printed(
        [&] { EXPECT_TRUE(gated_delta_rule_backward(sample.call.in, sample.call.d_out, sample.call.grads).ok()); });
    expect_contains(text, "nan: d_o f32 [2, 5, 4, 6] nan 1 inf 0 min 1 max 1 first bad [0, 0, 0, 0]\n");
    expect_contains(text, "nan: d_q f32 [2, 5, 2, 3] nan ");
    expect_contains(text, "nan: d_v f32 [2, 5, 4, 6] nan ");
    expect_contains(text, ": first NaN in d_o\n");
}

TEST_F(DebugNan, N5StagesOutsideACallPrintNothing) {
    float value = nan;
    EXPECT_EQ(printed([&] { debug_stage("state", TensorView(&value, DType::f32, {1})); }), "");
}

}  // namespace
}  // namespace headrace::test
