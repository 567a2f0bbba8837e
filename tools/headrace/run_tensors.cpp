// The tensors and options of headrace run: what a file may hold, its metadata, and the outputs of a call on it.
#include "tools/headrace/run_tensors.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

namespace headrace::cli {
namespace {

using harness::Tensor;

bool has(const TensorMap& tensors, const std::string& name) { return tensors.count(name) > 0; }

// The shortest text that reads back as the same number.
std::string number_text(double value) {
    char text[64];
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    return std::string(text, end);
}

[[noreturn]] void refuse(const std::string& who, const std::string& key, const std::string& expected,
                         const std::string& value) {
    std::string shown = key;
    if (who == "--") std::replace(shown.begin(), shown.end(), '_', '-');
    throw Failure{who + shown + ": expected " + expected + ", got '" + value + "'"};
}

double parse_number(const std::string& who, const std::string& key, const std::string& value) {
    double number = 0;
    if (!harness::read_number(value, &number)) refuse(who, key, "a number", value);
    return number;
}

int parse_count(const std::string& who, const std::string& key, const std::string& value) {
    int count = 0;  // the library knows its limits
    if (!harness::read_integer(value, 0, std::numeric_limits<int>::max(), &count)) {
        refuse(who, key, "a whole number", value);
    }
    return count;
}

bool parse_truth(const std::string& who, const std::string& key, const std::string& value) {
    if (value != "true" && value != "false") refuse(who, key, "true or false", value);
    return value == "true";
}

int parse_choice(const std::string& who, const std::string& key, const std::string& value,
                 const std::vector<std::string>& choices) {
    std::string known;
    for (std::size_t i = 0; i < choices.size(); ++i) {
        if (value == choices[i]) return static_cast<int>(i);
        known += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i];
    }
    refuse(who, key, known, value);
}

const std::vector<std::string> gate_forms = {"log_decay", "softplus", "bounded"};
const std::vector<std::string> beta_forms = {"value", "sigmoid",
                                             "two_sigmoid"};  // in the order of ProblemLine::beta_form
const std::vector<std::string> devices = {"cpu", "cuda"};
const std::vector<std::string> dtypes = {"f64", "f32", "bf16", "f16"};  // in the order of DType
constexpr double default_lower_bound = -5;

void apply_gate_form(int form, ProblemLine* line) {
    line->gate_raw = form != 0;
    if (form != 2) {
        line->lower_bound.reset();
    } else if (!line->lower_bound) {
        line->lower_bound = default_lower_bound;
    }
}

void apply_option(const std::string& who, const std::string& key, const std::string& value, ProblemLine* line) {
    if (key == "scale") line->scale = parse_number(who, key, value);
    if (key == "reverse") line->reverse = parse_truth(who, key, value);
    if (key == "l2norm") line->l2norm = parse_truth(who, key, value);
    if (key == "vfirst") line->vfirst = parse_truth(who, key, value);
    if (key == "chunk") line->chunk = parse_count(who, key, value);
    if (key == "num_steps") line->num_steps = parse_count(who, key, value);
    if (key == "gate_form") apply_gate_form(parse_choice(who, key, value, gate_forms), line);
    if (key == "lower_bound") {
        line->gate_raw = true;
        line->lower_bound = parse_number(who, key, value);
    }
    if (key == "beta_form") line->beta_form = parse_choice(who, key, value, beta_forms);
    if (key == "device") line->cuda = parse_choice(who, key, value, devices) == 1;
    if (key == "saved") line->state_dtype = static_cast<DType>(parse_choice(who, key, value, dtypes));
}

}  // namespace

const std::vector<std::string>& input_names() {
    static const std::vector<std::string> names = {"q",
                                                   "k",
                                                   "v",
                                                   "p",
                                                   "g",
                                                   "gv",
                                                   "g_gamma",
                                                   "beta",
                                                   "A_log",
                                                   "dt_bias",
                                                   "initial_state",
                                                   "cu_seqlens",
                                                   "d_o",
                                                   "d_final_state",
                                                   "pool",
                                                   "indices",
                                                   "num_accepted_tokens"};
    return names;
}

Metadata metadata_of(const ProblemLine& line) {
    Metadata metadata = {{"operator", headrace::name_of(line.op)}, {"problem", format(line)}};
    if (line.scale) metadata["scale"] = number_text(*line.scale);
    if (line.reverse) metadata["reverse"] = "true";
    if (line.l2norm) metadata["l2norm"] = "true";
    if (line.vfirst) metadata["vfirst"] = "true";
    if (line.chunk != 0) metadata["chunk"] = std::to_string(line.chunk);
    if (line.num_steps != 0) metadata["num_steps"] = std::to_string(line.num_steps);
    if (line.gate_raw || line.lower_bound) metadata["gate_form"] = gate_forms[line.lower_bound ? 2 : 1];
    if (line.lower_bound) metadata["lower_bound"] = number_text(*line.lower_bound);
    if (line.beta_form != 0) metadata["beta_form"] = beta_forms[static_cast<std::size_t>(line.beta_form)];
    if (line.cuda) metadata["device"] = devices[1];
    if (line.state_dtype) metadata["saved"] = headrace::name_of(*line.state_dtype);
    return metadata;
}

void apply_options(const std::string& who, const Metadata& options, ProblemLine* line) {
    // In the map's order gate_form stands before lower_bound, which it would reset.
    for (const auto& [key, value] : options) apply_option(who, key, value, line);
}

TensorMap take_inputs(const std::string& path, TensorMap* file, const ProblemLine& line,
                      std::vector<std::string>* unused) {
    const bool backward = line.direction == Direction::backward, step = line.direction == Direction::step;
    for (const char* name : {"q", "k", "v"}) {
        if (!has(*file, name)) throw Failure{path + ": has no tensor '" + name + "'"};
    }
    if (backward && !has(*file, "d_o") && !has(*file, "d_final_state")) {
        throw Failure{path + ": has no tensor 'd_o' nor 'd_final_state', and a backward needs one of them"};
    }
    if (step && !has(*file, "pool")) throw Failure{path + ": has no tensor 'pool', the states that a step updates"};
    TensorMap inputs;
    for (const std::string& name : input_names()) {
        const bool gradient = name == "d_o" || name == "d_final_state";
        const bool of_step = name == "pool" || name == "indices" || name == "num_accepted_tokens";
        if ((gradient && !backward) || (of_step && !step) || !has(*file, name)) continue;
        inputs[name] = std::move((*file)[name]);
        file->erase(name);
    }
    for (const auto& [name, tensor] : *file) unused->push_back(name);
    return inputs;
}

void set_sizes(const TensorMap& tensors, ProblemLine* line) {
    const auto& q = tensors.at("q");
    const auto& v = tensors.at("v");
    line->dtype = q.dtype();
    if (q.shape().size() == 4) {
        line->B = q.shape()[0];
        line->T = q.shape()[1];
        line->H = q.shape()[2];
        line->K = q.shape()[3];
    }
    if (v.shape().size() == 4) {
        line->HV = v.shape()[2];
        line->V = v.shape()[3];
    }
    if (!has(tensors, "cu_seqlens")) return;
    const auto& cu_seqlens = tensors.at("cu_seqlens");
    const bool integer = cu_seqlens.dtype() == DType::i32 || cu_seqlens.dtype() == DType::i64;
    if (integer && cu_seqlens.shape().size() == 1) line->varlen = cu_seqlens.integers();
}

std::vector<std::string> add_outputs(const ProblemLine& line, TensorMap* tensors, harness::Memory memory) {
    std::vector<std::string> names;
    const auto add = [&](const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
        double bytes =
            static_cast<double>(size_of(dtype));  // of a state: sizes of two inputs meet here for the first time
        for (std::int64_t size : shape) bytes *= static_cast<double>(std::max<std::int64_t>(size, 1));
        if (bytes > 0x1p62) throw Failure{name + ": its shape " + shape_text(shape) + " is too large"};
        (*tensors)[name] = Tensor(dtype, shape, {}, memory);
        names.push_back(name);
    };
    if (line.direction != Direction::backward) {
        add("o", line.dtype, (*tensors)["v"].shape());
        if (line.direction == Direction::step) return names;
        const bool wide = line.dtype == DType::f64;
        add("final_state", wide ? DType::f64 : DType::f32,
            {line.sequences(), line.HV, line.vfirst ? line.V : line.K, line.vfirst ? line.K : line.V});
        return names;
    }
    for (const std::string& name : input_names()) {
        if (!has(*tensors, name) || name == "cu_seqlens" || name.starts_with("d_")) continue;
        const Tensor& input = (*tensors)[name];
        add("d_" + name, input.dtype(), std::vector<std::int64_t>(input.shape()));
    }
    return names;
}

}  // namespace headrace::cli
