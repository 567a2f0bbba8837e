// Problem lines: words, defaults, presets, messages, and that format and parse are inverse to each other.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <set>

#include "harness/problem_line.hpp"

namespace headrace::harness {
namespace {

ProblemLine parsed(const std::string& text) {
    ProblemLine line;
    const Status status = parse(text, &line);
    EXPECT_TRUE(status.ok()) << text << "\n" << status.message();
    return line;
}

std::string message_of(const std::string& text) {
    ProblemLine line;
    const Status status = parse(text, &line);
    EXPECT_EQ(status.code(), Code::invalid_argument) << text;
    EXPECT_EQ(line, ProblemLine{}) << "a failed parse must leave the line alone: " << text;
    return status.message();
}

TEST(ProblemLine, DefaultsAreThoseOfTheStructAndTheOperatorsGate) {
    ProblemLine expected;
    EXPECT_EQ(parsed("linear_attention:fwd"), expected);
    EXPECT_EQ(parsed("retention:fwd").gate, GateKind::head);
    EXPECT_EQ(parsed("simple_gla:fwd").gate, GateKind::step);
    EXPECT_EQ(parsed("gla:fwd").gate, GateKind::channel);
    EXPECT_EQ(parsed("delta_rule:fwd").gate, GateKind::none);
    EXPECT_EQ(parsed("gated_delta_rule:fwd").gate, GateKind::step);
    EXPECT_EQ(parsed("comba:fwd").gate, GateKind::step);
    EXPECT_EQ(parsed("kda:fwd").gate, GateKind::channel);
}

TEST(ProblemLine, EveryWordIsRead) {
    const ProblemLine line = parsed(
        "gated_delta_rule:bwd b2 t4096 h16 hv32 k128 v64 bf16 gate=step+head gamma=-0.7 gates=strong chunk=64 "
        "num_steps=4 state=inout l2norm vfirst reverse bound=-2.5 beta=two_sigmoid gv betav scale=1 saved=f32 strided "
        "force=avx2.chunk threads=2 seed=18446744073709551615");
    ProblemLine expected;
    expected.op = Operator::gated_delta_rule;
    expected.direction = Direction::backward;
    expected.B = 2, expected.T = 4096, expected.H = 16, expected.HV = 32, expected.K = 128, expected.V = 64;
    expected.dtype = DType::bf16;
    expected.gate = GateKind::step_head;
    expected.gamma = -0.7;
    expected.gates = GateValues::strong;
    expected.chunk = 64, expected.num_steps = 4;
    expected.state_in = expected.state_out = true;
    expected.l2norm = expected.vfirst = expected.reverse = expected.gate_raw = true;
    expected.lower_bound = -2.5;
    expected.beta_form = 2;
    expected.value_gate = expected.elementwise_beta = expected.strided = true;
    expected.scale = 1;
    expected.state_dtype = DType::f32;
    expected.force = "avx2.chunk";
    expected.threads = 2;
    expected.seed = ~std::uint64_t{0};
    EXPECT_EQ(line, expected);
    EXPECT_EQ(parsed(format(line)), line);
}

TEST(ProblemLine, SizesFollowFromEachOther) {
    const ProblemLine heads = parsed("gla:fwd h6 k48");
    EXPECT_EQ(heads.HV, 6);
    EXPECT_EQ(heads.V, 48);
    const ProblemLine ragged = parsed("gla:fwd varlen=0,0,100,130");
    EXPECT_EQ(ragged.T, 130);
    EXPECT_EQ(ragged.B, 1);
    EXPECT_EQ(ragged.sequences(), 3);
    EXPECT_EQ(parsed("gla:step b3 spec=4").T, 4);
    EXPECT_EQ(parsed("simple_gla:fwd gamma=-1").gate, GateKind::head);
    EXPECT_EQ(parsed("simple_gla:fwd gamma=-1 gate=step+head").gate, GateKind::step_head);
    EXPECT_EQ(parsed("kda:fwd bound=-5").gate_raw, true);
}

TEST(ProblemLine, CanonicalTextLeavesDefaultsOut) {
    EXPECT_EQ(format(ProblemLine{}), "linear_attention:fwd");
    EXPECT_EQ(format(parsed("simple_gla:bwd t4096 b1 h16 hv16 k128 v128 f32 gate=step seed=1 state=none")),
              "simple_gla:bwd t4096 h16 k128");
    EXPECT_EQ(format(parsed("kda:step spec=3 t3 pool=9")), "kda:step pool=9 spec=3");
    EXPECT_EQ(format(parsed("retention:fwd varlen=0,5 gamma=-0.10")), "retention:fwd gamma=-0.1 varlen=0,5");
}

TEST(ProblemLine, EveryGateOfEveryOperatorIsAcceptedOrRefused) {
    const std::pair<const char*, std::set<std::string>> table[] = {
        {"linear_attention", {"none"}},
        {"retention", {"head"}},
        {"simple_gla", {"none", "head", "step", "step+head"}},
        {"gla", {"none", "head", "channel", "channel+head"}},
        {"delta_rule", {"none"}},
        {"gated_delta_rule", {"none", "head", "step", "step+head"}},
        {"comba", {"none", "head", "step", "step+head"}},
        {"kda", {"none", "head", "channel", "channel+head"}}};
    for (const auto& [op, allowed] : table) {
        for (const char* gate : {"none", "head", "step", "channel", "step+head", "channel+head"}) {
            ProblemLine line;
            const Status status = parse(std::string(op) + ":fwd gate=" + gate, &line);
            EXPECT_EQ(status.ok(), allowed.count(gate) == 1) << op << " " << gate << " " << status.message();
        }
    }
}

TEST(ProblemLine, StatesThatHardlyForgetAreAskedForInNumbers) {
    const ProblemLine line = parsed("kda:fwd gates=lasting forget=5e-4 share=0.25 betas=1.9,2 beta=two_sigmoid");
    EXPECT_EQ(line.gates, GateValues::lasting);
    EXPECT_EQ(line.forget, 5e-4);
    EXPECT_EQ(line.share, 0.25);
    EXPECT_EQ(line.betas, (Range{1.9, 2}));
    EXPECT_EQ(format(line), "kda:fwd gates=lasting forget=5e-04 share=0.25 beta=two_sigmoid betas=1.9,2");
}

TEST(ProblemLine, KeysOfFewDirections) {
    EXPECT_EQ(parsed("gla:fwd").directions, 0);
    EXPECT_EQ(parsed("gla:fwd directions=3").directions, 3);
    EXPECT_EQ(format(parsed("kda:fwd directions=3 betas=1.9,2")), "kda:fwd betas=1.9,2 directions=3");
}

TEST(ProblemLine, SummariesAndPieces) {
    const ProblemLine summary = parsed("kda:summary t100 part=transition state=in");
    EXPECT_EQ(summary.direction, Direction::summarize);
    EXPECT_EQ(summary.part, Parts::transition);
    EXPECT_EQ(format(summary), "kda:summary t100 state=in part=transition");
    EXPECT_EQ(parsed("kda:summary_bwd state=out").direction, Direction::summarize_backward);
    const ProblemLine pieces = parsed("kda:bwd ranks=4 link=12.5");
    EXPECT_EQ(pieces.ranks, 4);
    EXPECT_EQ(pieces.link, 12.5);
    EXPECT_EQ(format(pieces), "kda:bwd ranks=4 link=12.5");
    EXPECT_TRUE(parsed("kda:bwd strided cuda").cuda);
    EXPECT_EQ(format(parsed("kda:bwd cuda")), "kda:bwd cuda");
    const ProblemLine of_a_kind = parsed("kda:bwd cuda=h200");
    EXPECT_TRUE(of_a_kind.cuda);
    EXPECT_EQ(of_a_kind.gpu, "h200");
    EXPECT_EQ(format(of_a_kind), "kda:bwd cuda=h200");
}

TEST(ProblemLine, MessagesNameTheWordAndWhatWasExpected) {
    const std::pair<const char*, const char*> cases[] = {
        {"gla:fwd chunk=20", "chunk=20: expected a power of two from 16 to 256"},
        {"gla:fwd chunk=512", "chunk=512: expected a power of two from 16 to 256"},
        {"gla:fwd chunk=64x", "chunk=64x: expected a power of two from 16 to 256"},
        {"gla:fwd b0", "b0: expected b1 to b16777216"},
        {"gla:fwd t16777217", "t16777217: expected t0 to t16777216"},
        {"gla:fwd t99999999999999999999", "t99999999999999999999: expected t0 to t16777216"},
        {"gla:fwd k-4", "k-4: expected k1 to k16777216"},
        {"gla:fwd h2 h4", "h4: expected each word once, after h2"},
        {"gla:fwd f32 bf16", "bf16: expected each word once, after f32"},
        {"gla:fwd h4 hv6", "hv6: expected value heads (6) a multiple of heads (4)"},
        {"gla:fwd gate=step", "gate=step: expected a gate of gla: channel, none, head, channel+head"},
        {"retention:fwd gate=none", "gate=none: expected a gate of retention: head"},
        {"delta_rule:fwd gamma=-1", "gamma=-1: expected a gate of delta_rule: none"},
        {"gla:fwd gamma=0.1", "gamma=0.1: expected a number <= 0"},
        {"gla:fwd gamma=nan", "gamma=nan: expected a number <= 0"},
        {"gla:fwd gamma=-inf", "gamma=-inf: expected a number <= 0"},
        {"gla:fwd gamma=-1 gate=channel", "gamma=-1: expected a head gate, as in gate=head"},
        {"gla:fwd gates=weak", "gates=weak: expected random, zero, strong, reset, minus_inf or lasting"},
        {"gla:fwd forget=0.1", "forget=0.1: expected gates=lasting"},
        {"gla:fwd gates=lasting forget=2", "forget=2: expected a number from 0 to 1"},
        {"gla:fwd share=0.5", "share=0.5: expected gates=lasting"},
        {"simple_gla:fwd gates=lasting share=0.5", "share=0.5: expected a channel gate"},
        {"gla:fwd gates=lasting share=-1", "share=-1: expected a number from 0 to 1"},
        {"gla:fwd betas=0,1", "betas=0,1: expected a delta-rule operator"},
        {"kda:fwd betas=1", "betas=1: expected two numbers from 0 to 2, as in 1.9,2"},
        {"kda:fwd betas=2,1", "betas=2,1: expected two numbers from 0 to 2, as in 1.9,2"},
        {"kda:fwd betas=1,2.1", "betas=1,2.1: expected two numbers from 0 to 2, as in 1.9,2"},
        {"kda:fwd betas=1,2 beta=sigmoid", "betas=1,2: expected at most 1 with beta=sigmoid"},
        {"kda:fwd directions=0", "directions=0: expected 1 to 65536"},
        {"gla:fwd gates=minus_inf rawgate", "gates=minus_inf: expected no rawgate: its gates are finite"},
        {"retention:fwd rawgate", "rawgate: expected a step or channel gate"},
        {"kda:fwd bound=-6", "bound=-6: expected a number from -5 to below 0"},
        {"kda:fwd bound=0", "bound=0: expected a number from -5 to below 0"},
        {"gla:fwd beta=sigmoid", "beta=sigmoid: expected a delta-rule operator"},
        {"gla:fwd betav", "betav: expected a delta-rule operator"},
        {"gla:fwd part=state", "part=state: expected direction summary"},
        {"gla:summary part=o", "part=o: expected both, transition or state"},
        {"gla:summary state=out", "state=out: expected none or in: no state leaves a summary"},
        {"gla:summary gv", "gv: expected no summary of it: it has one matrix for all value channels"},
        {"kda:fwd betav ranks=2", "betav: expected no summary of it: it has one matrix for all value channels"},
        {"kda:fwd ranks=9", "ranks=9: expected 1 to 8"},
        {"kda:step ranks=2", "ranks=2: expected direction fwd or bwd"},
        {"kda:fwd ranks=2 link=10 cuda", "link=10: expected no cuda: it is for a model of ranks on CPUs"},
        {"kda:fwd cuda=h201", "cuda=h201: expected h200, h100 or a100"},
        {"kda:fwd cuda=", "cuda=: expected h200, h100 or a100"},
        {"kda:fwd cuda cuda=h100", "cuda=h100: expected each word once, after cuda"},
        {"kda:fwd link=10", "link=10: expected ranks=P"},
        {"kda:fwd ranks=2 link=0", "link=0: expected a number above 0"},
        {"gla:fwd state=both", "state=both: expected none, in, out or inout"},
        {"gla:step state=in", "state=in: expected none: a step keeps its states in the pool"},
        {"gla:fwd pool=4", "pool=4: expected direction step"},
        {"gla:step b4 pool=3", "pool=3: expected at least 4 rows"},
        {"gla:step b2 spec=4 pool=7", "pool=7: expected at least 8 rows"},
        {"gla:step t3 spec=4", "spec=4: expected that many tokens in each sequence, got 3"},
        {"gla:fwd varlen=0,5 t6", "t6: expected t5, the end of varlen, or no t"},
        {"gla:fwd varlen=0,5 b2", "b2: expected b1 with varlen"},
        {"gla:bwd bf16 saved=f16", "saved=f16: expected f32 or bf16"},
        {"gla:fwd scale=1e999", "scale=1e999: expected a number"},
        {"gla:fwd threads=0", "threads=0: expected 1 to 1024"},
        {"gla:fwd seed=-1", "seed=-1: expected 0 to 18446744073709551615"},
        {"gla:fwd force=", "force=: expected the name of an implementation"},
        {"gla:fwd force=a/b", "force=a/b: expected the name of an implementation"},
        {"gla:fwd t16777216 h16777216", "sizes: expected tensors of at most 2^40 elements"},
        {"gla:up", "gla:up: expected fwd, bwd, step, summary or summary_bwd behind the colon"},
        {"gla", "gla: expected fwd, bwd, step, summary or summary_bwd behind it, as in gla:fwd"},
        {"gla-1.3b:up", "gla-1.3b:up: expected fwd, bwd, step, summary or summary_bwd behind the colon"},
        {"", "problem: expected OPERATOR:fwd|bwd|step|summary|summary_bwd or a preset, then words such as b2 t4096"}};
    for (const auto& [text, message] : cases) EXPECT_EQ(message_of(text), message);
}

TEST(ProblemLine, UnknownWordsAreNamed) {
    for (const char* word : {"h", "hv", "x3", "colour=red", "f8", "l2norm=1", "vfirst2", "=", "gate", "bf16x", "--"}) {
        const std::string message = message_of(std::string("gla:fwd ") + word);
        EXPECT_EQ(message.find(std::string(word) + ": expected one of b2, t4096"), 0u) << message;
    }
    EXPECT_EQ(message_of("glb:fwd").find("glb:fwd: expected an operator (linear_attention, "), 0u);
    for (const char* offsets : {"", "0", "1,2", "0,5,4", "0,,5", "0,5,", ",0,5", "0,16777217", "0,a", "0;5"}) {
        const std::string word = std::string("varlen=") + offsets;
        EXPECT_EQ(message_of("gla:fwd " + word).find(word + ": expected token offsets from 0"), 0u);
    }
    const std::string bytes = message_of(std::string("gla:fwd \x01\xff") + std::string(500, 'z'));
    EXPECT_EQ(bytes.find("??zzz"), 0u) << bytes;
    EXPECT_LT(bytes.size(), 500u);
}

TEST(ProblemLine, PresetsAreValidAndLaterWordsOverride) {
    std::set<std::string> names;
    for (const Preset& preset : presets()) {
        EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
        EXPECT_EQ(parsed(preset.name), parsed(preset.line));
        EXPECT_FALSE(preset.source.empty());
    }
    for (const std::string& name : family_presets()) EXPECT_EQ(names.count(name), 1u) << name;
    EXPECT_EQ(family_presets().size(), 5u);
    EXPECT_EQ(parsed("ling-mini-linear"), parsed("simple_gla:fwd b2 t4096 h16 k128 bf16 gate=head"));
    EXPECT_EQ(parsed("ling-mini-linear:bwd t8192 f32"), parsed("simple_gla:bwd b2 t8192 h16 k128 f32 gate=head"));
    EXPECT_EQ(parsed("qwen3-next-80b:step b8 t1"),
              parsed("gated_delta_rule:step b8 t1 h16 hv32 k128 bf16 rawgate beta=sigmoid l2norm"));
    EXPECT_EQ(parsed("minimax-text-01").scale, 1.0);
    EXPECT_EQ(parsed("minimax-text-01").chunk, 256);
    EXPECT_EQ(parsed("ling-mini-linear varlen=0,7").T, 7);
    EXPECT_EQ(parsed("kimi-linear-48b:step spec=2").T, 2);
    EXPECT_EQ(message_of("gla-1.3b h2 h2"), "h2: expected each word once, after h2");
}

TEST(ProblemLine, RandomProblemsAreValidAndSurviveTheRoundTrip) {
    std::set<std::string> seen;
    std::set<Operator> operators;
    std::set<DType> dtypes;
    int summaries = 0, joined = 0, steps = 0, backwards = 0, ragged = 0, empty = 0, long_ones = 0;
    for (std::uint64_t seed = 0; seed < 3000; ++seed) {
        const ProblemLine line = random_problem(seed);
        const std::string text = format(line);
        ASSERT_EQ(parsed(text), line) << text;
        ASSERT_EQ(format(parsed(text)), text);
        ASSERT_EQ(random_problem(seed), line) << "a seed must always give the same problem";
        const std::int64_t work = line.B * line.T * line.HV * line.K * line.V;
        ASSERT_LE(work, 8'500'000) << text;
        long_ones += work > 1'200'000;
        seen.insert(text);
        operators.insert(line.op);
        dtypes.insert(line.dtype);
        steps += line.direction == Direction::step;
        summaries += line.direction == Direction::summarize || line.direction == Direction::summarize_backward;
        joined += line.ranks > 0;
        backwards += line.direction == Direction::backward;
        ragged += !line.varlen.empty();
        empty += line.T == 0;
    }
    EXPECT_GT(seen.size(), 2990u);
    EXPECT_EQ(operators.size(), 8u);
    EXPECT_EQ(dtypes.size(), 4u);
    EXPECT_GT(long_ones, 30);
    EXPECT_LT(long_ones, 150) << "these take the oracle tens of milliseconds";
    EXPECT_GT(steps, 400);
    EXPECT_GT(summaries, 400);
    EXPECT_GT(joined, 200);
    EXPECT_GT(backwards, 900);
    EXPECT_GT(ragged, 600);
    EXPECT_GT(empty, 50);
}

TEST(ProblemLine, HalfOfTheRandomProblemsOfADeviceAreForTensorCores) {
    int for_tensor_cores = 0;
    for (std::uint64_t seed = 0; seed < 1000; ++seed) {
        const ProblemLine line = random_problem(seed, Device::cuda);
        ASSERT_TRUE(line.cuda);
        ASSERT_EQ(parsed(format(line)), line);
        ASSERT_LE(line.B * line.T * line.HV * line.K * line.V, 8'500'000);
        const bool half = line.dtype == DType::bf16 || line.dtype == DType::f16;
        for_tensor_cores += half && line.K >= 32 && line.V >= 32 && line.direction != Direction::step;
    }
    EXPECT_GT(for_tensor_cores, 400);
}

TEST(ProblemLine, FilesAreReadWithCommentsAndErrorsNameTheLine) {
    const std::string path = testing::TempDir() + "headrace_problem_line_test.txt";
    std::ofstream(path) << "# caption\n\ngla:fwd t3  # why\r\n  kda:bwd t4\t\n";
    std::vector<ProblemLine> lines;
    ASSERT_TRUE(read_problem_file(path, &lines).ok());
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0], parsed("gla:fwd t3"));
    EXPECT_EQ(lines[1], parsed("kda:bwd t4"));
    std::ofstream(path) << "# caption\ngla:fwd t3\ngla:fwd t-3\n";
    EXPECT_EQ(read_problem_file(path, &lines).message(), path + ":3: t-3: expected t0 to t16777216");
    EXPECT_EQ(lines.size(), 2u);
    std::remove(path.c_str());
    EXPECT_EQ(read_problem_file(path, &lines).message(), path + ": expected a readable file of problem lines");
}

}  // namespace
}  // namespace headrace::harness
