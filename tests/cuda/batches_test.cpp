// Walks of the delta rule over many heads and sequences, by two groups of warps in a block (compute capability 9.0).
#include <utility>

#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

// The call of its first two rows alone, which has too few heads for that. Ragged batches have one row.
Call of_few(Call call) {
    constexpr std::int64_t rows = 2;
    const auto narrow = [&](TensorView& view) {
        if (view.given() && !call.in.cu_seqlens.given()) view.shape[0] = rows;
    };
    for (TensorView Inputs::*tensor :
         {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::p, &Inputs::g, &Inputs::beta, &Inputs::initial_state})
        narrow(call.in.*tensor);
    narrow(call.out.o), narrow(call.out.final_state);
    return call;
}

// Two groups find what they should, and the bits that one group does.
void expect_right_as_of_few(const std::string& text) {
    const std::string line = text + " bf16 force=cuda.tensor cuda";
    const CallTensors made = harness::make_tensors(line_of(line)), few = harness::make_tensors(line_of(line));
    const harness::Expected expected = harness::expect(made.call);
    run_there(made);
    expect_within_bars(made.call, expected.outputs, line, expected.terms);
    run_there(few, of_few(few.call));
    const Outputs all = of_few(made.call).out, alone = of_few(few.call).out;
    for (const auto& [one, other] : {std::pair(all.o, alone.o), std::pair(all.final_state, alone.final_state)})
        EXPECT_TRUE(!one.given() || harness::read_bytes(one) == harness::read_bytes(other)) << line;
}

// Whole chunks and others, values that end in the second group, keys that overlap and that repeat, gates of any
// strength.
TEST(CudaBatches, GatesPerToken) {
    for (const char* text : {"gated_delta_rule:fwd b34 t130 h1 hv2 k128 v128 state=inout",
                             "gated_delta_rule:fwd b17 t70 h2 hv4 k128 v100 l2norm gates=lasting reverse",
                             "gated_delta_rule:fwd b34 t150 h2 k128 v72 l2norm directions=20 betas=0,1 gates=lasting",
                             "gated_delta_rule:fwd b34 t100 h2 k128 v128 l2norm directions=1 betas=1.9,2 forget=0.1 "
                             "gates=lasting state=in",
                             "gated_delta_rule:fwd b34 t200 h2 k128 v65 betas=1.9,2 gates=zero state=inout",
                             "delta_rule:fwd b9 t90 h4 k72 v256 l2norm state=out strided",
                             "comba:fwd b34 t130 h1 hv2 k100 v128 gates=strong state=inout",
                             "comba:fwd b34 t130 h2 k128 v96 l2norm directions=1 betas=1.9,2 forget=0.1 gates=lasting "
                             "reverse strided",
                             "gated_delta_rule:fwd varlen=0,40,40,41,170,200 h14 k128 v128 state=inout"})
        expect_right_as_of_few(text);
}

TEST(CudaBatches, GatesPerChannel) {
    for (const char* text : {"kda:fwd b34 t150 h1 hv2 k128 v128 state=inout",
                             "kda:fwd b34 t130 h2 k128 v72 l2norm gates=lasting betas=1.9,2 directions=1 state=inout",
                             "kda:fwd b17 t200 h4 k100 v100 l2norm gates=zero betas=0,1 directions=20 reverse",
                             "kda:fwd b34 t150 h2 k128 v128 l2norm gates=zero betas=1.9,2 state=in",
                             "kda:fwd varlen=0,40,40,41,170,200 h14 k128 v96 gate=channel+head rawgate strided"})
        expect_right_as_of_few(text);
}

}  // namespace
}  // namespace headrace::test
