// Options::piece: sequences cut at multiples of 64 tokens give, piece by piece, the bits of one call.
#include "pieces.hpp"

namespace headrace::test {
namespace {

using harness::Tensor;

// Sanitizers, which find in a few problems of each kind what there is to find, take one of eleven: a number that
// divides no loop of these tests, and half a minute instead of four.
bool is_left_out() {
#ifdef HEADRACE_SANITIZED
    static int problems = 0;
    return problems++ % 11 != 0;
#else
    return false;
#endif
}

// Every multiple of 64 counts from where a sequence begins to run.
void expect_same_in_pieces(const ProblemLine& line, const Cuts& cuts) {
    if (is_left_out()) return;
    CallTensors made = harness::make_tensors(line);
    const std::string what = harness::format(line);
    const Status status = run(made.call);
    ASSERT_TRUE(status.ok()) << what << ": " << status.message();
    std::map<std::string, Bytes> expected = written(made.call);
    std::map<std::string, std::vector<double>> sums;
    for (const char* name : parameter_gradients) {
        if (!expected.erase(name)) continue;
        sums[name] = made.tensors.at(name).values();
    }
    for (const harness::NamedView& output : harness::output_views(made.call)) {
        made.tensors.at(output.name).fill(std::numeric_limits<double>::quiet_NaN());
    }
    Pieces pieces(made, cuts);
    line.direction == Direction::forward ? pieces.run_forward() : pieces.run_backward();
    std::map<std::string, Bytes> actual = written(made.call);
    for (const auto& [name, values] : sums) {
        actual.erase(name);
        EXPECT_LT(relative_error(made.tensors.at(name).values(), values), 1e-5) << what << ": " << name;
    }
    expect_same_bits(expected, actual, what);
}
void expect_same_in_pieces_everywhere(const std::string& text, const Cuts& cuts) {
    for (const ProblemLine& line : forced_lines(text)) expect_same_in_pieces(line, cuts);
    expect_same_in_pieces(line_of(text), cuts);
}

const char* const directions[] = {"fwd", "bwd"};

TEST(Pieces, EveryOperatorGateTypeAndImplementation) {
    for (const char* direction : directions) {
        for (const std::string& line : operators_and_gates(direction)) {
            for (const char* sizes : {" t200 h2 k64 v48", " t200 h8 k64 v64 bf16", " t200 h2 k32 f16", " t130 h1 k24 f64"}) {
                expect_same_in_pieces_everywhere(line + sizes + " state=inout threads=1", {64, 128});
            }
        }
    }
}

TEST(Pieces, EmptyAndUnevenOnes) {
    for (const char* direction : directions) {
        for (const char* op : {"simple_gla:", "gla:", "gated_delta_rule:", "kda:"}) {
            for (const char* type : {" f32", " bf16"}) {
                const std::string line = std::string(op) + direction + " t513 h8 k64 state=inout" + type;
                expect_same_in_pieces(line_of(line), {0, 64, 64, 320, 448, 512, 513});
            }
        }
    }
}

// Two tokens at a time against an undecayed state; tokens one by one with value gates; in double with few key channels.
TEST(Pieces, TheRecurrentForm) {
    for (const char* direction : directions) {
        for (const char* words : {"simple_gla: t577 h2 k16 v16 gates=strong", "gla: t577 h2 k16 v32", "gla: t130 h2 k32 v32 gv",
                                  "gated_delta_rule: t577 h2 k64 v32", "kda: t577 h2 k32 v64 gates=reset", "comba: t300 h2 k24",
                                  "delta_rule: t193 h2 k32 v40 betav", "kda: t193 h2 k8 v40", "kda: t129 h1 k32 betav gv f64"}) {
            std::string line = words;
            line.insert(line.find(':') + 1, direction);
            expect_same_in_pieces_everywhere(line + " state=inout", {64, 128});
        }
    }
    // The last token alone; nothing but the first one before a cut is no cut at all.
    expect_same_in_pieces_everywhere("kda:fwd t129 h2 k32 state=inout", {128});
    expect_same_in_pieces_everywhere("kda:fwd t129 h2 k32", {64, 128, 129});
}

// What the kernels know beside the state passes a cut: the estimates of bf16, the count that sends a forward into
// double.
TEST(Pieces, WhatIsKnownAboutRoundings) {
    for (const char* op : {"delta_rule", "gated_delta_rule", "kda", "comba"}) {
        for (const char* words : {" betas=2,2", " betas=1.5,2 l2norm", " betas=1.9,1.9 beta=two_sigmoid"}) {
            const std::string gates = std::string(op) == "delta_rule" ? "" : " gates=lasting forget=0.0005";
            const std::string line = std::string(op) + ":fwd t1500 h4 k64 v32 state=inout" + words + gates;
            expect_same_in_pieces_everywhere(line, {192, 576, 1024, 1280});
            expect_same_in_pieces_everywhere(line + " bf16", {192, 576, 1024, 1280});
            expect_same_in_pieces(line_of(line + " reverse"), {28, 220, 604, 1500 - 64});
        }
        expect_same_in_pieces_everywhere(std::string(op) + ":bwd t1100 h8 k64 v32 state=inout bf16 betas=1.8,2", {192, 576, 1024});
    }
    expect_same_in_pieces_everywhere("delta_rule:fwd t1500 h2 k32 v40 betav betas=2,2 state=inout", {192, 640, 1280});
}

TEST(Pieces, PackedReversedAndGroupedSequences) {
    for (const char* direction : directions) {
        for (const char* op : {"retention:", "simple_gla:", "gla:", "gated_delta_rule:", "comba:", "kda:"}) {
            for (const char* type : {" f32", " bf16"}) {
                const std::string line = std::string(op) + direction + " h4 hv8 k64 v32 state=inout" + type;
                expect_same_in_pieces(line_of(line + " varlen=0,64,64,100,420,449,1000"), {64, 164, 356, 420, 705});
                expect_same_in_pieces(line_of(line + " t300 b2 reverse"), {44, 172, 236});
                expect_same_in_pieces(line_of(line + " t300 b3 gates=minus_inf"), {64, 256});
            }
        }
        expect_same_in_pieces(line_of(std::string("kda:") + direction + " t300 h2 k32 rawgate beta=sigmoid l2norm"), {128});
        expect_same_in_pieces(line_of(std::string("kda:") + direction + " t300 h1 k128 v128 threads=3"), {128});
    }
}

bool has_chunks(const Call& call) {
    for (const Candidate& candidate : candidates_of(call)) {
        if (candidate.refusal.empty() && candidate.yields.empty()) return candidate.name.find("chunk") != std::string::npos;
    }
    return false;
}

// Where forward and backward are said to compute states alike they are the same bits: chunks in every type.
TEST(Pieces, StatesThatAgree) {
    int agreeing = 0, in_double = 0;
    for (const std::string& words : operators_and_gates("bwd")) {
        for (const char* sizes : {" t512 h8 k64 v64", " t500 h8 k128 v128 bf16", " t512 h2 k256 v128", " t700 h2 k128 v64 betas=1.9,2 gates=zero",
                                  " t512 h8 k16", " t40 h8 k64 f16", " t100 h2 k64 f64"}) {
            const bool has_betas = std::string(sizes).find("betas") != std::string::npos;
            if (has_betas && !harness::has_delta_rule(line_of(words).op)) continue;
            if (!has_betas && is_left_out()) continue;  // few of those that go on in double are there
            const std::string text = words + sizes + " state=inout";
            const bool no_gates = line_of(words).op == Operator::delta_rule;
            CallTensors made = harness::make_tensors(line_of(has_betas && no_gates ? words + " t700 h2 k128 v64 betas=1.9,2 state=inout" : text));
            Call& call = made.call;
            bool agree = false;
            Status status = states_agree(call, &agree);
            ASSERT_TRUE(status.ok()) << text << ": " << status.message();
            agreeing += agree ? 1 : 0;
            const std::vector<std::int64_t> shape(call.in.initial_state.shape, call.in.initial_state.shape + 4);
            const TensorView& v = call.in.v;
            Tensor o(v.dtype, {v.shape[0], v.shape[1], v.shape[2], v.shape[3]});
            Tensor of_forward(DType::f64, shape), of_backward(DType::f64, shape);
            Tensor known(DType::f32, {shape[0], shape[1], roundings_size(shape[2])});
            Call forwards = call;
            forwards.direction = Direction::forward;
            forwards.out.o = o.view();
            EXPECT_EQ(agree, has_chunks(forwards) && has_chunks(call)) << text;
            Piece piece;
            piece.final_roundings = known.view();
            call.options.piece = &piece;
            status = forward(call.op, call.in, {o.view(), of_forward.view()}, call.options);
            ASSERT_TRUE(status.ok()) << text << ": " << status.message();
            const std::vector<double> numbers = known.values();
            bool left_float = false;
            for (std::size_t i = 0; i < numbers.size(); i += static_cast<std::size_t>(roundings_size(shape[2]))) {
                left_float |= numbers[i + static_cast<std::size_t>(roundings_size(shape[2])) - 1] > 512;
            }
            in_double += left_float ? 1 : 0;
            status = backward_states(call.op, call.in, call.d_out, call.grads, {{}, of_backward.view()}, call.options);
            ASSERT_TRUE(status.ok()) << text << ": " << status.message();
            if (agree && !left_float) {
                EXPECT_EQ(of_forward.values(), of_backward.values()) << text;
            }
            EXPECT_LT(relative_error(of_backward.values(), of_forward.values()), 2e-3) << text;
        }
    }
    EXPECT_GT(agreeing, 0);
    EXPECT_GT(in_double, 0);
}

TEST(Pieces, WhatMakesNoPieceIsRefused) {
    CallTensors made = harness::make_tensors(line_of("kda:fwd t40 h2 k32 state=inout"));
    Tensor numbers(DType::f32, {1, 2, roundings_size(32)}), narrow(DType::f32, {1, 2, 32}), halves(DType::bf16, {1, 2, roundings_size(32)});
    const auto message_of = [&](const Piece& piece) {
        made.call.options.piece = &piece;
        const Status status = run(made.call);
        EXPECT_EQ(status.ok(), status.message().empty());
        return status.message();
    };
    Piece piece;
    EXPECT_EQ(message_of(piece), "");
    piece.final_roundings = numbers.view();
    EXPECT_EQ(message_of(piece), "");
    piece.final_roundings = narrow.view();
    EXPECT_EQ(message_of(piece), "final_roundings: expected numbers 48 as in roundings_size(K), got 32");
    piece.final_roundings = halves.view();
    EXPECT_EQ(message_of(piece), "final_roundings: expected dtype f32, got bf16");
    piece.final_roundings = {};
    piece.d_final_roundings = numbers.view();
    EXPECT_EQ(message_of(piece), "d_final_roundings: expected none, forward does not take it, got shape [1, 2, 48]");
    piece.d_final_roundings = {};
    piece.longest = 39;
    EXPECT_EQ(message_of(piece), "piece.longest: expected at least 40 as in the call, got 39");
    piece.longest = 0, piece.heads = 1;
    EXPECT_EQ(message_of(piece), "piece.heads: expected at least 2 as in the call, got 1");
    made.call.out.final_state = {};
    piece.heads = 0, piece.final_roundings = numbers.view();
    EXPECT_EQ(message_of(piece), "final_roundings: expected none without final_state, got shape [1, 2, 48]");
    CallTensors step = harness::make_tensors(line_of("kda:step t1 h2 k32"));
    const Piece whole;
    step.call.options.piece = &whole;
    EXPECT_EQ(run(step.call).message(), "piece: expected none, step does not take it");
    CallTensors backward = harness::make_tensors(line_of("kda:bwd t40 h2 k32"));
    const Call& c = backward.call;
    EXPECT_EQ(backward_states(c.op, c.in, c.d_out, c.grads, {}, c.options).message(), "final_state: backward_states requires it");
}

}  // namespace
}  // namespace headrace::test
