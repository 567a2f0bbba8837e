// Backwards on CUDA with keys that overlap, nearly parallel ones and combinations of few directions: gradients are
// small differences of large sums there, and within their bars all the same.
#include "tests/cuda/device_runs.hpp"
#include "tests/key_directions.hpp"

namespace headrace::test {
namespace {

void expect_right_there(const CallTensors& made, const std::string& what) {
    const harness::Expected expected = harness::expect(made.call);
    run_there(made);
    expect_within_bars(made.call, expected.outputs, what, expected.terms);
}

TEST(CudaKeys, OfFewDirections) {
    for (const std::string op : {"delta_rule", "gated_delta_rule", "comba", "kda"}) {
        for (const std::int64_t directions : {1, 2, 8}) {
            const std::string text = op + ":bwd t200 h2 v32 bf16 force=cuda.tensor cuda" +
                                     (directions == 8 ? " k128" : " k64") + (op == "delta_rule" ? "" : " gates=zero") +
                                     (directions == 2 ? " l2norm" : "");
            const ProblemLine line = line_of(text);
            CallTensors made = harness::make_tensors(line);
            draw_few_directions(made, line, directions);
            expect_right_there(made, text + " keys of " + std::to_string(directions) + " directions");
        }
    }
}

TEST(CudaKeys, NearlyParallel) {
    for (const std::string op : {"gated_delta_rule", "comba", "kda"}) {
        for (const Overlap overlap : {Overlap{1, 1}, {0.99999, 0.98}, {0.999, 0.9}, {0.9, 1}}) {
            const std::string text = op + ":bwd t200 h2 k64 v32 bf16 gates=zero state=inout force=cuda.tensor cuda";
            const ProblemLine line = line_of(text);
            CallTensors made = harness::make_tensors(line);
            draw_overlapping(made, line, overlap);
            expect_right_there(made, text + overlap.text());
        }
    }
}

// What writes nothing has a gradient of beta all the same.
TEST(CudaKeys, SomeBetasOfZero) {
    for (const std::string op : {"gated_delta_rule", "kda"}) {
        const ProblemLine line = line_of(op + ":bwd t200 h2 k64 v32 bf16 force=cuda.tensor cuda");
        CallTensors made = harness::make_tensors(line);
        harness::Tensor& beta = made.tensors.at("beta");
        for (std::int64_t i = 0; i < beta.numel(); i += 3) beta.set(i, 0);
        expect_right_there(made, op + " every third beta zero");
    }
}

}  // namespace
}  // namespace headrace::test
