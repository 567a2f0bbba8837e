// Raw gates and betas at the ends of what their formulas take, left out and of either sign, in every CUDA
// kernel that reads them.
#include "tests/cuda/device_runs.hpp"
#include "tests/formula_ends.hpp"
#include "tests/optional_inputs.hpp"

namespace headrace::test {
namespace {

TEST(CudaFormulas, N2_EndsOfTheirRange) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "kda"}) {
        for (const std::string direction : {":fwd t40", ":bwd t40", ":step t1", ":step t2"}) {
            for (const char* type : {" k16 f32", " k64 bf16", " k16 f64", " k100 f64", " k200 f64"}) {
                for (const std::string& text : lines_of_formulas(op, direction + type + " cuda")) {
                    for (const ProblemLine& line : forced_lines(text)) {
                        CallTensors made = tensors_at_ends(line);
                        const harness::Expected expected = harness::expect(made.call);
                        run_there(made);
                        expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
                    }
                }
            }
        }
    }
}

// As many tokens, heads and values as tensor cores serve, and types that others do.
constexpr int tokens = 66, few_tokens = 33;
const std::string on_tensor_cores = " h1 hv4 k64 v32 bf16 cuda";
const char* const on_others[] = {" h1 k64 v32 f16 cuda", " h1 k16 v8 cuda", " h1 k8 v8 f64 cuda"};

TEST(CudaFormulas, AbsentInputs) {
    for (const char* direction : {"gated_delta_rule:fwd t66", "gated_delta_rule:bwd t66"})
        EXPECT_EQ(served_by(direction + on_tensor_cores), "cuda.tensor");
    const auto run = [](const CallTensors& made) { return run_there(made); };
    expect_absent_inputs(tokens, on_tensor_cores, run);
    for (const char* rest : on_others) expect_absent_inputs(few_tokens, rest, run);
}
TEST(CudaFormulas, BetasOfEitherSign) {
    const auto run = [](const CallTensors& made) { return run_there(made); };
    expect_betas_of_either_sign(tokens, on_tensor_cores, run);
    for (const char* rest : on_others) expect_betas_of_either_sign(few_tokens, rest, run);
}

}  // namespace
}  // namespace headrace::test
