// F1 to F8: the forward of every operator at every gate, size, length, ragged batch and hint.
#include <set>

#include "behaviours.hpp"
#include "core/threads.hpp"

namespace headrace::test {
namespace {

TEST(Forward, F1_OneParallelRegion) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : forced_lines(line_text(op, ":fwd b2 t70 h4 k32 state=inout threads=2"))) {
            const CallTensors made = harness::make_tensors(line);
            const std::uint64_t before = shared_calls();
            ASSERT_TRUE(run(made.call).ok()) << format(line);
            EXPECT_EQ(shared_calls() - before, 1u) << format(line);
        }
    }
}

TEST(Forward, F1_NothingIsKeptPerChunk) {
    for (const Operator op : operators()) {
        for (ProblemLine line :
             forced_lines(line_text(op, ":fwd b2 t256 h4 k128 v128 state=inout chunk=64 threads=2"))) {
            const std::vector<PlanEntry> few = workspace_entries(line);
            line.T = 8192;
            const std::vector<PlanEntry> many = workspace_entries(line);
            ASSERT_EQ(few.size(), many.size()) << format(line);
            for (std::size_t i = 0; i < few.size(); ++i) {
                EXPECT_EQ(few[i].name, many[i].name) << format(line);
                EXPECT_EQ(few[i].shape, many[i].shape) << format(line) << ": " << few[i].name;
            }
        }
    }
}

// What a thread adds to the workspace stays in a second-level cache: half of M1's 2 MiB for two threads.
TEST(Forward, F1_ScratchOfAThreadFitsACache) {
    for (const char* type : {"f32", "bf16"}) {
        for (const std::string& text : operators_and_gates("fwd")) {
            for (ProblemLine line : forced_lines(text + " b2 t1024 h8 k128 v128 threads=2 " + type)) {
                const std::size_t two = workspace_bytes(line);
                line.threads = 4;
                const std::size_t per_thread = (workspace_bytes(line) - two) / 2;
                EXPECT_GE(per_thread, std::size_t{1}) << format(line);
                EXPECT_LE(per_thread, std::size_t{1} << 20) << format(line);
            }
        }
    }
}

TEST(Forward, F2_NumStepsIsOnlyAHint) {
    for (const Operator op : operators()) {
        for (const int chunks : {1, 2, 3, 6, 7, 64}) {
            const int tokens = 16 * chunks - 3;
            for (ProblemLine line : forced_lines(
                     line_text(op, ":fwd h2 k16 v24 chunk=16 state=inout threads=1 t" + std::to_string(tokens)))) {
                const std::map<std::string, Bytes> plain = run_and_read(line);
                const std::size_t workspace = workspace_bytes(line);
                for (const int num_steps : {1, 2, 3, 4, 5, 8, 16}) {
                    line.num_steps = num_steps;
                    expect_same_bits(plain, run_and_read(line), format(line));
                    EXPECT_EQ(workspace_bytes(line), workspace) << format(line);
                }
            }
        }
    }
}

TEST(Forward, F3_EveryGateWithAndWithoutStates) {
    std::set<std::string> gates;
    for (const char* direction : {"fwd", "bwd"}) {
        for (const std::string& text : operators_and_gates(direction)) {
            gates.insert(text.substr(text.find("gate=")));
            for (const char* states : {"none", "in", "out", "inout"}) {
                expect_right_everywhere(text + " b2 t37 h2 hv4 k16 v24 state=" + states);
            }
        }
    }
    EXPECT_EQ(gates.size(), 6u);
}

TEST(Forward, F4_EveryHeadSize) {
    const std::pair<int, int> sizes[] = {{16, 8},    {64, 64},   {96, 80},   {127, 129},
                                         {128, 128}, {128, 256}, {256, 128}, {192, 320}};
    for (const Operator op : operators()) {
        for (const auto& [K, V] : sizes) {
            const std::string rest = " t40 h1 threads=1 state=inout k" + std::to_string(K) + " v" + std::to_string(V);
            for (const char* direction : {":fwd", ":bwd"}) expect_right(line_text(op, direction + rest));
            expect_right_everywhere(line_text(op, ":fwd bf16" + rest));
        }
    }
}

TEST(Forward, F4_TheScaleUsesTheTrueKeySize) {
    for (const Operator op : operators()) {
        ProblemLine line = line_of(line_text(op, ":fwd t40 h2 k127 v40"));
        const std::map<std::string, Bytes> plain = run_and_read(line);
        line.scale = 1 / std::sqrt(127.0);
        expect_same_bits(plain, run_and_read(line), format(line));
        line.scale = 1 / std::sqrt(128.0);
        EXPECT_NE(plain, run_and_read(line)) << format(line);
    }
}

// Partial outputs for each block of 128 key channels would grow with B * T * H * V.
TEST(Forward, F4_NoPartialOutputs) {
    for (const Operator op : operators()) {
        for (ProblemLine line : forced_lines(line_text(op, ":fwd b2 t256 h8 k512 v64 threads=2"))) {
            const std::size_t small = workspace_bytes(line);
            line.B = 4, line.T = 8192;
            EXPECT_LE(workspace_bytes(line), small + 1024) << format(line);
        }
    }
}

TEST(Forward, F5_EveryLengthAroundAChunk) {
    for (const Operator op : operators()) {
        for (const int C : {16, 32, 64}) {
            for (const int tokens : {0, 1, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1}) {
                const std::string rest =
                    " t" + std::to_string(tokens) + " h1 k16 v24 state=inout chunk=" + std::to_string(C);
                expect_right_everywhere(line_text(op, ":fwd" + rest));
                expect_right_everywhere(line_text(op, ":bwd" + rest));
            }
        }
        expect_right_everywhere(line_text(op, ":fwd t1000 h1 k16 v24 state=inout"));
        expect_right_everywhere(line_text(op, ":bwd t1000 h1 k16 v24 state=inout"));
    }
}

// The chunk form and the recurrence leave the same state of a ragged length, not only one near the oracle's.
TEST(Forward, F5_ChunksAndRecurrenceLeaveTheSameState) {
    for (const Operator op : operators()) {
        for (const int tokens : {1, 31, 33, 77}) {
            const ProblemLine line =
                line_of(line_text(op, ":fwd f64 h2 k32 v16 state=inout chunk=32 threads=1 t" + std::to_string(tokens)));
            ProblemLine chunked = line, recurrent = line;
            chunked.force = accepting(line, ".chunk").at(0);
            recurrent.force = accepting(line, ".recurrent").at(0);
            const CallTensors a = harness::make_tensors(chunked), b = harness::make_tensors(recurrent);
            ASSERT_TRUE(run(a.call).ok() && run(b.call).ok()) << format(line);
            for (const char* name : {"o", "final_state"}) {
                EXPECT_LE(relative_error(a.tensors.at(name).values(), b.tensors.at(name).values()), 1e-13)
                    << format(line) << ": " << name;
            }
        }
    }
}

TEST(Forward, F5_SplitSequencesChain) {
    for (const Operator op : operators()) {
        for (const char* type : {"f64", "f32", "bf16"}) {
            const std::string text = line_text(op, ":fwd b2 t75 h2 hv4 k32 v24 state=inout chunk=16 threads=1 ") + type;
            for (const ProblemLine& line : forced_lines(text)) {
                const CallTensors made = harness::make_tensors(line);
                const harness::Expected expected = harness::expect(made.call);
                const TensorView& state = made.call.out.final_state;
                harness::Tensor middle(state.dtype, {2, 4, 32, 24});
                for (const std::int64_t split : {0, 1, 15, 16, 17, 40, 74, 75}) {
                    Call first = tokens_of(made.call, 0, split), second = tokens_of(made.call, split, line.T);
                    first.out.final_state = second.in.initial_state = middle.view();
                    ASSERT_TRUE(run(first).ok() && run(second).ok()) << format(line);
                    expect_within_bars(made.call, expected.outputs,
                                       format(line) + " split at " + std::to_string(split));
                }
            }
        }
    }
}

// Runs the backward of tokens from `split` on, then that of the tokens before; both gradients of g_gamma are added.
void expect_split_gradients(const ProblemLine& line, std::int64_t split) {
    CallTensors made = harness::make_tensors(line);
    std::map<std::string, std::vector<double>> expected = harness::expect(made.call).outputs;
    const std::vector<std::int64_t> shape = {line.B, line.HV, line.K, line.V};
    const DType type = made.call.in.initial_state.dtype;
    harness::Tensor state(type, shape), d_state(type, shape), gamma_before(type, {line.HV});

    Call before = tokens_of(made.call, 0, split), after = tokens_of(made.call, split, line.T);
    harness::Tensor unread(line.dtype, {line.B, split, line.HV, line.V});
    before.out = {unread.view(), state.view()};
    Options one_thread;
    one_thread.threads = 1;
    ASSERT_TRUE(forward(before.op, before.in, before.out, one_thread).ok()) << format(line);
    after.in.initial_state = state.view();
    after.grads.d_initial_state = before.d_out.d_final_state = d_state.view();
    if (before.grads.d_g_gamma.given()) before.grads.d_g_gamma = gamma_before.view();
    ASSERT_TRUE(run(after).ok() && run(before).ok()) << format(line);
    if (before.grads.d_g_gamma.given()) {
        harness::Tensor& gamma = made.tensors.at("d_g_gamma");
        for (std::int64_t h = 0; h < line.HV; ++h) gamma.set(h, gamma.get(h) + gamma_before.get(h));
    }
    expect_within_bars(made.call, expected, format(line) + " split at " + std::to_string(split));
}

// Eight heads: with fewer, a part of one token alone would be left to the recurrent form.
TEST(Forward, F5_GradientsOfSplitSequencesChain) {
    for (const std::string& gated : operators_and_gates("bwd")) {
        for (const char* type : {"f64", "f32"}) {
            const std::string text = gated + " t53 h8 k16 v24 state=inout chunk=16 threads=1 " + type;
            for (const ProblemLine& line : forced_lines(text)) {
                for (const std::int64_t split : {1, 16, 37}) expect_split_gradients(line, split);
            }
        }
    }
}

TEST(Forward, F6_RaggedBatches) {
    for (const Operator op : operators()) {
        for (const char* offsets : {"0,0", "0,100", "0,0,5,5,37,38,38,100,100", "0,16,32,48,64", "0,1,2,3,4,5,6,7,70",
                                    "0,33,66,99,132", "0,0,0,17,17,17,50"}) {
            for (const char* rest : {":fwd", ":bwd", ":fwd reverse", ":bwd reverse"}) {
                const std::string text = line_text(op, rest) + " h2 k16 v24 state=inout chunk=32 varlen=" + offsets;
                expect_right_everywhere(text);
                expect_right(text + " threads=1 seed=5");  // the seed decides between i32 and i64 offsets, among others
            }
        }
    }
}

// State n of a view [N, HV, K, V] alone; not given stays so.
TensorView state_of(TensorView view, std::int64_t n) {
    if (!view.given()) return view;
    view.data = static_cast<char*>(view.data) + n * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[0] = 1;
    return view;
}

// Eight heads: with fewer, the sequence of one token would be computed in double when it is alone.
TEST(Forward, F6_ARaggedBatchIsItsSequencesOneByOne) {
    const std::vector<std::int64_t> offsets = {0, 0, 5, 37, 38, 38, 100};
    for (const Operator op : operators()) {
        for (const char* direction : {":fwd", ":bwd"}) {
            const std::string text =
                line_text(op, direction) + " h8 k16 v24 state=inout chunk=16 threads=1 varlen=0,0,5,37,38,38,100";
            for (const ProblemLine& line : forced_lines(text)) {
                const CallTensors packed = harness::make_tensors(line), alone = harness::make_tensors(line);
                ASSERT_TRUE(run(packed.call).ok()) << format(line);
                for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
                    Call call = tokens_of(alone.call, offsets[n], offsets[n + 1]);
                    call.in.cu_seqlens = {};
                    for (TensorView* state : {&call.in.initial_state, &call.out.final_state, &call.d_out.d_final_state,
                                              &call.grads.d_initial_state}) {
                        *state = state_of(*state, static_cast<std::int64_t>(n));
                    }
                    ASSERT_TRUE(run(call).ok()) << format(line) << ", sequence " << n;
                }
                std::map<std::string, Bytes> expected = written(alone.call), actual = written(packed.call);
                expected.erase("d_g_gamma"), actual.erase("d_g_gamma");  // one sum over all sequences
                expect_same_bits(expected, actual, format(line));
            }
        }
    }
}

TEST(Forward, F7_HeadGatesOfAsManyHeadsAsChannels) {
    for (const std::string op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* direction : {":fwd", ":bwd"}) {
            for (const char* sizes : {" t40 h16 k16 v16", " t16 h16 k16 v16", " t40 h1 k16 v16", " t40 h1 hv3 k16 v8",
                                      " t40 h2 hv6 k16 v8"}) {
                expect_right_everywhere(op + direction + " gate=head" + sizes);
            }
        }
    }
}

// A head gate that differs between heads acts on its own head: equal to a call on that head alone.
TEST(Forward, F7_EveryHeadHasItsOwnGate) {
    for (const std::string op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const ProblemLine& line : forced_lines(op + ":fwd gate=head t40 h16 k16 v16 threads=1")) {
            const CallTensors made = harness::make_tensors(line), alone = harness::make_tensors(line);
            const std::vector<double> gates = made.tensors.at("g_gamma").values();
            EXPECT_EQ(std::set<double>(gates.begin(), gates.end()).size(), 16u);
            ASSERT_TRUE(run(made.call).ok()) << format(line);
            for (std::int64_t h = 0; h < line.H; ++h) {
                Call call = alone.call;
                for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.p, &call.in.beta, &call.out.o}) {
                    if (!view->given()) continue;
                    view->data = static_cast<float*>(view->data) + h * view->strides[2];
                    view->shape[2] = 1;
                }
                call.in.g_gamma.data = static_cast<float*>(call.in.g_gamma.data) + h;
                call.in.g_gamma.shape[0] = 1;
                ASSERT_TRUE(run(call).ok()) << format(line);
            }
            expect_same_bits(written(alone.call), written(made.call), format(line));
        }
    }
}

TEST(Forward, F7_NarrowHeadGatesAreWidenedFirst) {
    for (const std::string op : {"retention", "simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* rest :
             {":fwd gate=head bf16", ":bwd gate=head bf16", ":fwd gate=head f16", ":bwd gate=head f32"}) {
            for (const ProblemLine& line : forced_lines(op + rest + " t80 h4 k32 v32 chunk=64 threads=1")) {
                for (const DType narrow : {DType::bf16, DType::f16}) {
                    CallTensors made = harness::make_tensors(line);
                    harness::Tensor& wide = made.tensors.at("g_gamma");
                    harness::Tensor gates(narrow, {line.HV});
                    for (std::int64_t h = 0; h < line.HV; ++h) {
                        gates.set(h, wide.get(h));
                        wide.set(h, gates.get(h));
                    }
                    const std::map<std::string, Bytes> expected = run_and_read(made);
                    made.call.in.g_gamma = gates.view();
                    expect_same_bits(expected, run_and_read(made),
                                     format(line) + " with g_gamma in " + name_of(narrow));
                }
            }
        }
    }
}

TEST(Forward, F8_ChunkLengthsAreHints) {
    for (const std::string direction : {"fwd", "bwd"}) {
        for (const std::string& text : operators_and_gates(direction)) {
            for (const char* chunk : {"16", "32", "64", "128", "256"}) {
                for (const char* type : {"f64", "f32"}) {
                    expect_right(text + " t300 h1 k16 v24 threads=1 state=inout " + type + " chunk=" + chunk);
                }
            }
        }
    }
}

}  // namespace
}  // namespace headrace::test
