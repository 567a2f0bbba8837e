// Keys that are nearly or exactly parallel, whose triangular systems are as far from diagonal as they come: every delta
// operator, type, chunk and implementation stays within its bars.
#include "behaviours.hpp"
#include "key_directions.hpp"

namespace headrace::test {
namespace {

const char* const delta_operators[] = {"delta_rule", "gated_delta_rule", "comba", "kda"};

// In every implementation.
void expect_right_with(const std::string& text, const Overlap& overlap) {
    const ProblemLine line = line_of(text);
    CallTensors made = harness::make_tensors(line);
    draw_overlapping(made, line, overlap);
    const harness::Expected expected = harness::expect(made.call);
    for (const std::string& name : accepting(line)) {
        for (const harness::NamedView& output : harness::output_views(made.call)) {
            made.tensors.at(output.name).fill(std::numeric_limits<double>::quiet_NaN());
        }
        made.call.options.force = name.c_str();
        const Status status = run(made.call);
        EXPECT_TRUE(status.ok()) << text << " force=" << name << ": " << status.message();
        expect_within_bars(made.call, expected.outputs, text + " force=" + name + overlap.text(), expected.terms);
    }
}

// Every pair of a chunk and a number of key channels, with gates of zero: nothing forgets but the rule itself.
void expect_solved(const std::string& direction, const std::string& type) {
    const Overlap overlaps[] = {{1, 1}, {0.99999, 0.98}, {0.999, 1}, {0.9999, 1}, {1, 0.98}};
    std::size_t number = 0;
    for (const std::string op : delta_operators) {
        for (const int chunk : {16, 32, 64, 128, 256}) {
            for (const int K : {16, 64, 256}) {
                const std::string text = op + direction + " t" + std::to_string(chunk + 44) + " h2 k" + std::to_string(K) +
                                         " v16 gates=zero state=inout threads=1 chunk=" + std::to_string(chunk) + " " +
                                         type + (number % 2 == 0 ? "" : " l2norm");
                expect_right_with(text, overlaps[number++ % 5]);
            }
        }
    }
}

TEST(Solve, OverlappingKeysForwardInF64) { expect_solved(":fwd", "f64"); }
TEST(Solve, OverlappingKeysForwardInF32) { expect_solved(":fwd", "f32"); }
TEST(Solve, OverlappingKeysForwardInBf16) { expect_solved(":fwd", "bf16"); }
TEST(Solve, OverlappingKeysForwardInF16) { expect_solved(":fwd", "f16"); }
TEST(Solve, OverlappingKeysBackwardInF64) { expect_solved(":bwd", "f64"); }
TEST(Solve, OverlappingKeysBackwardInF32) { expect_solved(":bwd", "f32"); }
TEST(Solve, OverlappingKeysBackwardInBf16) { expect_solved(":bwd", "bf16"); }
TEST(Solve, OverlappingKeysBackwardInF16) { expect_solved(":bwd", "f16"); }

void expect_right_with_few_directions(const std::string& text, std::int64_t directions) {
    const ProblemLine line = line_of(text);
    CallTensors made = harness::make_tensors(line);
    draw_few_directions(made, line, directions);
    const harness::Expected expected = harness::expect(made.call);
    for (const std::string& name : accepting(line)) {
        if (name.find("recurrent") != std::string::npos || name.find("generic") != std::string::npos) continue;  // slow
        made.call.options.force = name.c_str();
        ASSERT_TRUE(run(made.call).ok());
        expect_within_bars(made.call, expected.outputs,
                           text + " force=" + name + " keys of " + std::to_string(directions) + " directions", expected.terms);
    }
}

// 2000 tokens let the gradient of the state grow.
TEST(Solve, KeysOfFewDirections) {
    for (const std::string op : delta_operators) {
        const std::string kept = op == "delta_rule" ? "" : " gates=zero", forgets = " gates=lasting forget=0.01";
        const std::string sizes = " t2000 h8 k64 v32 threads=1";
        for (const std::int64_t directions : {2, 8}) expect_right_with_few_directions(op + ":bwd bf16" + sizes + kept, directions);
        if (!kept.empty()) expect_right_with_few_directions(op + ":bwd bf16" + sizes + forgets, 8);
        expect_right_with_few_directions(op + ":bwd bf16 l2norm" + sizes + kept, 2);
        expect_right_with_few_directions(op + ":bwd f32" + sizes + kept, 8);
        expect_right_with_few_directions(op + ":fwd bf16" + sizes + kept, 8);
    }
}

// The kernels of bf16 dot products take 64 keys and 32 values at least, and for gates' gradients 256 tokens times heads.
TEST(Solve, OverlappingKeysInBf16DotProducts) {
    for (const std::string op : delta_operators) {
        for (const char* direction : {":fwd", ":bwd"}) {
            for (const char* form : {"", " l2norm", " chunk=64", " chunk=256"}) {
                for (const Overlap overlap : {Overlap{1, 1}, {0.99999, 0.98}, {0.9999, 1}, {0.999, 0.9}, {0.99, 1}}) {
                    expect_right_with(op + direction + " t300 h8 k64 v32 bf16 gates=zero state=inout threads=1" + form, overlap);
                }
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
