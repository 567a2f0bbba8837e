// N4, N6: what one NaN or infinity does, in every tensor of every call: refused by name, or kept to its sequence, head.
#include <cstring>

#include "behaviours.hpp"

namespace headrace::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double not_a_number = std::numeric_limits<double>::quiet_NaN();

// The spoiled element: in sequence 1, in value head 3 of 4 or the key head 1 of 2 that it shares with head 2; token 21
// of its sequence.
constexpr std::int64_t bad_sequence = 1, bad_head = 3, bad_token = 21, chunk = 16, group = 2, any = -1;

// Where an element of a tensor lies; `any`: it belongs to all sequences, or to no token.
struct Place {
    std::int64_t sequence = any, head = any, token = any;
};

// The letters of a tensor's dimensions: N, T (tokens, after a batch), H (value heads), h (key heads).
const char* letters_of(std::string_view name) {
    if (name.substr(0, 2) == "d_") name.remove_prefix(2);
    if (name == "q" || name == "k" || name == "p") return "BTh.";
    if (name == "initial_state" || name == "final_state" || name == "pool") return "NH..";
    if (name == "g_gamma" || name == "A_log" || name == "dt_bias") return "H.";
    return "BTH.";
}

bool has(const std::string& name, char letter) { return std::strchr(letters_of(name), letter) != nullptr; }

Place place_of(const std::string& name, const TensorView& view, std::int64_t element, const ProblemLine& line) {
    const char* letters = letters_of(name);
    Place place;
    std::int64_t rest = element;
    for (int i = view.rank - 1; i >= 0; --i) {
        const std::int64_t index = rest % view.shape[i];
        rest /= view.shape[i];
        switch (letters[i]) {
            case 'h': place.head = index * group; break;
            case 'H': place.head = name.find("dt_bias") != std::string::npos && view.rank == 1 && view.shape[0] != line.HV
                                       ? index / line.K  // [HV * K]
                                       : index;
                      break;
            case 'N':
            case 'B': place.sequence = index; break;
            case 'T': place.token = index; break;
            default: break;
        }
    }
    if (place.token == any || line.varlen.empty()) return place;
    place.sequence = 0;
    while (line.varlen[static_cast<std::size_t>(place.sequence) + 1] <= place.token) ++place.sequence;
    place.token -= line.varlen[static_cast<std::size_t>(place.sequence)];
    return place;
}

// The element to spoil: the middle one of its token, head and sequence.
std::int64_t element_to_spoil(const std::string& name, const TensorView& view, const ProblemLine& line) {
    std::int64_t first = any, last = any;
    for (std::int64_t i = 0; i < view.numel(); ++i) {
        const Place place = place_of(name, view, i, line);
        const bool fits = (place.sequence == any || place.sequence == bad_sequence) &&
                          (place.token == any || place.token == bad_token % line.T) && place.head / group == bad_head / group &&
                          (has(name, 'h') || place.head == bad_head);
        if (!fits) continue;
        if (first == any) first = i;
        last = i;
    }
    return (first + last) / 2;
}

// Whether a bad element of tensor `bad` may change the output at `place`. A tensor of the heads that share a key
// changes both; outputs of tokens before its chunk, or in the recurrent form before itself, it does not.
bool may_change(const std::string& bad, const std::string& output, const Place& place, const ProblemLine& line) {
    const bool everywhere = letters_of(bad)[0] == 'H';  // a parameter of a head, in all sequences
    if (!everywhere && place.sequence != any && place.sequence != bad_sequence) return false;
    const bool shared = has(bad, 'h') || has(output, 'h');
    if (shared ? place.head / group != bad_head / group : place.head != bad_head) return false;
    if (output != "o" || !has(bad, 'T')) return true;
    const bool recurrent = line.force.find(".recurrent") != std::string::npos;
    const std::int64_t tokens = line.varlen.empty() ? line.T : line.varlen[2] - line.varlen[1];
    const std::int64_t bad_turn = line.reverse ? tokens - 1 - bad_token % line.T : bad_token % line.T;
    const std::int64_t turn = line.reverse ? tokens - 1 - place.token : place.token;
    return turn >= (recurrent ? bad_turn : bad_turn / chunk * chunk);
}

enum class Answer { refused, served, spread };

// The table of docs/numerics.md.
Answer answer_to(const std::string& name, double value, const ProblemLine& line) {
    const bool nan = std::isnan(value);
    if (name == "beta") return nan || line.beta_form == 0 ? Answer::refused : Answer::served;
    if (name == "gv" || name == "g_gamma" || (name == "g" && !line.gate_raw))
        return nan || value > 0 ? Answer::refused : Answer::served;
    if (name != "g" && name != "A_log" && name != "dt_bias") return Answer::spread;
    if (nan) return Answer::refused;
    return name == "A_log" && value > 0 && line.direction == Direction::backward ? Answer::spread : Answer::served;
}

// What a call wrote, tensor by tensor.
struct Written {
    std::string name;
    TensorView view;
    Bytes bytes;
};
std::vector<Written> outputs_of(const Call& call) {
    std::vector<Written> outputs;
    for (const harness::NamedView& output : harness::output_views(call)) outputs.push_back({output.name, output.view, {}});
    if (call.pool.states.given()) outputs.push_back({"pool", call.pool.states, {}});
    for (Written& output : outputs) output.bytes = harness::read_bytes(output.view);
    return outputs;
}

// `clean`: what the same call writes without the bad element.
void expect_kept_apart(const std::vector<Written>& clean, const std::vector<Written>& spoiled, const std::string& bad,
                       const harness::Expected& expected, const ProblemLine& line, const std::string& what) {
    std::int64_t spread = 0;
    for (std::size_t number = 0; number < spoiled.size(); ++number) {
        const auto& [name, view, bytes] = spoiled[number];
        const std::vector<double> values = harness::read_values(view);
        const auto reference = expected.outputs.find(name);
        const std::size_t size = size_of(view.dtype);
        std::int64_t changed = 0, lost = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
            const bool same = std::memcmp(&bytes[i * size], &clean[number].bytes[i * size], size) == 0;
            const auto element = static_cast<std::int64_t>(i);
            if (!same && !may_change(bad, name, place_of(name, view, element, line), line)) ++changed;
            if (!std::isfinite(values[i])) {
                ++spread;
            } else if (reference != expected.outputs.end() && !std::isfinite(reference->second[i])) {
                ++lost;
            }
        }
        EXPECT_EQ(changed, 0) << what << ": elements of " << name << " changed that do not depend on it";
        EXPECT_EQ(lost, 0) << what << ": elements of " << name << " are finite where the oracle's are not";
    }
    EXPECT_GT(spread, 0) << what << ": no output shows it";
}

// One call with the bad element, in one implementation.
void expect_answer(const ProblemLine& line, const std::vector<Written>& clean, const std::string& bad,
                   std::int64_t element, double value, const harness::Expected& expected) {
    const std::string what = format(line) + ": " + std::to_string(value) + " in " + bad;
    CallTensors spoiled = harness::make_tensors(line);
    spoiled.tensors.at(bad).set(element, value);
    const Status status = run(spoiled.call);
    const Answer answer = answer_to(bad, value, line);
    if (answer == Answer::refused) {
        EXPECT_EQ(status.code(), Code::invalid_argument) << what;
        EXPECT_EQ(status.message().substr(0, bad.size() + 2), bad + ": ") << what;
        return;
    }
    EXPECT_TRUE(status.ok()) << what << ": " << status.message();
    if (answer == Answer::served) return expect_within_bars(spoiled.call, expected.outputs, what);
    expect_kept_apart(clean, outputs_of(spoiled.call), bad, expected, line, what);
}

void expect_answers(const std::string& text, const std::vector<double>& values = {not_a_number, infinity, -infinity}) {
    const std::vector<ProblemLine> lines = forced_lines(text + " threads=1");
    std::vector<std::vector<Written>> clean;
    for (const ProblemLine& line : lines) {
        const CallTensors made = harness::make_tensors(line);
        ASSERT_TRUE(run(made.call).ok()) << format(line);
        clean.push_back(outputs_of(made.call));
    }
    CallTensors made = harness::make_tensors(lines.at(0));
    std::vector<harness::NamedView> inputs = harness::input_views(made.call);
    if (made.call.pool.states.given()) inputs.push_back({"pool", made.call.pool.states});
    for (const harness::NamedView& input : inputs) {
        if (input.view.dtype == DType::i32 || input.view.dtype == DType::i64) continue;
        harness::Tensor& tensor = made.tensors.at(input.name);
        const std::int64_t element = element_to_spoil(input.name, input.view, lines[0]);
        const double old = tensor.get(element);
        for (const double value : values) {
            tensor.set(element, value);
            const harness::Expected expected = harness::expect(made.call);
            for (std::size_t i = 0; i < lines.size(); ++i) {
                expect_answer(lines[i], clean[i], input.name, element, value, expected);
            }
        }
        tensor.set(element, old);
    }
}

const char* const directions[] = {"fwd", "bwd", "step"};

std::string states_of(const std::string& direction) { return direction == "step" ? "" : " state=inout"; }

TEST(Values, OneBadElementOfAnyTensor) {
    for (const std::string direction : directions) {
        for (const std::string& words : operators_and_gates(direction)) {
            expect_answers(words + " b2 t40 h2 hv4 k16 v8 chunk=16" + states_of(direction));
        }
    }
}

TEST(Values, OneBadElementInARaggedBatch) {
    for (const std::string direction : directions) {
        for (const Operator op : operators()) {
            expect_answers(line_text(op, ":" + direction) + " varlen=0,19,52,60 h2 hv4 k16 v8 chunk=16 l2norm" +
                           states_of(direction), {not_a_number, infinity});
        }
    }
}

TEST(Values, OneBadElementInEveryType) {
    for (const std::string direction : directions) {
        for (const std::string op : {"simple_gla:", "gla:", "comba:", "kda:"}) {
            for (const char* type : {" f64", " bf16", " f16"}) {
                expect_answers(op + direction + " b2 t33 h2 hv4 k64 v32 chunk=16" + states_of(direction) + type,
                               {not_a_number});
            }
        }
    }
}

TEST(Values, OneBadElementInEveryForm) {
    for (const std::string direction : directions) {
        for (const char* form : {"simple_gla: rawgate", "gla: rawgate bound=-3", "gla: reverse gv", "kda: reverse",
                                 "kda: beta=sigmoid rawgate", "gated_delta_rule: beta=two_sigmoid", "kda: betav",
                                 "comba: betav beta=sigmoid"}) {
            std::string words = form;
            words.insert(words.find(':') + 1, direction);
            expect_answers(words + " b2 t40 h2 hv4 k16 v8 chunk=16" + states_of(direction));
        }
    }
}

}  // namespace
}  // namespace headrace::test
