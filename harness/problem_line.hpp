// ProblemLine: the one-line text form of a call, shared by tests, bench and command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::harness {

enum class GateKind { none, head, step, channel, step_head, channel_head };  // "step+head", "channel+head" in text
// How gate values are drawn: random = logsigmoid-like values of trained models; zero; strong = around -20 with some
// near 0; reset = random with -720, -1000 and -1e30 at random positions, and logits of beta with -720; minus_inf =
// random with -inf at random positions; lasting = uniform between -forget and 0, of channel gates on a share of the
// channels (the others random).
enum class GateValues { random, zero, strong, reset, minus_inf, lasting };

enum class Parts { both, transition, state };  // of a summary

// What uniform numbers are drawn from.
struct Range {
    double least, most;
    bool operator==(const Range&) const = default;
};

// One problem:  OPERATOR:fwd|bwd|step|summary|summary_bwd b2 t4096 h16 hv32 k128 v128 f64|f32|bf16|f16 [options]
// What is left out has a default: b1 t256 h4 hv=h k64 v=k f32, the operator's own gate, gates=random, seed=1.
struct ProblemLine {
    Operator op = Operator::linear_attention;
    Direction direction = Direction::forward;
    std::int64_t B = 1, T = 256, H = 4, HV = 4, K = 64, V = 64;
    DType dtype = DType::f32;
    GateKind gate = GateKind::none;
    std::optional<double> gamma;  // gamma=-0.7: the same head gate on every head; without it slopes per head
    GateValues gates = GateValues::random;
    double forget = 0.001, share = 1;  // gates=lasting: forget=0.001, share=0.25
    int chunk = 0, num_steps = 0;
    std::vector<std::int64_t> varlen;          // varlen=0,100,4096: cu_seqlens; sets T to the last and B to 1
    bool state_in = false, state_out = false;  // state=none|in|out|inout (backward: out = with d_final_state;
                                               // a summary has no state that leaves it)
    bool l2norm = false, vfirst = false, reverse = false;
    bool gate_raw = false;              // gate=raw form: A_log, dt_bias given: option word `rawgate`
    std::optional<double> lower_bound;  // `bound=-5`: bounded form, implies rawgate
    int beta_form = 0;                  // `beta=value|sigmoid|two_sigmoid`
    std::optional<Range> betas;         // `betas=1.9,2`: what beta is in the end, in each of its forms
    std::int64_t directions = 0;        // `directions=N`: keys repeat after N tokens; 0: they do not
    bool value_gate = false;            // `gv`: value-side gate (recurrent form only)
    bool elementwise_beta = false;      // `betav`: beta of shape [B,T,HV,V] (recurrent form only)
    std::optional<double> scale;        // scale=1
    std::optional<DType> state_dtype;   // saved=f32|bf16
    std::optional<DType> given_states;  // states=f16: initial_state, its gradient and that of final_state
    std::int64_t pool = 0;              // step: rows of the state pool, `pool=N`; 0: one row per sequence in order
    std::int64_t speculative = 0;       // step: `spec=S`: 2-D indices with S = tokens of each sequence
    Parts part = Parts::both;           // summary: part=transition|state
    int ranks = 0;               // fwd, bwd: ranks=P pieces of the tokens, joined by summaries (harness/ranks.hpp)
    std::optional<double> link;  // with ranks: link=25 Gbit/s between them, for headrace plan
    bool strided = false;        // `strided`: tensors with padded, permuted or doubled strides
    bool cuda = false;           // `cuda`: tensors on a CUDA device (harness/device_call.hpp)
    std::string gpu;             // `cuda=h200`: of what kind, for headrace plan (harness/gpu_model.hpp)
    std::string force;           // force=NAME
    int threads = 0;
    std::uint64_t seed = 1;  // 1: all variants that the seed decides (types, layouts) are the plain ones

    std::int64_t sequences() const { return varlen.empty() ? B : static_cast<std::int64_t>(varlen.size()) - 1; }
    bool operator==(const ProblemLine&) const = default;
};

// Facts about operators and gates that the line form needs.
bool has_delta_rule(Operator op);
const std::vector<GateKind>& allowed_gates(Operator op);  // the first is the operator's own
inline bool has_step(GateKind gate) { return gate == GateKind::step || gate == GateKind::step_head; }
inline bool has_channel(GateKind gate) { return gate == GateKind::channel || gate == GateKind::channel_head; }
inline bool has_head(GateKind gate) {
    return gate == GateKind::head || gate == GateKind::step_head || gate == GateKind::channel_head;
}

// Parses a line; a first word that is a preset's name (alone, or with :fwd, :bwd or :step) stands for that preset's
// line, later words override it. Without a gate word, gamma= means gate=head. Without a t word, spec=S means tS.
// On failure returns a Status that names the word and says what was expected; `line` is then unchanged.
Status parse(const std::string& text, ProblemLine* line);

// The canonical text: parse(format(x)) == x, defaults left out.
std::string format(const ProblemLine& line);

// One preset of real models: its name, its line and where it comes from.
struct Preset {
    std::string name, line, source;
};
const std::vector<Preset>& presets();

// The names of the presets that stand for the five families: lightning attention, GLA, Gated DeltaNet, Comba, KDA.
const std::vector<std::string>& family_presets();

// All lines of a problem file: '#' starts a comment, blank lines are skipped. Errors name the file and line number.
Status read_problem_file(const std::string& path, std::vector<ProblemLine>* lines);

// A random problem: operators, gates, types, ragged batches, grouped heads, odd sizes, extreme gates, states, strides,
// hints and forced implementations, all drawn from the seed. Small enough for the oracle (well under 10 ms each).
// On a CUDA device half of them are of types and sizes that tensor cores serve.
ProblemLine random_problem(std::uint64_t seed, Device device = Device::cpu);

}  // namespace headrace::harness
