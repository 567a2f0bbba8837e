// Sequences that the form on tensor cores cuts into segments, forward and backward, beside some that it does not.
#include <map>
#include <string>
#include <vector>

#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/pieces.hpp"

namespace headrace::test {
namespace {

// Of 512, 1024 and 2048 tokens, and sequences that are shorter.
TEST(CudaSegments, N6_Prefixes) {
    const struct {
        const char* text;
        std::vector<std::int64_t> lengths;
    } cases[] = {{"simple_gla:fwd t1300 h1 k32 v40 bf16", {400, 512, 520, 1024, 1030}},
                 {"simple_gla:fwd t1300 h1 k32 v40 f16", {400, 512, 520, 1024, 1030}},
                 {"simple_gla:fwd t2100 h33 k32 v40 bf16", {520, 2048, 2055}},
                 {"gla:fwd t1300 h1 k32 v40 bf16", {400, 512, 520, 1024, 1030}},
                 {"gla:fwd t2100 h33 k32 v40 bf16", {520, 2048, 2055}},
                 {"gated_delta_rule:fwd t1300 h1 k64 v40 bf16 l2norm", {400, 512, 520, 1024, 1030}},
                 {"gated_delta_rule:fwd t1300 h1 k64 v40 f16 l2norm", {400, 512, 520, 1024, 1030}},
                 {"gated_delta_rule:fwd t1300 h9 k72 v40 bf16 l2norm", {520, 1024, 1030}},
                 {"kda:fwd t1300 h1 k64 v40 bf16 l2norm", {400, 512, 520, 1024, 1030}},
                 {"kda:fwd t1300 h17 k72 v40 bf16 l2norm", {520, 1024, 1030}}};
    for (const auto& each : cases) {
        const ProblemLine line = line_of(std::string(each.text) + " state=inout force=cuda.tensor cuda");
        const CallTensors whole = harness::make_tensors(line), prefix = harness::make_tensors(line);
        const harness::Expected expected = harness::expect(whole.call);
        run_there(whole);
        expect_within_bars(whole.call, expected.outputs, format(line));
        for (const std::int64_t length : each.lengths) {
            run_there(prefix, tokens_of(prefix.call, 0, length));
            EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                        harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
                << format(line) << ": length " << length;
        }
    }
}

// The transitions of segments are joined in both directions, of any widths.
TEST(CudaSegments, Gradients) {
    for (const char* text : {"gated_delta_rule:bwd t2100 h1 hv2 k70 v49 gates=lasting state=inout betas=1.9,2 l2norm",
                             "gated_delta_rule:bwd varlen=0,0,1500,1537 h1 k128 v72 gates=lasting state=inout",
                             "comba:bwd t1100 h1 k127 v33 gates=zero state=inout reverse",
                             "delta_rule:bwd t1030 h2 k64 v64 betas=2,2 directions=2",
                             "kda:bwd t2100 h1 k100 v49 gates=lasting state=inout l2norm",
                             "kda:bwd varlen=0,37,1300 h1 hv2 k64 v130 gates=lasting betas=1.9,2 state=out",
                             "gla:bwd t2100 h1 k33 v40 gates=lasting state=inout reverse",
                             "gla:bwd varlen=0,1090,1095 h1 k200 v72 gates=lasting state=inout"})
        expect_right(std::string(text) + " bf16 force=cuda.tensor cuda");
}

// Some without tokens, some shorter than a segment and some longer.
TEST(CudaSegments, PiecesOfLongSequences) {
    for (const char* text :
         {"simple_gla:fwd t1900 h1 k32 v32", "gla:fwd t1900 h1 k32 v32", "gated_delta_rule:fwd t1900 h1 k64 v32",
          "kda:fwd t1900 h1 k64 v32", "comba:fwd varlen=0,1900,2000 h1 k64 v32", "simple_gla:bwd t1900 h8 k32 v32",
          "gla:bwd t1900 h8 k32 v32", "gated_delta_rule:bwd t1900 h8 k64 v32", "kda:bwd t1900 h8 k64 v32"}) {
        CallTensors made =
            harness::make_tensors(line_of(std::string(text) + " gates=lasting state=inout bf16 force=cuda.tensor cuda"));
        const harness::Expected expected = harness::expect(made.call);
        Pieces pieces(made, {0, 300, 300, 1500}, &run_piece_there, true);
        made.call.direction == Direction::forward ? pieces.run_forward() : pieces.run_backward();
        expect_within_bars(made.call, expected.outputs, text, expected.terms);
    }
}

// The gradient of v or the initial state alone has the same bits, and needs no states and nothing saved, in segments or
// without.
TEST(CudaSegments, AdjointsAlone) {
    for (const std::string text :
         {"gated_delta_rule:bwd t1100 h1 k64 v33 gates=lasting", "kda:bwd t1100 h1 k64 v33 gates=lasting",
          "gla:bwd t1100 h1 k64 v33 gates=lasting", "kda:bwd t130 h8 k64 v32", "gla:bwd t130 h8 k64 v32"}) {
        const ProblemLine line = line_of(text + " state=inout bf16 force=cuda.tensor cuda");
        const std::map<std::string, Bytes> all = run_there(line);
        for (TensorView Gradients::*wanted : {&Gradients::d_v, &Gradients::d_initial_state}) {
            const CallTensors made = harness::make_tensors(line);
            Call call = made.call;
            call.grads = {};
            call.grads.*wanted = made.call.grads.*wanted;
            for (const PlanEntry& entry : plan_of(harness::seen_from_device(call))) {
                for (const char* unneeded : {"states", "saved"})
                    EXPECT_EQ(entry.name.find(unneeded), std::string::npos) << format(line) << ": " << entry.name;
            }
            const char* const name = wanted == &Gradients::d_v ? "d_v" : "d_initial_state";
            EXPECT_TRUE(run_there(made, call).at(name) == all.at(name)) << format(line) << ": " << name;
        }
    }
}

// Where few blocks walk whole sequences, in segments of so many tokens; of a backward each takes a value head and 64
// values twice.
TEST(CudaSegments, WhereFewBlocksAre) {
    const auto segments = [](const std::string& text) {
        for (const PlanEntry& entry : workspace_entries(line_of(text + " bf16 cuda")))
            if (entry.name.find("segment states") == 0) return entry.shape[0];
        return std::int64_t{0};
    };
    // The most tokens without segments, and of how many one segment more has some.
    const struct {
        const char *text, *heads, *more_heads;
        std::int64_t tokens, more_tokens;
    } cases[] = {{"simple_gla:fwd k128 v64", "h32", "h33", 512, 2048},
                 {"simple_gla:fwd k128 v128", "h32", "h33", 2048, 0},
                 {"gla:fwd k128 v64", "h16", "h17", 512, 1024},
                 {"gla:fwd k128 v64", "h32", "h33", 1024, 2048},
                 {"gla:fwd k128 v64", "h48", "h49", 2048, 0},
                 {"gated_delta_rule:fwd k64 v64", "h32", "h33", 512, 0},
                 {"gated_delta_rule:fwd k128 v128", "h4", "h5", 512, 1024},
                 {"gated_delta_rule:fwd k128 v128", "h12", "h13", 1024, 0},
                 {"gated_delta_rule:fwd k128 v128", "b2 h2", "b3 h2", 512, 1024},
                 {"gated_delta_rule:fwd k256 v64", "h1", "h9", 0, 0},
                 {"kda:fwd k64 v64", "h32", "h33", 512, 0},
                 {"kda:fwd k128 v128", "h8", "h9", 512, 1024},
                 {"kda:fwd k128 v128", "h16", "h17", 1024, 0},
                 {"simple_gla:bwd k64 v128", "h16", "h17", 512, 2048},
                 {"simple_gla:bwd k128 v64", "h32", "h33", 2048, 0},
                 {"gated_delta_rule:bwd k64 v64", "h9", "h10", 512, 1024},
                 {"gated_delta_rule:bwd k128 v128", "h2 hv4", "h1 hv5", 512, 1024},
                 {"gated_delta_rule:bwd k128 v128", "h2 hv8", "h9", 1024, 0},
                 {"kda:bwd k128 v128", "b2 h4", "b3 h3", 1024, 0},
                 {"gla:bwd k64 v128", "h6", "h7", 512, 1024},
                 {"gla:bwd k64 v128", "h10", "h11", 1024, 0}};
    for (const auto& each : cases) {
        for (const auto& [heads, tokens] : {std::pair(each.heads, each.tokens), {each.more_heads, each.more_tokens}}) {
            const std::string text = std::string(each.text) + " " + heads;
            const std::int64_t most = tokens > 0 ? tokens : 8192,
                               sequences = text.find(" b") == text.npos ? 1 : text[text.find(" b") + 2] - '0';
            EXPECT_EQ(segments(text + " t" + std::to_string(most)), 0) << text;
            if (tokens == 0) continue;
            EXPECT_EQ(segments(text + " t" + std::to_string(most + 1)), 2 * sequences) << text;
            EXPECT_EQ(segments(text + " t" + std::to_string(2 * most + 1)), 3 * sequences) << text;
        }
    }
}

}  // namespace
}  // namespace headrace::test
