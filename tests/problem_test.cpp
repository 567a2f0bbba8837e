// I2: every mistake that Problem finds, with the whole message that the user reads.
// over 400 lines: one table entry for each message, all of one kind.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "core/problem.hpp"
#include "sample_call.hpp"

namespace headrace::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr auto fwd = Direction::forward, bwd = Direction::backward, stp = Direction::step;

struct Mistake {
    Operator op;
    Direction direction;
    const char* message;  // empty: no mistake
    std::function<void(SampleCall&)> make;
};

std::string message_of(const Call& call, Contents contents = Contents::check) {
    Problem problem;
    const Status status = make_problem(call, contents, &problem);
    EXPECT_EQ(status.code(), status.message().empty() ? Code::ok : Code::invalid_argument);
    return status.message();
}

void expect(const std::vector<Mistake>& mistakes) {
    for (const Mistake& mistake : mistakes) {
        SampleCall sample(mistake.op, mistake.direction);
        EXPECT_EQ(message_of(sample.call), "") << "before " << mistake.message;
        mistake.make(sample);
        EXPECT_EQ(message_of(sample.call), mistake.message);
    }
}

const Operator every_operator[] = {
    Operator::linear_attention, Operator::retention,        Operator::simple_gla, Operator::gla,
    Operator::delta_rule,       Operator::gated_delta_rule, Operator::comba,      Operator::kda};

TEST(Problem, AcceptsEveryOperatorAndResolvesDefaults) {
    for (const Operator op : every_operator) {
        for (const Direction direction : {fwd, bwd, stp}) {
            SampleCall sample(op, direction);
            Problem problem;
            const Status status = make_problem(sample.call, Contents::check, &problem);
            ASSERT_TRUE(status.ok()) << name_of(op) << ": " << status.message();
            EXPECT_EQ(problem.B, 2);
            EXPECT_EQ(problem.T, 5);
            EXPECT_EQ(problem.H, 2);
            EXPECT_EQ(problem.HV, 4);
            EXPECT_EQ(problem.K, 3);
            EXPECT_EQ(problem.V, 6);
            EXPECT_EQ(problem.N, 2);
            EXPECT_EQ(problem.group, 2);
            EXPECT_EQ(problem.scale, 1 / std::sqrt(3.0));
            EXPECT_EQ(problem.threads, default_threads());
            EXPECT_EQ(problem.state_dtype, DType::f32);
            EXPECT_EQ(problem.channel_gate, op == Operator::gla || op == Operator::kda);
            EXPECT_EQ(problem.head_gate, op == Operator::retention);
            EXPECT_EQ(problem.erase_with_p, op == Operator::comba);
            EXPECT_EQ(problem.rule == Rule::delta, sample.call.in.beta.given());
            ASSERT_EQ(problem.sequences.size(), 2u);
            EXPECT_EQ(problem.sequences[1].row, 1);
            EXPECT_EQ(problem.sequences[1].end, 5);
        }
    }
}

TEST(Problem, AcceptsEmptyBatchesAndSequences) {
    SampleCall sample(Operator::gated_delta_rule, fwd);
    sample.pack({0, 0, 3, 3, 5}, 5);
    Problem problem;
    ASSERT_EQ(message_of(sample.call), "");
    ASSERT_TRUE(make_problem(sample.call, Contents::check, &problem).ok());
    ASSERT_EQ(problem.N, 4);
    EXPECT_EQ(problem.sequences[1].begin, 0);
    EXPECT_EQ(problem.sequences[1].end, 3);
    EXPECT_EQ(problem.sequences[2].begin, problem.sequences[2].end);
    for (const int dimension : {0, 1}) {  // no rows, no tokens: null data is fine
        SampleCall empty(Operator::gated_delta_rule, fwd);
        for (TensorView* view : {&empty.call.in.q, &empty.call.in.k, &empty.call.in.v, &empty.call.in.g,
                                 &empty.call.in.beta, &empty.call.out.o}) {
            view->shape[dimension] = 0;
            view->data = nullptr;
        }
        EXPECT_EQ(message_of(empty.call), "");
    }
    SampleCall none(Operator::simple_gla, fwd);
    none.pack({0}, 0);
    EXPECT_EQ(message_of(none.call), "");
}

TEST(Problem, NamesWhatIsRequiredOrRefused) {
    expect({
        {Operator::gla, fwd, "q: expected a tensor, required by gla, got none", [](auto& s) { s.call.in.q = {}; }},
        {Operator::gla, fwd, "k: expected a tensor, required by gla, got none", [](auto& s) { s.call.in.k = {}; }},
        {Operator::gla, fwd, "v: expected a tensor, required by gla, got none", [](auto& s) { s.call.in.v = {}; }},
        {Operator::comba, fwd, "p: expected a tensor, required by comba, got none", [](auto& s) { s.call.in.p = {}; }},
        {Operator::kda, fwd, "p: expected none, kda does not take it, got shape [2, 5, 2, 3]",
         [](auto& s) { s.call.in.p = s.call.in.k; }},
        {Operator::gla, fwd, "beta: expected none, gla does not take it, got shape [2, 5, 4]",
         [](auto& s) {
             s.call.in.beta = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::linear_attention, fwd, "g: expected none, linear_attention does not take it, got shape [2, 5, 4]",
         [](auto& s) {
             s.call.in.g = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::delta_rule, fwd, "g_gamma: expected none, delta_rule does not take it, got shape [4]",
         [](auto& s) { s.call.in.g_gamma = s.tensor(DType::f32, {4}); }},
        {Operator::retention, fwd, "g_gamma: expected a tensor, required by retention, got none",
         [](auto& s) { s.call.in.g_gamma = {}; }},
        {Operator::retention, fwd, "g: expected none, retention does not take it, got shape [2, 5, 4]",
         [](auto& s) {
             s.call.in.g = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::simple_gla, fwd,
         "g: expected 3 dimensions [B, T, HV], the step gate of simple_gla, got 4: [2, 5, 4, 3]",
         [](auto& s) {
             s.call.in.g = s.tensor(DType::f32, {2, 5, 4, 3});
         }},
        {Operator::kda, fwd, "g: expected 4 dimensions [B, T, HV, K], the channel gate of kda, got 3: [2, 5, 4]",
         [](auto& s) {
             s.call.in.g = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::kda, fwd, "A_log: expected none, gate_form log_decay does not take it, got shape [4]",
         [](auto& s) { s.call.in.A_log = s.tensor(DType::f32, {4}); }},
        {Operator::kda, fwd, "dt_bias: expected none, gate_form log_decay does not take it, got shape [4]",
         [](auto& s) { s.call.in.dt_bias = s.tensor(DType::f32, {4}); }},
        {Operator::kda, fwd, "A_log: expected a tensor, required by gate_form softplus, got none",
         [](auto& s) { s.call.options.gate_form = GateForm::softplus; }},
        {Operator::retention, fwd, "g: expected a tensor, required by gate_form bounded, got none",
         [](auto& s) { s.call.options.gate_form = GateForm::bounded; }},
        {Operator::gla, fwd, "beta: expected a tensor, required by beta_form sigmoid, got none",
         [](auto& s) { s.call.options.beta_form = BetaForm::sigmoid; }},
        {Operator::kda, fwd, "beta: expected a tensor, required by beta_form two_sigmoid, got none",
         [](auto& s) { s.call.options.beta_form = BetaForm::two_sigmoid, s.call.in.beta = {}; }},
        {Operator::kda, fwd, "o: expected a tensor, required by forward, got none", [](auto& s) { s.call.out.o = {}; }},
        {Operator::kda, stp, "o: expected a tensor, required by step, got none", [](auto& s) { s.call.out.o = {}; }},
        {Operator::kda, stp, "pool.states: expected a tensor, required by step, got none",
         [](auto& s) { s.call.pool = {}; }},
        {Operator::kda, stp, "initial_state: expected none, step takes it from the pool, got shape [2, 4, 3, 6]",
         [](auto& s) {
             s.call.in.initial_state = s.tensor(DType::f32, {2, 4, 3, 6});
         }},
        {Operator::kda, stp, "final_state: expected none, step leaves it in the pool, got shape [2, 4, 3, 6]",
         [](auto& s) {
             s.call.out.final_state = s.tensor(DType::f32, {2, 4, 3, 6});
         }},
        {Operator::kda, bwd, "d_o: expected d_o or d_final_state or both, got neither",
         [](auto& s) { s.call.d_out = {}; }},
        {Operator::gla, bwd, "d_beta: expected none without beta, got shape [2, 5, 4]",
         [](auto& s) {
             s.call.grads.d_beta = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::gla, bwd, "d_g_gamma: expected none without g_gamma, got shape [4]",
         [](auto& s) { s.call.grads.d_g_gamma = s.tensor(DType::f32, {4}); }},
        {Operator::gla, bwd, "",
         [](auto& s) {
             s.call.grads.d_initial_state = s.tensor(DType::f32, {2, 4, 3, 6});
         }},
        {Operator::gla, bwd, "",
         [](auto& s) {
             s.call.in.gv = s.tensor(DType::f32, {2, 5, 4, 6});
         }},
        {Operator::kda, bwd, "",
         [](auto& s) {
             s.call.in.beta = s.tensor(DType::f32, {2, 5, 4, 6});
         }},
    });
}

TEST(Problem, NamesWrongShapes) {
    expect({
        {Operator::gla, fwd, "q: expected 4 dimensions [B, T, H, K], got 3: [2, 5, 2]",
         [](auto& s) { s.call.in.q.rank = 3; }},
        {Operator::gla, fwd, "v: expected 4 dimensions [B, T, HV, V], got 3: [2, 5, 4]",
         [](auto& s) { s.call.in.v.rank = 3; }},
        {Operator::gla, fwd, "k: expected 4 dimensions [B, T, H, K], got 2: [2, 5]",
         [](auto& s) { s.call.in.k.rank = 2; }},
        {Operator::gla, fwd, "k: expected key_dim 3 as in q, got 2", [](auto& s) { s.call.in.k.shape[3] = 2; }},
        {Operator::gla, fwd, "k: expected heads 2 as in q, got 1", [](auto& s) { s.call.in.k.shape[2] = 1; }},
        {Operator::gla, fwd, "k: expected tokens 5 as in q, got 4", [](auto& s) { s.call.in.k.shape[1] = 4; }},
        {Operator::gla, fwd, "v: expected batch 2 as in q, got 1", [](auto& s) { s.call.in.v.shape[0] = 1; }},
        {Operator::comba, fwd, "p: expected key_dim 3 as in q, got 2", [](auto& s) { s.call.in.p.shape[3] = 2; }},
        {Operator::gla, fwd, "v: expected value_heads that are a multiple of heads 2 of q, got 3",
         [](auto& s) { s.call.in.v.shape[2] = 3; }},
        {Operator::gla, fwd, "v: expected value_heads that are a multiple of heads 2 of q, got 0",
         [](auto& s) { s.call.in.v.shape[2] = 0; }},
        {Operator::gla, fwd, "q: expected at least 1 head, got 0", [](auto& s) { s.call.in.q.shape[2] = 0; }},
        {Operator::gla, fwd, "q: expected key_dim of at least 1, got 0", [](auto& s) { s.call.in.q.shape[3] = 0; }},
        {Operator::gla, fwd, "v: expected value_dim of at least 1, got 0", [](auto& s) { s.call.in.v.shape[3] = 0; }},
        {Operator::gla, fwd, "q: expected key_dim of at most 65536, got 65537",
         [](auto& s) {
             s.call.in.q.shape[3] = 65537;
             s.call.in.q.strides[3] = 0;
         }},
        {Operator::gla, fwd, "v: expected value_dim of at most 65536, got 65537",
         [](auto& s) {
             s.call.in.v.shape[3] = 65537;
             s.call.in.v.strides[3] = 0;
         }},
        {Operator::gla, fwd, "g: expected key_dim 3 as in q, got 2", [](auto& s) { s.call.in.g.shape[3] = 2; }},
        {Operator::simple_gla, fwd, "g: expected value_heads 4 as in v, got 2",
         [](auto& s) { s.call.in.g.shape[2] = 2; }},
        {Operator::retention, fwd, "g_gamma: expected value_heads 4 as in v, got 3",
         [](auto& s) { s.call.in.g_gamma.shape[0] = 3; }},
        {Operator::gla, fwd, "gv: expected value_dim 6 as in v, got 3",
         [](auto& s) {
             s.call.in.gv = s.tensor(DType::f32, {2, 5, 4, 3});
         }},
        {Operator::kda, fwd, "beta: expected 3 dimensions [B, T, HV], got 2: [2, 5]",
         [](auto& s) { s.call.in.beta.rank = 2; }},
        {Operator::kda, fwd, "beta: expected value_dim 6 as in v, got 3",
         [](auto& s) {
             s.call.in.beta = s.tensor(DType::f32, {2, 5, 4, 3});
         }},
        {Operator::gla, fwd, "initial_state: expected sequences 2 as in q, got 3",
         [](auto& s) {
             s.call.in.initial_state = s.tensor(DType::f32, {3, 4, 3, 6});
         }},
        {Operator::gla, fwd, "initial_state: expected key_dim 3 as in q, got 6",
         [](auto& s) {
             s.call.in.initial_state = s.tensor(DType::f32, {2, 4, 6, 3});
         }},
        {Operator::gla, fwd, "final_state: expected sequences 2 as in q, got 1",
         [](auto& s) {
             s.call.out.final_state = s.tensor(DType::f32, {1, 4, 3, 6});
         }},
        {Operator::gla, fwd, "o: expected value_dim 6 as in v, got 5", [](auto& s) { s.call.out.o.shape[3] = 5; }},
        {Operator::gla, bwd, "d_o: expected tokens 5 as in q, got 4", [](auto& s) { s.call.d_out.d_o.shape[1] = 4; }},
        {Operator::gla, bwd, "d_final_state: expected value_dim 6 as in v, got 3",
         [](auto& s) {
             s.call.d_out.d_final_state = s.tensor(DType::f32, {2, 4, 3, 3});
         }},
        {Operator::gla, bwd, "d_q: expected shape [2, 5, 2, 3] as in q, got [2, 5, 2, 2]",
         [](auto& s) { s.call.grads.d_q.shape[3] = 2; }},
        {Operator::gla, bwd, "d_g: expected shape [2, 5, 4, 3] as in g, got [2, 5, 4]",
         [](auto& s) {
             s.call.grads.d_g = s.tensor(DType::f32, {2, 5, 4});
         }},
        {Operator::gla, bwd, "d_initial_state: expected sequences 2 as in q, got 1",
         [](auto& s) {
             s.call.grads.d_initial_state = s.tensor(DType::f32, {1, 4, 3, 6});
         }},
        {Operator::gla, stp, "pool.states: expected value_heads 4 as in v, got 2",
         [](auto& s) {
             s.call.pool.states = s.tensor(DType::f32, {3, 2, 3, 6});
         }},
        {Operator::gla, stp, "pool.states: expected at least 2 rows, one for each sequence, got 1",
         [](auto& s) { s.call.pool.states.shape[0] = 1; }},
        {Operator::gla, stp, "pool.indices: expected sequences 2 as in q, got 3",
         [](auto& s) {
             s.call.pool.indices = s.integers({0, 1, 2});
         }},
        {Operator::gla, stp, "pool.indices: expected at least 1 index for each sequence, got 0",
         [](auto& s) { s.call.pool.indices = s.integers(2, 0, {}); }},
        {Operator::gla, stp, "pool.num_accepted_tokens: expected none, it needs indices [N, S], got shape [2]",
         [](auto& s) {
             s.call.pool.num_accepted_tokens = s.integers({1, 1});
         }},
        {Operator::gla, fwd, "q: expected sizes >= 0, got shape [2, -5, 2, 3]",
         [](auto& s) { s.call.in.q.shape[1] = -5; }},
        {Operator::gla, fwd, "g: expected 1 to 4 dimensions, got 5", [](auto& s) { s.call.in.g.rank = 5; }},
        {Operator::gla, fwd, "q: expected 1 to 4 dimensions, got -1", [](auto& s) { s.call.in.q.rank = -1; }},
    });
}

TEST(Problem, ShapesOfTheGateBias) {
    const auto with_bias = [](std::initializer_list<std::int64_t> shape) {
        return [shape = std::vector<std::int64_t>(shape)](SampleCall& s) {
            s.call.options.gate_form = GateForm::softplus;
            s.call.in.A_log = s.tensor(DType::f32, {4});
            TensorView& bias = s.call.in.dt_bias;
            bias = shape.size() == 1 ? s.tensor(DType::f32, {shape[0]}) : s.tensor(DType::f32, {shape[0], shape[1]});
        };
    };
    expect({
        {Operator::kda, fwd, "", with_bias({4})},
        {Operator::kda, fwd, "", with_bias({12})},
        {Operator::kda, fwd, "", with_bias({4, 3})},
        {Operator::gated_delta_rule, fwd, "", with_bias({4})},
        {Operator::kda, fwd, "dt_bias: expected shape [4], [4, 3] or [12] with a channel gate, got [3]",
         with_bias({3})},
        {Operator::kda, fwd, "dt_bias: expected key_dim 3 as in q, got 4", with_bias({4, 4})},
        {Operator::gated_delta_rule, fwd, "dt_bias: expected value_heads 4 as in v, got 12", with_bias({12})},
        {Operator::gated_delta_rule, fwd, "A_log: expected value_heads 4 as in v, got 2",
         [](auto& s) {
             s.call.options.gate_form = GateForm::softplus;
             s.call.in.A_log = s.tensor(DType::f32, {2});
         }},
    });
}

TEST(Problem, NamesWrongDtypesAndDevices) {
    expect({
        {Operator::gla, fwd, "k: expected dtype f32 as in q, got bf16",
         [](auto& s) { s.call.in.k.dtype = DType::bf16; }},
        {Operator::gla, fwd, "v: expected dtype f32 as in q, got f16", [](auto& s) { s.call.in.v.dtype = DType::f16; }},
        {Operator::comba, fwd, "p: expected dtype f32 as in q, got f16",
         [](auto& s) { s.call.in.p.dtype = DType::f16; }},
        {Operator::gla, fwd, "o: expected dtype f32 as in q, got bf16",
         [](auto& s) { s.call.out.o.dtype = DType::bf16; }},
        {Operator::gla, bwd, "d_o: expected dtype f32 as in q, got bf16",
         [](auto& s) { s.call.d_out.d_o.dtype = DType::bf16; }},
        {Operator::gla, fwd, "q: expected a floating-point dtype, got i32",
         [](auto& s) { s.call.in.q.dtype = DType::i32; }},
        {Operator::gla, fwd, "g: expected a floating-point dtype, got i64",
         [](auto& s) { s.call.in.g.dtype = DType::i64; }},
        {Operator::gla, fwd, "v: expected a floating-point dtype, got ?",
         [](auto& s) { s.call.in.v.dtype = static_cast<DType>(99); }},
        {Operator::retention, fwd, "g_gamma: expected dtype f32, bf16 or f16 where q has f32, got f64",
         [](auto& s) { s.call.in.g_gamma = s.tensor(DType::f64, {4}); }},
        {Operator::gla, fwd, "final_state: expected dtype f32 where q has f32, got bf16",
         [](auto& s) {
             s.call.out.final_state = s.tensor(DType::bf16, {2, 4, 3, 6});
         }},
        {Operator::gla, stp, "pool.states: expected dtype f32, bf16 or f16 where q has f32, got f64",
         [](auto& s) {
             s.call.pool.states = s.tensor(DType::f64, {3, 4, 3, 6});
         }},
        {Operator::gla, stp, "", [](auto& s) { s.call.pool.states.dtype = DType::bf16; }},
        {Operator::gla, stp, "pool.indices: expected dtype i32 or i64, got f32",
         [](auto& s) { s.call.pool.indices = s.tensor(DType::f32, {2}); }},
        {Operator::gla, fwd, "k: expected a CUDA tensor as q, got a CPU one", [](auto& s) { s.call.in.q.device = Device::cuda; }},
        {Operator::gla, fwd, "o: expected a CPU tensor as q, got a CUDA one", [](auto& s) { s.call.out.o.device = Device::cuda; }},
    });
}

TEST(Problem, NamesWrongStridesAndMemory) {
    expect({
        {Operator::gla, fwd, "k: expected strides >= 0, got [30, 6, -3, 1]",
         [](auto& s) { s.call.in.k.strides[2] = -3; }},
        {Operator::gla, fwd, "", [](auto& s) { s.call.in.g.strides[0] = s.call.in.g.strides[1] = 0; }},
        {Operator::gla, fwd,
         "o: expected elements that do not overlap, got shape [2, 5, 4, 6] with strides [0, 24, 6, 1]",
         [](auto& s) { s.call.out.o.strides[0] = 0; }},
        {Operator::gla, bwd,
         "d_q: expected elements that do not overlap, got shape [2, 5, 2, 3] with strides [30, 6, 2, 1]",
         [](auto& s) { s.call.grads.d_q.strides[2] = 2; }},
        {Operator::gla, stp,
         "pool.states: expected elements that do not overlap, got shape [3, 4, 3, 6] with strides [71, 18, 6, 1]",
         [](auto& s) { s.call.pool.states.strides[0] = 71; }},
        {Operator::gla, fwd, "v: expected data, got a null pointer", [](auto& s) { s.call.in.v.data = nullptr; }},
        {Operator::gla, fwd, "v: expected data aligned to 4 bytes, got an address that is not",
         [](auto& s) { s.call.in.v.data = static_cast<char*>(s.call.in.v.data) + 1; }},
        {Operator::gla, fwd, "o: expected memory of its own, got memory that overlaps v",
         [](auto& s) { s.call.out.o.data = s.call.in.v.data; }},
        {Operator::gla, bwd, "d_q: expected memory of its own, got memory that overlaps d_k",
         [](auto& s) { s.call.grads.d_k = s.call.grads.d_q; }},
        {Operator::gla, bwd, "d_q: expected memory of its own, got memory that overlaps d_o",
         [](auto& s) { s.call.grads.d_q.data = static_cast<float*>(s.call.d_out.d_o.data) + 239; }},
        {Operator::gla, stp, "pool.states: expected memory of its own, got memory that overlaps v",
         [](auto& s) { s.call.in.v.data = s.call.pool.states.data; }},
        {Operator::gla, fwd, "q: expected fewer than 2^58 elements, got shape [2305843009213693952, 5, 2, 3]",
         [](auto& s) { s.call.in.q.shape[0] = std::int64_t{1} << 61; }},
        {Operator::gla, fwd,
         "q: expected an extent of fewer than 2^58 elements, got shape [2, 5, 2, 3] with strides "
         "[4611686018427387904, 6, 3, 1]",
         [](auto& s) { s.call.in.q.strides[0] = std::int64_t{1} << 62; }},
    });
}

TEST(Problem, NamesWrongOptions) {
    expect({
        {Operator::gla, fwd, "scale: expected a finite number, got nan", [](auto& s) { s.call.options.scale = nan; }},
        {Operator::gla, fwd, "chunk: expected 0 or a power of two from 16 to 256, got 48",
         [](auto& s) { s.call.options.chunk = 48; }},
        {Operator::gla, fwd, "chunk: expected 0 or a power of two from 16 to 256, got 8",
         [](auto& s) { s.call.options.chunk = 8; }},
        {Operator::gla, fwd, "chunk: expected 0 or a power of two from 16 to 256, got 512",
         [](auto& s) { s.call.options.chunk = 512; }},
        {Operator::gla, fwd, "chunk: expected 0 or a power of two from 16 to 256, got -16",
         [](auto& s) { s.call.options.chunk = -16; }},
        {Operator::gla, fwd, "", [](auto& s) { s.call.options.chunk = 128; }},
        {Operator::gla, fwd, "num_steps: expected 0 to 4096, got -1", [](auto& s) { s.call.options.num_steps = -1; }},
        {Operator::gla, fwd, "num_steps: expected 0 to 4096, got 5000",
         [](auto& s) { s.call.options.num_steps = 5000; }},
        {Operator::gla, fwd, "threads: expected 0 to 1024, got -2", [](auto& s) { s.call.options.threads = -2; }},
        {Operator::gla, fwd, "threads: expected 0 to 1024, got 2000", [](auto& s) { s.call.options.threads = 2000; }},
        {Operator::gla, fwd, "state_dtype: expected f32 as in q, got bf16",
         [](auto& s) { s.call.options.state_dtype = DType::bf16; }},
        {Operator::gla, fwd, "gate_form: expected log_decay, softplus or bounded, got number 9",
         [](auto& s) { s.call.options.gate_form = static_cast<GateForm>(9); }},
        {Operator::gla, fwd, "beta_form: expected value, sigmoid or two_sigmoid, got number 7",
         [](auto& s) { s.call.options.beta_form = static_cast<BetaForm>(7); }},
        {Operator::gla, fwd, "op: expected an operator, got number 77",
         [](auto& s) { s.call.op = static_cast<Operator>(77); }},
        {Operator::gla, fwd, "direction: expected forward, backward, step, summarize or summarize_backward, got number 5",
         [](auto& s) { s.call.direction = static_cast<Direction>(5); }},
    });
    for (const auto& [bound, text] : {std::pair(0.0, "0"), std::pair(-5.5, "-5.5"), std::pair(nan, "nan")}) {
        SampleCall sample(Operator::kda, fwd);
        sample.call.options.gate_form = GateForm::bounded;
        sample.call.in.A_log = sample.tensor(DType::f32, {4});
        EXPECT_EQ(message_of(sample.call), "");
        sample.call.options.lower_bound = bound;
        EXPECT_EQ(message_of(sample.call), std::string("lower_bound: expected a number in [-5, 0), got ") + text);
    }
}

TEST(Problem, NamesWrongSequences) {
    expect({
        {Operator::gla, fwd, "q: expected batch 1 with cu_seqlens, got 2",
         [](auto& s) {
             s.call.in.cu_seqlens = s.integers({0, 5});
         }},
        {Operator::linear_attention, fwd, "q: expected at most 4194304 sequences, got 5000000",
         [](auto& s) {
             for (TensorView* view : {&s.call.in.q, &s.call.in.k, &s.call.in.v, &s.call.out.o}) {
                 view->shape[0] = 5000000, view->shape[1] = 0;
             }
         }},
        {Operator::gla, fwd, "cu_seqlens: expected 0 at [0], got 1",
         [](auto& s) {
             s.pack({1, 5}, 5);
         }},
        {Operator::gla, fwd, "cu_seqlens: expected at least 4 at [2], got 3",
         [](auto& s) {
             s.pack({0, 4, 3, 5}, 5);
         }},
        {Operator::gla, fwd, "cu_seqlens: expected tokens 5 as in q at [2], got 4",
         [](auto& s) {
             s.pack({0, 2, 4}, 5);
         }},
        {Operator::gla, fwd, "cu_seqlens: expected tokens 5 as in q at [2], got 9",
         [](auto& s) {
             s.pack({0, 2, 9}, 5);
         }},
        {Operator::gla, fwd, "cu_seqlens: expected 1 dimension [N + 1] of at least 1 entry, got shape [0]",
         [](auto& s) { s.call.in.cu_seqlens = s.integers(std::vector<std::int64_t>{}); }},
        {Operator::gla, fwd, "cu_seqlens: expected 1 dimension [N + 1] of at least 1 entry, got shape [1, 2]",
         [](auto& s) {
             s.call.in.cu_seqlens = s.integers(1, 2, {0, 5});
         }},
        {Operator::gla, fwd, "cu_seqlens: expected dtype i32 or i64, got f32",
         [](auto& s) { s.call.in.cu_seqlens = s.tensor(DType::f32, {2}); }},
        {Operator::gla, fwd, "cu_seqlens: expected a CPU tensor as q, got a CUDA one",
         [](auto& s) {
             s.pack({0, 5}, 5), s.call.in.cu_seqlens.device = Device::cuda;
         }},
        {Operator::gla, fwd, "initial_state: expected sequences 3 as in cu_seqlens, got 1",
         [](auto& s) {
             s.pack({0, 1, 3, 5}, 5);
             s.call.in.initial_state = s.tensor(DType::f32, {1, 4, 3, 6});
         }},
    });
}

}  // namespace
}  // namespace headrace::test
