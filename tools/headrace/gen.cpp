// headrace gen: draws a problem's inputs from its seed and writes them to a safetensors file.
#include <cstdio>
#include <memory>

#include "harness/memory.hpp"
#include "harness/safetensors.hpp"
#include "tools/headrace/common.hpp"
#include "tools/headrace/run_tensors.hpp"

namespace headrace::cli {
namespace {

struct GenArguments {
    std::vector<std::string> words;
    std::string out;
};

void generate(const GenArguments& arguments) {
    const ProblemLine line = parse_problem(arguments.words);
    require_served(line);
    // a strided tensor is written from a copy
    const double bytes = harness::tensor_bytes(harness::make_shapes(line)) * (line.strided ? 2 : 1);
    require(harness::fits(format(line), bytes, harness::available_memory()));
    harness::CallTensors problem = harness::make_tensors(line);
    harness::Safetensors file;
    for (const std::string& name : input_names()) {
        const auto found = problem.tensors.find(name);
        if (found != problem.tensors.end() && found->second.given()) file.tensors[name] = std::move(found->second);
    }
    file.metadata = metadata_of(line);
    require(harness::write_safetensors(arguments.out, file));
    std::printf("%s: %zu tensors of %s\n", arguments.out.c_str(), file.tensors.size(), format(line).c_str());
}

}  // namespace

void add_gen(CLI::App& app, int*) {
    CLI::App* command = app.add_subcommand("gen", "Write random inputs of a problem to a safetensors file.");
    auto arguments = std::make_shared<GenArguments>();
    command->add_option("PROBLEM", arguments->words, "The problem")->required();
    add_output(command, "--out", &arguments->out, Dash::names_a_file, "The file to write")->required();
    command->footer(
        std::string(problem_help) +
        "\nOptions of the problem (scale, l2norm, ...) go into the file's metadata, where headrace run finds "
        "them;\nso does the word cuda: the file is the same, headrace run then computes on the device.\nExample: "
        "headrace gen gla:bwd t1000 h4 k64 bf16 --out x.safetensors");
    command->callback([arguments] { generate(*arguments); });
}

}  // namespace headrace::cli
