// headrace check: compares the library with the oracle on given, listed or random problems.
#include "harness/check.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>

#include "harness/device_measure.hpp"
#include "harness/memory.hpp"
#include "tools/headrace/common.hpp"
#include "tools/headrace/interruption.hpp"
#include "tools/headrace/progress.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

constexpr std::uint64_t random_stride = 1'000'003;  // runs with neighbouring seeds share no problem

struct CheckArguments {
    std::vector<std::string> words;
    std::string file, device = "cpu", json_path;
    std::int64_t random = 0;
    std::uint64_t seed = 1;
    bool all = false, verbose = false;
};

bool on_cuda(const CheckArguments& arguments) { return arguments.device == "cuda"; }

// The tensor that came closest to its bar, or passed it by most.
struct Closest {
    double share = 0;  // of the bar
    std::string name, problem;
};

// The line itself, or forced through each implementation that accepts it.
std::vector<ProblemLine> variants_of(const ProblemLine& line, bool all) {
    if (!all) return {line};
    std::vector<ProblemLine> forced;
    for (const std::string& name : accepting_implementations(line)) {
        forced.push_back(line);
        forced.back().force = name;
    }
    if (forced.empty()) require_served(line);
    return forced;
}

void require_device() {
    harness::DeviceFacts facts;
    require(harness::describe_device(&facts));
}

// The problems that were given, not the random ones. What the library refuses, a wrong name say, what does not fit into
// memory and a device that is not there are found here, before anything is computed.
std::vector<ProblemLine> collect(const CheckArguments& arguments) {
    std::vector<ProblemLine> lines = parse_problems(arguments.words);
    if (!arguments.file.empty()) {
        std::vector<ProblemLine> listed;
        require(harness::read_problem_file(arguments.file, &listed));
        lines.insert(lines.end(), listed.begin(), listed.end());
    }
    if (lines.empty() && arguments.random == 0) {
        throw Failure{"check: nothing to check: expected a PROBLEM, --file or --random"};
    }
    if (arguments.random > 0) {  // of which none is forced by a wrong name, unless the environment does so
        std::vector<Candidate> candidates;
        require(explain(harness::make_shapes({}).call, &candidates));
    }
    if (on_cuda(arguments)) {
        require_device();
        for (ProblemLine& line : lines) line.cuda = true;
    }
    const harness::AvailableMemory available = harness::available_memory();
    std::vector<ProblemLine> variants;
    for (const ProblemLine& line : lines) {
        for (const ProblemLine& variant : variants_of(line, arguments.all)) {
            double bytes = 0;
            require(variant, harness::check_bytes(variant, &bytes));
            require(harness::fits(format(variant), bytes, available));
            variants.push_back(variant);
        }
    }
    if (std::any_of(variants.begin(), variants.end(), [](const ProblemLine& line) { return line.cuda; }))
        require_device();
    return variants;
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
}

void note_closest(const ProblemLine& line, const harness::CheckResult& result, Closest* closest) {
    for (const harness::TensorError& error : result.errors) {
        if (error.bar > 0 && error.error / error.bar > closest->share) {
            *closest = {error.error / error.bar, error.name, format(line)};
        }
    }
}

// What a run of check has done so far.
struct Tally {
    std::size_t checked = 0, misses = 0;
    Closest closest;
    json results = json::array();
};

void check_one(const CheckArguments& arguments, const ProblemLine& line, Progress& progress, Tally* tally) {
    const harness::CheckResult result = harness::check(line);
    if (!result.ok || arguments.verbose) {
        progress.clear();
        print_result(arguments.json_path == "-" ? stderr : stdout, line, result);
        require_stdout();
    }
    note_closest(line, result, &tally->closest);
    ++tally->checked;
    tally->misses += !result.ok;
    if (!arguments.json_path.empty()) tally->results.push_back(json_of(line, result));
}

// Random problems are drawn when their turn comes: a million would take memory, and seconds before the first.
Tally check_each(const CheckArguments& arguments, const Interruption& interruption) {
    const std::vector<ProblemLine> given = collect(arguments);
    const auto random = static_cast<std::size_t>(arguments.random), total = given.size() + random;
    Progress progress(static_cast<double>(total));
    Tally tally;
    for (std::size_t i = 0; i < total && !interruption.came(); ++i) {
        if (i < given.size()) {
            progress.show(static_cast<double>(i), format(given[i]));
            check_one(arguments, given[i], progress, &tally);
            continue;
        }
        const ProblemLine drawn = harness::random_problem(arguments.seed * random_stride + (i - given.size()),
                                                          on_cuda(arguments) ? Device::cuda : Device::cpu);
        for (const ProblemLine& line : variants_of(drawn, arguments.all)) {
            if (interruption.came()) break;
            progress.show(static_cast<double>(i), format(line));
            check_one(arguments, line, progress, &tally);
        }
    }
    return tally;
}

// Returns the exit code.
int check_all(const CheckArguments& arguments) {
    const Interruption interruption;
    const auto begin = std::chrono::steady_clock::now();
    const Tally tally = check_each(arguments, interruption);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!arguments.json_path.empty()) {
        json value = {{"problems", tally.checked}, {"missed", tally.misses}, {"seconds", seconds}};
        if (interruption.came()) value["stopped_by"] = interruption.name();
        value["results"] = tally.results;
        write_json(arguments.json_path, value);
    }
    if (arguments.json_path != "-") {
        std::printf("%zu problem%s checked in %s s, %zu missed", tally.checked, tally.checked == 1 ? "" : "s",
                    fixed(seconds, 1).c_str(), tally.misses);
        if (interruption.came()) std::printf(", then stopped by %s", interruption.name());
        if (tally.closest.share > 0) {
            std::printf("; closest to its bar: %s at %s of it in %s", tally.closest.name.c_str(),
                        figure(tally.closest.share).c_str(), tally.closest.problem.c_str());
        }
        std::printf("\n");
    }
    require_stdout();
    interruption.pass_on();
    return tally.misses > 0 ? 1 : 0;
}

}  // namespace

void add_check(CLI::App& app, int* exit_code) {
    CLI::App* command = app.add_subcommand("check", "Compare the library with the double-precision oracle.");
    auto arguments = std::make_shared<CheckArguments>();
    command->add_option("PROBLEM", arguments->words, "Problems");
    command->add_option("--file", arguments->file, "A file of problems, one per line")->type_name("FILE");
    add_number(command, "--random", &arguments->random, std::int64_t{0}, std::int64_t{random_stride},
               "Check so many random problems");
    add_number(command, "--seed", &arguments->seed, std::uint64_t{0}, ~std::uint64_t{0}, "Of the random problems [1]");
    command
        ->add_option("--device", arguments->device,
                     "cpu or cuda: where tensors lie of problems that do not say so [cpu]")
        ->check(CLI::IsMember({"cpu", "cuda"}));
    command->add_flag("--all", arguments->all, "Force each problem through every implementation that accepts it");
    command->add_flag("--verbose,-v", arguments->verbose, "Print a line for each problem, not only for misses");
    add_output(command, "--json", &arguments->json_path, Dash::means_stdout,
               "Write the results as JSON to this file (- for stdout)");
    command->footer(std::string(problem_help) +
                    "\nExits with 1 if a problem missed its bar; prints the command that repeats each miss.\n"
                    "Interrupted or terminated, it says what it checked; a second signal ends it at once.\n"
                    "Examples: headrace check kda:bwd t100 h2 k64 bf16 --all -v\n"
                    "          headrace check --random 2000 --seed 7\n"
                    "          headrace check --random 500 --device cuda");
    command->callback([arguments, exit_code] { *exit_code = check_all(*arguments); });
}

}  // namespace headrace::cli
