// headrace plan: the memory that a problem needs, tensor by tensor, the peak of a training step on it, and its launches
// on a GPU.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "tools/headrace/plan_gpu.hpp"
#include "tools/headrace/plan_ranks.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

struct PlanArguments {
    std::vector<std::string> words;
    bool as_json = false, peers = false;
    double gflops = 50;  // of a rank
};

struct Plan {
    std::vector<PlanEntry> entries;
    double bytes = 0;
};

Plan make_plan(const ProblemLine& line) {
    const harness::CallTensors shapes = planned_shapes(line);
    Plan result;
    require(plan(shapes.call, &result.entries));
    for (const PlanEntry& entry : result.entries) result.bytes += static_cast<double>(entry.bytes);
    return result;
}

// The same problem in the other direction, to be served by whatever serves it best.
ProblemLine turned(ProblemLine line, Direction direction) {
    if (line.direction != direction) line.force.clear();
    line.direction = direction;
    return line;
}

// A total under its name in text and in JSON.
struct Total {
    const char *key, *text;
    double bytes;
};

std::vector<Total> totals_of(const ProblemLine& line, const Plan& own) {
    std::vector<Total> totals;
    for (const auto& [role, key] : {std::pair("input", "inputs"), {"output", "outputs"}, {"workspace", "workspace"}}) {
        double bytes = 0;
        for (const PlanEntry& entry : own.entries) bytes += entry.role == role ? static_cast<double>(entry.bytes) : 0;
        totals.push_back({key, key, bytes});
    }
    totals.push_back({"peak", "peak of this call", own.bytes});
    if (line.direction != Direction::forward && line.direction != Direction::backward) return totals;
    const bool forward = line.direction == Direction::forward;
    const double other = make_plan(turned(line, forward ? Direction::backward : Direction::forward)).bytes;
    totals.push_back(
        {forward ? "backward_peak" : "forward_peak", forward ? "peak of the backward" : "peak of the forward", other});
    // o and the final state are the next layer's; the backward reads neither and needs nothing that the forward saved.
    totals.push_back({"training_step_peak", "peak of a training step", std::max(own.bytes, other)});
    return totals;
}

void print_plan(const PlanArguments& arguments) {
    const ProblemLine line = parse_problem(arguments.words);
    if (line.cuda && line.ranks > 0)
        throw Failure{format(line) + ": expected no ranks=P with cuda, but a problem of a piece's tokens"};
    const Plan own = make_plan(line);
    const std::vector<Total> totals = totals_of(line, own);
    if (arguments.as_json) {
        json value = {{"problem", format(line)}, {"tensors", json::array()}, {"bytes", json::object()}};
        for (const PlanEntry& entry : own.entries) {
            value["tensors"].push_back({{"name", entry.name},
                                        {"role", entry.role},
                                        {"shape", entry.shape},
                                        {"dtype", name_of(entry.dtype)},
                                        {"bytes", entry.bytes}});
        }
        for (const Total& total : totals) value["bytes"][total.key] = total.bytes;
        if (line.link) {
            value["model"] = {{"ranks", line.ranks},
                              {"link_gbits", *line.link},
                              {"gflops", arguments.gflops},
                              {"strategies", json::array()}};
            for (const Strategy& strategy : strategies_of(line, *line.link, arguments.gflops)) {
                value["model"]["strategies"].push_back(to_json(strategy));
            }
        }
        if (line.cuda) value["gpu"] = to_json(plan_on_gpu(line));
        write_json("-", value);
        return;
    }
    std::printf("%s\n\n", format(line).c_str());
    Table table({"tensor", "role", "shape", "dtype", ">MiB"});
    for (const PlanEntry& entry : own.entries) {
        table.add({entry.name, entry.role, shape_text(entry.shape), name_of(entry.dtype),
                   mebibytes(static_cast<double>(entry.bytes))});
    }
    table.print();
    std::printf("\n");
    Table sums({"total", ">MiB"});
    for (const Total& total : totals) sums.add({total.text, mebibytes(total.bytes)});
    sums.print();
    if (line.link) print_strategies(line, *line.link, arguments.gflops);
    if (line.cuda) print_gpu_plan(plan_on_gpu(line));
}

// The problems that others publish times for.
void plan_peers(const PlanArguments& arguments) {
    const auto is_gpu = [](const std::string& word) { return word == "cuda" || word.starts_with("cuda="); };
    if (arguments.words.size() > 1 || (!arguments.words.empty() && !is_gpu(arguments.words[0])))
        throw Failure{"--peers: expected cuda=NAME or nothing, got '" + arguments.words[0] + "'"};
    const std::string word = arguments.words.empty() ? "cuda" : arguments.words[0];
    std::vector<GpuPlan> plans;
    for (const std::string& problem : harness::peer_problems())
        plans.push_back(plan_on_gpu(parse_problem({problem + " " + word})));
    print_peers(plans, arguments.as_json);
}

}  // namespace

void add_plan(CLI::App& app, int*) {
    CLI::App* command = app.add_subcommand(
        "plan",
        "Print the memory plan of a problem: tensors, workspace, and the peak of a training step; on a GPU its "
        "launches.");
    auto arguments = std::make_shared<PlanArguments>();
    command->add_option("PROBLEM", arguments->words, "The problem");
    command->add_flag("--json", arguments->as_json, "Print JSON, sizes in bytes");
    command->add_flag("--peers", arguments->peers,
                      "In place of a problem: those that others publish times for on a GPU [cuda=h200]");
    add_number(command, "--gflops", &arguments->gflops, 1e-3, 1e9,
               "What a rank computes in a second, for ranks=P link=GBITS [50]");
    command->footer(
        std::string(problem_help) +
        "\nThe peak of a training step is the larger of the forward's and the backward's, each with its inputs,\n"
        "outputs and workspace. With ranks=P link=GBITS also a model of the ways to share the tokens among P ranks.\n"
        "With cuda or cuda=h200, h100 or a100 also every launch, what it computes and moves, and a model of its time.\n"
        "Example: headrace plan simple_gla:bwd b2 t4096 h16 k128 bf16");
    command->callback([arguments] { arguments->peers ? plan_peers(*arguments) : print_plan(*arguments); });
}

}  // namespace headrace::cli
