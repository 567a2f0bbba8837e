// parse: from the text of a problem line to its struct, one table row per word.
#include <algorithm>
#include <string_view>

#include "harness/problem_names.hpp"
#include "harness/gpu_model.hpp"
#include "harness/problem_values.hpp"

namespace headrace::harness {

namespace {

constexpr double largest_tensor = 0x1p40;  // elements: byte offsets stay far inside 64 bits

constexpr const char* operator_names =
    "linear_attention, retention, simple_gla, gla, delta_rule, gated_delta_rule, comba or kda";

// Printable and short, whatever bytes came.
std::string shown(std::string_view text) {
    std::string result(text.substr(0, 60));
    for (char& c : result) {
        if (c < ' ' || c > '~') c = '?';
    }
    return text.size() > 60 ? result + "..." : result;
}

Status error(std::string_view word, const std::string& expected) {
    return {Code::invalid_argument, shown(word) + ": expected " + expected};
}

// How a word is written: "h16" (size), "gate=none" (value), "l2norm" (flag), "bf16" (dtype).
enum class Form { size, value, flag, dtype };

struct Rule {
    const char* key;
    Form form;
    const char* expected;
    bool (*read)(std::string_view text, ProblemLine& line);  // text: what follows the key; false: not as expected
};

using Text = std::string_view;
using Line = ProblemLine;

constexpr Rule rules[] = {
    {"b", Form::size, "b1 to b16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.B); }},
    {"t", Form::size, "t0 to t16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{0}, largest_size, &l.T); }},
    {"hv", Form::size, "hv1 to hv16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.HV); }},
    {"h", Form::size, "h1 to h16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.H); }},
    {"k", Form::size, "k1 to k16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.K); }},
    {"v", Form::size, "v1 to v16777216",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.V); }},
    {"dtype", Form::dtype, "f64, f32, bf16 or f16", [](Text t, Line& l) { return read_dtype(t, &l.dtype); }},
    {"gate", Form::value, "none, head, step, channel, step+head or channel+head",
     [](Text t, Line& l) { return read_gate(t, &l.gate); }},
    {"gamma", Form::value, "a number <= 0", [](Text t, Line& l) { return read_number(t, &l.gamma) && *l.gamma <= 0; }},
    {"gates", Form::value, "random, zero, strong, reset, minus_inf or lasting",
     [](Text t, Line& l) { return read_enum(t, gate_value_names, &l.gates); }},
    {"forget", Form::value, "a number from 0 to 1",
     [](Text t, Line& l) { return read_number(t, &l.forget) && l.forget >= 0 && l.forget <= 1; }},
    {"share", Form::value, "a number from 0 to 1",
     [](Text t, Line& l) { return read_number(t, &l.share) && l.share >= 0 && l.share <= 1; }},
    {"chunk", Form::value, "a power of two from 16 to 256", [](Text t, Line& l) { return read_chunk(t, &l.chunk); }},
    {"num_steps", Form::value, "1 to 4096", [](Text t, Line& l) { return read_integer(t, 1, 4096, &l.num_steps); }},
    {"varlen", Form::value, "token offsets from 0 that do not decrease, as in 0,100,4096; at most 65536 up to 16777216",
     [](Text t, Line& l) { return read_varlen(t, &l.varlen); }},
    {"state", Form::value, "none, in, out or inout", read_state},
    {"l2norm", Form::flag, "", [](Text, Line& l) { return l.l2norm = true; }},
    {"vfirst", Form::flag, "", [](Text, Line& l) { return l.vfirst = true; }},
    {"reverse", Form::flag, "", [](Text, Line& l) { return l.reverse = true; }},
    {"rawgate", Form::flag, "", [](Text, Line& l) { return l.gate_raw = true; }},
    {"bound", Form::value, "a number from -5 to below 0",
     [](Text t, Line& l) {
         l.gate_raw = true;
         return read_number(t, &l.lower_bound) && *l.lower_bound >= -5 && *l.lower_bound < 0;
     }},
    {"beta", Form::value, "value, sigmoid or two_sigmoid",
     [](Text t, Line& l) { return read_enum(t, beta_form_names, &l.beta_form); }},
    {"betas", Form::value, "two numbers from 0 to 2, as in 1.9,2",
     [](Text t, Line& l) { return read_range(t, &l.betas) && l.betas->least >= 0 && l.betas->most <= 2; }},
    {"directions", Form::value, "1 to 65536",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, std::int64_t{65536}, &l.directions); }},
    {"gv", Form::flag, "", [](Text, Line& l) { return l.value_gate = true; }},
    {"betav", Form::flag, "", [](Text, Line& l) { return l.elementwise_beta = true; }},
    {"scale", Form::value, "a number", [](Text t, Line& l) { return read_number(t, &l.scale); }},
    {"saved", Form::value, "f64, f32, bf16 or f16",
     [](Text t, Line& l) { return read_dtype(t, &l.state_dtype.emplace()); }},
    {"states", Form::value, "f64, f32, bf16 or f16",
     [](Text t, Line& l) { return read_dtype(t, &l.given_states.emplace()); }},
    {"pool", Form::value, "1 to 16777216 rows",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, largest_size, &l.pool); }},
    {"spec", Form::value, "1 to 65536 tokens",
     [](Text t, Line& l) { return read_integer(t, std::int64_t{1}, std::int64_t{65536}, &l.speculative); }},
    {"part", Form::value, "both, transition or state",
     [](Text t, Line& l) { return read_enum(t, part_names, &l.part); }},
    {"ranks", Form::value, "1 to 8", [](Text t, Line& l) { return read_integer(t, 1, 8, &l.ranks); }},
    {"link", Form::value, "a number above 0", [](Text t, Line& l) { return read_number(t, &l.link) && *l.link > 0; }},
    {"strided", Form::flag, "", [](Text, Line& l) { return l.strided = true; }},
    {"cuda", Form::flag, "", [](Text, Line& l) { return l.cuda = true; }},
    {"cuda", Form::value, "h200, h100 or a100",
     [](Text t, Line& l) {
         l.gpu = t;
         return l.cuda = !l.gpu.empty() && find_gpu(l.gpu) != nullptr;
     }},
    {"force", Form::value, "the name of an implementation", [](Text t, Line& l) { return read_name(t, &l.force); }},
    {"threads", Form::value, "1 to 1024", [](Text t, Line& l) { return read_integer(t, 1, 1024, &l.threads); }},
    {"seed", Form::value, "0 to 18446744073709551615",
     [](Text t, Line& l) { return read_integer(t, std::uint64_t{0}, ~std::uint64_t{0}, &l.seed); }},
};

// One word of the text with its row of the table.
struct Word {
    std::string_view text, value;
    const Rule* rule = nullptr;
};

Word classify(std::string_view text) {
    DType dtype;
    const std::size_t equals = text.find('=');
    for (const Rule& rule : rules) {
        const std::string_view key = rule.key;
        const bool is_key = text.substr(0, key.size()) == key;
        const std::string_view rest = is_key ? text.substr(key.size()) : std::string_view{};
        switch (rule.form) {
            case Form::size:
                if (!rest.empty() && ((rest[0] >= '0' && rest[0] <= '9') || rest[0] == '-')) return {text, rest, &rule};
                break;
            case Form::value:
                if (text.substr(0, equals) == key && !rest.empty()) return {text, rest.substr(1), &rule};
                break;
            case Form::flag:
                if (text == key) return {text, {}, &rule};
                break;
            case Form::dtype:
                if (read_dtype(text, &dtype)) return {text, text, &rule};
                break;
        }
    }
    return {text, {}, nullptr};
}

std::string known_words() {
    std::string list = "b2, t4096, h16, hv32, k128, v128, f64, f32, bf16, f16";
    for (const Rule& rule : rules) {
        if (rule.form == Form::flag) list += std::string(", ") + rule.key;
        if (rule.form == Form::value) list += std::string(", ") + rule.key + "=";
    }
    return list;
}

// The words of one line, each at most once.
class Words {
  public:
    const Word* find(std::string_view key) const {
        const auto found =
            std::find_if(words_.begin(), words_.end(), [&](const Word& w) { return w.rule->key == key; });
        return found == words_.end() ? nullptr : &*found;
    }
    bool has(std::string_view key) const { return find(key) != nullptr; }
    // How the user wrote it, or the key where a default decided.
    std::string_view text(std::string_view key) const { return has(key) ? find(key)->text : key; }
    const std::vector<Word>& all() const { return words_; }

    Status add(std::string_view text) {
        const Word word = classify(text);
        if (word.rule == nullptr) return error(text, "one of " + known_words());
        if (const Word* earlier = find(word.rule->key)) {
            return error(text, "each word once, after " + shown(earlier->text));
        }
        words_.push_back(word);
        return {};
    }

    // Takes the words of a preset that nothing here replaces; new lengths replace all of the preset's.
    void add_defaults(const Words& preset) {
        const bool lengths = has("varlen"), tokens = has("spec");
        for (const Word& word : preset.all()) {
            const std::string_view key = word.rule->key;
            const bool replaced = has(key) || (lengths && (key == "b" || key == "t")) || (tokens && key == "t");
            if (!replaced) words_.push_back(word);
        }
    }

  private:
    std::vector<Word> words_;
};

Status read_direction(std::string_view word, std::string_view text, Direction* direction) {
    if (read_enum(text, direction_names, direction)) return {};
    return error(word, "fwd, bwd, step, summary or summary_bwd behind the colon");
}

// The first word: OPERATOR:DIRECTION, or a preset with or without a direction.
Status read_head(std::string_view word, ProblemLine* line, Words* words) {
    const std::size_t colon = word.find(':');
    const std::string_view name = word.substr(0, colon);
    for (int i = 0; i <= static_cast<int>(Operator::kda); ++i) {
        if (name != name_of(static_cast<Operator>(i))) continue;
        line->op = static_cast<Operator>(i);
        if (colon == std::string_view::npos)
            return error(word, "fwd, bwd, step, summary or summary_bwd behind it, as in " + shown(name) + ":fwd");
        return read_direction(word, word.substr(colon + 1), &line->direction);
    }
    for (const Preset& preset : presets()) {
        if (name != preset.name) continue;
        const std::vector<std::string_view> parts = split(preset.line, " ");
        Words defaults;
        for (std::size_t i = 1; i < parts.size(); ++i) {
            if (Status status = defaults.add(parts[i]); !status.ok()) return status;
        }
        if (Status status = read_head(parts[0], line, &defaults); !status.ok()) return status;
        words->add_defaults(defaults);
        return colon == std::string_view::npos ? Status{}
                                               : read_direction(word, word.substr(colon + 1), &line->direction);
    }
    return error(word, std::string("an operator (") + operator_names + ") or a preset");
}

// What is left out depends on what is given.
void fill_in(const Words& words, ProblemLine* line) {
    if (!words.has("hv")) line->HV = line->H;
    if (!words.has("v")) line->V = line->K;
    if (!words.has("gate")) line->gate = line->gamma ? GateKind::head : allowed_gates(line->op).front();
    if (!words.has("t") && line->speculative > 0) line->T = line->speculative;
    if (!line->varlen.empty() && !words.has("t")) line->T = line->varlen.back();
}

Status check_gates(const Words& words, const ProblemLine& line) {
    const std::vector<GateKind>& allowed = allowed_gates(line.op);
    if (std::find(allowed.begin(), allowed.end(), line.gate) == allowed.end()) {
        std::string names;
        for (GateKind gate : allowed) names += std::string(names.empty() ? "" : ", ") + name_of_gate(gate);
        const std::string_view word = words.has("gate") ? words.text("gate") : words.text("gamma");
        return error(word, "a gate of " + std::string(name_of(line.op)) + ": " + names);
    }
    if (line.gamma && !has_head(line.gate)) return error(words.text("gamma"), "a head gate, as in gate=head");
    for (const char* key : {"forget", "share"}) {
        if (words.has(key) && line.gates != GateValues::lasting) return error(words.text(key), "gates=lasting");
    }
    if (words.has("share") && !has_channel(line.gate)) return error(words.text("share"), "a channel gate");
    if (!line.gate_raw) return {};
    if (!has_step(line.gate) && !has_channel(line.gate)) {
        return error(words.text(line.lower_bound ? "bound" : "rawgate"), "a step or channel gate");
    }
    // the gradient of A_log would be 0 * inf
    if (line.gates == GateValues::minus_inf) return error(words.text("gates"), "no rawgate: its gates are finite");
    return {};
}

Status check_lengths(const Words& words, const ProblemLine& line) {
    if (line.HV % line.H != 0) {
        return error(
            words.has("hv") ? words.text("hv") : words.text("h"),
            "value heads (" + std::to_string(line.HV) + ") a multiple of heads (" + std::to_string(line.H) + ")");
    }
    if (!line.varlen.empty()) {
        const std::string last = std::to_string(line.varlen.back());
        if (line.T != line.varlen.back()) return error(words.text("t"), "t" + last + ", the end of varlen, or no t");
        if (line.B != 1) return error(words.text("b"), "b1 with varlen");
    }
    const double sequences = static_cast<double>(line.sequences()), values = static_cast<double>(line.V);
    const double tokens = static_cast<double>(line.B) * static_cast<double>(line.T);
    const double heads = static_cast<double>(line.HV), keys = static_cast<double>(line.K);
    const double rows =
        std::max(sequences * std::max(1.0, static_cast<double>(line.speculative)), static_cast<double>(line.pool));
    if (tokens * heads * std::max(keys, values) > largest_tensor || rows * heads * keys * values > largest_tensor) {
        return error("sizes", "tensors of at most 2^40 elements");
    }
    return {};
}

Status check_step(const Words& words, const ProblemLine& line) {
    if (line.direction != Direction::step) {
        for (const char* key : {"pool", "spec"}) {
            if (words.has(key)) return error(words.text(key), "direction step");
        }
        return {};
    }
    if (line.state_in || line.state_out) return error(words.text("state"), "none: a step keeps its states in the pool");
    for (std::int64_t n = 0; line.speculative > 0 && n < line.sequences(); ++n) {
        const std::size_t i = static_cast<std::size_t>(n);
        const std::int64_t length = line.varlen.empty() ? line.T : line.varlen[i + 1] - line.varlen[i];
        if (length != line.speculative) {
            return error(words.text("spec"), "that many tokens in each sequence, got " + std::to_string(length));
        }
    }
    const std::int64_t rows = line.sequences() * std::max<std::int64_t>(line.speculative, 1);
    if (line.pool > 0 && line.pool < rows)
        return error(words.text("pool"), "at least " + std::to_string(rows) + " rows");
    return {};
}

Status check_summary(const Words& words, const ProblemLine& line) {
    const bool map = line.direction == Direction::summarize;
    if (line.link && line.ranks == 0) return error(words.text("link"), "ranks=P");
    const bool joins = line.ranks > 0,
               in_pieces = line.direction == Direction::forward || line.direction == Direction::backward;
    if (joins && !in_pieces) return error(words.text("ranks"), "direction fwd or bwd");
    if (line.link && line.cuda) return error(words.text("link"), "no cuda: it is for a model of ranks on CPUs");
    if (!map && words.has("part")) return error(words.text("part"), "direction summary");
    if (in_pieces ? !joins : line.direction == Direction::step) return {};
    for (const char* key : {"gv", "betav"}) {
        if (words.has(key)) return error(words.text(key), "no summary of it: it has one matrix for all value channels");
    }
    if (map && line.state_out) return error(words.text("state"), "none or in: no state leaves a summary");
    return {};
}

Status check(const Words& words, const ProblemLine& line) {
    if (Status status = check_summary(words, line); !status.ok()) return status;
    if (Status status = check_gates(words, line); !status.ok()) return status;
    if (Status status = check_lengths(words, line); !status.ok()) return status;
    if (Status status = check_step(words, line); !status.ok()) return status;
    if (!has_delta_rule(line.op)) {
        for (const char* key : {"beta", "betas", "betav"}) {
            if (words.has(key)) return error(words.text(key), "a delta-rule operator");
        }
    }
    if (line.betas && line.betas->most > 1 && line.beta_form == 1) {
        return error(words.text("betas"), "at most 1 with beta=sigmoid");
    }
    if (line.state_dtype && *line.state_dtype != DType::f32 && *line.state_dtype != line.dtype) {
        return error(words.text("saved"),
                     line.dtype == DType::f32 ? "f32" : std::string("f32 or ") + name_of(line.dtype));
    }
    if (line.given_states && (*line.given_states == DType::f64) != (line.dtype == DType::f64)) {
        return error(words.text("states"), "f64 with f64, else f32, bf16 or f16");
    }
    return {};
}

}  // namespace

Status parse(const std::string& text, ProblemLine* line) {
    const std::vector<std::string_view> parts = split(text, " \t\r\n");
    if (parts.empty())
        return error("problem", "OPERATOR:fwd|bwd|step|summary|summary_bwd or a preset, then words such as b2 t4096");
    ProblemLine result;
    Words words;
    for (std::size_t i = 1; i < parts.size(); ++i) {
        if (Status status = words.add(parts[i]); !status.ok()) return status;
    }
    if (Status status = read_head(parts[0], &result, &words); !status.ok()) return status;
    for (const Word& word : words.all()) {
        if (!word.rule->read(word.value, result)) return error(word.text, word.rule->expected);
    }
    fill_in(words, &result);
    if (Status status = check(words, result); !status.ok()) return status;
    *line = std::move(result);
    return {};
}

}  // namespace headrace::harness
