// headrace bench: times problems and compares them with the machine's measured peaks.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "harness/memory.hpp"
#include "tools/headrace/bench_case.hpp"
#include "tools/headrace/progress.hpp"

namespace headrace::cli {
namespace {

struct BenchArguments {
    std::vector<std::string> words, presets;
    std::string file, json_path;
    int threads = 0;
    BenchOptions options;
};

std::vector<ProblemLine> collect(const BenchArguments& arguments) {
    std::vector<ProblemLine> lines = parse_problems(arguments.words);
    for (const std::string& name : arguments.presets) {
        std::vector<std::string> texts = {name};
        if (name == "families") {
            texts.clear();
            for (const std::string& family : harness::family_presets()) {
                texts.push_back(family + ":fwd");
                texts.push_back(family + ":bwd");
            }
        }
        for (const std::string& text : texts) {
            lines.emplace_back();
            require(harness::parse(text, &lines.back()));
        }
    }
    if (!arguments.file.empty()) {
        std::vector<ProblemLine> listed;
        require(harness::read_problem_file(arguments.file, &listed));
        lines.insert(lines.end(), listed.begin(), listed.end());
    }
    if (lines.empty()) throw Failure{"bench: nothing to measure: expected a PROBLEM, --preset or --file"};
    for (ProblemLine& line : lines) {
        if (arguments.threads > 0) line.threads = arguments.threads;
    }
    const harness::AvailableMemory available = harness::available_memory();
    for (const ProblemLine& line : lines) {
        if (line.cuda && line.ranks > 0)
            throw Failure{format(line) + ": expected no ranks=P with cuda: copies of its pieces would take the time"};
        const double bytes = std::max(bench_bytes(line, arguments.options), harness::bytes_of_measure_peaks);
        require(harness::fits(format(line), bytes, available));
    }
    return lines;
}

void bench_all(const BenchArguments& arguments) {
    const std::vector<ProblemLine> lines = collect(arguments);
    const bool text = arguments.json_path != "-";
    std::map<int, harness::Peaks> known_peaks;  // by the number of threads; 0: of the device
    json value = {{"peaks", json::array()}, {"cases", json::array()}};
    Progress progress(static_cast<double>(lines.size()));
    for (std::size_t i = 0; i < lines.size(); ++i) {
        const ProblemLine& line = lines[i];
        const int threads = line.cuda ? 0 : line.threads > 0 ? line.threads : default_threads();
        if (known_peaks.count(threads) == 0) {
            progress.show(static_cast<double>(i), "peaks of the machine");
            known_peaks[threads] = peaks_of(line);
            progress.clear();
            if (text) print_peaks(known_peaks[threads]);
            require_stdout();
            value["peaks"].push_back(to_json(known_peaks[threads]));
        }
        const auto show = [&](double done) { progress.show(static_cast<double>(i) + done, format(line)); };
        show(0);
        const BenchCase result = bench(line, arguments.options, known_peaks[threads], show);
        progress.clear();
        if (text) print_case(result, known_peaks[threads]);
        require_stdout();
        value["cases"].push_back(to_json(result));
        if (!line.cuda) value["cases"].back()["threads"] = threads;
    }
    if (!arguments.json_path.empty()) write_json(arguments.json_path, value);
}

}  // namespace

void add_bench(CLI::App& app, int*) {
    CLI::App* command =
        app.add_subcommand("bench", "Time problems and compare them with the machine's measured peaks.");
    auto arguments = std::make_shared<BenchArguments>();
    command->add_option("PROBLEM", arguments->words, "Problems");
    command
        ->add_option("--preset", arguments->presets,
                     "A preset (headrace list); families: the five families, fwd and bwd")
        ->allow_extra_args(false);
    command->add_option("--file", arguments->file, "A file of problems, one per line")->type_name("FILE");
    command->add_flag("--all", arguments->options.all, "Every implementation that accepts the problem, in turn");
    command->add_flag("--steps", arguments->options.steps, "With num_steps 1, 2, 4 and 8, in turn");
    add_number(command, "--threads", &arguments->threads, 1, most_threads, "Threads [the problem's, else all]");
    add_number(command, "--min-calls", &arguments->options.limits.min_calls, 1, 1000000, "Calls at least [5]");
    add_number(command, "--min-seconds", &arguments->options.limits.min_seconds, 1e-6, 1e6,
               "Seconds per variant at least [1]");
    add_output(command, "--json", &arguments->json_path, Dash::means_stdout,
               "Write the results as JSON to this file (- for stdout)");
    command->footer(
        std::string(problem_help) +
        "\nFirst calls and allocations are not timed. GFLOP/s and GB/s count the least work that the recurrence\n"
        "needs; the share of the limit is that work over the time and the peak of the arithmetic (fp64, fp32, or\n"
        "the bf16 dot product for bf16 where it is faster), each measured in the same run. A problem with ranks=P\n"
        "is timed in P pieces one after the other, summaries included.\n"
        "With the word cuda: the time of the GPU, between events around queued calls, and of the host in one\n"
        "asynchronous call; the bound is the larger of the bytes over a copy's rate and the work over the peak, both\n"
        "of that GPU.\n"
        "Examples: headrace bench gated_delta_rule:fwd t4096 h16 k128 v128 --threads 2\n"
        "          headrace bench --preset ling-mini-linear --all --steps --json result.json");
    command->callback([arguments] { bench_all(*arguments); });
}

}  // namespace headrace::cli
