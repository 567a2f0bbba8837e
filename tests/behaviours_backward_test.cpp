// B1 to B8: every form of the backward, forced and found to have run, with any wish of gradients, exact at every gate.
// over 400 lines: the rows of one page share their helpers.
#include <algorithm>
#include <cstring>
#include <set>

#include "behaviours.hpp"

namespace headrace::test {
namespace {

constexpr const char* one_pass = ".chunk.one_pass";
constexpr const char* two_pass = ".chunk.two_pass";
constexpr const char* two_sweep = ".chunk.two_sweep";
constexpr const char* recurrent = ".recurrent";

bool is_delta(Operator op) { return harness::has_delta_rule(op); }

// "gate=none" where the operator takes a gate, so that the two-sweep form serves the additive rule.
std::string ungated(Operator op) {
    const std::vector<harness::GateKind>& gates = harness::allowed_gates(op);
    const bool can = std::count(gates.begin(), gates.end(), harness::GateKind::none) > 0;
    return can ? " gate=none" : "";
}

// The candidates of a call whose name ends so, by name; "" where it would serve.
std::map<std::string, std::string> refusals(const Call& call, const std::string& algorithm) {
    std::map<std::string, std::string> found;
    for (const Candidate& candidate : candidates_of(call)) {
        const std::size_t at = candidate.name.rfind(algorithm);
        if (at != std::string::npos && at + algorithm.size() == candidate.name.size()) {
            found[candidate.name] = candidate.refusal;
        }
    }
    EXPECT_FALSE(found.empty()) << algorithm;
    return found;
}

// Whether the best instruction set's form serves the call.
bool serves(const Call& call, const std::string& algorithm) {
    bool any = false;
    for (const auto& [name, refusal] : refusals(call, algorithm)) any = any || refusal.empty();
    return any;
}

TEST(Backward, B1_FormsOfEachRule) {
    for (const Operator op : operators()) {
        CallTensors made = harness::make_shapes(line_of(line_text(op, ":bwd t70 h2 k32 v24 state=inout")));
        for (const char* form : {one_pass, two_pass, recurrent}) {
            EXPECT_TRUE(serves(made.call, form)) << name_of(op) << form;
        }
        made.call.grads.d_g = made.call.grads.d_g_gamma = {};
        EXPECT_EQ(serves(made.call, two_sweep), !is_delta(op)) << name_of(op);
    }
}

TEST(Backward, B1_TwoSweepSaysWhatItCannotDo) {
    const auto expect_refused = [](const std::string& text, const std::string& reason) {
        const CallTensors made = harness::make_shapes(line_of(text));
        for (const auto& [name, refusal] : refusals(made.call, two_sweep)) {
            EXPECT_EQ(refusal, reason) << name << ": " << text;
            Call forced = made.call;
            forced.options.force = name.c_str();
            std::size_t bytes = 0;
            const Status status = workspace_size(forced, &bytes);
            EXPECT_EQ(status.code(), Code::unsupported) << name;
            EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
        }
    };
    for (const char* op : {"delta_rule", "gated_delta_rule", "comba", "kda"}) {
        expect_refused(std::string(op) + ":bwd", "the delta rule's gradients need states and adjoints together");
    }
    for (const char* text : {"simple_gla:bwd", "gla:bwd", "retention:bwd", "simple_gla:bwd rawgate"}) {
        expect_refused(text, "gate gradients need states and adjoints together");
    }
}

TEST(Backward, B1_EachFormCanBeForcedRunsAndAgrees) {
    std::set<std::string> ran;
    for (const Operator op : operators()) {
        const std::string text = line_text(op, ":bwd b2 t70 h2 hv4 k32 v24 state=inout threads=1") + ungated(op);
        CallTensors made = harness::make_tensors(line_of(text));
        made.call.grads.d_g_gamma = {};  // retention has no other gate
        const harness::Expected expected = harness::expect(made.call);
        for (const Candidate& candidate : candidates_of(made.call)) {
            if (!candidate.refusal.empty()) continue;
            made.call.options.force = candidate.name.c_str();
            const Environment verbose("HEADRACE_VERBOSE", "1");
            const std::string text_printed = printed([&] { EXPECT_TRUE(run(made.call).ok()); });
            EXPECT_NE(text_printed.find(": served by " + candidate.name + "\n"), std::string::npos) << text_printed;
            expect_within_bars(made.call, expected.outputs, text + " force=" + candidate.name);
            ran.insert(candidate.name);
        }
    }
    for (const std::string isa : {"generic"}) {
        for (const char* form : {one_pass, two_pass, two_sweep, recurrent}) EXPECT_TRUE(ran.count(isa + form)) << form;
    }
}

TEST(Backward, B2_TwoPassHasTheSameBitsForAnyNumberOfThreads) {
    for (const Operator op : operators()) {
        for (const char* type : {" f32", " bf16"}) {
            const std::string text = line_text(op, ":bwd b2 t70 h2 hv4 k32 v24 state=inout chunk=16") + type;
            for (ProblemLine line : forced_lines(text, two_pass)) {
                for (const bool parameters : {true, false}) {  // sums of parameters put the chunks of a head in order
                    std::map<std::string, Bytes> first;
                    for (const int threads : {1, 2, 3, 4}) {
                        line.threads = threads;
                        CallTensors made = harness::make_tensors(line);
                        if (!parameters) made.call.grads.d_g_gamma = {};
                        const std::map<std::string, Bytes> bits = run_and_read(made);
                        if (threads == 1) first = bits;
                        expect_same_bits(first, bits, format(line));
                    }
                }
            }
        }
    }
}

TEST(Backward, B3_GradientsOfStates) {
    for (const Operator op : operators()) {
        for (const char* states : {"none", "in", "out", "inout"}) {
            expect_right_everywhere(line_text(op, ":bwd b2 t45 h2 k32 v24 chunk=16 state=") + states);
            expect_right_everywhere(line_text(op, ":bwd t0 h2 k32 v24 state=") + states);
        }
    }
}

TEST(Backward, B3_AGradientThroughTheFinalStateAlone) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line :
             forced_lines(line_text(op, ":bwd t45 h2 k32 v24 chunk=16 threads=1 state=inout"))) {
            CallTensors made = harness::make_tensors(line);
            made.call.d_out.d_o = {};
            expect_right_call(made, format(line));
            EXPECT_GT(std::abs(made.tensors.at("d_v").get(0)), 0.0) << format(line);
        }
    }
}

// The views of all gradients of a call, by name.
std::vector<std::pair<std::string, TensorView*>> gradient_views(Gradients& grads) {
    return {{"d_q", &grads.d_q},
            {"d_k", &grads.d_k},
            {"d_v", &grads.d_v},
            {"d_p", &grads.d_p},
            {"d_g", &grads.d_g},
            {"d_g_gamma", &grads.d_g_gamma},
            {"d_beta", &grads.d_beta},
            {"d_A_log", &grads.d_A_log},
            {"d_dt_bias", &grads.d_dt_bias},
            {"d_initial_state", &grads.d_initial_state}};
}

// Each gradient alone, and all but it: the same bits as among all, nothing else written, no more workspace.
TEST(Backward, B3_UnwantedGradientsCostNothing) {
    std::set<std::string> seen;
    for (const std::string words : {"retention:bwd", "simple_gla:bwd gate=step+head", "gla:bwd gate=channel+head",
                                    "gated_delta_rule:bwd gate=step+head", "comba:bwd", "kda:bwd rawgate"}) {
        for (const ProblemLine& line : forced_lines(words + " t45 h2 k32 v24 chunk=16 threads=1 state=inout")) {
            CallTensors all = harness::make_tensors(line);
            const std::map<std::string, Bytes> expected = run_and_read(all);
            const std::size_t workspace = workspace_bytes(all.call);
            for (const auto& [name, unused] : gradient_views(all.call.grads)) {
                if (!unused->given()) continue;
                seen.insert(name);
                for (const bool alone : {true, false}) {
                    const CallTensors made = harness::make_tensors(line);
                    Call call = made.call;
                    for (const auto& [other, view] : gradient_views(call.grads)) {
                        if ((other == name) != alone) *view = {};
                    }
                    EXPECT_LE(workspace_bytes(call), workspace) << format(line) << ": " << name;
                    ASSERT_TRUE(run(call).ok()) << format(line);
                    for (const auto& [other, bits] : written(made.call)) {
                        const bool wanted = (other == name) == alone;
                        const bool right =
                            wanted ? bits == expected.at(other) : bits == Bytes(bits.size(), 0xff);  // as it was made
                        EXPECT_TRUE(right) << format(line) << ": " << (alone ? "only " : "all but ") << name << ": "
                                           << other << (wanted ? " differs" : " was written");
                    }
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), 10u);
}

// What nobody wants is not written either, and a wish for few gradients is served with less memory than for all.
TEST(Backward, B3_GradientsOfValuesNeedNoStates) {
    for (const char* op : {"linear_attention", "retention", "simple_gla", "gla"}) {
        CallTensors made = harness::make_shapes(line_of(std::string(op) + ":bwd b2 t4096 h4 threads=2"));
        const TensorView d_v = made.call.grads.d_v;
        made.call.grads = {};
        made.call.grads.d_v = d_v;
        EXPECT_TRUE(serves(made.call, two_sweep)) << op;
    }
}

TEST(Backward, B4_GradientsOfHeadGatesAreTrueAtLength4096) {
    for (const std::string op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const std::string gate : {"gate=head", "gate=head gamma=-0.003", "own"}) {
            if (gate == "own" && (op == "retention" || op == "comba")) continue;
            const std::string both = op == "gla" || op == "kda" ? "gate=channel+head" : "gate=step+head";
            const std::string text =
                op + ":bwd t4096 h1 hv4 k16 v16 threads=1 state=inout " + (gate == "own" ? both : gate);
            CallTensors made = harness::make_tensors(line_of(text));
            const std::vector<double> expected = harness::expect(made.call).outputs.at("d_g_gamma");
            for (const double value : expected) ASSERT_GT(std::abs(value), 0.0) << text;
            int served = 0;
            for (const Candidate& candidate : candidates_of(made.call)) {
                if (!candidate.refusal.empty()) continue;
                ++served;
                made.call.options.force = candidate.name.c_str();
                harness::Tensor& gradient = made.tensors.at("d_g_gamma");
                gradient.fill(0);
                ASSERT_TRUE(run(made.call).ok()) << text;
                EXPECT_LE(relative_error(gradient.values(), expected), 1e-5) << text << " force=" << candidate.name;
            }
            EXPECT_GE(served, 3) << text;
        }
    }
}

TEST(Backward, B5_GradientsOfGatesOfEveryStrength) {
    for (const std::string op : {"simple_gla", "gated_delta_rule", "comba", "gla", "kda"}) {
        for (const char* gates : {"random", "zero", "strong", "reset", "minus_inf"}) {
            for (const char* type : {" f64", " f32", " bf16", " f16"}) {
                for (const char* form : {"", " rawgate"}) {
                    if (*form != 0 && std::string(gates) == "minus_inf") continue;
                    expect_right_everywhere(op + ":bwd t70 h2 hv4 k32 v32 chunk=64 state=inout gates=" + gates + type +
                                            form);
                }
            }
        }
    }
}

// dg by the identity R(q . dq - k . dk) of one additive step-gated head without a gradient of its final state.
std::vector<double> gate_gradient_by_identity(const CallTensors& made, const std::vector<double>& d_q,
                                              const std::vector<double>& d_k) {
    const std::vector<double> q = made.tensors.at("q").values(), k = made.tensors.at("k").values();
    const std::size_t tokens = made.tensors.at("g").values().size(), K = q.size() / tokens;
    std::vector<double> result(tokens);
    double sum = 0;
    for (std::size_t t = tokens; t-- > 0;) {
        for (std::size_t c = t * K; c < (t + 1) * K; ++c) sum += q[c] * d_q[c] - k[c] * d_k[c];
        result[t] = sum;
    }
    return result;
}

// The identity is exact on exact gradients, and at strong gates far off on those rounded to bf16, where the library's
// gradient stays within its bar.
TEST(Backward, B5_GateGradientsDoNotComeFromRoundedGradients) {
    for (const double gate : {-3.0, -10.0}) {
        CallTensors made = harness::make_tensors(line_of("simple_gla:bwd bf16 t64 h1 k64 v64"));
        made.tensors.at("g").fill(gate);
        const std::map<std::string, std::vector<double>> exact = harness::expect(made.call).outputs;
        ASSERT_TRUE(run(made.call).ok());
        const auto error_of = [&](const std::vector<double>& d_g) { return relative_error(d_g, exact.at("d_g")); };
        const auto values = [&](const char* name) { return made.tensors.at(name).values(); };
        const double bar = harness::bar_of("d_g", DType::bf16, DType::f32);
        EXPECT_LE(error_of(gate_gradient_by_identity(made, exact.at("d_q"), exact.at("d_k"))), 1e-6) << gate;
        EXPECT_GT(error_of(gate_gradient_by_identity(made, values("d_q"), values("d_k"))), 2 * bar) << gate;
        EXPECT_LE(error_of(values("d_g")), bar) << gate;
    }
}

// In f32, gates of -20 leave nothing of a difference of two products; a sum of what crosses the gate stays exact.
TEST(Backward, B5_StrongGatesAloneStayExact) {
    for (const std::string text :
         {"simple_gla:bwd t64 h1 k64 v64", "gla:bwd t64 h1 k64 v64", "gated_delta_rule:bwd t64 h1 k64 v64",
          "comba:bwd t64 h1 k64 v64", "kda:bwd t64 h1 k64 v64"}) {
        for (const double gate : {-3.0, -10.0, -20.0}) {
            for (const ProblemLine& line : forced_lines(text + " threads=1")) {
                CallTensors made = harness::make_tensors(line);
                made.tensors.at("g").fill(gate);
                const std::vector<double> expected = harness::expect(made.call).outputs.at("d_g");
                ASSERT_TRUE(run(made.call).ok()) << format(line);
                EXPECT_LE(relative_error(made.tensors.at("d_g").values(), expected), 1e-5)
                    << format(line) << " g " << gate;
            }
        }
    }
}

// dW, [T, HV, K] in f32, would be the only block of a workspace that grows with T and K.
TEST(Backward, B6_NoGradientOfWInMemory) {
    for (const char* op : {"delta_rule", "gated_delta_rule", "comba", "kda"}) {
        for (const char* form : {one_pass, two_pass}) {
            for (ProblemLine line : forced_lines(std::string(op) + ":bwd h2 k512 v16 chunk=64 threads=2", form)) {
                const std::int64_t chunks = 64, heads = form == one_pass ? line.threads : line.H;
                line.T = 64;
                const std::size_t one = workspace_bytes(line);
                line.T = 64 * (chunks + 1);
                const std::size_t grown = workspace_bytes(line) - one;
                // S (and D) of each chunk, and the residuals of its tokens beside their erase scores
                const std::size_t states = (form == one_pass ? 1 : 2) * 512 * 16, residuals = 64 * (16 + 64);
                EXPECT_LE(grown, static_cast<std::size_t>(chunks * heads) * (states + residuals) * sizeof(float))
                    << format(line);
            }
        }
    }
}

// Nearly parallel keys with beta near 1 make I + L far from the identity: a transpose left out of -A^T dA A^T shows.
TEST(Backward, B6_TheInverseOfParallelKeysHasAnExactGradient) {
    for (const std::string op : {"delta_rule", "gated_delta_rule", "comba", "kda"}) {
        for (const char* type : {" f64", " f32"}) {
            for (const ProblemLine& line :
                 forced_lines(op + ":bwd t70 h1 hv2 k32 v24 chunk=64 threads=1 state=inout" + type)) {
                CallTensors made = harness::make_tensors(line);
                for (const char* name : {"k", "p"}) {
                    if (!made.tensors.count(name)) continue;
                    harness::Tensor& keys = made.tensors.at(name);
                    for (std::int64_t i = 0; i < keys.numel(); ++i) {
                        keys.set(i, 0.9 / std::sqrt(32.0) + 0.3 * keys.get(i));
                    }
                }
                harness::Tensor& beta = made.tensors.at("beta");
                for (std::int64_t i = 0; i < beta.numel(); ++i) beta.set(i, 0.9 + 0.1 * beta.get(i));
                expect_right_call(made, format(line) + " with parallel keys");
            }
        }
    }
}

// The delta rule's adjoints are saved in f32 in any case (docs/numerics.md).
TEST(Backward, B7_SavedStatesInF32OrInTheTypeOfTheInputs) {
    int saving = 0;
    for (const Operator op : operators()) {
        for (const std::string type : {"bf16", "f16"}) {
            const std::string text = line_text(op, ":bwd t80 h8 k32 v32 threads=1 state=inout ") + type;
            for (ProblemLine line : forced_lines(text)) {
                std::map<DType, std::size_t> bytes;
                std::map<DType, Bytes> d_q;
                for (const DType saved : {DType::f32, line.dtype}) {
                    line.state_dtype = saved;
                    for (const PlanEntry& entry : workspace_entries(line)) {
                        if (entry.name != "saved states" && entry.name != "saved adjoints") continue;
                        if (line.force.find("recurrent") != std::string::npos) continue;  // keeps f32 always
                        ++saving;
                        if (harness::has_delta_rule(op) && entry.name == "saved adjoints") {
                            EXPECT_EQ(entry.dtype, DType::f32) << format(line);
                            continue;
                        }
                        EXPECT_EQ(entry.dtype, saved) << format(line) << ": " << entry.name;
                        bytes[saved] += entry.bytes;
                    }
                    expect_right(line);
                    d_q[saved] = run_and_read(line).at("d_q");
                }
                if (bytes.empty()) continue;
                EXPECT_EQ(bytes[DType::f32], 2 * bytes[line.dtype]) << format(line);
                // The bf16 dot product rounds the state as it uses it, whichever way it was saved.
                if (line.force.find("bf16") == std::string::npos) {
                    EXPECT_FALSE(d_q[DType::f32] == d_q[line.dtype]) << format(line) << ": the option has no effect";
                }
                line.state_dtype.reset();
                EXPECT_TRUE(run_and_read(line).at("d_q") == d_q[line.dtype]) << format(line) << ": not the default";
            }
        }
    }
    EXPECT_GT(saving, 0);
}

// Their sums are few and may cancel, which roundings of states would not.
TEST(Backward, B7_GateGradientsOfFewHeadsComeFromStatesInF32) {
    const auto saved = [](const std::string& text) {
        for (const PlanEntry& entry : workspace_entries(line_of(text))) {
            if (entry.name == "saved states") return entry.dtype;
        }
        throw std::runtime_error(text + ": no saved states");
    };
    for (const std::string op : {"simple_gla", "kda"}) {
        EXPECT_EQ(saved(op + ":bwd t80 h7 k32 bf16"), DType::f32);
        EXPECT_EQ(saved(op + ":bwd t80 h7 k32 bf16 saved=bf16"), DType::f32);
        EXPECT_EQ(saved(op + ":bwd t80 h8 k32 bf16"), DType::bf16);
        EXPECT_EQ(saved(op + ":bwd b2 t80 h4 k32 bf16"), DType::bf16);
    }
    EXPECT_EQ(saved("delta_rule:bwd t80 h1 k32 bf16"), DType::bf16);  // has no gate
}

// All outputs written, nothing read from outputs or workspace, nothing around any buffer touched.
TEST(Backward, B8_OldContentsOfMemoryChangeNothing) {
    for (const Operator op : operators()) {
        for (const char* words : {":fwd b2 t45 state=inout", ":bwd b2 t45 state=inout", ":step b2 t3"}) {
            for (const char* layout : {" threads=2", " threads=1 strided"}) {
                const std::string text = line_text(op, words) + " h2 hv4 k32 v24 chunk=16" + layout;
                for (const ProblemLine& line : forced_lines(text)) {
                    std::map<std::string, Bytes> first;
                    for (const int filling : {0x7f, 0xff}) {  // 3e38, NaN
                        CallTensors made = harness::make_tensors(line);
                        for (const harness::NamedView& output : harness::output_views(made.call)) {
                            const double old = filling == 0xff ? std::nan("") : 3e38;
                            made.tensors.at(output.name).fill(old);
                        }
                        const std::size_t size = workspace_bytes(made.call), guard = 512;
                        Bytes memory(size + 2 * guard, static_cast<unsigned char>(filling));
                        const std::map<std::string, Bytes> bits = run_and_read(made, {memory.data() + guard, size});
                        if (first.empty()) first = bits;
                        expect_same_bits(first, bits, format(line) + " over " + std::to_string(filling));
                        const Bytes untouched(guard, static_cast<unsigned char>(filling));
                        EXPECT_EQ(std::memcmp(memory.data(), untouched.data(), guard), 0) << format(line);
                        EXPECT_EQ(std::memcmp(memory.data() + guard + size, untouched.data(), guard), 0)
                            << format(line);
                        for (const auto& [name, tensor] : made.tensors) {
                            EXPECT_TRUE(tensor.guards_intact()) << format(line) << ": " << name;
                        }
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
