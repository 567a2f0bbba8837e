// I1 and I2: implementations are asked for, forced and found to have run; bad input is an error that leaves no trace.
#include <algorithm>
#include <cstring>
#include <functional>
#include <set>

#include "core/machine.hpp"
#include "harness/device_call.hpp"
#include "optional_inputs.hpp"

namespace headrace::test {
namespace {

const char* const directions[] = {":fwd", ":bwd", ":step", ":summary", ":summary_bwd"};

std::string served_by(const std::string& text) {
    const std::string before = ": served by ";
    const std::size_t begin = text.find(before);
    if (begin == std::string::npos) return "";
    return text.substr(begin + before.size(), text.find('\n', begin) - begin - before.size());
}

// The implementation that a call prints as its own when HEADRACE_VERBOSE asks.
std::string verbose_choice(const Call& call) {
    const Environment verbose("HEADRACE_VERBOSE", "1");
    return served_by(printed([&] { EXPECT_TRUE(run(call).ok()); }));
}

// The first candidate that neither refuses nor yields; if all yield, the first that does not refuse.
std::string first_choice(const std::vector<Candidate>& candidates) {
    for (const Candidate& candidate : candidates) {
        if (candidate.refusal.empty() && candidate.yields.empty()) return candidate.name;
    }
    for (const Candidate& candidate : candidates) {
        if (candidate.refusal.empty()) return candidate.name;
    }
    return "";
}

TEST(Interface, I1_TheAnswerIsWhatRuns) {
    std::set<std::string> chosen;
    for (const Operator op : operators()) {
        for (const char* direction : directions) {
            for (const std::string sizes :
                 {" t40 h2 k32", " t3 h2 k32", " t40 h2 k8", " t40 h4 k32 bf16", " t40 h1 k32 f64 gv"}) {
                const bool summary = std::string(direction).rfind(":summary", 0) == 0;
                if (summary && sizes.ends_with(" gv")) continue;  // refused: no matrix for all value channels
                const CallTensors made = harness::make_tensors(line_of(line_text(op, direction) + sizes));
                const std::vector<Candidate> candidates = candidates_of(made.call);
                const std::string choice = first_choice(candidates);
                EXPECT_NE(choice, "") << name_of(op) << direction << sizes;
                EXPECT_EQ(verbose_choice(made.call), choice) << name_of(op) << direction << sizes;
                chosen.insert(choice);
            }
        }
    }
    EXPECT_GE(chosen.size(), 3u);
}

// Host memory that says it lies on a GPU: an error in any build, and nothing is computed elsewhere.
TEST(Interface, I2_CudaTensorsAreNeverServedByACpu) {
    for (const Operator op : operators()) {
        for (const char* direction : directions) {
            CallTensors made = harness::make_tensors(line_of(line_text(op, direction) + " t40 h2 k32"));
            const Call host = made.call;
            const std::map<std::string, Bytes> before = written(host);
            const Status status = run(harness::seen_from_device(host));
            EXPECT_FALSE(status.ok()) << name_of(op) << direction;
            EXPECT_NE(status.message().find("CUDA"), std::string::npos) << status.message();
            EXPECT_EQ(written(host), before) << name_of(op) << direction;
        }
    }
}

TEST(Interface, I1_EveryRefusalHasItsReasonAndIsPrinted) {
    const CallTensors made = harness::make_tensors(line_of("kda:fwd t40 h2 k8"));
    const std::vector<Candidate> candidates = candidates_of(made.call);
    int refused = 0;
    const Environment verbose("HEADRACE_VERBOSE", "1");
    const std::string text = printed([&] { EXPECT_TRUE(run(made.call).ok()); });
    for (const Candidate& candidate : candidates) {
        if (candidate.name == served_by(text)) break;  // later ones were not asked
        ++refused;
        EXPECT_NE(candidate.refusal + candidate.yields, "") << candidate.name;
        EXPECT_NE(text.find("  not " + candidate.name + ": " + candidate.refusal + candidate.yields + "\n"),
                  std::string::npos)
            << text;
    }
    EXPECT_GT(refused, 0);
}

TEST(Interface, I1_EveryImplementationCanBeForcedAndReallyRuns) {
    std::set<std::string> ran, refused_by_machine;
    for (const std::string op : {"simple_gla", "gated_delta_rule", "gla", "kda"}) {
        for (const char* direction : directions) {
            for (const char* type : {" f32", " bf16"}) {
                CallTensors made = harness::make_tensors(line_of(op + direction + " t40 h2 k32 gate=none" + type));
                for (const Candidate& candidate : candidates_of(made.call)) {
                    if (candidate.refusal.find("machine lacks") != std::string::npos)
                        refused_by_machine.insert(candidate.name);
                    if (!candidate.refusal.empty()) continue;
                    for (const bool by_option : {true, false}) {
                        made.call.options.force = by_option ? candidate.name.c_str() : nullptr;
                        const Environment force("HEADRACE_FORCE",
                                                by_option ? "generic.recurrent" : candidate.name.c_str());
                        for (const Candidate& other : candidates_of(made.call)) {
                            EXPECT_EQ(other.refusal.empty(), other.name == candidate.name) << other.name;
                        }
                        EXPECT_EQ(verbose_choice(made.call), candidate.name);
                    }
                    ran.insert(candidate.name);
                }
            }
        }
    }
    for (const std::string& name : implementations()) {
        if (name.rfind("cuda.", 0) == 0) continue;  // of tensors on a device: tests/cuda
        EXPECT_EQ(ran.count(name) + refused_by_machine.count(name), 1u) << name;
    }
    EXPECT_TRUE(ran.count("generic.chunk") && ran.count("generic.recurrent"));
}

// Different arithmetic leaves different last bits: the name that is printed is not all that changes.
TEST(Interface, I1_ForcedImplementationsComputeDifferently) {
    const ProblemLine line = line_of("gated_delta_rule:fwd t200 h2 k64 v64");
    ProblemLine chunk = line, recurrent = line;
    chunk.force = "generic.chunk";
    recurrent.force = "generic.recurrent";
    EXPECT_FALSE(run_and_read(chunk).at("o") == run_and_read(recurrent).at("o"));
    EXPECT_NE(workspace_entries(line_of("gla:bwd t200 force=generic.chunk.two_pass")).size(),
              workspace_entries(line_of("gla:bwd t200 force=generic.chunk.one_pass")).size());
}

// bf16 tensors do not wait for a dot product that is slower than fp32, unless they are told to.
TEST(Interface, I1_SlowDotProductsYield) {
    for (const char* words : {"kda:fwd t256 h8 k128 bf16", "gla:bwd t256 h8 k128 bf16", "gated_delta_rule:summary t256 h8 k128 bf16"}) {
        const CallTensors made = harness::make_tensors(line_of(words));
        std::vector<Candidate> candidates;
        ASSERT_TRUE(explain(made.call, &candidates).ok());
        for (const Candidate& candidate : candidates) {
            if (candidate.name.rfind("avx512_bf16.", 0) != 0 || !candidate.refusal.empty()) continue;
            const bool yields = candidate.yields.find("slower than fp32") != std::string::npos;
            EXPECT_EQ(yields, machine().slow_bf16_dot) << words << ", " << candidate.name;
        }
    }
}

TEST(Interface, I1_UnknownNamesAreErrors) {
    for (const char* direction : directions) {
        CallTensors made = harness::make_tensors(line_of(std::string("kda") + direction + " t20 h2 k32"));
        made.call.options.force = "avx1024.chunk";
        std::vector<Candidate> candidates;
        std::vector<PlanEntry> entries;
        std::size_t bytes = 0;
        const std::map<std::string, Bytes> before = written(made.call);
        for (const Status& status : {run(made.call), explain(made.call, &candidates), workspace_size(made.call, &bytes),
                                     plan(made.call, &entries)}) {
            EXPECT_EQ(status.code(), Code::invalid_argument);
            EXPECT_EQ(status.message().rfind("force: expected one of ", 0), 0u) << status.message();
            EXPECT_NE(status.message().find(", got avx1024.chunk"), std::string::npos) << status.message();
        }
        expect_same_bits(before, written(made.call), direction);
        made.call.options.force = nullptr;
        const Environment force("HEADRACE_FORCE", "avx1024.chunk");
        EXPECT_EQ(run(made.call).message().rfind("HEADRACE_FORCE: ", 0), 0u) << run(made.call).message();
    }
}

struct BadCall {
    const char *words, *argument;
    std::function<void(CallTensors&)> spoil;
};

// The whole call of the API, not only its validation: an error that names the argument, and no byte written.
void expect_refused(const BadCall& bad) {
    CallTensors made = harness::make_tensors(line_of(bad.words));
    EXPECT_TRUE(run(harness::make_tensors(line_of(bad.words)).call).ok()) << bad.words;
    const std::map<std::string, Bytes> before = written(made.call);
    std::map<std::string, Bytes> all_before;
    for (const auto& [name, tensor] : made.tensors) all_before[name] = harness::read_bytes(tensor.view());
    const Call right = made.call;
    bad.spoil(made);
    const Status status = run(made.call);
    EXPECT_EQ(status.code(), Code::invalid_argument) << bad.words << " " << bad.argument;
    EXPECT_EQ(status.message().rfind(std::string(bad.argument) + ": expected ", 0), 0u) << status.message();
    EXPECT_NE(status.message().find(", got "), std::string::npos) << status.message();
    expect_same_bits(before, written(right), bad.argument);
    Bytes workspace(1 << 20);
    EXPECT_EQ(run(made.call, {workspace.data(), workspace.size()}).message(), status.message());
    for (const auto& [name, tensor] : made.tensors) {
        EXPECT_TRUE(tensor.guards_intact()) << bad.argument;
        if (name == "cu_seqlens") continue;  // it is what was spoiled
        EXPECT_TRUE(harness::read_bytes(tensor.view()) == all_before.at(name)) << name;
    }
}

void set_offsets(CallTensors& made, std::initializer_list<double> offsets) {
    harness::Tensor& tensor = made.tensors.at("cu_seqlens");
    std::int64_t i = 0;
    for (const double offset : offsets) tensor.set(i++, offset);
}

TEST(Interface, I2_BadTensorsWriteNothing) {
    for (const BadCall& bad : std::vector<BadCall>{
             {"gla:fwd t20 h2 k16", "q", [](CallTensors& m) { m.call.in.q.rank = 3; }},
             {"gla:bwd t20 h2 k16", "k", [](CallTensors& m) { m.call.in.k.shape[3] = 15; }},
             {"kda:step t2 h2 k16", "v", [](CallTensors& m) { m.call.in.v.shape[1] = 1; }},
             {"gla:bwd t20 h2 k16", "d_o", [](CallTensors& m) { m.call.d_out.d_o.shape[3] = 15; }},
             {"gla:bwd t20 h2 k16", "d_k", [](CallTensors& m) { m.call.grads.d_k.shape[1] = 19; }},
             {"gla:fwd t20 h2 k16", "k", [](CallTensors& m) { m.call.in.k.dtype = DType::bf16; }},
             {"gla:fwd t20 h2 k16 bf16", "o", [](CallTensors& m) { m.call.out.o.dtype = DType::f32; }},
             {"comba:fwd t20 h2 k16", "p", [](CallTensors& m) { m.call.in.p.device = Device::cuda; }},
             {"gla:fwd t20 h2 k16", "v", [](CallTensors& m) { m.call.in.v.strides[1] = -32; }},
             {"gla:fwd t20 h2 k16", "o", [](CallTensors& m) { m.call.out.o.strides[1] = 16; }},
             {"gla:fwd t20 h2 k16", "o", [](CallTensors& m) { m.call.out.o.data = m.call.in.v.data; }},
             {"gla:bwd t20 h2 k16", "d_q", [](CallTensors& m) { m.call.grads.d_q.data = m.call.in.q.data; }},
             {"kda:step t2 h2 k16", "pool.states", [](CallTensors& m) { m.call.in.q.data = m.call.pool.states.data; }},
             {"gla:fwd t20 h2 hv4 k16", "v", [](CallTensors& m) { m.call.in.v.shape[2] = 3; }},
             {"gla:fwd t20 h2 k16", "q", [](CallTensors& m) { m.call.in.q.data = nullptr; }},
             {"gla:bwd b2 t20 h2 k16 state=in", "initial_state",
              [](CallTensors& m) { m.call.in.initial_state.shape[0] = 1; }},
             {"gla:fwd b2 t20 h2 k16 state=out", "final_state",
              [](CallTensors& m) { m.call.out.final_state.shape[0] = 1; }},
         }) {
        expect_refused(bad);
    }
}

TEST(Interface, I2_BadSequencesWriteNothing) {
    const char* const ragged = "gla:fwd h2 k16 varlen=0,7,20";
    for (const BadCall& bad : std::vector<BadCall>{
             {ragged, "cu_seqlens",
              [](CallTensors& m) {
                  set_offsets(m, {1, 7, 20});
              }},
             {ragged, "cu_seqlens",
              [](CallTensors& m) {
                  set_offsets(m, {0, 7, 19});
              }},
             {ragged, "cu_seqlens",
              [](CallTensors& m) {
                  set_offsets(m, {0, 7, 21});
              }},
             {ragged, "cu_seqlens",
              [](CallTensors& m) {
                  set_offsets(m, {0, 21, 20});
              }},
             {ragged, "cu_seqlens",
              [](CallTensors& m) {
                  set_offsets(m, {0, -7, 20});
              }},
             {ragged, "cu_seqlens", [](CallTensors& m) { m.call.in.cu_seqlens.dtype = DType::f32; }},
             {ragged, "q",
              [](CallTensors& m) {
                  for (TensorView* view : {&m.call.in.q, &m.call.in.k, &m.call.in.v, &m.call.in.g, &m.call.out.o}) {
                      view->shape[0] = 2, view->shape[1] = 10;
                      view->strides[0] = 10 * view->strides[1];
                  }
              }},
         }) {
        expect_refused(bad);
    }
}

TEST(Interface, I2_BadOptionsWriteNothing) {
    for (const int chunk : {-64, 8, 48, 512}) {
        expect_refused({"gla:fwd t20 h2 k16", "chunk", [=](CallTensors& m) { m.call.options.chunk = chunk; }});
    }
    expect_refused({"gla:bwd t20 h2 k16", "num_steps", [](CallTensors& m) { m.call.options.num_steps = -1; }});
    static constexpr GpuLimits gpu{90, 227 << 10};
    expect_refused({"gla:fwd t20 h2 k16", "planned_gpu", [](CallTensors& m) { m.call.options.planned_gpu = &gpu; }});
    expect_refused({"gla:bwd t20 h2 k16", "threads", [](CallTensors& m) { m.call.options.threads = -1; }});
    expect_refused({"gla:bwd t20 h2 k16", "scale", [](CallTensors& m) { m.call.options.scale = std::nan(""); }});
    expect_refused(
        {"gla:bwd t20 h2 k16", "state_dtype", [](CallTensors& m) { m.call.options.state_dtype = DType::f16; }});
}

// What every front of the library answers to a call.
std::vector<Status> answers(Call call) {
    std::size_t bytes = 0;
    std::vector<PlanEntry> entries;
    std::vector<Candidate> candidates;
    std::vector<Status> found = {run(call), workspace_size(call, &bytes), plan(call, &entries), explain(call, &candidates)};
    if (call.direction == Direction::backward) {
        bool agree = false;
        found.push_back(states_agree(call, &agree));
        const TensorView& entering = call.in.initial_state;
        harness::Tensor leaving(entering.dtype, {entering.shape, entering.shape + entering.rank});
        found.push_back(backward_states(call.op, call.in, call.d_out, call.grads, {{}, leaving.view()}, call.options));
        call.out.final_state = leaving.view();
        found.push_back(workspace_size(call, &bytes));
    }
    return found;
}

// Kernels share work out by heads: a divisor there that is 0 would end the process.
TEST(Interface, I2_NoHeadsAreRefusedAndNoSequencesServedByEveryFront) {
    const Piece piece;
    for (const Operator op : operators()) {
        for (const char* direction : directions) {
            for (const char* words : {" t100 h4 hv8 k64 v64 bf16", " t100 h4 k64 v64", " t4 h2 k16 v16 f64"}) {
                ProblemLine no_heads = line_of(line_text(op, direction) + words + " threads=1");
                no_heads.state_in = no_heads.state_out = no_heads.direction == Direction::backward;
                ProblemLine no_sequences = no_heads;
                no_heads.H = no_heads.HV = no_sequences.B = 0;
                CallTensors refused = harness::make_tensors(no_heads), served = harness::make_tensors(no_sequences);
                for (const Piece* whole : {static_cast<const Piece*>(nullptr), &piece}) {
                    if (whole != nullptr && served.call.direction == Direction::step) continue;  // takes none
                    refused.call.options.piece = served.call.options.piece = whole;
                    const std::string message = refused.call.direction == Direction::summarize ? "k" : "q";
                    for (const Status& status : answers(refused.call)) {
                        EXPECT_EQ(status.message(), message + ": expected at least 1 head, got 0");
                    }
                    for (const Status& status : answers(served.call)) EXPECT_EQ(status.message(), "");
                }
            }
        }
    }
}

// Chunk 0 is no chunk length but "as you like": the hint that was never given.
TEST(Interface, I2_ChunkZeroIsTheDefault) {
    ProblemLine line = line_of("gla:fwd t70 h2 k16");
    CallTensors made = harness::make_tensors(line);
    made.call.options.chunk = 0;
    expect_same_bits(run_and_read(line), run_and_read(made), format(line));
}

TEST(Interface, I2_AWorkspaceInsideATensorIsRefused) {
    const CallTensors made = harness::make_tensors(line_of("linear_attention:fwd b2 t4096 h2 k64 threads=1"));
    const std::map<std::string, Bytes> before = written(made.call);
    for (const auto& [view, name] : {std::pair(made.call.out.o, "o"), std::pair(made.call.in.q, "q")}) {
        const Status status = run(made.call, {view.data, static_cast<std::size_t>(view.numel()) * 4});
        EXPECT_EQ(status.code(), Code::invalid_argument);
        EXPECT_EQ(status.message(),
                  std::string("workspace: expected memory of its own, got memory that overlaps ") + name);
    }
    EXPECT_EQ(run(made.call, {nullptr, 1 << 20}).code(), Code::invalid_argument);
    expect_same_bits(before, written(made.call), "workspace");
}

TEST(Inputs, AbsentOnesHaveTheirValues) {
    for (const char* rest : {" h2 hv4 k64 v32 bf16", " h2 k128 v16 f16", " h1 k16 v8", " h1 k8 v8 f64"})
        expect_absent_inputs(directions_of(70), rest, [](const CallTensors& made) { return run_and_read(made); });
}
TEST(Inputs, BetasOfEitherSign) {
    for (const char* rest : {" h2 hv4 k64 v32 bf16", " h2 k128 v16 f16", " h1 k16 v8", " h1 k8 v8 f64"})
        expect_betas_of_either_sign(directions_of(70), rest, [](const CallTensors& made) { return run_and_read(made); });
}

}  // namespace
}  // namespace headrace::test
