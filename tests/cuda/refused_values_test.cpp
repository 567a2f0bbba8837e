// Values that are no gate and no beta, in every CUDA kernel that reads them: they make NaN of what their head computes
// from there on, and touch no other head; and cu_seqlens that are no list of sequences.
#include "tests/behaviours.hpp"
#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

constexpr int heads = 2;

struct Bad {
    const char* tensor;
    double value;
};

// f(tensors with a bad value in the second head, what they are) for each of these, run.
template <class F>
void each_spoilt(const ProblemLine& line, const std::vector<Bad>& values, F f) {
    for (const Bad& bad : values) {
        CallTensors spoilt = harness::make_tensors(line);
        harness::Tensor& tensor = spoilt.tensors.at(bad.tensor);
        const std::int64_t row = tensor.numel() / (line.T * heads);  // one gate, or one of each channel
        const std::int64_t token = line.T / 2;
        for (std::int64_t i = 0; i < row; ++i) tensor.set((token * heads + 1) * row + i, bad.value);
        run_there(spoilt);
        f(spoilt, harness::format(line) + ", " + bad.tensor + " of " + std::to_string(bad.value));
    }
}

// The last token's values of a forward or step, the first one's of a gradient.
void expect_only_its_head(const ProblemLine& line, const std::vector<Bad>& values) {
    const std::string name = line.direction == Direction::backward ? "d_v" : "o";
    const CallTensors clean = harness::make_tensors(line);
    run_there(clean);
    const TensorView before = clean.tensors.at(name).view();
    each_spoilt(line, values, [&](const CallTensors& spoilt, const std::string& what) {
        const TensorView after = spoilt.tensors.at(name).view();
        EXPECT_EQ(of_head(before, heads, 0, false), of_head(after, heads, 0, false)) << what;
        const std::vector<double> poisoned = of_head(after, heads, 1, false);
        const auto count = static_cast<std::ptrdiff_t>(poisoned.size()) / line.T;
        const auto first = line.direction == Direction::backward ? poisoned.begin() : poisoned.end() - count;
        EXPECT_TRUE(std::none_of(first, first + count, [](double x) { return std::isfinite(x); })) << what;
    });
}

// The same of what a summary makes of a head, or an adjoint.
void expect_only_its_states(const ProblemLine& line, const std::vector<Bad>& values) {
    const CallTensors clean = harness::make_tensors(line);
    run_there(clean);
    each_spoilt(line, values, [&](const CallTensors& spoilt, const std::string& what) {
        for (const harness::NamedView& output : harness::output_views(clean.call)) {
            const TensorView after = spoilt.tensors.at(output.name).view();
            EXPECT_EQ(of_head(output.view, heads, 0, true), of_head(after, heads, 0, true))
                << what << ", " << output.name;
            const std::vector<double> poisoned = of_head(after, heads, 1, true);
            EXPECT_TRUE(std::none_of(poisoned.begin(), poisoned.end(), [](double x) { return std::isfinite(x); }))
                << what << ", " << output.name;
        }
    });
}

const std::vector<Bad> bad_gates = {{"g", std::nan("")}, {"g", 0.5}};
std::vector<Bad> and_gates(std::vector<Bad> others) {
    others.insert(others.end(), bad_gates.begin(), bad_gates.end());
    return others;
}

TEST(CudaRefusedValues, PoisonTheirStatesAlone) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "kda"}) {
        for (const char* direction : {":summary t40", ":summary_bwd t40"}) {
            for (const char* type : {" k16 f32", " k64 v32 bf16", " k64 v32 f16", " k16 f64"}) {
                for (const ProblemLine& line : forced_lines(op + direction + " h2 cuda" + type)) {
                    const bool delta = harness::has_delta_rule(line.op);
                    expect_only_its_states(line, delta ? and_gates({{"beta", std::nan("")}}) : bad_gates);
                }
            }
        }
    }
}

TEST(CudaRefusedValues, PoisonTheirHeadAlone) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "kda"}) {
        const bool delta = op == "gated_delta_rule" || op == "kda";
        for (const std::string direction : {":fwd t40", ":bwd t40", ":step t1", ":step t2"}) {
            for (const std::string& type : types_of(direction, {" k16 f32", " k64 bf16", " k64 f16", " k16 f64"})) {
                for (const ProblemLine& line : forced_lines(op + direction + " h2 v16 cuda" + type)) {
                    constexpr double infinity = std::numeric_limits<double>::infinity();
                    const std::vector<Bad> betas = {{"beta", std::nan("")}, {"beta", infinity}};
                    expect_only_its_head(line, delta ? and_gates(betas) : bad_gates);
                }
            }
        }
    }
}

// Of what a formula makes gates and betas of, NaN alone is refused.
TEST(CudaRefusedValues, InFormulas) {
    for (const std::string op : {"gated_delta_rule", "kda"}) {
        const auto expect_right = [&](const std::string& direction, const std::string& words) {
            for (const ProblemLine& line : forced_lines(op + direction + " h2 v16 cuda" + words))
                expect_only_its_head(line, {{"g", std::nan("")}, {"beta", std::nan("")}});
        };
        for (const std::string direction : {":fwd t40", ":bwd t40", ":step t1", ":step t2"}) {
            for (const char* words : {" k16 f32 rawgate beta=sigmoid", " k64 bf16 rawgate beta=two_sigmoid",
                                      " k64 bf16 bound=-5 beta=sigmoid", " k16 f64 bound=-5 beta=two_sigmoid"})
                expect_right(direction, words);
        }
        for (const std::string& type : types_of(":step t1", {}))
            expect_right(":step t1", type + " rawgate beta=sigmoid");
    }
}

// Numbers on the device that are no list of sequences make NaN of all results, and nothing around these is touched.
TEST(CudaRefusedValues, SequencesThatAreNone) {
    constexpr std::int64_t far = std::int64_t{1} << 40;
    const std::vector<std::vector<std::int64_t>> lists = {{0, 9, 9, 50, 67},  {1, 9, 9, 50, 67},    {0, 9, 9, 50, 66},
                                                          {0, 9, 9, 50, 68},  {0, 50, 9, 50, 67},   {0, 9, 9, far, 67},
                                                          {0, 9, 9, 50, far}, {-far, 9, 9, 50, 67}, {0, 9, -1, 50, 67}};
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "kda"}) {
        for (const std::string direction :
             {":fwd state=inout", ":bwd state=inout gate=", ":summary state=in", ":summary_bwd"}) {
            for (const char* type : {" k64 v32 bf16", " k16 v16", " k16 v16 f64"}) {
                const bool channel = op == "gla" || op == "kda";
                const std::string gate = direction.back() == '=' ? channel ? "channel+head" : "step+head" : "";
                const std::string text = op + direction + gate + " varlen=0,9,9,50,67 h1" + type + " cuda";
                for (const ProblemLine& line : forced_lines(text)) {
                    for (const std::vector<std::int64_t>& list : lists) {
                        CallTensors made = harness::make_tensors(line);
                        harness::Tensor& boundaries = made.tensors.at("cu_seqlens");
                        for (std::size_t i = 0; i < list.size(); ++i)
                            boundaries.set(
                                static_cast<std::int64_t>(i),
                                static_cast<double>(boundaries.dtype() == DType::i32 ? list[i] % 100000007 : list[i]));
                        for (const harness::NamedView& output : harness::output_views(made.call))
                            made.tensors.at(output.name).fill(1);
                        run_there(made);
                        for (const harness::NamedView& output : harness::output_views(made.call)) {
                            for (const double value : harness::read_values(output.view))
                                ASSERT_EQ(std::isnan(value), &list != &lists.front())
                                    << harness::format(line) << ", list " << &list - &lists.front() << ": "
                                    << output.name;
                        }
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
