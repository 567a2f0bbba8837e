// Summaries: what they refuse, what they do not depend on, and the bits that any number of threads leaves.
#include "headrace/summary.hpp"

#include <functional>
#include <limits>

#include "behaviours.hpp"
#include "harness/random.hpp"
#include "core/problem.hpp"
#include "sample_call.hpp"

namespace headrace::test {
namespace {

std::string message_of(const Call& call) {
    Problem problem;
    return make_problem(call, Contents::check, &problem).message();
}

// A call of the sample's operator that asks for a summary, or for the adjoint.
struct SampleSummary : SampleCall {
    SampleSummary(Operator op, Direction direction) : SampleCall(op, Direction::forward) {
        call.direction = direction;
        call.out = {};
        const std::int64_t N = B;
        if (direction == Direction::summarize) {
            call.in.q = {};
            const bool delta = call.in.beta.given();
            call.summary.transition = delta                 ? tensor(DType::f32, {N, HV, K, K})
                                      : call.in.g.rank == 4 ? tensor(DType::f32, {N, HV, K})
                                                            : tensor(DType::f32, {N, HV});
            call.summary.state = tensor(DType::f32, {N, HV, K, V});
        } else {
            call.d_out.d_o = tensor(DType::f32, {B, T, HV, V}, 1.0f);
            call.grads.d_initial_state = tensor(DType::f32, {N, HV, K, V});
        }
    }
};

TEST(Summary, NamesWhatIsWrong) {
    struct Mistake {
        Operator op;
        Direction direction;
        const char* message;
        std::function<void(SampleSummary&)> make;
    };
    constexpr auto map = Direction::summarize, adjoint = Direction::summarize_backward;
    const Mistake mistakes[] = {
        {Operator::kda, map, "transition: expected transition or state or both, got neither",
         [](SampleSummary& s) { s.call.summary = {}; }},
        {Operator::kda, map, "k: expected a tensor, required by kda, got none", [](SampleSummary& s) { s.call.in.k = {}; }},
        {Operator::kda, map, "k: expected 4 dimensions [B, T, H, K], got 3: [2, 5, 2]", [](SampleSummary& s) { s.call.in.k.rank = 3; }},
        {Operator::kda, map, "v: expected tokens 5 as in k, got 4", [](SampleSummary& s) { s.call.in.v.shape[1] = 4; }},
        {Operator::kda, map, "transition: expected key_dim 3 as in k, got 2",
         [](SampleSummary& s) { s.call.summary.transition.shape[3] = 2; }},
        {Operator::gla, map, "transition: expected 3 dimensions [N, HV, K], got 4: [2, 4, 3, 3]",
         [](SampleSummary& s) { s.call.summary.transition = s.tensor(DType::f32, {2, 4, 3, 3}); }},
        {Operator::retention, map, "transition: expected 2 dimensions [N, HV], got 3: [2, 4, 3]",
         [](SampleSummary& s) { s.call.summary.transition = s.tensor(DType::f32, {2, 4, 3}); }},
        {Operator::kda, map, "state: expected dtype f32 where k has f32, got bf16",
         [](SampleSummary& s) { s.call.summary.state = s.tensor(DType::bf16, {2, 4, 3, 6}); }},
        {Operator::kda, map, "state: expected memory of its own, got memory that overlaps v",
         [](SampleSummary& s) { s.call.summary.state.data = s.call.in.v.data; }},
        {Operator::kda, map, "gv: expected none, a summary's transition is one K x K matrix for all value channels, got shape [2, 5, 4, 6]",
         [](SampleSummary& s) { s.call.in.gv = s.tensor(DType::f32, {2, 5, 4, 6}); }},
        {Operator::kda, adjoint, "beta: expected 3 dimensions [B, T, HV], a summary's transition is one K x K matrix for all value "
                                 "channels, got 4: [2, 5, 4, 6]",
         [](SampleSummary& s) { s.call.in.beta = s.tensor(DType::f32, {2, 5, 4, 6}); }},
        {Operator::kda, adjoint, "q: expected a tensor, required by kda, got none", [](SampleSummary& s) { s.call.in.q = {}; }},
        {Operator::kda, adjoint, "d_o: expected d_o or d_final_state or both, got neither", [](SampleSummary& s) { s.call.d_out = {}; }},
        {Operator::kda, adjoint, "d_initial_state: expected a tensor, required by summarize_backward, got none",
         [](SampleSummary& s) { s.call.grads = {}; }},
    };
    for (const Mistake& mistake : mistakes) {
        SampleSummary sample(mistake.op, mistake.direction);
        EXPECT_EQ(message_of(sample.call), "") << "before " << mistake.message;
        mistake.make(sample);
        EXPECT_EQ(message_of(sample.call), mistake.message);
    }
    SampleSummary sample(Operator::kda, map);
    static_cast<float*>(sample.call.in.g.data)[7] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(run(sample.call).message().rfind("g: expected values <= 0, got nan at ", 0), 0u) << run(sample.call).message();
}

TEST(Summary, NamesWhatIsWrongWithProducts) {
    std::vector<float> memory(4096);
    const auto tensor = [&](std::size_t at, std::initializer_list<std::int64_t> shape) { return TensorView(&memory[at], DType::f32, shape); };
    const TensorView matrix = tensor(0, {2, 3, 4, 4}), diagonal = tensor(0, {2, 3, 4}), number = tensor(0, {2, 3}), state = tensor(200, {2, 3, 4, 5});
    const TensorView out = tensor(1000, {2, 3, 4, 5}), square = tensor(2000, {2, 3, 4, 4});
    const auto composing = [&](const Summary& second, const Summary& first, const Summary& to) { return compose(second, first, to).message(); };
    EXPECT_EQ(composing({matrix, state}, {matrix, state}, {square, out}), "");
    EXPECT_EQ(composing({{}, state}, {matrix, state}, {square, out}), "");
    EXPECT_EQ(composing({number, state}, {{}, state}, {{}, out}), "");
    EXPECT_EQ(composing({matrix, state}, {matrix, state}, {}), "out.transition: expected transition or state or both, got neither");
    EXPECT_EQ(composing({matrix, state}, {diagonal, state}, {square, out}),
              "first.transition: expected 4 dimensions as in second.transition, got 3: [2, 3, 4]");
    EXPECT_EQ(composing({matrix, state}, {matrix, {}}, {square, out}), "first.state: expected a tensor, required by out.state, got none");
    EXPECT_EQ(composing({matrix, {}}, {matrix, state}, {{}, out}), "second.state: expected a tensor, required by out.state, got none");
    EXPECT_EQ(composing({{}, {}}, {{}, {}}, {square, {}}),
              "out.transition: expected none where both transitions are the identity, got shape [2, 3, 4, 4]");
    EXPECT_EQ(composing({diagonal, {}}, {{}, {}}, {square, {}}),
              "out.transition: expected shape [2, 3, 4] as in second.transition, got [2, 3, 4, 4]");
    EXPECT_EQ(composing({tensor(0, {2, 3, 4, 3}), {}}, {}, {square, {}}), "second.transition: expected key_dim 4 as in second.transition, got 3");
    EXPECT_EQ(composing({matrix, state}, {matrix, tensor(200, {2, 3, 4, 6})}, {{}, out}), "first.state: expected value_dim 5 as in second.state, got 6");
    EXPECT_EQ(compose({matrix, state}, {matrix, state}, {square, out}, -1).message(), "threads: expected 0 to 1024, got -1");
    const auto applying = [&](const Summary& summary, const TensorView& to, const TensorView& result) {
        return apply(summary, to, true, result).message();
    };
    EXPECT_EQ(applying({matrix, {}}, state, out), "");
    EXPECT_EQ(applying({}, state, out), "");
    EXPECT_EQ(applying({matrix, {}}, {}, out), "state: expected a tensor, required by apply, got none");
    EXPECT_EQ(applying({matrix, {}}, state, {}), "out: expected a tensor, required by apply, got none");
    EXPECT_EQ(applying({tensor(0, {2, 2}), {}}, state, out), "state: expected value_heads 2 as in summary.transition, got 3");
    EXPECT_EQ(applying({tensor(0, {6}), {}}, state, out),
              "summary.transition: expected 2 dimensions [N, HV], 3 [N, HV, K] or 4 [N, HV, K, K], got 1: [6]");
    EXPECT_EQ(applying({matrix, {}}, state, state), "out: expected memory of its own, got memory that overlaps state");
    TensorView narrow = out;
    narrow.dtype = DType::bf16;
    EXPECT_EQ(applying({matrix, {}}, state, narrow), "out: expected dtype f32 or f64, got bf16");
    EXPECT_EQ(applying({matrix, {}}, narrow, state), "");  // a state may be of any
}

// Every form of a transition, both ways, with f64 states beside f32 and batches of any size, against sums in double.
TEST(Summary, ProductsAreRight) {
    for (const int rank : {0, 2, 3, 4}) {
        for (const bool transposed : {false, true}) {
            for (const DType dtype : {DType::f32, DType::f64}) {
                constexpr std::int64_t N = 2, HV = 3, K = 21, V = 37;
                const harness::Stream stream(7, "products");
                const auto draw = [&](std::vector<std::int64_t> shape, DType type, std::int64_t from) {
                    harness::Tensor tensor(type, std::move(shape));
                    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, stream.normal(from + i));
                    return tensor;
                };
                std::vector<std::int64_t> shape = {N, HV};
                for (int d = 2; d < rank; ++d) shape.push_back(K);
                const harness::Tensor M = rank == 0 ? harness::Tensor() : draw(shape, DType::f32, 0);
                const harness::Tensor R = draw({N, HV, K, V}, DType::f32, 10'000), S = draw({N, HV, K, V}, dtype, 50'000);
                harness::Tensor out(dtype, {N, HV, K, V});
                ASSERT_TRUE(apply({M.view(), R.view()}, S.view(), transposed, out.view()).ok());
                std::vector<double> expected = R.values();
                for (std::int64_t s = 0; s < N * HV; ++s) {
                    for (std::int64_t c = 0; c < K; ++c) {
                        for (std::int64_t i = 0; i < K; ++i) {
                            const std::int64_t at = s * K * K + (transposed ? i * K + c : c * K + i);
                            const double diagonal = rank == 0 ? 1 : rank == 2 ? M.get(s) : rank == 3 ? M.get(s * K + c) : 0;
                            const double factor = rank == 4 ? M.get(at) : i == c ? diagonal : 0;
                            for (std::int64_t j = 0; j < V; ++j) {
                                expected[static_cast<std::size_t>((s * K + c) * V + j)] += factor * S.get((s * K + i) * V + j);
                            }
                        }
                    }
                }
                EXPECT_LT(relative_error(out.values(), expected), dtype == DType::f64 ? 1e-14 : 3e-7) << rank << transposed;
            }
        }
    }
}

const char* const kinds[] = {":summary", ":summary_bwd"};

TEST(Summary, SameBitsForAnyNumberOfThreads) {
    for (const Operator op : operators()) {
        for (const std::string kind : kinds) {
            for (const char* type : {"f32", "bf16", "f64"}) {
                const std::string state = kind == ":summary" ? " state=in " : " state=out ";
                for (ProblemLine line : forced_lines(line_text(op, kind + " t150 h2 hv4 k64 v80" + state + type))) {
                    line.threads = 1;
                    const auto expected = run_and_read(line);
                    for (const int threads : {2, 3, 8}) {
                        line.threads = threads;
                        expect_same_bits(expected, run_and_read(line), harness::format(line));
                    }
                }
            }
        }
    }
}

// A part is what it is beside the other; a transition does not depend on values and states, the adjoint not on values.
TEST(Summary, PartsStandAlone) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":summary t90 h2 k64 v48 state=in"))) {
            CallTensors made = harness::make_tensors(line);
            const auto both = run_and_read(made);
            for (const harness::Parts part : {harness::Parts::transition, harness::Parts::state}) {
                ProblemLine alone = line;
                alone.part = part;
                const auto only = run_and_read(alone);
                ASSERT_EQ(only.size(), 1u);
                EXPECT_EQ(only.begin()->second, both.at(only.begin()->first)) << harness::format(alone);
            }
            made.tensors.at("v").fill(std::numeric_limits<double>::quiet_NaN());
            made.tensors.at("initial_state").fill(std::numeric_limits<double>::quiet_NaN());
            EXPECT_EQ(run_and_read(made).at("transition"), both.at("transition")) << harness::format(line);
        }
        for (const ProblemLine& line : forced_lines(line_text(op, ":summary_bwd t90 h2 k64 v48 state=inout"))) {
            CallTensors made = harness::make_tensors(line);
            const auto expected = run_and_read(made);
            made.tensors.at("v").fill(std::numeric_limits<double>::quiet_NaN());
            made.tensors.at("initial_state").fill(std::numeric_limits<double>::quiet_NaN());
            expect_same_bits(expected, run_and_read(made), harness::format(line));
        }
    }
}

// Behind a reset, or without tokens, nothing is left of the identity, or all.
TEST(Summary, EmptySequencesAreTheIdentity) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":summary varlen=0,0,40,40 h2 k64 v32"))) {
            const CallTensors made = harness::make_tensors(line);
            ASSERT_TRUE(run(made.call).ok());
            const harness::Tensor& transition = made.tensors.at("transition");
            const std::int64_t rank = static_cast<std::int64_t>(transition.shape().size()), of_one = transition.numel() / 3;
            for (std::int64_t i = 0; i < of_one; ++i) {
                const bool diagonal = rank < 4 || i / line.K % line.K == i % line.K;
                EXPECT_EQ(transition.get(i), diagonal ? 1 : 0) << harness::format(line);
                EXPECT_EQ(transition.get(2 * of_one + i), diagonal ? 1 : 0) << harness::format(line);
            }
            EXPECT_EQ(made.tensors.at("state").get(0), 0);
        }
    }
}

TEST(Summary, WorkspaceDoesNotGrowWithTokens) {
    for (const Operator op : operators()) {
        for (const std::string kind : kinds) {
            for (const char* type : {" f32", " bf16", " f64"}) {
                const std::string text = line_text(op, kind + " h8 k64 v64 threads=2" + type);
                for (const ProblemLine& line : forced_lines(text + " t256")) {
                    ProblemLine longer = line;
                    longer.T = 16384;
                    EXPECT_EQ(workspace_bytes(line), workspace_bytes(longer)) << harness::format(line);
                }
            }
        }
    }
}

// A NaN in one head's keys stays in that head.
TEST(Summary, NanStaysInItsHead) {
    for (const Operator op : operators()) {
        for (const std::string kind : kinds) {
            for (const ProblemLine& line : forced_lines(line_text(op, kind + " t70 h3 k64 v32"))) {
                CallTensors made = harness::make_tensors(line);
                const char* const name = kind == ":summary" ? "state" : "d_initial_state";
                ASSERT_TRUE(run(made.call).ok());
                const std::vector<double> expected = made.tensors.at(name).values();
                made.tensors.at(kind == ":summary" ? "k" : "q").set(33 * 3 * 64 + 64 + 5, std::numeric_limits<double>::quiet_NaN());
                ASSERT_TRUE(run(made.call).ok());
                const std::vector<double> values = made.tensors.at(name).values();
                bool spread = false;
                for (std::size_t i = 0; i < values.size(); ++i) {
                    if (i / (64 * 32) == 1) {
                        spread |= std::isnan(values[i]);
                    } else {
                        ASSERT_EQ(values[i], expected[i]) << harness::format(line);
                    }
                }
                EXPECT_TRUE(spread) << harness::format(line);
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
