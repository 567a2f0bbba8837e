// headrace check: compares the library with the oracle on given, listed or random problems.
#include "harness/check.hpp"

#include <chrono>
#include <cstdio>
#include <memory>

#include "tools/headrace/common.hpp"
#include "tools/headrace/progress.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

struct CheckArguments {
    std::vector<std::string> words;
    std::string file, json_path;
    std::int64_t random = 0;
    std::uint64_t seed = 1;
    bool all = false, verbose = false;
};

// The tensor that came closest to its bar, or passed it by most.
struct Closest {
    double share = 0;  // of the bar
    std::string name, problem;
};

std::vector<ProblemLine> collect(const CheckArguments& arguments) {
    std::vector<ProblemLine> lines = parse_problems(arguments.words);
    if (!arguments.file.empty()) {
        std::vector<ProblemLine> listed;
        require(harness::read_problem_file(arguments.file, &listed));
        lines.insert(lines.end(), listed.begin(), listed.end());
    }
    for (std::int64_t i = 0; i < arguments.random; ++i) {
        constexpr std::uint64_t stride = 1'000'003;  // runs with neighbouring seeds share no problem
        lines.push_back(harness::random_problem(arguments.seed * stride + static_cast<std::uint64_t>(i)));
    }
    if (lines.empty()) throw Failure{"check: nothing to check: expected a PROBLEM, --file or --random"};
    if (!arguments.all) return lines;
    std::vector<ProblemLine> forced;
    for (ProblemLine line : lines) {
        const std::vector<std::string> names = accepting_implementations(line);
        if (names.empty()) throw Failure{format(line) + ": no implementation serves this problem"};
        for (const std::string& name : names) {
            line.force = name;
            forced.push_back(line);
        }
    }
    return forced;
}

json json_of(const ProblemLine& line, const harness::CheckResult& result) {
    json value = {{"problem", format(line)}, {"ok", result.ok},           {"implementation", result.implementation},
                  {"errors", json::array()}, {"message", result.message}, {"repeat", result.repeat}};
    for (const harness::TensorError& error : result.errors) {
        value["errors"].push_back({{"name", error.name},
                                   {"error", error.error},
                                   {"bar", error.bar},
                                   {"nan_count", error.nan_count},
                                   {"ok", error.ok},
                                   {"detail", error.detail}});
    }
    return value;
}

void print_result(std::FILE* stream, const ProblemLine& line, const harness::CheckResult& result) {
    if (!result.ok) {
        std::fprintf(stream, "MISS %s%s%s\n", format(line).c_str(), result.implementation.empty() ? "" : "  ",
                     result.implementation.c_str());
        std::string indented = result.message;
        for (std::size_t at = 0; (at = indented.find('\n', at)) != std::string::npos; at += 3)
            indented.insert(at + 1, "  ");
        std::fprintf(stream, "  %s\n  repeat: %s\n", indented.c_str(), result.repeat.c_str());
    } else {
        std::string errors;
        for (const harness::TensorError& error : result.errors) {
            char text[64];
            std::snprintf(text, sizeof text, " %.1e", error.error);
            errors += "  " + error.name + text;
        }
        std::fprintf(stream, "ok   %s  %s%s\n", format(line).c_str(), result.implementation.c_str(), errors.c_str());
    }
    std::fflush(stream);
}

void note_closest(const ProblemLine& line, const harness::CheckResult& result, Closest* closest) {
    for (const harness::TensorError& error : result.errors) {
        if (error.bar > 0 && error.error / error.bar > closest->share) {
            *closest = {error.error / error.bar, error.name, format(line)};
        }
    }
}

// Returns the number of misses.
std::size_t check_all(const CheckArguments& arguments) {
    const std::vector<ProblemLine> lines = collect(arguments);
    const bool json_to_stdout = arguments.json_path == "-";
    const auto begin = std::chrono::steady_clock::now();
    Progress progress(static_cast<double>(lines.size()));
    Closest closest;
    std::size_t misses = 0;
    json results = json::array();
    for (std::size_t i = 0; i < lines.size(); ++i) {
        progress.show(static_cast<double>(i), format(lines[i]));
        const harness::CheckResult result = harness::check(lines[i]);
        if (!result.ok || arguments.verbose) {
            progress.clear();
            print_result(json_to_stdout ? stderr : stdout, lines[i], result);
        }
        note_closest(lines[i], result, &closest);
        misses += !result.ok;
        if (!arguments.json_path.empty()) results.push_back(json_of(lines[i], result));
    }
    progress.clear();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!arguments.json_path.empty()) {
        write_json(arguments.json_path,
                   {{"problems", lines.size()}, {"missed", misses}, {"seconds", seconds}, {"results", results}});
    }
    if (json_to_stdout) return misses;
    std::printf("%zu problem%s checked in %s s, %zu missed", lines.size(), lines.size() == 1 ? "" : "s",
                fixed(seconds, 1).c_str(), misses);
    if (closest.share > 0) {
        std::printf("; closest to its bar: %s at %s of it in %s", closest.name.c_str(), figure(closest.share).c_str(),
                    closest.problem.c_str());
    }
    std::printf("\n");
    return misses;
}

}  // namespace

void add_check(CLI::App& app, int* exit_code) {
    CLI::App* command = app.add_subcommand("check", "Compare the library with the double-precision oracle.");
    auto arguments = std::make_shared<CheckArguments>();
    command->add_option("PROBLEM", arguments->words, "Problems");
    command->add_option("--file", arguments->file, "A file of problems, one per line")->type_name("FILE");
    command->add_option("--random", arguments->random, "Check so many random problems")->check(CLI::NonNegativeNumber);
    command->add_option("--seed", arguments->seed, "Of the random problems [1]");
    command->add_flag("--all", arguments->all, "Force each problem through every implementation that accepts it");
    command->add_flag("--verbose,-v", arguments->verbose, "Print a line for each problem, not only for misses");
    command->add_option("--json", arguments->json_path, "Write the results as JSON to this file (- for stdout)")
        ->type_name("FILE");
    command->footer(std::string(problem_help) +
                    "\nExits with 1 if a problem missed its bar; prints the command that repeats each miss.\n"
                    "Examples: headrace check kda:bwd t100 h2 k64 bf16 --all -v\n"
                    "          headrace check --random 2000 --seed 7");
    command->callback([arguments, exit_code] { *exit_code = check_all(*arguments) > 0 ? 1 : 0; });
}

}  // namespace headrace::cli
