// Behaviours of the form on tensor cores: gates of any strength, gradients; segments are in segments_test.cpp, what all
// forms have in common in numerics_test.cpp.
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

// What tensor cores serve: both types of 16 bits, under channel gates bf16.
const char* const tensor_operators[] = {"simple_gla:fwd bf16",      "simple_gla:fwd f16", "gated_delta_rule:fwd bf16",
                                        "gated_delta_rule:fwd f16", "comba:fwd bf16",     "comba:fwd f16",
                                        "gla:fwd bf16",             "kda:fwd bf16"};

TEST(CudaTensor, N1_N2_Gates) {
    for (const std::string op : tensor_operators) {
        const std::string text = op + " t130 h1 k64 v64 state=inout force=cuda.tensor cuda";
        for (const char* gamma :
             {"-0.3", "-0.5", "-0.7071", "-0.7443", "-0.8", "-0.9286", "-1", "-1.4", "-1.5", "-3", "-20"})
            expect_right(text + " gate=head gamma=" + gamma);
        for (const char* gates : {"zero", "strong", "reset", "minus_inf"}) expect_right(text + " gates=" + gates);
    }
}

// A decay that rounds by the same amount in each of 128 chunks would be off by 2.8e-6 behind them (CarriedDecay).
// Nothing else happens to these states, of too many channels for segments.
TEST(CudaTensor, ConstantGatesOfStatesThatLast) {
    constexpr double gate = -1.3e-4, tokens = 8192;
    for (const std::string direction : {":fwd", ":bwd"}) {
        const std::string text =
            "gated_delta_rule" + direction + " t8192 h1 k256 v32 bf16 state=inout force=cuda.tensor";
        CallTensors made = harness::make_tensors(line_of(text + " cuda"));
        made.tensors.at("g").fill(gate);
        for (const char* name : {"beta", "v", "d_o"}) {
            if (const auto found = made.tensors.find(name); found != made.tensors.end()) found->second.fill(0);
        }
        run_there(made);
        const bool back = direction == ":bwd";
        const harness::Tensor &from = made.tensors.at(back ? "d_final_state" : "initial_state"),
                              &to = made.tensors.at(back ? "d_initial_state" : "final_state");
        const double decay = std::exp(tokens * static_cast<double>(static_cast<float>(gate)));
        double off = 0, size = 0;
        for (std::int64_t i = 0; i < from.numel(); ++i) {
            const double expected = decay * from.get(i);
            off += std::pow(to.get(i) - expected, 2), size += expected * expected;
        }
        EXPECT_LT(std::sqrt(off / size), 8e-7) << text;
    }
}

// Channel gates: gates of both kinds, chunks of the delta rule that read and write with 16 bits, prefixes, also where
// only later tokens of a block of 16 decay too far for their pairs to meet at its start.
TEST(CudaTensor, N6_ChannelGates) {
    for (const std::string text :
         {"gla:fwd t150 h1 hv2 k70 v40 gate=channel+head l2norm reverse",
          "kda:fwd t200 h1 k96 v80 rawgate gate=channel+head l2norm",
          "kda:fwd t300 h1 k64 v64 l2norm gates=zero betas=1.9,2", "kda:fwd t500 h1 k128 v40 l2norm gates=lasting",
          "kda:fwd t300 h1 k64 v64 l2norm gates=strong", "kda:fwd t300 h1 k128 v40 l2norm gates=reset betas=1.9,2",
          "gla:fwd t300 h1 k64 v64 gates=strong", "gla:fwd t300 h1 k128 v40 gates=minus_inf",
          "kda:fwd varlen=0,0,37,200 h2 k80 v33 l2norm strided gates=reset"}) {
        const ProblemLine line = line_of(text + " bf16 state=inout force=cuda.tensor cuda");
        const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
        const harness::Expected expected = harness::expect(whole.call);
        run_there(whole);
        expect_within_bars(whole.call, expected.outputs, format(line));
        if (line.T <= 200) continue;
        for (const std::int64_t length : {40, 128, 150, 260}) {
            run_there(prefix, tokens_of(prefix.call, 0, length));
            EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                        harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
                << format(line) << ": length " << length;
        }
    }
}

// The delta rule prepares a chunk once for up to four value heads of a key head, and joins segments of any widths.
TEST(CudaTensor, SharedKeysAndJoinedSegments) {
    for (const char* text :
         {"gated_delta_rule:fwd t130 h1 hv5 k64 v100 bf16 l2norm state=inout",
          "comba:fwd t70 h2 hv6 k100 v48 bf16 reverse", "comba:fwd t70 h2 hv6 k100 v48 f16 reverse strided",
          "gated_delta_rule:fwd t2100 h1 k70 v49 bf16 state=inout betas=1.9,2 l2norm",
          "gated_delta_rule:fwd t2100 h1 k70 v49 f16 state=inout betas=1.9,2 l2norm",
          "comba:fwd t1100 h1 k127 v33 bf16 state=inout",
          "comba:fwd varlen=0,0,37,200 h2 k128 v72 f16 state=inout l2norm"})
        expect_right(std::string(text) + " force=cuda.tensor cuda");
}

// States, gradients of states and what is written into them that are no numbers of f16, or hardly any.
TEST(CudaTensor, StatesBeyondTheRangeOfF16) {
    struct Case {
        const char* text;
        std::map<std::string, double> factors;  // of what the line makes
    };
    for (const Case& each :
         {Case{"simple_gla:fwd t200 h1 k64 v64", {{"q", 0x1p-12}, {"k", 0x1p13}, {"v", 0x1p12}}},
          Case{"simple_gla:fwd t200 h1 k128 v40 gates=zero", {{"q", 0x1p13}, {"k", 0x1p-10}, {"v", 0x1p-12}}},
          Case{"linear_attention:bwd t200 h1 k64 v64", {{"k", 0x1p11}, {"v", 0x1p11}, {"d_o", 0x1p-9}}},
          Case{"gated_delta_rule:fwd t200 h1 k64 v64 l2norm gates=lasting scale=0.001 state=inout",
               {{"initial_state", 0x1p18}}},
          Case{"gated_delta_rule:fwd t200 h1 k128 v64 l2norm scale=4096", {{"v", 0x1p-16}}},
          Case{"comba:fwd t200 h1 k64 v32 l2norm", {{"q", 0x1p10}, {"k", 0x1p10}, {"v", 0x1p-6}}}}) {
        const std::string text = std::string(each.text) + " f16 force=cuda.tensor cuda";
        CallTensors made = harness::make_tensors(line_of(text));
        for (const auto& [name, factor] : each.factors) {
            harness::Tensor& tensor = made.tensors.at(name);
            for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, factor * tensor.get(i));
        }
        const harness::Expected expected = harness::expect(made.call);
        run_there(made);
        expect_within_bars(made.call, expected.outputs, text, expected.terms);
    }
}

// Of each value of a state one channel is far larger than the others, each of them for some value: no other decides by
// which power of two the row is scaled.
TEST(CudaTensor, StatesWithOneLargeChannel) {
    for (const std::string text :
         {"simple_gla:fwd t130 h1 k64 v64", "simple_gla:fwd t130 h1 k128 v128", "gated_delta_rule:fwd t130 h1 k64 v64",
          "gated_delta_rule:fwd t130 h1 k128 v128", "comba:fwd t130 h1 k128 v128"}) {
        const std::string line = text + " l2norm gates=lasting state=inout f16 force=cuda.tensor cuda";
        CallTensors made = harness::make_tensors(line_of(line));
        harness::Tensor& state = made.tensors.at("initial_state");  // [1,1,K,V]
        const std::int64_t K = made.call.in.initial_state.shape[2], V = made.call.in.initial_state.shape[3];
        for (std::int64_t value = 0; value < V; ++value) state.set((value * 37 % K) * V + value, 2000);
        const harness::Expected expected = harness::expect(made.call);
        run_there(made);
        expect_within_bars(made.call, expected.outputs, line, expected.terms);
    }
}

// Keys that repeat: what is written and read of them are small differences of what a chunk's products are made of. With
// betas of 2 each token reflects the state, which keeps all that was ever rounded.
TEST(CudaTensor, KeysOfFewDirections) {
    for (const char* op : {"gated_delta_rule:fwd bf16 k64 v40", "gated_delta_rule:fwd f16 k128 v32 reverse",
                           "kda:fwd bf16 k64 v40 rawgate", "kda:fwd bf16 k128 v32 gate=channel+head strided"})
        for (const char* directions : {"1", "2", "5", "20"})
            for (const char* betas : {"2,2", "1.9,2", "0,1"})
                expect_right(std::string(op) + " t300 h1 l2norm gates=lasting state=inout directions=" + directions +
                             " betas=" + betas + " force=cuda.tensor cuda");
    for (const char* line :
         {"gated_delta_rule:fwd t3000 h1 k128 v32 bf16 l2norm gates=zero betas=2,2 state=inout directions=2",
          "delta_rule:fwd t3000 h1 k64 v32 f16 l2norm betas=2,2 state=inout directions=2",
          "kda:fwd t3000 h1 k128 v32 bf16 l2norm gates=zero betas=2,2 state=inout directions=2",
          "kda:fwd t2000 h1 k64 v32 bf16 gates=zero betas=2,2 directions=5",
          "comba:fwd t300 h1 hv3 k70 v48 bf16 gates=lasting betas=0.9,1 state=inout directions=1",
          "comba:fwd t300 h1 hv3 k128 v40 f16 l2norm gates=lasting betas=0.9,1 directions=3 reverse",
          "gated_delta_rule:fwd varlen=0,40,40,200,1300 h1 hv2 k100 v48 bf16 rawgate betas=1.9,2 state=in directions=2",
          "kda:fwd varlen=0,40,40,200,500 h1 hv2 k100 v48 bf16 gates=reset betas=1.9,2 state=inout directions=1",
          "kda:fwd t150 h1 k128 v64 bf16 betas=1,1 state=inout directions=1",
          "kda:fwd t150 h1 k75 v33 bf16 gate=channel+head rawgate betas=1.9,2 state=inout directions=1 reverse",
          "kda:fwd t200 h1 k75 v33 bf16 gates=strong betas=1.9,2 directions=1 reverse strided",
          "kda:fwd varlen=0,1070,1071,2240 h1 hv2 k70 v40 bf16 betas=1.9,2 state=out directions=8 reverse seed=589797",
          "kda:fwd t700 h1 v64 bf16 l2norm gates=lasting forget=0.01 share=0.25 betas=1.95,2 directions=3 seed=248703",
          "kda:fwd t1500 h1 k128 v64 bf16 gates=lasting share=0.2 betas=0.5,1 directions=14 state=out seed=994773",
          "kda:fwd t700 h1 v64 bf16 l2norm gates=lasting share=0.3 betas=0.8,1 directions=10 seed=18052",
          "gated_delta_rule:fwd t300 h1 bf16 l2norm gates=lasting forget=0.02 betas=2,2 directions=24 seed=724939"})
        expect_right(std::string(line) + " force=cuda.tensor cuda");
}
TEST(CudaTensor, GradientsOfKeysOfFewDirections) {
    for (const char* op : {"gated_delta_rule:bwd k64 v40", "kda:bwd k64 v40", "kda:bwd k128 v48 reverse strided"})
        for (const char* directions : {"1", "2", "5", "20"})
            for (const char* betas : {"2,2", "1.9,2", "0,1"})
                expect_right(std::string(op) + " t200 h2 bf16 l2norm gates=lasting state=inout directions=" +
                             directions + " betas=" + betas + " force=cuda.tensor cuda");
    for (const char* line : {"gated_delta_rule:bwd t300 h2 k64 v32 bf16 l2norm gates=zero betas=2,2 directions=1",
                             "gated_delta_rule:bwd t300 h2 k64 v32 bf16 l2norm gates=zero betas=2,2 directions=2",
                             "gated_delta_rule:bwd t1500 h2 k64 v32 bf16 gates=zero betas=2,2 directions=2",
                             "delta_rule:bwd t3000 h1 k128 v32 bf16 betas=2,2 directions=2",
                             "kda:bwd t1000 h2 k64 v32 bf16 gates=zero betas=2,2 directions=1",
                             "kda:bwd t600 h2 k64 v32 bf16 l2norm gates=zero betas=2,2 directions=1",
                             "kda:bwd t300 h2 k128 v64 bf16 l2norm betas=0.9,1 directions=1",
                             "kda:bwd t200 h2 k64 v32 bf16 l2norm gates=lasting betas=1,1 directions=1",
                             "kda:bwd t150 h1 hv2 k75 v100 bf16 rawgate gate=channel+head betas=1.5,1.9 directions=2",
                             "gated_delta_rule:bwd t200 h1 hv2 k128 v64 bf16 betas=1.5,2 directions=3 reverse",
                             "comba:bwd t200 h2 k64 v64 bf16 l2norm betas=0.9,1 directions=1 state=in"})
        expect_right(std::string(line) + " force=cuda.tensor cuda");
}
// Which products are exact, and what is computed token by token, follows from no later token.
TEST(CudaTensor, N6_KeysOfFewDirections) {
    for (const char* text : {"gated_delta_rule:fwd t300 h1 k64 v40 bf16 l2norm gates=lasting betas=1.9,2 directions=3",
                             "gated_delta_rule:fwd t300 h1 k128 v40 f16 gates=zero betas=0.5,2 directions=20",
                             "gated_delta_rule:fwd t300 h1 k64 v40 f16 l2norm gates=zero betas=2,2",
                             "comba:fwd t300 h1 k64 v40 bf16 l2norm betas=0.5,1 directions=1",
                             "kda:fwd t300 h1 k64 v40 bf16 l2norm gates=lasting betas=1.9,2 directions=3",
                             "kda:fwd t300 h1 k128 v40 bf16 gates=zero betas=0.5,2 directions=20"}) {
        const ProblemLine line = line_of(std::string(text) + " state=in force=cuda.tensor cuda");
        const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
        run_there(whole);
        for (const std::int64_t length : {33, 40, 60, 64, 70, 100, 150, 210, 290}) {
            run_there(prefix, tokens_of(prefix.call, 0, length));
            EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                        harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
                << format(line) << ": length " << length;
        }
    }
}

// The additive rule on tensor cores, which leave out the gradients of gates: all others, each alone with the same bits.
TEST(CudaTensor, B3_GradientsWithoutThoseOfGates) {
    for (const std::string text :
         {"linear_attention:bwd t200 h2 k64 v64 bf16 state=inout",
          "retention:bwd b2 t130 h1 k128 v40 bf16 gamma=-0.3 scale=2",
          "retention:bwd varlen=0,100,100,263 h2 k100 v70 bf16 state=inout reverse strided vfirst",
          "retention:bwd varlen=0,100,100,263 h2 k100 v70 f16 state=inout reverse strided vfirst",
          "simple_gla:bwd t300 h1 k64 v128 bf16 gate=step+head state=inout",
          "simple_gla:bwd t150 h2 k32 v64 bf16 gates=reset state=in",
          "simple_gla:bwd t150 h2 k32 v64 f16 gates=reset state=in",
          "simple_gla:bwd t190 h1 bf16 gates=minus_inf state=out",
          "simple_gla:bwd t190 h1 k80 bf16 gates=lasting rawgate bound=-5 reverse",
          "simple_gla:bwd t190 h1 k80 f16 gates=lasting rawgate bound=-5 reverse",
          "simple_gla:bwd t130 h1 hv3 k70 v64 bf16 gates=strong state=inout",
          "linear_attention:bwd t150 h2 k80 v40 bf16 l2norm",
          "retention:bwd varlen=0,33,33,200 h2 hv4 k32 v100 f16 l2norm state=inout reverse strided",
          "retention:bwd varlen=0,0,700,1900 h1 k32 v32 bf16 gamma=-0.001 state=inout",
          "simple_gla:bwd t600 h1 hv2 k70 v40 bf16 gates=lasting state=inout reverse",
          "linear_attention:bwd t600 h1 k40 v70 bf16 l2norm state=inout"}) {
        const ProblemLine line = line_of(text + " force=cuda.tensor cuda");
        CallTensors made = harness::make_tensors(line);
        Gradients& grads = made.call.grads;
        grads.d_g = grads.d_g_gamma = grads.d_A_log = grads.d_dt_bias = {};
        const harness::Expected expected = harness::expect(made.call);
        const std::map<std::string, Bytes> all = run_there(made);
        expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
        for (const auto& [name, bits] : all) {
            const CallTensors again = harness::make_tensors(line);
            Call call = again.call;
            call.grads.d_g = call.grads.d_g_gamma = call.grads.d_A_log = call.grads.d_dt_bias = {};
            for (TensorView* view : {&call.grads.d_q, &call.grads.d_k, &call.grads.d_v, &call.grads.d_initial_state})
                if (view->given() && view->data != again.tensors.at(name).view().data) *view = {};
            if (harness::output_views(call).empty()) continue;  // of a gate
            for (const auto& [other, found] : run_there(again, call))
                EXPECT_EQ(found == bits, other == name) << format(line) << ": only " << name << ": " << other;
        }
    }
}

// The same with those of gates: value heads that share keys, in groups of odd counts and of up to all of them; rows of
// unit length, of which one launch has the norms and another the gradients; both, along segments.
TEST(CudaTensor, GradientsOfSharedKeysAndUnitRows) {
    for (const char* text :
         {"simple_gla:bwd t200 h1 hv8 k128 v64 bf16 state=inout",
          "simple_gla:bwd t70 h16 hv32 k64 v33 bf16 gate=step+head rawgate",
          "simple_gla:bwd t150 h4 hv12 k64 v33 f16 gate=step+head",
          "simple_gla:bwd varlen=0,0,64,150 h2 hv10 k100 v100 bf16 gates=reset state=in reverse",
          "simple_gla:bwd t130 h8 k128 v128 bf16 l2norm state=inout",
          "retention:bwd b2 t100 h4 k70 v50 bf16 l2norm gamma=-0.2",
          "simple_gla:bwd t130 h8 k70 v128 f16 l2norm state=inout",
          "simple_gla:bwd t140 h2 hv8 k64 v64 bf16 l2norm gates=strong strided vfirst",
          "simple_gla:bwd varlen=0,40,170 h3 hv9 k48 v128 bf16 l2norm gates=minus_inf state=in reverse",
          "simple_gla:bwd t700 h1 hv8 k32 v32 bf16 l2norm gates=lasting gate=step+head"})
        expect_right(std::string(text) + " force=cuda.tensor cuda");
}

// States that are saved for the gate's gradient lie in d_v as far as it has room, where its elements lie together and
// its walk comes last: the bits are the same without.
TEST(CudaTensor, StatesWaitInTheGradientOfValues) {
    for (const auto& [text, lent] : std::map<std::string, bool>{{"t100 h8 k32 v32", true},
                                                                {"varlen=0,70,200 h2 hv8 k64 v100 reverse", true},
                                                                {"t100 h8 k32 v32 strided", true},  // permuted
                                                                {"t100 h8 k32 v32 strided seed=2", false},  // padded
                                                                {"t100 h8 k32 v32 l2norm", false}}) {
        const ProblemLine line = line_of("simple_gla:bwd " + text + " bf16 force=cuda.tensor cuda");
        const CallTensors made = harness::make_tensors(line), without = harness::make_tensors(line);
        Call call = without.call;
        call.grads.d_v = {};
        const auto bytes_of_states = [](const Call& of) {
            for (const PlanEntry& entry : plan_of(harness::seen_from_device(of)))
                if (entry.name == "saved states") return static_cast<std::int64_t>(entry.bytes);
            return std::int64_t{-1};
        };
        const std::int64_t d_v = 2 * made.call.grads.d_v.numel(),
                           in_d_v = bytes_of_states(call) - bytes_of_states(made.call);
        EXPECT_LE(in_d_v, lent ? d_v : 0) << format(line);
        EXPECT_GT(in_d_v, lent ? d_v / 2 : -1) << format(line);
        const harness::Expected expected = harness::expect(made.call);
        const std::map<std::string, Bytes> all = run_there(made);
        expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
        for (const auto& [name, bits] : run_there(without, call)) {
            EXPECT_TRUE(name == "d_v" || bits == all.at(name)) << format(line) << ": " << name;
        }
    }
}

// Channel gates: ends of chunks and sequences, values in more than one block, shared keys, gates of any strength and
// formula, states that hardly forget and come back.
TEST(CudaTensor, GradientsUnderChannelGates) {
    for (const char* text :
         {"kda:bwd t200 h2 k128 v72 state=inout",
          "kda:bwd varlen=0,33,33,130 h1 hv2 k96 v40 rawgate l2norm state=inout",
          "kda:bwd t130 h2 k64 v32 gate=channel+head gates=reset reverse strided",
          "kda:bwd t70 h4 k70 v32 gates=minus_inf", "kda:bwd t300 h2 k64 v32 gates=lasting betas=1.9,2 l2norm state=in",
          "kda:bwd t66 h34 hv68 k64 v130 bound=-5", "gla:bwd t150 h2 k32 v72 gate=channel+head state=inout",
          "gla:bwd varlen=0,0,64,150 h1 hv4 k128 v40 rawgate", "gla:bwd t130 h2 k70 v32 gates=strong l2norm reverse",
          "gla:bwd t70 h34 hv68 k64 v130 gates=zero state=in"})
        expect_right(std::string(text) + " bf16 force=cuda.tensor cuda");
}

// Of a final state's gradient, strong gates leave comba's d_p the last token's product of two rows of values, which no
// sum averages: with 8 bits it came to 1.2 and 1.3 of its bar.
TEST(CudaTensor, GradientsThatRestOnOnePair) {
    for (const char* text : {"comba:bwd t150 h8 k128 v128 gates=strong state=out l2norm seed=14",
                             "comba:bwd t1447 h1 hv2 k100 v32 gates=strong betas=1.5,2 state=inout l2norm seed=898383",
                             "comba:bwd varlen=0,70,150 h8 k64 v32 gates=strong state=out reverse"})
        expect_right(std::string(text) + " bf16 force=cuda.tensor cuda");
}

// Gradients of gates of f16 tensors.
TEST(CudaTensor, GateGradientsOfF16) {
    for (const char* text :
         {"simple_gla:bwd t200 h8 k64 v40 state=inout",
          "simple_gla:bwd varlen=0,33,33,130 h8 k128 v128 rawgate bound=-5 strided",
          "simple_gla:bwd t70 h8 k40 v72 gates=strong gate=step+head reverse",
          "retention:bwd t130 h8 k64 v64 state=in"})
        expect_right(std::string(text) + " f16 force=cuda.tensor cuda");
}

// Gradients may have another type than their inputs; what stores 16 bits leaves them to others.
TEST(CudaTensor, GradientsOfAnotherTypeAreLeftToOthers) {
    for (TensorView Gradients::*gradient : {&Gradients::d_q, &Gradients::d_k, &Gradients::d_v}) {
        CallTensors made = harness::make_tensors(line_of("simple_gla:bwd t70 h8 k32 v32 bf16 cuda"));
        TensorView& view = made.call.grads.*gradient;
        harness::Tensor wide(DType::f32, {1, 70, 8, 32});
        view = wide.view();
        const harness::Expected expected = harness::expect(made.call);
        run_there(made);
        expect_within_bars(made.call, expected.outputs, "a gradient in f32", expected.terms);
        made.call.options.force = "cuda.tensor";
        std::string violation;
        EXPECT_FALSE(harness::run_on_device(made.call, true, &violation).ok());
    }
}

const char* const staged[] = {"gated_delta_rule:fwd t200 h2 k72 v50 bf16 state=inout",
                              "comba:bwd t100 h8 k64 v72 bf16 l2norm state=inout",
                              "simple_gla:fwd t150 h2 k64 v64 f16 states=f16 state=inout",
                              "simple_gla:bwd t100 h8 k40 v64 bf16 state=inout",
                              "kda:fwd t150 h2 k66 v64 bf16 rawgate state=inout",
                              "gla:bwd t100 h8 k64 v64 bf16 states=bf16 state=inout"};

// What lies otherwise than kernels take it is copied first.
TEST(CudaTensor, BitsDoNotDependOnHowTensorsLie) {
    for (const std::string text : staged) {
        const std::map<std::string, Bytes> expected = run_there(line_of(text + " force=cuda.tensor cuda"));
        EXPECT_TRUE(run_there(line_of(text + " strided force=cuda.tensor cuda")) == expected) << text;
        // Each tensor an element further.
        DeviceTensors tensors(text + " force=cuda.tensor");
        const std::size_t before = tensors.workspace_bytes();
        std::vector<std::pair<TensorView*, void*>> moved;
        std::vector<DeviceMemory> memory;
        each_device_view(tensors.call, [&](TensorView& view) {
            memory.emplace_back(extent_bytes(view) + 16);
            char* const to = static_cast<char*>(memory.back().data()) + size_of(view.dtype);
            transfer(to, view.data, extent_bytes(view));
            moved.emplace_back(&view, view.data);
            view.data = to;
        });
        const std::size_t needed = tensors.workspace_bytes();
        EXPECT_GT(needed, before) << text;
        const DeviceMemory workspace(needed);
        expect_error(run(tensors.call, {workspace.data(), before}), Code::out_of_memory, {"workspace"});
        const Status status = run(tensors.call, {workspace.data(), needed});
        EXPECT_TRUE(status.ok()) << text << ": " << status.message();
        tensors.synchronize();
        for (const auto& [view, back] : moved) transfer(back, view->data, extent_bytes(*view)), view->data = back;
        EXPECT_TRUE(tensors.written() == expected) << text;
    }
}

// Where results rest on long sums of products, and nothing that it lacks is asked for.
TEST(CudaTensor, ServesWhatItCan) {
    for (const char* text :
         {"linear_attention:fwd t64 k32 v32", "retention:fwd t64", "simple_gla:fwd t64 k128 v256", "delta_rule:fwd t64",
          "gated_delta_rule:fwd t64 h2 hv4", "comba:fwd varlen=0,9,64", "gla:fwd t64 k32", "kda:fwd t64 h2 hv4",
          "simple_gla:bwd t64 h8", "simple_gla:bwd t64 h1 hv8 k128", "simple_gla:bwd t64 h8 l2norm",
          "retention:bwd t64 h8 k32 v128", "gated_delta_rule:bwd t64 h8",
          "comba:bwd t64 h2 hv8 v200 l2norm", "delta_rule:bwd t64 h1 k100", "kda:bwd t64 h2 hv8 k100 v200",
          "gla:bwd t64 h2 hv8 k32 l2norm", "delta_rule:fwd t64 k129", "comba:fwd t64 k256 v512 l2norm",
          "gated_delta_rule:bwd t64 h8 k256 v512 l2norm", "comba:bwd t64 h8 k129 gate=step+head"})
        EXPECT_EQ(served_by(std::string(text) + " bf16 cuda"), "cuda.tensor") << text;
    for (const char* text :
         {"linear_attention:fwd t64 k32 v32", "simple_gla:fwd t64 k128 v256", "delta_rule:fwd t64",
          "comba:fwd varlen=0,9,64", "simple_gla:bwd t64 h2 hv8 l2norm", "retention:bwd t64 h8 k32 v128"})
        EXPECT_EQ(served_by(std::string(text) + " f16 cuda"), "cuda.tensor") << text;
    for (const char* text :
         {"gla:fwd t64 f16", "kda:fwd t64 f16", "gla:bwd t64 h8 f16", "kda:bwd t64 h8 f16", "simple_gla:fwd t64 f32",
          "gated_delta_rule:fwd t64 k63 f16", "simple_gla:fwd t31 bf16", "simple_gla:fwd t64 k31 bf16",
          "simple_gla:fwd t64 v31 bf16", "delta_rule:fwd t64 k63 bf16", "simple_gla:fwd t64 k129 l2norm bf16",
          "gla:fwd t64 k31 bf16", "kda:fwd t64 k63 bf16", "gated_delta_rule:bwd t36 h7 bf16", "gla:bwd t36 h7 bf16",
          "gated_delta_rule:bwd t64 h8 f16", "kda:bwd t64 h8 k63 bf16", "kda:bwd t64 h8 k129 bf16",
          "simple_gla:bwd t36 h7 bf16", "delta_rule:fwd t64 k129 f16", "kda:fwd t64 k129 bf16"})
        EXPECT_NE(served_by(std::string(text) + " cuda"), "cuda.tensor") << text;
}

}  // namespace
}  // namespace headrace::test
