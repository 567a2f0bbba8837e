// bad_elements: what one NaN or infinity in any tensor of a call does, on a CPU or a device: it is refused, served, or
// kept to its sequence, head and tokens (the table of docs/numerics.md).
#pragma once

#include <cstring>
#include <functional>

#include "behaviours.hpp"

namespace headrace::test {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline const double not_a_number = std::numeric_limits<double>::quiet_NaN();

// What it is asked of: a machine and an element, in sequence 1, in value head 3 of 4 or the key head 1 of 2 that it
// shares with head 2.
class BadElements {
  public:
    using RunCall = std::function<Status(const Call&)>;
    // `refuses`: calls return errors of what they refuse, and do not make NaN of its head. The element is of that token
    // of its sequence, where it may change all outputs of a chunk of so many tokens.
    BadElements(RunCall run_call, bool refuses, std::int64_t token = 21, std::int64_t chunk = 16)
        : run_call_(std::move(run_call)), refuses_(refuses), token_(token), chunk_(chunk) {}

    // Each value in each tensor of the line, by every implementation, or those whose names end so.
    void expect_answers(const std::string& text,
                        const std::vector<double>& values = {not_a_number, infinity, -infinity},
                        const std::string& algorithm = "") const {
        const std::vector<ProblemLine> lines = forced_lines(text + " threads=1", algorithm);
        ASSERT_FALSE(lines.empty()) << text;
        std::vector<std::vector<Written>> clean;
        for (const ProblemLine& line : lines) {
            const CallTensors made = harness::make_tensors(line);
            ASSERT_TRUE(run_call_(made.call).ok()) << format(line);
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
                for (std::size_t i = 0; i < lines.size(); ++i)
                    expect_answer(lines[i], clean[i], input.name, element, value, expected);
            }
            tensor.set(element, old);
        }
    }

  private:
    static constexpr std::int64_t bad_sequence = 1, bad_head = 3, group = 2, any = -1;
    RunCall run_call_;
    bool refuses_;
    std::int64_t token_, chunk_;

    // Where an element of a tensor lies; `any`: it belongs to all sequences, or to no token.
    struct Place {
        std::int64_t sequence = any, head = any, token = any;
    };

    // The letters of a tensor's dimensions: N, T (tokens, after a batch), H (value heads), h (key heads).
    static const char* letters_of(std::string_view name) {
        if (name.substr(0, 2) == "d_") name.remove_prefix(2);
        if (name == "q" || name == "k" || name == "p") return "BTh.";
        if (name == "initial_state" || name == "final_state" || name == "pool") return "NH..";
        if (name == "g_gamma" || name == "A_log" || name == "dt_bias") return "H.";
        return "BTH.";
    }
    static bool has(const std::string& name, char letter) { return std::strchr(letters_of(name), letter) != nullptr; }

    static Place place_of(const std::string& name, const TensorView& view, std::int64_t element,
                          const ProblemLine& line) {
        const char* letters = letters_of(name);
        Place place;
        std::int64_t rest = element;
        for (int i = view.rank - 1; i >= 0; --i) {
            const std::int64_t index = rest % view.shape[i];
            rest /= view.shape[i];
            switch (letters[i]) {
                case 'h': place.head = index * group; break;
                case 'H':
                    place.head = name.find("dt_bias") != std::string::npos && view.rank == 1 && view.shape[0] != line.HV
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
    std::int64_t element_to_spoil(const std::string& name, const TensorView& view, const ProblemLine& line) const {
        std::int64_t first = any, last = any;
        for (std::int64_t i = 0; i < view.numel(); ++i) {
            const Place place = place_of(name, view, i, line);
            const bool fits = (place.sequence == any || place.sequence == bad_sequence) &&
                              (place.token == any || place.token == token_ % line.T) &&
                              place.head / group == bad_head / group && (has(name, 'h') || place.head == bad_head);
            if (!fits) continue;
            if (first == any) first = i;
            last = i;
        }
        return (first + last) / 2;
    }

    // Whether a bad element of tensor `bad` may change the output at `place`. A tensor of the heads that share a key
    // changes both; outputs of tokens before its chunk, or in the recurrent form before itself, it does not.
    bool may_change(const std::string& bad, const std::string& output, const Place& place,
                    const ProblemLine& line) const {
        const bool everywhere = letters_of(bad)[0] == 'H';  // a parameter of a head, in all sequences
        if (!everywhere && place.sequence != any && place.sequence != bad_sequence) return false;
        const bool shared = has(bad, 'h') || has(output, 'h');
        if (shared ? place.head / group != bad_head / group : place.head != bad_head) return false;
        if (output != "o" || !has(bad, 'T')) return true;
        const bool recurrent = line.force.find(".recurrent") != std::string::npos;
        const std::int64_t tokens = line.varlen.empty() ? line.T : line.varlen[2] - line.varlen[1];
        const std::int64_t bad_turn = line.reverse ? tokens - 1 - token_ % line.T : token_ % line.T;
        const std::int64_t turn = line.reverse ? tokens - 1 - place.token : place.token;
        return turn >= (recurrent ? bad_turn : bad_turn / chunk_ * chunk_);
    }

    enum class Answer { refused, served, spread };

    // The table of docs/numerics.md.
    static Answer answer_to(const std::string& name, double value, const ProblemLine& line) {
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
    static std::vector<Written> outputs_of(const Call& call) {
        std::vector<Written> outputs;
        for (const harness::NamedView& output : harness::output_views(call))
            outputs.push_back({output.name, output.view, {}});
        if (call.pool.states.given()) outputs.push_back({"pool", call.pool.states, {}});
        for (Written& output : outputs) output.bytes = harness::read_bytes(output.view);
        return outputs;
    }

    // `clean`: what the same call writes without the bad element.
    void expect_kept_apart(const std::vector<Written>& clean, const std::vector<Written>& spoiled,
                           const std::string& bad, const harness::Expected& expected, const ProblemLine& line,
                           const std::string& what) const {
        std::int64_t spread = 0;
        for (std::size_t number = 0; number < spoiled.size(); ++number) {
            const auto& [name, view, bytes] = spoiled[number];
            const std::vector<double> values = harness::read_values(view);
            const auto reference = expected.outputs.find(name);
            const std::size_t size = size_of(view.dtype);
            std::int64_t changed = 0, lost = 0;
            std::string where;  // the first lost one
            for (std::size_t i = 0; i < values.size(); ++i) {
                const bool same = std::memcmp(&bytes[i * size], &clean[number].bytes[i * size], size) == 0;
                const auto element = static_cast<std::int64_t>(i);
                if (!same && !may_change(bad, name, place_of(name, view, element, line), line)) ++changed;
                if (!std::isfinite(values[i])) {
                    ++spread;
                } else if (reference != expected.outputs.end() && !std::isfinite(reference->second[i])) {
                    if (lost++ == 0) where = ", the first at " + std::to_string(i);
                }
            }
            EXPECT_EQ(changed, 0) << what << ": elements of " << name << " changed that do not depend on it";
            EXPECT_EQ(lost, 0) << what << ": elements of " << name << " are finite where the oracle's are not" << where;
        }
        EXPECT_GT(spread, 0) << what << ": no output shows it";
    }

    // One call with the bad element, in one implementation.
    void expect_answer(const ProblemLine& line, const std::vector<Written>& clean, const std::string& bad,
                       std::int64_t element, double value, const harness::Expected& expected) const {
        const std::string what = format(line) + ": " + std::to_string(value) + " in " + bad;
        CallTensors spoiled = harness::make_tensors(line);
        spoiled.tensors.at(bad).set(element, value);
        const Status status = run_call_(spoiled.call);
        const Answer answer = answer_to(bad, value, line);
        if (answer == Answer::refused && refuses_) {
            EXPECT_EQ(status.code(), Code::invalid_argument) << what;
            EXPECT_EQ(status.message().substr(0, bad.size() + 2), bad + ": ") << what;
            return;
        }
        EXPECT_TRUE(status.ok()) << what << ": " << status.message();
        if (answer == Answer::served) return expect_within_bars(spoiled.call, expected.outputs, what);
        expect_kept_apart(clean, outputs_of(spoiled.call), bad, expected, line, what);
    }
};

inline std::string states_of(const std::string& direction) { return direction == "step" ? "" : " state=inout"; }

}  // namespace headrace::test
