// What the commands share: failing with one line, problems from words, operators by name.
#include "tools/headrace/common.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "harness/output_file.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"

namespace headrace::cli {
namespace {

bool begins_problem(const std::string& word) {
    if (word.find(':') != std::string::npos) return true;
    for (const harness::Preset& preset : harness::presets()) {
        if (word == preset.name) return true;
    }
    return false;
}

}  // namespace

const char* const problem_help =
    R"(PROBLEM is OPERATOR:fwd|bwd|step|summary|summary_bwd or a preset's name (headrace list), then any of these words:
  b2 t4096 h16 hv32 k128 v128    sizes; left out: b1 t256 h4 hv=h k64 v=k
  f64|f32|bf16|f16               type of the tensors; left out: f32
  varlen=0,100,4096              a ragged batch: where its sequences begin and end
  gate=none|head|step|channel|step+head|channel+head   left out: the operator's own; gamma=-0.7: of every head
  gates=random|zero|strong|reset|minus_inf|lasting     how gates are drawn; lasting: forget=0.001, of share=0.25
                                 of the channels
  rawgate, bound=-5              g is a pre-activation of the softplus or the bounded form
  beta=value|sigmoid|two_sigmoid beta itself or its logit; betas=1.9,2: what it is drawn from in the end
  directions=2                   keys repeat after two tokens
  gv, betav                      a gate on values, a beta of each value
  l2norm, scale=1, reverse, vfirst   options of the call; vfirst: states are [V, K]
  state=none|in|out|inout        states given and returned; states=f16: their type; saved=f32: that of saved ones
  pool=8, spec=4                 of a step: rows of the state pool, tokens of speculative decoding
  part=transition|state          of a summary: that part alone
  ranks=4                        in as many pieces, joined by summaries; link=25: Gbit/s between them, in plan
  strided                        tensors with padded, permuted or doubled strides
  cuda                           tensors on a GPU; cuda=h200|h100|a100: on that one, in plan
  chunk=64, num_steps=4, threads=2, force=NAME, seed=1   hints, the implementation (headrace explain), random numbers
)";

void require(const Status& status) {
    if (!status.ok()) throw Failure{status.message()};
}

std::vector<ProblemLine> parse_problems(const std::vector<std::string>& words) {
    std::vector<std::string> texts;
    for (const std::string& argument : words) {
        std::istringstream stream(argument);
        bool first = true;  // a quoted argument that begins with anything else is judged by the parser
        for (std::string word; stream >> word; first = false) {
            const bool quoted = first && argument.find(' ') != std::string::npos;
            if (texts.empty() || begins_problem(word) || quoted) {
                texts.push_back(word);
            } else {
                texts.back() += " " + word;
            }
        }
    }
    std::vector<ProblemLine> lines;
    for (const std::string& text : texts) {
        lines.emplace_back();
        require(harness::parse(text, &lines.back()));
    }
    return lines;
}

ProblemLine parse_problem(const std::vector<std::string>& words) {
    const std::vector<ProblemLine> lines = parse_problems(words);
    if (lines.size() != 1) throw Failure{"expected one problem, got " + std::to_string(lines.size())};
    return lines[0];
}

std::vector<std::string> accepting_implementations(ProblemLine line) {
    line.force.clear();
    std::vector<Candidate> candidates;
    require(explain(harness::make_shapes(line).call, &candidates));
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates) {
        if (candidate.refusal.empty()) names.push_back(candidate.name);
    }
    return names;
}

std::string serving_implementation(const Call& call) {
    std::string name;
    require(harness::find_serving(call, &name));
    return name;
}

void require(const ProblemLine& line, const Status& status) {
    if (!status.ok()) throw Failure{format(line) + ": " + status.message()};
}

void require_served(const ProblemLine& line) {
    std::size_t bytes = 0;
    require(line, workspace_size(harness::make_shapes(line).call, &bytes));
}

void refuse_number(const std::string& flag, bool whole, const std::string& range, const std::string& text) {
    throw Failure{flag + ": expected a " + (whole ? "whole " : "") + "number from " + range + ", got '" + text + "'"};
}

CLI::Option* add_output(CLI::App* command, const std::string& flag, std::string* path, Dash dash,
                        const std::string& help) {
    const auto read = [=](const std::string& text) {
        if (text.empty()) throw Failure{flag + ": expected the name of a file, got ''"};
        if (dash == Dash::names_a_file || text != "-") require(harness::can_write(text));
        *path = text;
    };
    return command->add_option_function<std::string>(flag, read, help)->type_name("FILE");
}

void require_stdout() {
    errno = 0;
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
    throw Failure{"stdout: could not be written" + (errno != 0 ? std::string(": ") + std::strerror(errno) : "")};
}

const std::vector<Operator>& operators() {
    static const std::vector<Operator> all = {
        Operator::linear_attention, Operator::retention,        Operator::simple_gla, Operator::gla,
        Operator::delta_rule,       Operator::gated_delta_rule, Operator::comba,      Operator::kda};
    return all;
}

Operator operator_named(const std::string& name) {
    std::string known;
    for (Operator op : operators()) {
        if (name == headrace::name_of(op)) return op;
        known += std::string(known.empty() ? "" : ", ") + headrace::name_of(op);
    }
    throw Failure{"operator: expected one of " + known + ", got '" + name + "'"};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (std::int64_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
    return text;
}

void write_json(const std::string& path, const json& value) {
    const std::string text = value.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
    if (path == "-") {
        std::fputs(text.c_str(), stdout);
    } else {
        require(harness::write_text_file(path, text));
    }
}

}  // namespace headrace::cli
