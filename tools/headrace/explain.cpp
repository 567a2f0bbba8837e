// headrace explain: which implementation serves a problem, and why each of the others does not.
#include <cstdio>
#include <memory>

#include "harness/tensors.hpp"
#include "tools/headrace/common.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

struct ExplainArguments {
    std::vector<std::string> words;
    bool as_json = false;
};

void explain_problem(const ExplainArguments& arguments) {
    const ProblemLine line = parse_problem(arguments.words);
    const harness::CallTensors shapes = harness::make_shapes(line);
    std::vector<Candidate> candidates;
    require(explain(shapes.call, &candidates));
    std::string chosen;
    json list = json::array();
    Table table({"implementation", "answer"});
    for (const Candidate& candidate : candidates) {
        const bool accepts = candidate.refusal.empty(), serves = accepts && candidate.yields.empty() && chosen.empty();
        if (serves) chosen = candidate.name;
        const std::string could = candidate.yields.empty() ? "could serve it" : "could serve it; " + candidate.yields;
        table.add({candidate.name, serves ? "serves this problem" : accepts ? could : candidate.refusal});
        list.push_back({{"name", candidate.name},
                        {"accepts", accepts},
                        {"refusal", candidate.refusal},
                        {"yields", candidate.yields}});
    }
    if (arguments.as_json) {
        write_json("-", {{"problem", format(line)}, {"implementation", chosen}, {"candidates", list}});
        return;
    }
    std::printf("%s\n\n", format(line).c_str());
    if (candidates.empty()) {  // as calls are refused
        std::size_t workspace = 0;
        std::printf("%s\n", workspace_size(shapes.call, &workspace).message().c_str());
        return;
    }
    table.print();
    if (chosen.empty()) std::printf("\nno implementation serves this problem\n");
}

}  // namespace

void add_explain(CLI::App& app, int*) {
    CLI::App* command =
        app.add_subcommand("explain", "Print which implementation serves a problem and why the others refuse.");
    auto arguments = std::make_shared<ExplainArguments>();
    command->add_option("PROBLEM", arguments->words, "The problem")->required();
    command->add_flag("--json", arguments->as_json, "Print JSON");
    command->footer(std::string(problem_help) + "\nExample: headrace explain gla:fwd t4096 h16 k128 bf16");
    command->callback([arguments] { explain_problem(*arguments); });
}

}  // namespace headrace::cli
