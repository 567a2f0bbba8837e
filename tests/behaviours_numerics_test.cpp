// N1, N2, N4 to N7, B7's range: gates of any strength, bad gates, reports of NaN, prefixes, threads. N3: _exp_test.
#include <cstring>

#include "behaviours.hpp"
#include "formula_ends.hpp"

namespace headrace::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double not_a_number = std::numeric_limits<double>::quiet_NaN();

TEST(Numerics, N1_HeadGatesOfRealModels) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string direction : {":fwd", ":bwd"}) {
            for (const char* gamma :
                 {"-0.3", "-0.5", "-0.7071", "-0.7443", "-0.8", "-0.9286", "-1", "-1.4", "-1.5", "-3", "-20"}) {
                for (const char* chunk : {"64", "128", "256"}) {
                    for (const char* type : {"f32", "bf16", "f16"}) {
                        expect_right(op + direction + " t270 h1 k32 v16 threads=1 state=inout gamma=" + gamma +
                                     " chunk=" + chunk + " " + type);
                    }
                }
            }
        }
    }
}

TEST(Numerics, N1_HeadGatesInEveryImplementation) {
    for (const std::string op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string direction : {":fwd", ":bwd"}) {
            for (const char* gamma : {"-0.3", "-0.9286", "-3", "-20"}) {
                for (const char* type : {"f64", "f32", "bf16", "f16"}) {
                    expect_right_everywhere(op + direction + " t140 h2 hv4 k32 v16 chunk=64 gate=head gamma=" + gamma +
                                            " " + type);
                }
            }
        }
    }
}

TEST(Numerics, N2_ResetsAndExtremeGates) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string direction : {":fwd", ":bwd", ":step"}) {
            for (const char* gates : {"zero", "strong", "reset", "minus_inf"}) {
                for (const char* type : {"f64", "f32", "bf16", "f16"}) {
                    const std::string states = direction == ":step" ? "" : " state=inout";
                    expect_right_everywhere(op + direction + " b2 t70 h2 k32 v16 chunk=64 gates=" + gates + states +
                                            " " + type);
                }
            }
        }
    }
}

// Gates of -1000, -1e30 or -inf at tokens 3 and 40, gates of -1e-4 everywhere else: a running sum that swallowed the
// small ones would show at once.
TEST(Numerics, N2_TinyGatesBehindAHugeOne) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string direction : {":fwd", ":bwd"}) {
            for (const char* type : {" f64", " f32", " bf16"}) {
                for (const ProblemLine& line :
                     forced_lines(op + direction + " t70 h1 k32 v16 chunk=64 threads=1 state=inout" + type)) {
                    for (const double huge : {-1000.0, -1e30, -infinity}) {
                        CallTensors made = harness::make_tensors(line);
                        harness::Tensor& g = made.tensors.at("g");
                        const std::int64_t per_token = g.numel() / line.T;
                        for (std::int64_t i = 0; i < g.numel(); ++i) {
                            const std::int64_t token = i / per_token, channel = i % per_token;
                            const bool reset = (token == 3 || token == 40) && (per_token == 1 || channel % 3 != 0);
                            g.set(i, reset ? huge : -1e-4 * static_cast<double>(1 + (token + channel) % 7));
                        }
                        expect_right_call(made, format(line) + " with gates of " + std::to_string(huge));
                    }
                }
            }
        }
    }
}

// What one bad element of a tensor is answered with. Nothing is written before the answer, but for a bad g, which is
// found on the way: a step, which changes states in place, looks at it first.
Status status_with(CallTensors& made, const std::string& name, std::int64_t element, double value,
                   const Options& options = {}) {
    harness::Tensor& tensor = made.tensors.at(name);
    const double old = tensor.get(element);
    tensor.set(element, value);
    made.call.options = options;
    const std::map<std::string, Bytes> before = written(made.call);
    const Status status = run(made.call);
    const bool looked_first = name != "g" || made.call.direction == Direction::step;
    if (!status.ok() && looked_first) expect_same_bits(before, written(made.call), name);
    tensor.set(element, old);
    return status;
}

TEST(Numerics, N2_EndsOfFormulas) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string direction : {":fwd t40", ":bwd t40", ":step t2"}) {
            for (const char* type : {" k16 f64", " k16 f32", " k64 bf16", " k64 f16"}) {
                for (const std::string& text : lines_of_formulas(op, direction + type)) {
                    for (const ProblemLine& line : forced_lines(text)) {
                        CallTensors made = tensors_at_ends(line);  // anew, as steps write over their states
                        expect_right_by_each(made, {line.force}, text);
                    }
                }
            }
        }
    }
}

TEST(Numerics, N4_BadGatesAreRefusedByName) {
    struct Case {
        const char *words, *name;
        std::int64_t element;
        std::string message;  // up to the value
    };
    const Case cases[] = {
        {"retention:fwd h3", "g_gamma", 2, "g_gamma[2]"},
        {"simple_gla:bwd b2 t5 h3", "g", 20, "g[1, 1, 2]"},
        {"gla:fwd b2 t5 h3 k7", "g", 20, "g[0, 0, 2, 6]"},
        {"kda:step b2 t5 h3 k7", "g", 209, "g[1, 4, 2, 6]"},
        {"gated_delta_rule:fwd t5 h3 bf16 seed=1", "g", 14, "g[0, 4, 2]"},
        {"comba:bwd t5 h3 f64 gate=step+head", "g_gamma", 1, "g_gamma[1]"},
        {"linear_attention:fwd t5 h1 v4 gv", "gv", 19, "gv[0, 4, 0, 3]"},
    };
    for (const Case& one : cases) {
        for (const double value : {not_a_number, 0.25, infinity}) {
            CallTensors made = harness::make_tensors(line_of(one.words));
            const Status status = status_with(made, one.name, one.element, value);
            EXPECT_EQ(status.code(), Code::invalid_argument) << one.words;
            const std::string& text = status.message();
            EXPECT_EQ(text.substr(0, std::strlen(one.name) + 1), std::string(one.name) + ":") << text;
            const std::string position = one.message.substr(std::strlen(one.name));
            EXPECT_NE(text.find(position), std::string::npos) << one.words << ": " << text;
            const std::string shown = std::isnan(value) ? "nan" : std::isinf(value) ? "inf" : "0.25";
            EXPECT_NE(text.find(shown), std::string::npos) << one.words << ": " << text;
        }
        CallTensors made = harness::make_tensors(line_of(one.words));
        EXPECT_TRUE(status_with(made, one.name, one.element, 0.0).ok()) << one.words;
        EXPECT_TRUE(status_with(made, one.name, one.element, -infinity).ok()) << one.words;
    }
}

TEST(Numerics, N4_TheFirstBadGateIsNamed) {
    CallTensors made = harness::make_tensors(line_of("gla:fwd t300 h4 k64"));
    harness::Tensor& g = made.tensors.at("g");
    for (const std::int64_t element : {70000, 40000, 54321}) g.set(element, not_a_number);
    const Status status = run(made.call);
    EXPECT_NE(status.message().find("[0, 156, 1, 0]"), std::string::npos) << status.message();  // 40000
}

TEST(Numerics, N4_PositiveGatesByOption) {
    for (const std::string words :
         {"simple_gla:fwd gate=step+head", "simple_gla:bwd gate=step+head", "kda:fwd gate=channel+head",
          "kda:bwd gate=channel+head", "gla:fwd", "gla:bwd", "comba:fwd", "gated_delta_rule:bwd"}) {
        for (ProblemLine line : forced_lines(words + " t40 h2 k32 v16 chunk=16 threads=1")) {
            CallTensors made = harness::make_tensors(line);
            harness::Tensor& g = made.tensors.at("g");
            for (std::int64_t i = 0; i < g.numel(); i += 3) g.set(i, 0.03 * static_cast<double>(i % 5));
            EXPECT_EQ(run(made.call).code(), Code::invalid_argument) << format(line);
            made.call.options.allow_positive_gates = true;
            expect_right_call(made, format(line) + " with positive gates");
            g.set(4, not_a_number);
            EXPECT_EQ(run(made.call).code(), Code::invalid_argument) << format(line) << ": NaN";
        }
    }
}

// The stages that were reported, in order: the first word of each line but the last.
std::vector<std::string> stages_of(const std::string& text) {
    std::vector<std::string> stages;
    const std::string prefix = "headrace: nan: ";
    for (std::size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at + 1)) {
        const std::size_t begin = at + prefix.size();
        stages.push_back(text.substr(begin, text.find(' ', begin) - begin));
    }
    if (!stages.empty()) stages.pop_back();  // the verdict
    return stages;
}

bool in_order(const std::vector<std::string>& stages, const std::vector<std::string>& wanted) {
    std::size_t next = 0;
    for (const std::string& stage : stages) {
        if (next < wanted.size() && stage == wanted[next]) ++next;
    }
    return next == wanted.size();
}

TEST(Numerics, N5_OneLinePerStage) {
    const Environment debug("HEADRACE_DEBUG_NAN", "1");
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":fwd t40 h2 k32 v16 state=inout threads=1"))) {
            const CallTensors made = harness::make_tensors(line);
            const std::string text = printed([&] { EXPECT_TRUE(run(made.call).ok()); });
            EXPECT_TRUE(in_order(stages_of(text), {"q", "k", "v", "initial_state", "state", "o", "final_state"}))
                << format(line) << "\n"
                << text;
            EXPECT_NE(text.find(": no NaN\n"), std::string::npos) << text;
        }
        for (const ProblemLine& line : forced_lines(line_text(op, ":bwd t40 h2 k32 v16 state=inout threads=1"))) {
            const CallTensors made = harness::make_tensors(line);
            const std::string text = printed([&] { EXPECT_TRUE(run(made.call).ok()); });
            std::vector<std::string> wanted = {"q", "k", "v", "d_o", "d_final_state"};
            const bool keeps = line.force.find("two_sweep") == std::string::npos;  // keeps neither states nor adjoints
            if (keeps) wanted.push_back("state");
            if (line.force.find("two_pass") != std::string::npos) wanted.push_back("D");
            for (const char* output : {"d_q", "d_k", "d_v", "d_g", "d_g_gamma", "d_beta", "d_initial_state"}) {
                if (made.tensors.count(output)) wanted.push_back(output);
            }
            EXPECT_TRUE(in_order(stages_of(text), wanted)) << format(line) << "\n" << text;
        }
    }
}

TEST(Numerics, N5_TheRightStageIsBlamed) {
    struct Case {
        const char *words, *tensor, *report;
    };
    const Case cases[] = {
        {"simple_gla:fwd t40 h2 k32 v16", "v", "v f32 [1, 40, 2, 16] nan 1 inf 0 "},
        {"kda:fwd t40 h2 k32 v16", "k", "k f32 [1, 40, 2, 32] nan 1 inf 0 "},
        {"gla:bwd t40 h2 k32 v16", "d_o", "d_o f32 [1, 40, 2, 16] nan 1 inf 0 "},
        {"gated_delta_rule:bwd t40 h2 k32 v16 state=in", "initial_state",
         "initial_state f32 [1, 2, 32, 16] nan 1 inf 0 "},
    };
    for (const Case& one : cases) {
        CallTensors made = harness::make_tensors(line_of(one.words));
        made.tensors.at(one.tensor).set(5, not_a_number);
        EXPECT_EQ(printed([&] { EXPECT_TRUE(run(made.call).ok()); }), "") << "off: nothing is printed";
        const Environment debug("HEADRACE_DEBUG_NAN", "1");
        const std::string text = printed([&] { EXPECT_TRUE(run(made.call).ok()); });
        EXPECT_NE(text.find(std::string("headrace: nan: ") + one.report), std::string::npos) << text;
        EXPECT_NE(text.find(std::string(": first NaN in ") + one.tensor + "\n"), std::string::npos) << text;
    }
}

TEST(Numerics, N5_OffChangesNoBitAndNoWorkspace) {
    for (const char* words : {"kda:fwd t40 h2 k32", "simple_gla:bwd t40 h2 k32"}) {
        const ProblemLine line = line_of(words);
        const std::size_t workspace = workspace_bytes(line);
        const std::map<std::string, Bytes> off = run_and_read(line);
        const Environment debug("HEADRACE_DEBUG_NAN", "1");
        EXPECT_EQ(workspace_bytes(line), workspace);
        std::map<std::string, Bytes> on;
        EXPECT_NE(printed([&] { on = run_and_read(line); }), "");
        expect_same_bits(off, on, words);
    }
}

// Also where states hardly forget, which bf16 kernels write otherwise than the states of later tokens with resets.
TEST(Numerics, N6_LaterTokensChangeNoBit) {
    for (const Operator op : operators()) {
        for (const char* form : {" k32 v24 chunk=64 f32", " k32 v24 chunk=64 bf16", " k32 v24 chunk=64 f16",
                                 " k32 v24 chunk=64 f64", " k64 v32 chunk=16 gates=zero bf16"}) {
            for (const char* order : {"", " reverse"}) {
                const std::string text = line_text(op, ":fwd b2 t75 h2 threads=1 state=in") + form + order;
                for (const ProblemLine& line : forced_lines(text)) {
                    const CallTensors made = harness::make_tensors(line);
                    ASSERT_TRUE(run(made.call).ok()) << format(line);
                    for (const std::int64_t cut : {1, 16, 37, 74}) {
                        const std::int64_t begin = line.reverse ? cut : 0, end = line.reverse ? line.T : cut;
                        CallTensors changed = harness::make_tensors(line);
                        change_tokens(changed, line.reverse ? 0 : cut, line.reverse ? cut : line.T);
                        ASSERT_TRUE(run(changed.call).ok()) << format(line);
                        EXPECT_TRUE(harness::read_bytes(tokens_of(changed.call.out.o, begin, end)) ==
                                    harness::read_bytes(tokens_of(made.call.out.o, begin, end)))
                            << format(line) << ": tokens from " << cut << " on changed those before";
                        EXPECT_FALSE(harness::read_bytes(changed.call.out.o) == harness::read_bytes(made.call.out.o));
                    }
                }
            }
        }
    }
}

// A token is a step of its own in the recurrent form: not even a NaN in it reaches the tokens before.
TEST(Numerics, N6_LaterNaNsStayLaterInTheRecurrentForm) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":fwd t64 h1 k32 v24 threads=1"), ".recurrent")) {
            const CallTensors made = harness::make_tensors(line);
            ASSERT_TRUE(run(made.call).ok()) << format(line);
            for (const char* name : {"q", "k", "v"}) {
                CallTensors changed = harness::make_tensors(line);
                harness::Tensor& tensor = changed.tensors.at(name);
                tensor.set(21 * (tensor.numel() / line.T), not_a_number);
                ASSERT_TRUE(run(changed.call).ok()) << format(line);
                EXPECT_TRUE(harness::read_bytes(tokens_of(changed.call.out.o, 0, 21)) ==
                            harness::read_bytes(tokens_of(made.call.out.o, 0, 21)))
                    << format(line) << ": NaN in " << name;
            }
        }
    }
}

// The same without the later tokens: a prefix of the sequence has the outputs of the prefix.
TEST(Numerics, N6_AShorterSequenceIsAPrefix) {
    for (const Operator op : operators()) {
        for (const char* words : {" f32", " bf16", " l2norm state=in"}) {
            for (const ProblemLine& line :
                 forced_lines(line_text(op, ":fwd b2 t75 h2 k64 v32 chunk=64 threads=1") + words)) {
                const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
                ASSERT_TRUE(run(whole.call).ok()) << format(line);
                for (const std::int64_t length : {1, 2, 16, 33, 37, 74}) {
                    if (length < 32 && line.force == "avx512_bf16.chunk") continue;  // which takes 32 tokens or more
                    ASSERT_TRUE(run(tokens_of(prefix.call, 0, length)).ok()) << format(line);
                    EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                                harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
                        << format(line) << ": length " << length;
                }
            }
        }
    }
}

TEST(Numerics, N7_TheSameBitsFromRunToRunAndForAnyNumberOfThreads) {
    for (const Operator op : operators()) {
        for (const char* words : {":fwd state=inout", ":bwd state=inout", ":step"}) {
            for (const char* type : {" f32", " bf16"}) {
                const std::string text = line_text(op, words) + " b1 t75 h1 hv3 k64 v80 chunk=16 gates=random" + type;
                for (ProblemLine line : forced_lines(text)) {
                    std::map<std::string, Bytes> first;
                    for (const int threads : {1, 2, 3, 4, 4, 1}) {
                        line.threads = threads;
                        const std::map<std::string, Bytes> bits = run_and_read(line);
                        if (first.empty()) first = bits;
                        expect_same_bits(first, bits, format(line));
                    }
                }
            }
        }
    }
}

// More threads than heads: two passes instead of one.
TEST(Numerics, N7_TheChoiceOfThePassesChangesNoBit) {
    for (const std::string& line : operators_and_gates("bwd")) {
        for (const char* type : {" f32", " f64"}) {  // 16-bit: docs/numerics.md
            std::map<std::string, std::map<std::string, Bytes>> by_isa;
            for (const ProblemLine& forced : forced_lines(line + " t200 h8 k64 state=inout" + type, "_pass")) {
                const std::map<std::string, Bytes> bits = run_and_read(forced);
                const auto [first, is_first] = by_isa.emplace(forced.force.substr(0, forced.force.find('.')), bits);
                if (!is_first) expect_same_bits(first->second, bits, format(forced));
            }
        }
    }
}

// f16 holds 6e-8 to 65504; what is saved in it may be larger or smaller.
TEST(Numerics, B7_StatesSavedInF16KeepTheirRange) {
    for (const double size : {1e6, 1e-7}) {
        for (const ProblemLine& line : forced_lines("gla:bwd t70 h2 k32 v32 f16 threads=1 state=inout gates=zero")) {
            CallTensors made = harness::make_tensors(line);
            const auto scale = [&](const char* name, double factor) {
                harness::Tensor& tensor = made.tensors.at(name);
                for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, tensor.get(i) * factor);
            };
            scale("initial_state", size);
            scale("d_o", size > 1 ? 0.001 : 100);  // so that d_q = S d_o fits into f16
            if (size < 1) scale("v", 0);
            expect_right_call(made, format(line));
        }
    }
}

// With threads to spare a task takes one head, else a few: 8 heads on one thread and on eight. In one pass only where
// the saved states outgrow the caches: 2100 tokens are 132 chunks of 16.
TEST(Numerics, N7_HeadsThatAreTakenTogetherChangeNoBit) {
    for (const char* text : {"kda:fwd t70 h4 hv8 k32 v24 state=inout", "linear_attention:bwd b2 t70 h4 hv8 k32 state=inout",
                             "gla:fwd t70 h8 k32 bf16", "kda:bwd t2100 h4 k128 chunk=16 state=inout",
                             "simple_gla:bwd t2100 h4 k64 v256 bf16 chunk=16"}) {
        expect_right(std::string(text) + " threads=1");
        for (ProblemLine line : forced_lines(std::string(text) + " threads=1")) {
            if (line.force.find(".chunk") == std::string::npos) continue;
            for (const PlanEntry& entry : workspace_entries(line)) {
                const bool many = line.T == 2100 && line.force.find("one_pass") != std::string::npos;
                if (entry.name != "saved states" || !many) continue;
                EXPECT_EQ(entry.shape.at(0), 2 * 132) << format(line);
            }
            const std::map<std::string, Bytes> together = run_and_read(line);
            line.threads = 8;
            expect_same_bits(together, run_and_read(line), format(line));
        }
    }
}

}  // namespace
}  // namespace headrace::test
