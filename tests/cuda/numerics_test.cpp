// Behaviours of CUDA calls: gates of any strength, prefixes and repetition in bits, hints, sizes, pieces of sequences,
// NaN in the way.
#include "tests/behaviours.hpp"
#include "tests/cuda/child_process.hpp"
#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

const char* const directions[] = {":fwd", ":bwd"};
const char* const types[] = {" f32", " bf16", " f16"};

void expect_right_by_each(const std::string& text) {
    for (const ProblemLine& line : forced_lines(text + " cuda")) expect_right(line);
}

// ---- gates ----

TEST(CudaNumerics, N1_HeadGatesOfRealModels) {
    int type = 0;
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* direction : directions) {
            for (const char* gamma : {"-0.3", "-0.7071", "-0.9286", "-1.5", "-3", "-20"}) {
                for (const char* chunk :
                     {"16", "64"}) {  // the types in turn: each with each gamma of an operator or of the next
                    expect_right(op + direction + " t70 h1 k32 v16 gate=head state=inout gamma=" + gamma +
                                 " chunk=" + chunk + types[type++ % 3] + " cuda");
                }
            }
            ++type;
        }
    }
}

TEST(CudaNumerics, N1_HeadGatesInEveryImplementation) {
    for (const std::string op : {"retention", "gla", "gated_delta_rule", "kda"}) {
        for (const char* direction : directions) {
            for (const char* gamma : {"-0.3", "-20"}) {
                for (const char* type : types) {
                    expect_right_by_each(op + direction + " t40 h1 hv2 k32 v16 gate=head gamma=" + gamma + type);
                }
            }
        }
    }
}

// As many sums in fp32, one after another, would be past the bar.
TEST(CudaNumerics, LongSumsOfStatesThatHardlyForget) {
    expect_right("linear_attention:fwd t65536 h1 k32 v4 cuda");
    expect_right("gla:fwd t65536 h1 k64 v4 gates=lasting forget=0.00001 cuda");
}

TEST(CudaNumerics, N2_ResetsAndExtremeGates) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* words : {":fwd t40 state=inout", ":bwd t40 state=inout", ":step t1", ":step t2"}) {
            for (const char* gates : {"zero", "strong", "reset", "minus_inf"}) {
                for (const char* type : {" f32", " bf16"})
                    expect_right_by_each(op + words + " h1 k32 v16 gates=" + gates + type);
            }
        }
    }
}

// Gates of -1000, -1e30 or -inf at tokens 3 and 20, gates of -1e-4 everywhere else.
TEST(CudaNumerics, N2_TinyGatesBehindAHugeOne) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* direction : directions) {
            for (const ProblemLine& line : forced_lines(op + direction + " t40 h1 k32 v16 state=inout cuda")) {
                for (const double huge : {-1000.0, -1e30, -infinity}) {
                    CallTensors made = harness::make_tensors(line);
                    harness::Tensor& g = made.tensors.at("g");
                    const std::int64_t per_token = g.numel() / line.T;
                    for (std::int64_t i = 0; i < g.numel(); ++i) {
                        const std::int64_t token = i / per_token, channel = i % per_token;
                        const bool reset = (token == 3 || token == 20) && (per_token == 1 || channel % 3 != 0);
                        g.set(i, reset ? huge : -1e-4 * static_cast<double>(1 + (token + channel) % 7));
                    }
                    const harness::Expected expected = harness::expect(made.call);
                    run_there(made);
                    expect_within_bars(made.call, expected.outputs, format(line) + " gates of " + std::to_string(huge),
                                       expected.terms);
                }
            }
        }
    }
}

TEST(CudaNumerics, N4_PositiveGatesByOption) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "kda"}) {
        for (const char* direction : directions) {
            for (const ProblemLine& line : forced_lines(op + direction + " t40 h1 k32 v16 cuda")) {
                CallTensors made = harness::make_tensors(line);
                harness::Tensor& g = made.tensors.at("g");
                for (std::int64_t i = 0; i < g.numel(); i += 3) g.set(i, 0.03 * static_cast<double>(i % 5));
                made.call.options.allow_positive_gates = true;
                const harness::Expected expected = harness::expect(made.call);
                run_there(made);
                expect_within_bars(made.call, expected.outputs, format(line) + " with positive gates", expected.terms);
            }
        }
    }
}

// N3, as far as results show it (exponentials_test.py watches each): exponentials of positive numbers
// overflow where running sums of gates span more than f32 does.
TEST(CudaNumerics, N3_SumsOfGatesBeyondTheRangeOfExponentials) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* direction : directions) {
            for (const char* type : types)
                expect_right_by_each(op + direction + " t40 h1 k32 v16 gate=head gamma=-90 state=inout" + type);
        }
    }
}

// ---- bits ----

TEST(CudaNumerics, N6_LaterTokensChangeNoBit) {
    for (const Operator op : operators()) {
        for (const char* form :
             {" t43 k32 v24 f32", " t43 k32 v24 bf16 reverse", " t43 k32 v24 f64", " t110 k64 v32 bf16"}) {
            for (const ProblemLine& line : forced_lines(line_text(op, ":fwd b1 h2 state=in cuda") + form)) {
                const CallTensors made = harness::make_tensors(line);
                run_there(made);
                for (const std::int64_t cut : {std::int64_t{1}, std::int64_t{16}, line.T - 6}) {
                    const std::int64_t begin = line.reverse ? cut : 0, end = line.reverse ? line.T : cut;
                    CallTensors changed = harness::make_tensors(line);
                    change_tokens(changed, line.reverse ? 0 : cut, line.reverse ? cut : line.T);
                    run_there(changed);
                    EXPECT_TRUE(harness::read_bytes(tokens_of(changed.call.out.o, begin, end)) ==
                                harness::read_bytes(tokens_of(made.call.out.o, begin, end)))
                        << format(line) << ": tokens beyond " << cut << " changed others";
                    EXPECT_FALSE(harness::read_bytes(changed.call.out.o) == harness::read_bytes(made.call.out.o));
                }
            }
        }
    }
}

// The first tokens alone have the outputs that they have of the whole, which was run.
void expect_prefix(const ProblemLine& line, const CallTensors& whole, const CallTensors& prefix, std::int64_t length) {
    run_there(prefix, tokens_of(prefix.call, 0, length));
    EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
        << format(line) << ": length " << length;
}
TEST(CudaNumerics, N6_AShorterSequenceIsAPrefix) {
    for (const Operator op : operators()) {
        for (const char* words : {" t70 k32 v24 f32", " t70 k32 v24 bf16 l2norm state=in", " t140 k64 v32 bf16"}) {
            for (const ProblemLine& line : forced_lines(line_text(op, ":fwd b2 h1 cuda") + words)) {
                const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
                run_there(whole);
                for (const std::int64_t length : {1, 16, 33, 64, 100}) {
                    const bool too_short = line.force == "cuda.tensor" && length < 32;
                    if (length > line.T || too_short) continue;
                    expect_prefix(line, whole, prefix, length);
                }
            }
        }
    }
}

// Tokens before the first of a chunk whose keys overlap are solved as in a chunk without.
TEST(CudaNumerics, N6_KeysThatOverlapFromATokenOn) {
    for (const char* operation : {"gated_delta_rule:fwd gates=lasting", "comba:fwd gates=lasting", "delta_rule:fwd"}) {
        for (const char* words :
             {" k64 directions=12", " k128 directions=20", " k128 directions=60", " k256 directions=100"}) {
            const ProblemLine line =
                line_of(std::string(operation) + words + " t128 h2 v32 bf16 betas=0,1 l2norm force=cuda.tensor cuda");
            const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
            run_there(whole);
            for (std::int64_t length = 32; length < 128; length += 5) expect_prefix(line, whole, prefix, length);
        }
    }
}

// Chunks in double, where the first token of a chunk whose decays cannot be lifted is another in each.
TEST(CudaNumerics, N6_GatesThatCannotBeLifted) {
    for (const char* operation : {"kda:fwd l2norm", "gla:fwd"}) {
        for (const char* gates : {" gates=strong", " gates=reset", " gates=minus_inf", " gates=lasting"}) {
            for (const char* type : {" f32 reverse", " f64"}) {
                const ProblemLine line =
                    line_of(std::string(operation) + gates + type + " t70 h2 k33 v40 state=inout force=cuda.walk cuda");
                const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
                const harness::Expected expected = harness::expect(whole.call);
                run_there(whole);
                expect_within_bars(whole.call, expected.outputs, format(line));
                if (line.reverse) continue;  // whose first tokens are the last ones
                for (const std::int64_t length : {3, 5, 9, 14, 20, 35, 61}) expect_prefix(line, whole, prefix, length);
            }
        }
    }
}

// A token is a step of its own in the recurrent form: not even a NaN in it reaches the tokens before.
TEST(CudaNumerics, N6_LaterNaNsStayLaterInTheRecurrentForm) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":fwd t30 h1 k32 v24 cuda"), ".recurrent")) {
            const CallTensors made = harness::make_tensors(line);
            run_there(made);
            for (const char* name : {"q", "k", "v"}) {
                CallTensors changed = harness::make_tensors(line);
                harness::Tensor& tensor = changed.tensors.at(name);
                tensor.set(21 * (tensor.numel() / line.T), std::numeric_limits<double>::quiet_NaN());
                run_there(changed);
                EXPECT_TRUE(harness::read_bytes(tokens_of(changed.call.out.o, 0, 21)) ==
                            harness::read_bytes(tokens_of(made.call.out.o, 0, 21)))
                    << format(line) << ": NaN in " << name;
            }
        }
    }
}

std::vector<ProblemLine> lines_of_every_kind() {
    std::vector<ProblemLine> lines;
    for (const Operator op : operators()) {
        for (const char* words : {":fwd t24 state=inout", ":bwd t20 state=inout", ":step t1 bf16", ":step t2 bf16"}) {
            for (const ProblemLine& line : forced_lines(line_text(op, words) + " h1 hv2 k32 v24 cuda"))
                lines.push_back(line);
        }
    }
    for (const char* text :
         {"kda:bwd varlen=0,9,24 h1 k16 rawgate bf16 cuda", "simple_gla:bwd b2 t20 h1 k32 gate=step+head cuda",
          "simple_gla:fwd t130 h1 hv2 v100 state=inout bf16 cuda", "comba:fwd t130 h1 k128 l2norm bf16 cuda"}) {
        for (const ProblemLine& line : forced_lines(text)) lines.push_back(line);
    }
    return lines;
}

// A hash of what each line writes, for the comparison of processes.
TEST(DISABLED_ChildBits, Print) {
    for (const ProblemLine& line : lines_of_every_kind()) {
        std::uint64_t hash = 1469598103934665603ULL;  // FNV-1a
        for (const auto& [name, bytes] : run_there(line, std::getenv("HEADRACE_TEST_WORKSPACE") != nullptr)) {
            for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211ULL;
        }
        std::printf("bits of %s: %llu\n", format(line).c_str(), static_cast<unsigned long long>(hash));
    }
}

std::vector<std::string> printed_bits(const std::string& environment) {
    const Outcome outcome = run_child("Bits", environment);
    EXPECT_TRUE(outcome.passed) << environment << "\n" << outcome.output;
    std::vector<std::string> bits;
    for (std::size_t at = outcome.output.find("bits of "); at != std::string::npos;
         at = outcome.output.find("bits of ", at + 1)) {
        bits.push_back(outcome.output.substr(at, outcome.output.find('\n', at) - at));
    }
    return bits;
}

// From run to run, in every order of threads, with a workspace of the caller or without.
TEST(CudaNumerics, N7_TheSameBitsInEveryOrder) {
    const std::vector<std::string> first = printed_bits("HEADRACE_PTX_ORDER=ascending");
    EXPECT_GT(first.size(), 40U);
    EXPECT_EQ(first, printed_bits("HEADRACE_PTX_ORDER=ascending HEADRACE_TEST_WORKSPACE=1"));
    EXPECT_EQ(first, printed_bits("HEADRACE_PTX_ORDER=descending"));
    EXPECT_EQ(first, printed_bits("HEADRACE_PTX_ORDER=random HEADRACE_PTX_SEED=11 HEADRACE_TEST_WORKSPACE=1"));
}

TEST(CudaNumerics, F2_NumStepsIsOnlyAHint) {
    for (ProblemLine line : lines_of_every_kind()) {
        if (line.force.find("recurrent") != std::string::npos) continue;
        const std::map<std::string, Bytes> plain = run_there(line);
        const std::size_t workspace = workspace_bytes(line);
        line.num_steps = 3;
        expect_same_bits(plain, run_there(line), format(line));
        EXPECT_EQ(workspace_bytes(line), workspace) << format(line);
    }
}

// Outputs and workspace hold NaN, or outputs 3e38 and the library's own workspace what was there.
TEST(CudaNumerics, B8_OldContentsOfMemoryChangeNothing) {
    for (const ProblemLine& line : lines_of_every_kind()) {
        CallTensors other = harness::make_tensors(line);
        for (const harness::NamedView& output : harness::output_views(other.call))
            other.tensors.at(output.name).fill(3e38);
        expect_same_bits(run_there(line, true), run_there(other, false), format(line));
    }
}

// ---- sizes ----

TEST(CudaNumerics, F4_EveryHeadSize) {
    const std::pair<int, int> sizes[] = {{1, 1},   {3, 7},     {16, 8},    {33, 65},   {64, 64},
                                         {96, 80}, {127, 129}, {128, 256}, {256, 128}, {192, 320}};
    int number = 0;
    for (const Operator op : operators()) {
        for (const auto& [K, V] : sizes) {
            const std::string rest = " t20 h1 state=inout k" + std::to_string(K) + " v" + std::to_string(V);
            expect_right(line_text(op, ":fwd") + rest + types[number++ % 3] + " cuda");
            if (K * V <= 10000) expect_right(line_text(op, ":bwd") + rest + types[number % 2] + " cuda");
        }
    }
    for (const char* line :
         {"gla:bwd t20 h1 k127 v129", "kda:bwd t17 h1 k256 v128", "gated_delta_rule:bwd t20 h1 k128 v256 bf16",
          "kda:fwd t17 h1 k256 v512", "simple_gla:bwd t17 h1 k256 v512 state=inout"}) {
        expect_right(std::string(line) + " cuda");
    }
}

TEST(CudaNumerics, F5_EveryLengthAroundAChunk) {
    for (const Operator op : operators()) {
        for (const int tokens : {1, 15, 16, 17, 31, 32, 33, 63, 64, 65}) {
            const std::string rest = " t" + std::to_string(tokens) + " h1 k16 v24 state=inout";
            expect_right_by_each(line_text(op, ":fwd") + rest);
            expect_right_by_each(line_text(op, ":bwd") + rest);
        }
    }
    for (const char* line : {"kda:fwd t600 h1 k16 v16 state=inout", "simple_gla:bwd t600 h1 k16 v16 state=inout"})
        expect_right_by_each(line);
}

TEST(CudaNumerics, F5_SplitSequencesChain) {
    for (const Operator op : operators()) {
        for (const char* type : {" t43 k32 v24 f64", " t43 k32 v24 f32", " t43 k32 v24 bf16", " t140 k64 v40 bf16"}) {
            for (const ProblemLine& line :
                 forced_lines(line_text(op, ":fwd b2 h1 hv2 state=inout chunk=16 cuda") + type)) {
                const CallTensors made = harness::make_tensors(line);
                const harness::Expected expected = harness::expect(made.call);
                harness::Tensor middle(made.call.out.final_state.dtype, {2, 2, line.K, line.V});
                const bool long_parts = line.force == "cuda.tensor";  // it refuses others
                for (const std::int64_t split : {long_parts ? 40 : 1, long_parts ? 64 : 16, long_parts ? 100 : 37}) {
                    Call first = tokens_of(made.call, 0, split), second = tokens_of(made.call, split, line.T);
                    first.out.final_state = second.in.initial_state = middle.view();
                    run_there(made, first), run_there(made, second);
                    expect_within_bars(made.call, expected.outputs,
                                       format(line) + " split at " + std::to_string(split));
                }
            }
        }
    }
}

TEST(CudaNumerics, F8_ChunkLengthsAreHints) {
    for (const std::string direction : {"fwd", "bwd"}) {
        for (const std::string& text : operators_and_gates(direction)) {
            for (const char* chunk : {"16", "32", "256"})
                expect_right(text + " t70 h1 k16 v24 state=inout cuda chunk=" + chunk);
        }
    }
}

// ---- gradients that are wanted ----

TEST(CudaNumerics, B3_GradientsOfStates) {
    for (const Operator op : operators()) {
        for (const char* states : {"none", "in", "out", "inout"})
            expect_right_by_each(line_text(op, ":bwd b2 t20 h1 k32 v24 state=") + states);
    }
}

TEST(CudaNumerics, B3_AGradientThroughTheFinalStateAlone) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":bwd t20 h2 k32 v24 state=inout cuda"))) {
            CallTensors made = harness::make_tensors(line);
            made.call.d_out.d_o = {};
            const harness::Expected expected = harness::expect(made.call);
            run_there(made);
            expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
        }
    }
}

// Each gradient alone, and all but it: the same bits as among all, nothing else written, no more workspace.
TEST(CudaNumerics, B3_UnwantedGradientsCostNothing) {
    for (const std::string words : {"gla:bwd gate=channel+head", "comba:bwd gate=step+head", "kda:bwd rawgate"}) {
        for (const ProblemLine& line : forced_lines(words + " t20 h1 k32 v24 state=inout cuda")) {
            const CallTensors all = harness::make_tensors(line);
            const std::map<std::string, Bytes> expected = run_there(all);
            for (const auto& [name, unused] : expected) {
                for (const bool alone : {true, false}) {
                    const CallTensors made = harness::make_tensors(line);
                    Call call = made.call;
                    Gradients& grads = call.grads;
                    for (TensorView* view :
                         {&grads.d_q, &grads.d_k, &grads.d_v, &grads.d_p, &grads.d_g, &grads.d_g_gamma, &grads.d_beta,
                          &grads.d_A_log, &grads.d_dt_bias, &grads.d_initial_state}) {
                        if (view->given() && (view->data == made.tensors.at(name).view().data) != alone) *view = {};
                    }
                    EXPECT_LE(workspace_bytes(harness::seen_from_device(call)),
                              workspace_bytes(harness::seen_from_device(all.call)));
                    for (const auto& [other, bits] : run_there(made, call)) {
                        const bool wanted = (other == name) == alone;
                        const bool right = wanted ? bits == expected.at(other) : bits == Bytes(bits.size(), 0xff);
                        EXPECT_TRUE(right) << format(line) << ": " << (alone ? "only " : "all but ") << name << ": "
                                           << other << (wanted ? " differs" : " was written");
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
