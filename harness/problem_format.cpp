// format: from a ProblemLine to its canonical text; and the facts about operators that the text depends on.
#include <charconv>
#include <fstream>

#include "harness/problem_names.hpp"

namespace headrace::harness {

namespace {

// The shortest text that reads back as the same double.
std::string text_of(double value) {
    char buffer[32];
    const auto [end, code] = std::to_chars(buffer, buffer + sizeof buffer, value);
    return code == std::errc{} ? std::string(buffer, end) : "?";
}

// Appends the words that differ from the defaults.
class Writer {
  public:
    explicit Writer(std::string head) : text_(std::move(head)) {}

    void word(bool written, const std::string& text) {
        if (written) text_ += " " + text;
    }
    void size(const char* letters, std::int64_t value, std::int64_t standard) {
        word(value != standard, letters + std::to_string(value));
    }
    void value(const char* key, const std::string& value, const std::string& standard) {
        word(value != standard, std::string(key) + "=" + value);
    }
    void value(const char* key, const std::optional<double>& value) {
        if (value) word(true, std::string(key) + "=" + text_of(*value));
    }
    const std::string& text() const { return text_; }

  private:
    std::string text_;
};

void write_sizes(Writer& writer, const ProblemLine& line) {
    const ProblemLine standard;
    const bool equal_lengths = line.varlen.empty();
    if (equal_lengths) writer.size("b", line.B, standard.B);
    if (equal_lengths) writer.size("t", line.T, line.speculative > 0 ? line.speculative : standard.T);
    writer.size("h", line.H, standard.H);
    writer.size("hv", line.HV, line.H);
    writer.size("k", line.K, standard.K);
    writer.size("v", line.V, line.K);
    writer.word(line.dtype != standard.dtype, name_of(line.dtype));
}

void write_gates(Writer& writer, const ProblemLine& line) {
    const GateKind standard = line.gamma ? GateKind::head : allowed_gates(line.op).front();
    writer.value("gate", name_of_gate(line.gate), name_of_gate(standard));
    writer.value("gamma", line.gamma);
    writer.value("gates", gate_value_names[static_cast<int>(line.gates)], gate_value_names[0]);
    const ProblemLine defaults;
    writer.value("forget", text_of(line.forget), text_of(defaults.forget));
    writer.value("share", text_of(line.share), text_of(defaults.share));
    writer.word(line.gate_raw && !line.lower_bound, "rawgate");
    writer.value("bound", line.lower_bound);
    writer.value("beta", beta_form_names[line.beta_form], beta_form_names[0]);
    if (line.betas) writer.word(true, "betas=" + text_of(line.betas->least) + "," + text_of(line.betas->most));
    if (line.directions > 0) writer.word(true, "directions=" + std::to_string(line.directions));
    writer.word(line.value_gate, "gv");
    writer.word(line.elementwise_beta, "betav");
}

std::string joined(const std::vector<std::int64_t>& values) {
    std::string text;
    for (std::int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
    return text;
}

}  // namespace

bool has_delta_rule(Operator op) {
    return op == Operator::delta_rule || op == Operator::gated_delta_rule || op == Operator::comba ||
           op == Operator::kda;
}

const std::vector<GateKind>& allowed_gates(Operator op) {
    static const std::vector<GateKind> none = {GateKind::none}, head = {GateKind::head},
                                       step = {GateKind::step, GateKind::none, GateKind::head, GateKind::step_head},
                                       channel = {GateKind::channel, GateKind::none, GateKind::head,
                                                  GateKind::channel_head};
    switch (op) {
        case Operator::linear_attention:
        case Operator::delta_rule: return none;
        case Operator::retention: return head;
        case Operator::simple_gla:
        case Operator::gated_delta_rule:
        case Operator::comba: return step;
        case Operator::gla:
        case Operator::kda: return channel;
    }
    return none;
}

std::string format(const ProblemLine& line) {
    Writer writer(std::string(name_of(line.op)) + ":" + direction_names[static_cast<int>(line.direction)]);
    write_sizes(writer, line);
    write_gates(writer, line);
    writer.value("scale", line.scale);
    writer.value("varlen", joined(line.varlen), "");
    writer.value("state", state_names[(line.state_in ? 1 : 0) + (line.state_out ? 2 : 0)], state_names[0]);
    writer.word(line.l2norm, "l2norm");
    writer.word(line.vfirst, "vfirst");
    writer.word(line.reverse, "reverse");
    writer.word(line.strided, "strided");
    writer.word(line.cuda && line.gpu.empty(), "cuda");
    writer.value("cuda", line.gpu, "");
    writer.value("chunk", std::to_string(line.chunk), "0");
    writer.value("num_steps", std::to_string(line.num_steps), "0");
    writer.value("saved", line.state_dtype ? name_of(*line.state_dtype) : "", "");
    writer.value("states", line.given_states ? name_of(*line.given_states) : "", "");
    writer.value("pool", std::to_string(line.pool), "0");
    writer.value("spec", std::to_string(line.speculative), "0");
    writer.value("part", part_names[static_cast<int>(line.part)], part_names[0]);
    writer.value("ranks", std::to_string(line.ranks), "0");
    writer.value("link", line.link);
    writer.value("force", line.force, "");
    writer.value("threads", std::to_string(line.threads), "0");
    writer.value("seed", std::to_string(line.seed), "1");
    return writer.text();
}

Status read_problem_file(const std::string& path, std::vector<ProblemLine>* lines) {
    std::ifstream file(path);
    if (!file) return {Code::invalid_argument, path + ": expected a readable file of problem lines"};
    std::vector<ProblemLine> result;
    std::string text;
    for (int number = 1; std::getline(file, text); ++number) {
        text = text.substr(0, text.find('#'));
        if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
        if (Status status = parse(text, &result.emplace_back()); !status.ok()) {
            return {status.code(), path + ":" + std::to_string(number) + ": " + status.message()};
        }
    }
    if (file.bad()) return {Code::invalid_argument, path + ": expected a readable file of problem lines"};
    *lines = std::move(result);
    return {};
}

}  // namespace headrace::harness
