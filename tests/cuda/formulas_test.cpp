// Raw gates and betas at the ends of what their formulas take, left out and of either sign, in every CUDA
// kernel that reads them; gradients of strong gates beside weak ones.
#include <cmath>

#include "tests/cuda/device_runs.hpp"
#include "tests/formula_ends.hpp"
#include "tests/optional_inputs.hpp"

namespace headrace::test {
namespace {

void expect_right_at_ends(const ProblemLine& line) {
    CallTensors made = tensors_at_ends(line);
    const harness::Expected expected = harness::expect(made.call);
    run_there(made);
    expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
}

TEST(CudaFormulas, N2_EndsOfTheirRange) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        // As many tokens as gradients of gates on tensor cores ask for, and behind a softplus sequences and heads.
        const char* const sizes = op == "simple_gla" ? ":bwd b8 t70 k64 bf16 cuda" : ":bwd t70 k64 bf16 cuda";
        for (const std::string& text : lines_of_formulas(op, sizes))
            for (const ProblemLine& line : forced_lines(text, ".tensor")) expect_right_at_ends(line);
        for (const std::string direction : {":fwd t40", ":bwd t40", ":step t1", ":step t2"}) {
            for (const std::string& type :
                 types_of(direction, {" k16 f32", " k64 bf16", " k16 f64", " k100 f64", " k200 f64"})) {
                for (const std::string& text : lines_of_formulas(op, direction + type + " cuda")) {
                    for (const ProblemLine& line : forced_lines(text)) expect_right_at_ends(line);
                }
            }
        }
    }
}

// As many tokens, heads and values as tensor cores serve, and types that others do.
constexpr int tokens = 66, few_tokens = 33;
const std::string on_tensor_cores = " h1 hv4 k64 v32 bf16 cuda";
const char* const on_others[] = {" h1 k64 v32 f16 cuda", " h1 k16 v8 cuda", " h1 k8 v8 f64 cuda"};
template <class Expect>
void on_all(Expect expect) {
    expect(directions_of(tokens), on_tensor_cores);
    for (const char* rest : on_others) expect(directions_of(few_tokens), rest);
    for (const std::string& type : types_of(":step t1", {})) expect({":step t1"}, " h2 v9" + type + " cuda");
}
const auto run = [](const CallTensors& made) { return run_there(made); };

TEST(CudaFormulas, AbsentInputs) {
    for (const char* direction : {"gated_delta_rule:fwd t66", "gated_delta_rule:bwd t66"})
        EXPECT_EQ(served_by(direction + on_tensor_cores), "cuda.tensor");
    on_all([](const Directions& directions, const std::string& rest) { expect_absent_inputs(directions, rest, run); });
}
TEST(CudaFormulas, BetasOfEitherSign) {
    on_all([](const Directions& directions, const std::string& rest) {
        expect_betas_of_either_sign(directions, rest, run);
    });
}

// Where the formula's slope leaves nothing of the gradients of weak gates, strong ones' decide, of which sums of other
// tokens' terms must leave nothing.
TEST(CudaFormulas, StrongGatesBesideWeakOnes) {
    for (const char* text : {"simple_gla:bwd t292 h1 k64 v64 f16", "simple_gla:bwd t292 h8 k64 v64 f16 l2norm",
                             "simple_gla:bwd t292 h1 k64 v64 bf16", "simple_gla:bwd t292 h8 k64 v64 bf16 reverse",
                             "simple_gla:bwd t100 h4 hv8 k64 v64 bf16", "simple_gla:bwd t292 b2 h6 k64 v64 bf16",
                             "gla:bwd t100 h2 k64 v64 bf16", "gated_delta_rule:bwd t292 h1 k64 v64 bf16",
                             "comba:bwd t100 h2 k64 v64 f16", "kda:bwd t100 h8 k64 v64 bf16",
                             "simple_gla:bwd t66 h32 k64 v64 bf16"}) {
        for (int seed = 1; seed <= 4; ++seed)
            expect_right(std::string(text) + " gates=strong rawgate state=in cuda seed=" + std::to_string(seed));
    }
}

// On tensor cores a strong gate's gradient has its decay, and nothing of pairs of tokens behind it.
TEST(CudaFormulas, GradientsOfStrongGates) {
    constexpr double strong = -30, most = 1e-8;  // e^-30 of 1e5, of roundings 1e-6 and more
    for (const char* type : {"bf16", "f16"}) {
        for (const char* order : {"", " reverse"}) {
            const ProblemLine line = line_of(std::string("simple_gla:bwd t300 h1 k64 v64 ") + type + order +
                                             " gates=lasting state=in force=cuda.tensor cuda");
            CallTensors made = harness::make_tensors(line);
            for (std::int64_t i = 5; i < line.T; i += 10) made.tensors.at("g").set(i, strong);
            const harness::Expected expected = harness::expect(made.call);
            run_there(made);
            expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
            const std::vector<double> gradients = harness::read_values(made.call.grads.d_g);
            for (std::size_t i = 5; i < gradients.size(); i += 10)
                EXPECT_LT(std::abs(gradients[i]), most) << format(line) << ": token " << i;
        }
    }
}

TEST(CudaFormulas, SoftplusOnTensorCores) {
    const auto served = [](const std::string& sizes) { return served_by("simple_gla:bwd t292 k64 v64 " + sizes); };
    for (const char* sizes : {"h31 bf16 rawgate cuda", "b3 h10 bf16 rawgate cuda", "h64 f16 rawgate cuda"})
        EXPECT_EQ(served(sizes), "cuda.split") << sizes;
    for (const char* sizes : {"h32 bf16 rawgate cuda", "b4 h8 bf16 rawgate cuda", "h8 f16 rawgate bound=-5 cuda",
                              "h8 f16 cuda"})
        EXPECT_EQ(served(sizes), "cuda.tensor") << sizes;
}

}  // namespace
}  // namespace headrace::test
