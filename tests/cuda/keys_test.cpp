// CUDA with keys that overlap, nearly parallel ones and combinations of few directions: gradients are small differences
// of large sums there, and within their bars all the same.
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

// Of three chunks one: what is computed more exactly there, fetched or prepared for it, is not what others have.
TEST(CudaKeys, InSomeChunks) {
    constexpr std::int64_t chunk = 64, heads = 2;
    for (const std::string op :
         {"gated_delta_rule:fwd k64 bf16", "gated_delta_rule:fwd k128 bf16", "gated_delta_rule:fwd k160 bf16",
          "comba:fwd k128 bf16", "gated_delta_rule:fwd k128 f16", "delta_rule:fwd k64 f16", "kda:fwd k64 bf16",
          "kda:fwd k128 bf16", "gated_delta_rule:bwd k64 bf16", "gated_delta_rule:bwd k128 bf16", "comba:bwd k160 bf16",
          "kda:bwd k64 bf16", "kda:bwd k128 bf16"}) {
        for (const std::int64_t directions : {1, 3}) {
            // Of the former in segments, too.
            const std::string length = directions == 1 && op.find("fwd") != std::string::npos ? " t2200" : " t300",
                              text = op + length +
                                     " h2 v40 gates=lasting l2norm betas=1.9,2 state=inout force=cuda.tensor cuda";
            const ProblemLine line = line_of(text);
            CallTensors made = harness::make_tensors(line);
            const CallTensors drawn = harness::make_tensors(line);
            draw_few_directions(made, line, directions);
            for (const char* name : {"k", "p"}) {
                if (!made.tensors.count(name)) continue;
                harness::Tensor& keys = made.tensors.at(name);
                for (std::int64_t i = 0; i < keys.numel(); ++i)
                    if (i / (line.K * heads * chunk) % 3 != 1) keys.set(i, drawn.tensors.at(name).get(i));
            }
            expect_right_there(made, text + " of some chunks " + std::to_string(directions) + " directions");
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

// What few channels leave of a state is a small difference in chunks: those of f64 go token by token.
TEST(CudaKeys, OfFewChannels) {
    for (const std::string op : {"delta_rule", "gated_delta_rule", "comba", "kda"}) {
        for (const char* words : {":fwd t70 state=inout", ":bwd t70 state=inout", ":summary t70", ":summary_bwd t70"}) {
            for (const char* K : {" k1", " k2", " k15"}) {
                for (const char* keys : {" betas=1,1 l2norm", " beta=sigmoid"}) {
                    for (const char* type : {" f64", " f32", " bf16"})
                        expect_right(op + words + " h2" + K + " v6 gates=lasting" + keys + type + " cuda");
                }
            }
        }
        for (const char* words : {":fwd t70", ":bwd t70", ":summary t70", ":summary_bwd t70"}) {
            EXPECT_EQ(served_by(op + words + " k15 f64 cuda"), "cuda.recurrent") << op << words;
            EXPECT_NE(served_by(op + words + " k16 f64 cuda"), "cuda.recurrent") << op << words;
        }
    }
}

}  // namespace
}  // namespace headrace::test
