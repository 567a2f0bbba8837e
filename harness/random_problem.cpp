// random_problem: a valid problem drawn from a seed, over everything that a problem line can say.
#include <algorithm>
#include <initializer_list>

#include "harness/random.hpp"
#include "harness/tensors.hpp"

namespace headrace::harness {

namespace {

// What the oracle computes in a few milliseconds, and a long sequence's: states updated (tokens x heads x K x V).
constexpr std::int64_t most_work = 1'200'000, most_work_of_long = 8'500'000;

class Drawing {
  public:
    explicit Drawing(std::uint64_t seed) : stream_(seed, "problem") {}

    std::int64_t below(std::int64_t count) { return stream_.below(next_++, count); }
    std::int64_t between(std::int64_t least, std::int64_t most) { return least + below(most - least + 1); }
    bool chance(int percent) { return below(100) < percent; }

    template <typename T>
    T pick(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
    }
    template <typename T>
    T pick(const std::vector<T>& choices) {
        return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
    }

  private:
    Stream stream_;
    std::int64_t next_ = 0;
};

void draw_head_sizes(Drawing& draw, ProblemLine& line) {
    struct Pair {
        std::int64_t K, V;
    };
    const Pair pair = draw.pick({Pair{16, 8}, Pair{64, 64}, Pair{96, 80}, Pair{127, 129}, Pair{128, 128},
                                 Pair{128, 256}, Pair{256, 128}, Pair{192, 320}, Pair{32, 32}, Pair{16, 16}});
    const bool odd = draw.chance(50);
    const std::int64_t most = draw.pick<std::int64_t>({8, 40, 160});
    line.K = odd ? draw.between(1, most) : pair.K;
    line.V = odd ? draw.between(1, most) : pair.V;
    line.H = draw.pick<std::int64_t>({1, 1, 2, 3, 4});
    line.HV = line.H * draw.pick<std::int64_t>({1, 1, 1, 2, 3});
}

std::int64_t draw_length(Drawing& draw, Direction direction) {
    if (direction == Direction::step) return draw.chance(60) ? 1 : draw.between(0, 9);
    return draw.pick<std::int64_t>({0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200});
}

// A ragged batch: mostly short sequences, some empty, lengths at and around chunk borders.
void draw_varlen(Drawing& draw, ProblemLine& line) {
    line.varlen = {0};
    for (std::int64_t n = draw.between(1, 6); n > 0; --n) {
        const std::int64_t length = draw.chance(20)   ? 0
                                    : draw.chance(50) ? draw.between(1, 20)
                                                      : draw_length(draw, line.direction);
        line.varlen.push_back(line.varlen.back() + length);
    }
}

// Also what it takes to draw and compare the states where tokens are few.
std::int64_t work_of(const ProblemLine& line) {
    return std::max(line.B * line.T, line.sequences()) * line.HV * line.K * line.V;
}

// Gives up batch rows, groups, heads and at last tokens until the oracle is quick; head sizes stay as drawn.
void shrink(ProblemLine& line, std::int64_t most = most_work) {
    if (!line.varlen.empty()) line.B = 1, line.T = line.varlen.back();
    if (work_of(line) > most) line.B = 1;
    if (work_of(line) > most) line.HV = line.H;
    if (work_of(line) > most) line.H = line.HV = 1;
    const std::int64_t most_tokens = std::max<std::int64_t>(most / (line.HV * line.K * line.V), 1);
    line.T = std::min(line.T, most_tokens);
    for (std::int64_t& offset : line.varlen) offset = std::min(offset, line.T);
}

// Tokens enough that a state which hardly forgets adds up their roundings.
void draw_long(Drawing& draw, ProblemLine& line) {
    line.dtype = draw.pick({DType::f32, DType::bf16, DType::bf16, DType::f16});
    line.K = draw.pick<std::int64_t>({64, 128});
    line.V = draw.pick<std::int64_t>({32, 64});
    line.H = line.HV = draw.pick<std::int64_t>({1, 8});
    line.B = 1;
    line.T = most_work_of_long / (line.HV * line.K * line.V) - draw.below(100);
}

// Results that rest on few sums: a token or a few of one head or two, states of few columns.
void draw_few(Drawing& draw, ProblemLine& line) {
    line.dtype = draw.pick({DType::f32, DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64});
    line.B = 1;
    line.T = draw.pick<std::int64_t>({1, 1, 2, 3, 5, 8, 16});
    line.H = draw.pick<std::int64_t>({1, 1, 2});
    line.HV = line.H * draw.pick<std::int64_t>({1, 1, 2, 3});
    line.K = draw.pick<std::int64_t>({1, 2, 16, 32, 127, 256});
    line.V = draw.pick<std::int64_t>({1, 1, 2, 8, 129});
}

// What tensor cores of a GPU serve, or nearly, in a few chunks of 64 tokens.
void draw_for_tensor_cores(Drawing& draw, ProblemLine& line) {
    line.dtype = draw.pick({DType::bf16, DType::bf16, DType::bf16, DType::f16});
    const bool odd = draw.chance(30);
    line.K = odd ? draw.between(32, 256) : draw.pick<std::int64_t>({32, 64, 64, 80, 128, 128, 128, 200, 256});
    line.V = odd ? draw.between(32, 140) : draw.pick<std::int64_t>({32, 64, 64, 128, 128});
    line.B = draw.pick<std::int64_t>({1, 1, 2});
    line.H = draw.pick<std::int64_t>({1, 1, 2, 8});
    line.HV = line.H * draw.pick<std::int64_t>({1, 1, 2, 3, 5});
    line.T = draw.pick<std::int64_t>({33, 63, 64, 65, 127, 128, 129, 200, 300});
    if (draw.chance(30)) draw_varlen(draw, line);
    shrink(line, line.direction == Direction::backward ? most_work : 3 * most_work);
}

void draw_sizes(Drawing& draw, ProblemLine& line) {
    if (line.cuda && line.direction != Direction::step && draw.chance(50)) return draw_for_tensor_cores(draw, line);
    if (draw.chance(5)) return draw_few(draw, line);
    if (line.direction != Direction::step && draw.chance(3)) return draw_long(draw, line);
    line.dtype =
        draw.pick({DType::f32, DType::f32, DType::f32, DType::f32, DType::bf16, DType::bf16, DType::f16, DType::f64});
    draw_head_sizes(draw, line);
    line.B = draw.pick<std::int64_t>({1, 1, 2, 3});
    line.T = draw_length(draw, line.direction);
    if (draw.chance(30)) draw_varlen(draw, line);
    shrink(line);
}

// States that hardly forget, or in some channels only.
void draw_lasting(Drawing& draw, ProblemLine& line) {
    line.forget = draw.pick({0.0001, 0.001, 0.01, 0.05});
    if (has_channel(line.gate)) line.share = draw.pick({1.0, 1.0, 0.5, 0.2, 0.05});
}

// Up to 2, as values and as logits. With few channels a beta of 1 leaves of a state what rounding errors are, in the
// oracle too: 1 - sigmoid(30) is 9e-14. Comba erases from the undecayed state with a key of its own: above 1 its states
// grow.
void draw_beta(Drawing& draw, ProblemLine& line) {
    line.beta_form = static_cast<int>(draw.pick<std::int64_t>({0, 0, 1, 2}));
    constexpr std::int64_t channels_enough = 16;
    if (line.K < channels_enough || !draw.chance(30)) return;
    const double most = line.beta_form == 1 || line.op == Operator::comba ? 1 : 2;
    line.betas = Range{most * draw.pick({0.0, 0.5, 0.9, 1.0}), most};
}

void draw_gates(Drawing& draw, ProblemLine& line) {
    const std::vector<GateKind>& allowed = allowed_gates(line.op);
    line.gate = draw.chance(50) ? allowed.front() : draw.pick(allowed);
    if (has_head(line.gate) && draw.chance(50)) {
        line.gamma = draw.pick({-0.001, -0.3, -0.5, -0.7071, -0.7443, -0.8, -0.9286, -1.0, -1.4, -1.5, -3.0, -20.0});
    }
    const bool streamed = has_step(line.gate) || has_channel(line.gate);
    if (draw.chance(50)) {
        line.gates = draw.pick({GateValues::zero, GateValues::strong, GateValues::reset, GateValues::minus_inf,
                                GateValues::lasting});
    }
    if (line.gates == GateValues::lasting) draw_lasting(draw, line);
    line.gate_raw = streamed && line.gates != GateValues::minus_inf && draw.chance(25);
    if (line.gate_raw && draw.chance(40)) line.lower_bound = draw.pick({-5.0, -1.0, -0.25});
    if (has_delta_rule(line.op)) draw_beta(draw, line);
    const bool summary = line.direction == Direction::summarize || line.direction == Direction::summarize_backward;
    line.value_gate = draw.chance(4) && !summary;
    line.elementwise_beta = has_delta_rule(line.op) && draw.chance(4) && !summary;
}

void draw_options(Drawing& draw, ProblemLine& line) {
    const bool backward = line.direction == Direction::backward, step = line.direction == Direction::step;
    // K = 1: a normalised key has no direction left to learn, its exact gradient is rounding noise of any computation
    line.l2norm = draw.chance(25) && !(backward && line.K == 1);
    line.vfirst = draw.chance(25);
    line.reverse = !step && draw.chance(20);
    line.strided = draw.chance(40);
    line.state_in = !step && draw.chance(50);
    line.state_out = !step && draw.chance(50) && line.direction != Direction::summarize;
    if (line.direction == Direction::summarize)
        line.part = draw.pick({Parts::both, Parts::both, Parts::transition, Parts::state});
    if (draw.chance(20)) line.scale = draw.pick({1.0, 0.25, 2.0, -0.5});
    if (draw.chance(50)) line.chunk = draw.pick({16, 32, 64, 128, 256});
    if (draw.chance(40)) line.num_steps = draw.pick({1, 2, 3, 4, 5, 8, 16});
    // saved states are used once: in the type of the problem they cost less than the bars of 16-bit types allow
    if (backward && draw.chance(40))
        line.state_dtype = line.dtype == DType::f64 || draw.chance(50) ? line.dtype : DType::f32;
    line.threads = static_cast<int>(draw.between(1, 2));
}

// Keys that repeat: what a state learns of them are differences.
void draw_directions(Drawing& draw, ProblemLine& line) {
    if (!draw.chance(15)) return;
    const std::int64_t directions = draw.pick<std::int64_t>({1, 1, 2, 5, 20});
    // Backwards in bf16 whose tokens all reflect whole along few directions miss their bars on a CPU
    // (docs/numerics.md).
    const bool backward = line.direction == Direction::backward;
    const bool reflects = backward && line.dtype == DType::bf16 && line.betas && line.betas->least > 1.9;
    // Behind a reset Comba's transitions become next to nothing, and are right beside the identity only.
    const bool resets =
        line.gates == GateValues::strong || line.gates == GateValues::reset || line.gates == GateValues::minus_inf;
    const bool vanishes = line.op == Operator::comba && line.direction == Direction::summarize && resets;
    if (!reflects && !vanishes) line.directions = directions;
}

void draw_pool(Drawing& draw, ProblemLine& line) {
    if (line.direction != Direction::step) return;
    if (line.varlen.empty() && line.T > 0 && draw.chance(30)) line.speculative = line.T;
    const std::int64_t rows = line.sequences() * std::max<std::int64_t>(line.speculative, 1);
    if (draw.chance(60)) line.pool = rows + draw.between(0, 4);
}

void draw_ranks(Drawing& draw, ProblemLine& line) {
    const bool in_pieces = line.direction == Direction::forward || line.direction == Direction::backward;
    if (in_pieces && !line.value_gate && !line.elementwise_beta && draw.chance(15))
        line.ranks = static_cast<int>(draw.between(1, 8));
}

// Forces one of the implementations that accept the problem, if any does.
void draw_force(Drawing& draw, ProblemLine& line) {
    if (!draw.chance(50)) return;
    const CallTensors shapes = make_shapes(line);
    std::vector<Candidate> candidates;
    if (Status status = explain(shapes.call, &candidates); !status.ok()) return;
    std::vector<std::string> accepting;
    for (const Candidate& candidate : candidates) {
        if (candidate.refusal.empty()) accepting.push_back(candidate.name);
    }
    if (!accepting.empty()) line.force = draw.pick(accepting);
}

}  // namespace

ProblemLine random_problem(std::uint64_t seed, Device device) {
    Drawing draw(seed);
    ProblemLine line;
    line.cuda = device == Device::cuda;
    line.op = static_cast<Operator>(draw.below(static_cast<std::int64_t>(Operator::kda) + 1));
    line.direction =
        draw.pick({Direction::forward, Direction::forward, Direction::forward, Direction::forward, Direction::backward,
                   Direction::backward, Direction::backward, Direction::backward, Direction::step, Direction::step,
                   Direction::summarize, Direction::summarize_backward});
    line.seed = static_cast<std::uint64_t>(draw.between(1, 999'999));
    draw_sizes(draw, line);
    draw_gates(draw, line);
    draw_options(draw, line);
    draw_pool(draw, line);
    draw_ranks(draw, line);
    draw_directions(draw, line);
    draw_force(draw, line);
    return line;
}

}  // namespace headrace::harness
