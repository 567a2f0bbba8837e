// Gates that are the same at every token and hardly forget: roundings of their decays must not all point one way.
#include "behaviours.hpp"

namespace headrace::test {
namespace {

void fill_gates(CallTensors& made, double gate) {
    for (const char* name : {"g", "g_gamma", "gv"}) {
        const auto found = made.tensors.find(name);
        if (found != made.tensors.end()) found->second.fill(gate);
    }
}

// -1e-8 and -2.05e-7 take less from a number, at one token or at one chunk, than half a unit in its last place.
void expect_right_with_gate(const std::string& text, double gate, const std::string& algorithm) {
    const ProblemLine line = line_of(text + " threads=1");
    CallTensors made = harness::make_tensors(line);
    fill_gates(made, gate);
    expect_right_by_each(made, accepting(line, algorithm), text + " gate " + std::to_string(gate));
}

constexpr double gates[] = {-1e-8, -2.05e-7, -3.3e-6, -1e-4};

TEST(ConstantGates, ChunksOfLongSequences) {
    for (const char* op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const double gate : gates) {
            expect_right_with_gate(std::string(op) + ":fwd t16384 h1 k16 v16 state=inout", gate, "chunk");
            expect_right_with_gate(std::string(op) + ":fwd t4096 h1 k16 v16 state=inout chunk=128", gate, "chunk");
            for (const char* form : {"chunk.one_pass", "chunk.two_pass"}) {
                expect_right_with_gate(std::string(op) + ":bwd t16384 h1 k16 v16 state=inout", gate, form);
            }
        }
    }
    for (const double gate : gates) expect_right_with_gate("simple_gla:bwd gate=head t16384 h1 k16 v16 state=inout", gate, "chunk.two_pass");
}

TEST(ConstantGates, Recurrences) {
    for (const char* op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const double gate : gates) {
            expect_right_with_gate(std::string(op) + ":fwd t16384 h1 k16 v16 state=inout", gate, "recurrent");
            expect_right_with_gate(std::string(op) + ":bwd t4096 h1 k16 v16 state=inout", gate, "recurrent");
        }
    }
}

// Unforced: small states of so many tokens are left to the form that rounds them least.
TEST(ConstantGates, LongSequencesOfSmallStates) {
    for (const char* op : {"retention", "gla", "kda"}) {
        const std::string text = std::string(op) + ":fwd t65536 h1 k16 v16 state=inout threads=1";
        CallTensors made = harness::make_tensors(line_of(text));
        fill_gates(made, -1e-8);
        expect_right_call(made, text);
    }
}

TEST(ConstantGates, OfValues) {
    for (const double gate : gates) {
        for (const char* direction : {":fwd", ":bwd"}) {
            expect_right_with_gate(std::string("gla") + direction + " t4096 h1 k16 v16 gv state=inout", gate, "recurrent");
        }
    }
}

// Decoding carries a state through as many calls as there are tokens.
TEST(ConstantGates, OneTokenAfterTheOther) {
    constexpr std::int64_t tokens = 4095;  // odd: the last one writes final_state
    for (const char* op : {"retention", "gla", "kda"}) {
        CallTensors made = harness::make_tensors(line_of(std::string(op) + ":fwd t" + std::to_string(tokens) + " h1 k16 v16 state=inout"));
        fill_gates(made, -2.05e-7);
        const harness::Expected expected = harness::expect(made.call);
        const TensorView states[] = {made.tensors.at("initial_state").view(), made.tensors.at("final_state").view()};
        for (std::int64_t t = 0; t < tokens; ++t) {
            Call token = tokens_of(made.call, t, t + 1);
            token.in.initial_state = states[t % 2];
            token.out.final_state = states[(t + 1) % 2];
            const Status status = run(token);
            ASSERT_TRUE(status.ok()) << status.message();
        }
        expect_within_bars(made.call, expected.outputs, op, expected.terms);
    }
}

}  // namespace
}  // namespace headrace::test
