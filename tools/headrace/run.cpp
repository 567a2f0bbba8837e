// headrace run: computes an operator on the tensors of a safetensors file.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "harness/device_call.hpp"
#include "harness/measure.hpp"
#include "harness/memory.hpp"
#include "harness/safetensors.hpp"
#include "tools/headrace/run_tensors.hpp"
#include "tools/headrace/table.hpp"
#include "tools/headrace/workspace.hpp"

namespace headrace::cli {
namespace {

using harness::Tensor;

struct RunArguments {
    std::string op, in, out, force;
    bool backward = false, step = false, allow_positive_gates = false, as_json = false;
    int threads = 0, repeat = 1;
    Metadata options;  // those given on the command line, as in a file's metadata
};

struct Outcome {
    std::string implementation;
    harness::Timing timing;
    std::size_t workspace_bytes = 0;
};

ProblemLine line_of(const RunArguments& arguments, const Metadata& metadata) {
    ProblemLine line;
    line.op = operator_named(arguments.op);
    if (arguments.backward && arguments.step) throw Failure{"--backward: cannot be given with --step"};
    line.direction = arguments.backward ? Direction::backward : arguments.step ? Direction::step : Direction::forward;
    apply_options(arguments.in + ": metadata: ", metadata, &line);
    apply_options("--", arguments.options, &line);
    line.threads = arguments.threads;
    line.force = arguments.force;
    return line;
}

// Runs the call `repeat` times, each from the same pool of states.
Outcome compute_on_host(const Call& call, int repeat) {
    Outcome outcome;
    outcome.implementation = serving_implementation(call);
    const OwnedWorkspace workspace(call);
    outcome.workspace_bytes = workspace.get().bytes;
    const TensorView& states = call.pool.states;  // contiguous, as every tensor that comes from a file
    const std::size_t bytes = states.given() ? static_cast<std::size_t>(states.numel()) * size_of(states.dtype) : 0;
    std::vector<char> initial(bytes);
    if (bytes > 0) std::memcpy(initial.data(), states.data, bytes);
    std::vector<double> seconds;
    for (int i = 0; i < repeat; ++i) {
        if (i > 0 && bytes > 0) std::memcpy(states.data, initial.data(), bytes);
        seconds.push_back(harness::time_once([&] { require(run_call(call, workspace.get())); }));
    }
    outcome.timing = harness::summary_of(seconds);
    return outcome;
}

// The same on tensors of the current CUDA device, copied there and back; a time is that of the call and of waiting for
// it, and for its word that no value was wrong.
Outcome compute_on_device(const Call& call, int repeat) {
    ::setenv("HEADRACE_DEBUG_NAN", "1", 1);
    Outcome outcome;
    outcome.implementation = serving_implementation(harness::seen_from_device(call));
    std::unique_ptr<harness::CallOnDevice> device;
    require(harness::copy_to_device(call, &device));
    Workspace workspace;
    require(device->add_workspace(device->call(), &workspace));
    outcome.workspace_bytes = workspace.bytes;
    std::vector<double> seconds;
    for (int i = 0; i < repeat; ++i) {
        if (i > 0) require(device->upload());
        require(device->synchronize());
        seconds.push_back(harness::time_once([&] {
            require(run_call(device->call(), workspace));
            require(device->synchronize());
        }));
    }
    std::string violation;
    require(device->download(&violation));
    if (!violation.empty()) throw Failure{"run: " + violation};
    outcome.timing = harness::summary_of(seconds);
    return outcome;
}

void report(const RunArguments& arguments, const ProblemLine& line, const Outcome& outcome, const TensorMap& results) {
    const double tokens_per_second = static_cast<double>(line.B * line.T) / outcome.timing.min_ms * 1e3;
    const double gflops = harness::useful_flop(line) / outcome.timing.min_ms * 1e-6;
    if (!arguments.as_json) {
        std::printf("%s %s: %s, %s ms%s, %s tokens/s, %s useful GFLOP/s\n", arguments.op.c_str(),
                    name_of(line.direction), outcome.implementation.c_str(), figure(outcome.timing.min_ms).c_str(),
                    arguments.repeat > 1 ? " (best)" : "", fixed(tokens_per_second, 0).c_str(), figure(gflops).c_str());
        return;
    }
    json value = {{"operator", arguments.op},
                  {"direction", name_of(line.direction)},
                  {"implementation", outcome.implementation},
                  {"calls", outcome.timing.calls},
                  {"ms_min", outcome.timing.min_ms},
                  {"ms_median", outcome.timing.median_ms},
                  {"tokens_per_second", tokens_per_second},
                  {"useful_gflops", gflops},
                  {"workspace_bytes", outcome.workspace_bytes},
                  {"outputs", json::array()}};
    if (line.cuda) {
        value["device"] = "cuda";
    } else {
        value["threads"] = line.threads > 0 ? line.threads : default_threads();
    }
    for (const auto& [name, tensor] : results) {
        value["outputs"].push_back(
            {{"name", name}, {"dtype", headrace::name_of(tensor.dtype())}, {"shape", tensor.shape()}});
    }
    write_json("-", value);
}

// The outputs, the workspace and the copy of the pool that the call will need, before any of them is allocated.
void require_memory(const RunArguments& arguments, const ProblemLine& line, TensorMap& tensors) {
    double bytes = 0;
    for (const std::string& name : add_outputs(line, &tensors, harness::Memory::none)) {
        const Tensor& output = tensors[name];
        bytes += static_cast<double>(output.numel()) * static_cast<double>(size_of(output.dtype()));
    }
    const Call call = harness::make_call(line, tensors);
    std::size_t workspace = 0;
    require(workspace_size(line.cuda ? harness::seen_from_device(call) : call, &workspace));
    if (!line.cuda) bytes += static_cast<double>(workspace);
    if (const TensorView& states = call.pool.states; states.given()) {
        bytes += static_cast<double>(states.numel()) * static_cast<double>(size_of(states.dtype));
    }
    require(harness::fits(arguments.in, bytes, harness::available_memory()));
}

void run_file(const RunArguments& arguments) {
    operator_named(arguments.op);  // before a large file is read
    std::error_code failure;       // is left to the reader
    const auto file_bytes = static_cast<double>(std::filesystem::file_size(arguments.in, failure));
    if (!failure) require(harness::fits(arguments.in, file_bytes, harness::available_memory()));
    harness::Safetensors file;
    require(harness::read_safetensors(arguments.in, &file));
    ProblemLine line = line_of(arguments, file.metadata);
    std::vector<std::string> unused;
    TensorMap tensors = take_inputs(arguments.in, &file.tensors, line, &unused);
    for (const std::string& name : unused) {
        const auto& names = input_names();
        if (std::find(names.begin(), names.end(), name) == names.end()) {
            std::fprintf(stderr, "headrace: note: %s: tensor '%s' is not used\n", arguments.in.c_str(), name.c_str());
        }
    }
    set_sizes(tensors, &line);
    require_memory(arguments, line, tensors);
    std::vector<std::string> names = add_outputs(line, &tensors, harness::Memory::allocate);
    if (line.direction == Direction::step) names.push_back("pool");
    Call call = harness::make_call(line, tensors);
    call.options.allow_positive_gates = arguments.allow_positive_gates;
    const Outcome outcome =
        line.cuda ? compute_on_device(call, arguments.repeat) : compute_on_host(call, arguments.repeat);
    harness::Safetensors results;
    for (const std::string& name : names) results.tensors[name] = std::move(tensors[name]);
    results.metadata = {
        {"operator", arguments.op}, {"direction", name_of(line.direction)}, {"implementation", outcome.implementation}};
    require(harness::write_safetensors(arguments.out, results));
    report(arguments, line, outcome, results.tensors);
}

void add_options(CLI::App* command, const std::shared_ptr<RunArguments>& arguments) {
    const auto text = [&](const char* flag, const char* key, const char* help, const char* type = "VALUE") {
        command
            ->add_option_function<std::string>(
                flag, [arguments, key](const std::string& value) { arguments->options[key] = value; }, help)
            ->type_name(type);
    };
    const auto truth = [&](const char* flags, const char* key, const char* help) {
        command->add_flag_function(
            flags, [arguments, key](std::int64_t count) { arguments->options[key] = count > 0 ? "true" : "false"; },
            help);
    };
    text("--scale", "scale", "Scale of q at the read-out [K^-0.5]", "NUMBER");
    truth("--reverse,!--no-reverse", "reverse", "Run each sequence from its last token to its first");
    truth("--l2norm,!--no-l2norm", "l2norm", "Normalise q, k (and p) to unit length first");
    truth("--vfirst,!--no-vfirst", "vfirst", "States are [N, HV, V, K]");
    text("--gate-form", "gate_form", "log_decay, softplus or bounded: what g is [log_decay]");
    text("--lower-bound", "lower_bound", "Of the bounded gate form [-5]", "NUMBER");
    text("--beta-form", "beta_form", "value, sigmoid or two_sigmoid: what beta is [value]");
    text("--chunk", "chunk", "Hint: tokens per chunk, a power of two from 16 to 256 [the backend's]", "NUMBER");
    text("--num-steps", "num_steps", "Hint: chunks per scheduling step", "NUMBER");
    text("--device", "device", "cpu or cuda: where it is computed; the files stay on the host [cpu]");
    text("--saved", "saved", "f64, f32, bf16 or f16: type of the states that a backward keeps [that of q]");
}

}  // namespace

void add_run(CLI::App& app, int*) {
    CLI::App* command = app.add_subcommand("run", "Compute an operator on the tensors of a safetensors file.");
    auto arguments = std::make_shared<RunArguments>();
    command->add_option("OPERATOR", arguments->op, "The operator (headrace list)")->required();
    command->add_option("--in", arguments->in, "File of the inputs")->required()->type_name("FILE");
    add_output(command, "--out", &arguments->out, Dash::names_a_file, "File to write the outputs to")->required();
    command->add_flag("--backward", arguments->backward, "Compute the gradient of every input from d_o, d_final_state");
    command->add_flag("--step", arguments->step, "Decode: start from the states in pool and leave the new ones there");
    add_options(command, arguments);
    command->add_flag("--allow-positive-gates", arguments->allow_positive_gates, "Accept gates above 0");
    command->add_option("--force", arguments->force, "Implementation to use (headrace explain)");
    add_number(command, "--threads", &arguments->threads, 0, most_threads, "Threads [all]");
    add_number(command, "--repeat", &arguments->repeat, 1, 1000000, "Calls to time; the first includes warming up [1]");
    command->add_flag("--json", arguments->as_json, "Print the report as JSON");
    command->footer(
        "Tensors of the input file, named as in the API (docs/math.md gives the shapes): q k v, and as the operator\n"
        "needs them p g gv g_gamma beta A_log dt_bias initial_state cu_seqlens; for --backward d_o and/or "
        "d_final_state;\n"
        "for --step pool, indices, num_accepted_tokens. Outputs: o and final_state; or d_q, d_k, ..., one per input;\n"
        "or o and pool. Options in the file's metadata (headrace gen writes them) are defaults.\n"
        "Example: headrace run gla --in x.safetensors --out y.safetensors --backward");
    command->callback([arguments] { run_file(*arguments); });
}

}  // namespace headrace::cli
