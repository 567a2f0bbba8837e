// One problem of headrace bench: its variants timed in turn, against the machine's peaks.
#include "tools/headrace/bench_case.hpp"

#include <algorithm>
#include <cstdio>
#include <list>

#include "harness/memory.hpp"
#include "harness/ranks.hpp"
#include "tools/headrace/table.hpp"
#include "tools/headrace/workspace.hpp"

namespace headrace::cli {
namespace {

struct Variant {
    std::string implementation;
    Call call;
    OwnedWorkspace workspace;

    Variant(const std::string& name, int num_steps, const Call& base)
        : implementation(name), call(with_options(base, implementation, num_steps)), workspace(call) {}

    static Call with_options(Call call, const std::string& name, int num_steps) {
        call.options.force = name.c_str();
        call.options.num_steps = num_steps;
        return call;
    }
};

std::vector<std::string> names_of(const ProblemLine& line, const BenchOptions& options) {
    if (line.cuda) throw Failure{format(line) + ": bench times CPUs only; check and plan take the word cuda"};
    if (!line.force.empty()) return {line.force};
    std::vector<std::string> names = accepting_implementations(line);
    if (names.empty()) throw Failure{format(line) + ": no implementation serves this problem"};
    if (!options.all) names.resize(1);
    return names;
}

std::vector<int> steps_of(const ProblemLine& line, const BenchOptions& options) {
    return options.steps ? std::vector<int>{1, 2, 4, 8} : std::vector<int>{line.num_steps};
}

// A list, for a variant's call points into it.
std::list<Variant> variants_of(const ProblemLine& line, const BenchOptions& options, const Call& call) {
    std::list<Variant> variants;
    for (const std::string& name : names_of(line, options)) {
        for (int num_steps : steps_of(line, options)) variants.emplace_back(name, num_steps, call);
    }
    return variants;
}

}  // namespace

double bench_bytes(const ProblemLine& line, const BenchOptions& options) {
    const harness::CallTensors shapes = harness::make_shapes(line);
    double bytes = harness::tensor_bytes(shapes);
    for (const std::string& name : names_of(line, options)) {
        for (int num_steps : steps_of(line, options)) {
            std::size_t workspace = 0;
            require(line, workspace_size(Variant::with_options(shapes.call, name, num_steps), &workspace));
            bytes += static_cast<double>(workspace);
        }
    }
    return bytes;
}

BenchCase bench(const ProblemLine& line, const BenchOptions& options, const harness::Peaks& peaks,
                const std::function<void(double)>& on_round) {
    const harness::CallTensors tensors = harness::make_tensors(line);
    std::list<Variant> variants = variants_of(line, options, tensors.call);
    std::vector<std::function<void()>> calls;
    const std::vector<std::int64_t> borders = line.ranks > 0 ? harness::borders_of(line) : std::vector<std::int64_t>();
    for (const Variant& variant : variants) {
        const auto once = [&variant, borders] {
            if (!borders.empty()) return harness::run_in_ranks(variant.call, borders, harness::Folding::states);
            return run_call(variant.call, variant.workspace.get());
        };
        require(once());  // an error shows here, before anything is timed
        calls.emplace_back([once] { (void)once(); });
    }
    const std::vector<harness::Timing> timings = harness::time_interleaved(calls, options.limits, on_round);
    BenchCase result;
    result.line = line;
    result.useful_flop = harness::useful_flop(line);
    result.least_bytes = harness::least_bytes(tensors.call);
    result.bounds = harness::bounds(line, tensors.call, peaks);
    std::size_t i = 0;
    for (const Variant& variant : variants) {
        const harness::Timing& timing = timings[i++];
        const double seconds = timing.min_ms * 1e-3;
        result.rows.push_back({variant.implementation, variant.call.options.num_steps, timing,
                               variant.workspace.get().bytes, static_cast<double>(line.B * line.T) / seconds,
                               result.useful_flop / seconds * 1e-9, result.least_bytes / seconds * 1e-9,
                               harness::share_of_limit(line, peaks, timing.min_ms)});
    }
    return result;
}

void print_peaks(const harness::Peaks& peaks) {
    std::printf("measured peaks, %d thread%s, %s: fp32 %s GFLOP/s, fp64 %s GFLOP/s, ", peaks.threads,
                peaks.threads == 1 ? "" : "s", peaks.isa.c_str(), figure(peaks.f32_gflops).c_str(),
                figure(peaks.f64_gflops).c_str());
    if (peaks.bf16_gflops > 0) {
        std::printf("bf16 dot %s GFLOP/s, ", figure(peaks.bf16_gflops).c_str());
    } else {
        std::printf("no bf16 dot, ");
    }
    std::printf("copy %s GB/s\n", figure(peaks.copy_gbs).c_str());
    constexpr double steady = 0.85;
    if (peaks.steadiness >= steady) return;
    std::printf("note: the machine is busy: its peaks varied by %.0f %%; do not trust times and shares of this run\n",
                100 * (1 - peaks.steadiness));
}

json to_json(const harness::Peaks& peaks) {
    return {{"threads", peaks.threads},         {"isa", peaks.isa},
            {"f32_gflops", peaks.f32_gflops},   {"f64_gflops", peaks.f64_gflops},
            {"bf16_gflops", peaks.bf16_gflops}, {"copy_gbs", peaks.copy_gbs},
            {"steadiness", peaks.steadiness}};
}

void print_case(const BenchCase& result, const harness::Peaks& peaks) {
    std::printf("\n%s\n", format(result.line).c_str());
    std::printf("least work: %s MiB, %s ms at %s GB/s; %s GFLOP, %s ms at %s GFLOP/s\n",
                mebibytes(result.least_bytes).c_str(), figure(result.bounds.bytes_ms).c_str(),
                figure(peaks.copy_gbs).c_str(), figure(result.useful_flop * 1e-9).c_str(),
                figure(result.bounds.flop_ms).c_str(),
                figure(harness::judging_gflops(peaks, result.line.dtype)).c_str());
    Table table({"implementation", ">steps", ">ms min", ">ms median", ">calls", ">ktokens/s", ">GFLOP/s", ">GB/s",
                 ">workspace MiB", ">share of limit"});
    for (const BenchRow& row : result.rows) {
        table.add({row.implementation, row.num_steps > 0 ? std::to_string(row.num_steps) : "-",
                   figure(row.timing.min_ms), figure(row.timing.median_ms), std::to_string(row.timing.calls),
                   figure(row.tokens_per_second * 1e-3), figure(row.useful_gflops), figure(row.gbs),
                   mebibytes(static_cast<double>(row.workspace_bytes)), fixed(row.share * 100, 1) + " %"});
    }
    table.print();
}

json to_json(const BenchCase& result) {
    json value = {{"problem", format(result.line)},         {"useful_flop", result.useful_flop},
                  {"least_bytes", result.least_bytes},      {"floor_ms_bytes", result.bounds.bytes_ms},
                  {"floor_ms_flop", result.bounds.flop_ms}, {"rows", json::array()}};
    for (const BenchRow& row : result.rows) {
        value["rows"].push_back({{"implementation", row.implementation},
                                 {"num_steps", row.num_steps},
                                 {"ms_min", row.timing.min_ms},
                                 {"ms_median", row.timing.median_ms},
                                 {"calls", row.timing.calls},
                                 {"tokens_per_second", row.tokens_per_second},
                                 {"useful_gflops", row.useful_gflops},
                                 {"gbs", row.gbs},
                                 {"workspace_bytes", row.workspace_bytes},
                                 {"share_of_limit", row.share}});
    }
    return value;
}

}  // namespace headrace::cli
