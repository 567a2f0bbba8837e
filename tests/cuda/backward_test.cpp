// Behaviours of backwards on CUDA: which form serves, what is saved between launches and in which type, sums over
// many chunks.
#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

std::map<std::string, DType> workspace_types(const ProblemLine& line) {
    std::map<std::string, DType> types;
    for (const PlanEntry& entry : workspace_entries(line)) types[entry.name] = entry.dtype;
    return types;
}

TEST(CudaBackward, B1_EachFormServesWhatItDoesBest) {
    EXPECT_EQ(served_by("simple_gla:bwd t33 h2 k32 cuda"), "cuda.split");
    EXPECT_EQ(served_by("simple_gla:bwd t32 h2 k32 cuda"), "cuda.walk");
    EXPECT_EQ(served_by("kda:bwd t17 h2 k32 cuda"), "cuda.split");
    EXPECT_EQ(served_by("kda:bwd t16 h2 k32 cuda"), "cuda.walk");
    EXPECT_EQ(served_by("kda:bwd t100 h2 k32 gv cuda"), "cuda.recurrent");
    for (const std::string op : {"delta_rule", "gated_delta_rule", "comba", "kda", "gla"}) {
        const std::string of = op + ":bwd bf16 cuda";
        EXPECT_EQ(served_by(of + " t64 h8 k64 v32"), "cuda.tensor");
        EXPECT_EQ(served_by(of + " t64 h4 hv8 k128 v256 l2norm"), "cuda.tensor");
        EXPECT_EQ(served_by(of + " t64 h8 k32 v32"), op == "gla" ? "cuda.tensor" : "cuda.split");
    }
    for (const char* of : {" k256 v512", " k136 v64", " k64 v256"}) {
        for (const std::string op : {"simple_gla:bwd", "simple_gla:fwd", "gla:bwd", "gla:fwd"})
            EXPECT_EQ(served_by(op + " bf16 cuda t64 h8" + of), "cuda.tensor");
        EXPECT_EQ(served_by(std::string("simple_gla:bwd f16 cuda t64 h8") + of), "cuda.tensor");
    }
    for (const char* refused :
         {"simple_gla:bwd bf16 cuda t64 h8 k136 v64 l2norm", "gla:bwd bf16 cuda t64 h8 k136 v64 l2norm",
          "gla:bwd bf16 cuda t64 h8 k136 v64 rawgate", "kda:bwd bf16 cuda t64 h8 k136 v64"})
        EXPECT_EQ(served_by(refused), "cuda.split") << refused;
    // gates of few tokens
    for (const std::string op : {"gated_delta_rule", "simple_gla", "kda"}) {
        EXPECT_EQ(served_by(op + ":bwd bf16 cuda t36 h7 k64 v32"), "cuda.split");
        EXPECT_EQ(served_by(op + ":bwd bf16 cuda t37 h7 k64 v32"), "cuda.tensor");
        EXPECT_EQ(served_by(op + ":bwd bf16 cuda t256 h1 k64 v32"), "cuda.tensor");
    }
    EXPECT_EQ(served_by("delta_rule:bwd bf16 cuda t36 h7 k64 v32"), "cuda.tensor");
    for (const char* text : {"kda:bwd t16 h1 k16", "simple_gla:bwd t100 h1 k16"}) {
        const std::vector<std::string> all = {"cuda.split", "cuda.walk", "cuda.recurrent"};
        EXPECT_EQ(accepting(line_of(std::string(text) + " cuda")), all);
    }
}

TEST(CudaBackward, B3_OfTheInitialStateAloneNothingIsSaved) {
    for (const Operator op : operators()) {
        const ProblemLine line = line_of(line_text(op, ":bwd t40 h1 k32 v24 state=inout force=cuda.split cuda"));
        const CallTensors all = harness::make_tensors(line), made = harness::make_tensors(line);
        Call call = made.call;
        const TensorView wanted = call.grads.d_initial_state;
        call.grads = {};
        call.grads.d_initial_state = wanted;
        for (const PlanEntry& entry : plan_of(harness::seen_from_device(call)))
            EXPECT_EQ(entry.name.find("saved"), std::string::npos) << format(line) << ": " << entry.name;
        EXPECT_TRUE(run_there(made, call).at("d_initial_state") == run_there(all).at("d_initial_state"))
            << format(line);
    }
}

TEST(CudaBackward, B4_GradientsOfHeadGatesOfManyChunks) {
    for (const char* text : {"retention:bwd t4096 h1 k8 v8", "gla:bwd t2048 h1 k8 v8 gate=channel+head",
                             "gated_delta_rule:bwd t500 h1 k16 v8 rawgate state=inout"}) {
        for (const ProblemLine& line : forced_lines(std::string(text) + " cuda")) expect_right(line);
    }
}

// All gates of a head are strong: on tensor cores, too, their gradient is far below what tokens leave in the final
// state, which has one, and in each other (docs/decisions/002).
TEST(CudaBackward, B4_GradientsOfHeadGatesThatForgetAll) {
    for (const std::string op : {"simple_gla", "gla", "gated_delta_rule", "comba", "kda"}) {
        for (const char* rest :
             {" t130 h8 k64 v64 bf16 gate=head gamma=-10", " t100 h2 hv8 k128 v32 bf16 gate=head gamma=-30 reverse"})
            expect_right(op + ":bwd" + rest + " state=inout force=cuda.tensor cuda");
    }
    expect_right("simple_gla:bwd t130 h8 k64 v64 f16 gate=head gamma=-20 state=inout force=cuda.tensor cuda");
}

// The gradients of states are saved in f32 under the delta rule (docs/numerics.md).
TEST(CudaBackward, B7_SavedStatesInF32OrInTheTypeOfTheInputs) {
    for (const Operator op : operators()) {
        for (const std::string type : {" bf16", " f16"}) {
            ProblemLine line = line_of(line_text(op, ":bwd t80 h8 k32 v24 state=inout force=cuda.split cuda") + type);
            std::map<DType, Bytes> d_q;
            for (const DType saved : {DType::f32, line.dtype}) {
                line.state_dtype = saved;
                const std::map<std::string, DType> types = workspace_types(line);
                EXPECT_EQ(types.at("saved states"), saved) << format(line);
                EXPECT_EQ(types.at("saved adjoints"), harness::has_delta_rule(op) ? DType::f32 : saved) << format(line);
                EXPECT_EQ(types.count("saved factors"), saved == DType::f16 ? 1U : 0U) << format(line);
                expect_right(line);
                d_q[saved] = run_there(line).at("d_q");
            }
            EXPECT_FALSE(d_q[DType::f32] == d_q[line.dtype]) << format(line) << ": the option has no effect";
            line.state_dtype.reset();
            EXPECT_TRUE(run_there(line).at("d_q") == d_q[line.dtype]) << format(line) << ": not the default";
        }
    }
}

// Their sums are few and may cancel, which roundings of states would not; so may a gradient through the final state.
TEST(CudaBackward, B7_WhatRestsOnFewSumsComesFromStatesInF32) {
    const auto saved = [](const std::string& text) { return workspace_types(line_of(text)).at("saved states"); };
    for (const std::string op : {"simple_gla", "kda"}) {
        EXPECT_EQ(saved(op + ":bwd t80 h7 k32 bf16 force=cuda.split cuda"), DType::f32);
        EXPECT_EQ(saved(op + ":bwd t80 h7 k32 bf16 saved=bf16 force=cuda.split cuda"), DType::f32);
        EXPECT_EQ(saved(op + ":bwd t80 h8 k32 bf16 force=cuda.split cuda"), DType::bf16);
    }
    CallTensors made = harness::make_tensors(line_of("simple_gla:bwd t80 h8 k32 bf16 state=inout cuda"));
    made.call.d_out.d_o = {};
    for (const PlanEntry& entry : plan_of(harness::seen_from_device(made.call))) {
        if (entry.name == "saved states") {
            EXPECT_EQ(entry.dtype, DType::f32);
        }
    }
}

// f16 holds 6e-8 to 65504; what is saved in it may be larger or smaller, all of a state or one number of it.
TEST(CudaBackward, B7_StatesSavedInF16KeepTheirRange) {
    constexpr std::int64_t K = 32, V = 80;
    for (const std::string text : {"linear_attention:bwd h2", "gla:bwd h8"}) {
        for (const double size : {1e6, 1e-7}) {
            for (const bool alone : {false, true}) {
                const ProblemLine line = line_of(text + " t70 k32 v80 f16 state=inout force=cuda.split cuda");
                CallTensors made = harness::make_tensors(line);
                const auto scale = [&](const char* name, double factor) {
                    harness::Tensor& tensor = made.tensors.at(name);
                    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, tensor.get(i) * factor);
                };
                scale("initial_state", size);
                harness::Tensor& state = made.tensors.at("initial_state");
                for (std::int64_t i = 0; alone && i < state.numel(); ++i)
                    if (i % (K * V) != 17 * V + 77) state.set(i, 0);
                scale("d_o", size > 1 ? 0.001 : 100);  // so that d_q = S d_o fits into f16
                if (size < 1) scale("v", 0);
                EXPECT_EQ(workspace_types(line).at("saved states"), DType::f16);
                const harness::Expected expected = harness::expect(made.call);
                run_there(made);
                expect_within_bars(made.call, expected.outputs, format(line) + (alone ? " alone" : ""), expected.terms);
            }
        }
    }
}

// A block takes a second part: 2 x 2 chunks of 140 key heads, and of sequences whose lengths are not known.
TEST(CudaBackward, MorePartsThanBlocks) {
    for (const char* text :
         {"simple_gla:bwd b2 t40 h140 k8 v8 gate=step+head", "delta_rule:bwd varlen=0,40,80 h160 k16 v8",
          "kda:bwd b2 t20 h140 hv280 k16 v8 rawgate state=inout bf16"}) {
        expect_right(std::string(text) + " force=cuda.split cuda");
    }
}

}  // namespace
}  // namespace headrace::test
