// One problem of headrace bench: its variants timed in turn, against the machine's peaks.
#include "tools/headrace/bench_case.hpp"

#include <algorithm>
#include <cstdio>
#include <list>
#include <memory>

#include "harness/device_call.hpp"
#include "harness/device_measure.hpp"
#include "harness/memory.hpp"
#include "harness/ranks.hpp"
#include "tools/headrace/table.hpp"
#include "tools/headrace/workspace.hpp"

namespace headrace::cli {
namespace {

struct Variant {
    std::string implementation;
    Call call;
};

Call with_options(Call call, const std::string& name, int num_steps) {
    call.options.force = name.c_str();
    call.options.num_steps = num_steps;
    return call;
}

std::vector<std::string> names_of(const ProblemLine& line, const BenchOptions& options) {
    if (!line.force.empty()) return {line.force};
    require_served(line);
    if (options.all) return accepting_implementations(line);
    return {serving_implementation(harness::make_shapes(line).call)};
}

std::vector<int> steps_of(const ProblemLine& line, const BenchOptions& options) {
    return options.steps ? std::vector<int>{1, 2, 4, 8} : std::vector<int>{line.num_steps};
}

// A list, for a variant's call points to its name.
std::list<Variant> variants_of(const ProblemLine& line, const BenchOptions& options, const Call& call) {
    std::list<Variant> variants;
    for (const std::string& name : names_of(line, options)) {
        for (int num_steps : steps_of(line, options)) {
            Variant& variant = variants.emplace_back(Variant{name, call});
            variant.call = with_options(call, variant.implementation, num_steps);
        }
    }
    return variants;
}

// The line's variants with their times.
struct Measured {
    std::list<Variant> variants;
    std::vector<std::size_t> workspace_bytes;
    std::vector<harness::Timing> timings, calls;  // calls: on a device
};

Measured measure_on_host(const ProblemLine& line, const BenchOptions& options, const Call& call,
                         const std::function<void(double)>& on_round) {
    Measured measured;
    measured.variants = variants_of(line, options, call);
    const std::vector<std::int64_t> borders = line.ranks > 0 ? harness::borders_of(line) : std::vector<std::int64_t>();
    std::list<OwnedWorkspace> workspaces;
    std::vector<std::function<void()>> calls;
    for (const Variant& variant : measured.variants) {
        const Workspace workspace = workspaces.emplace_back(variant.call).get();
        const auto once = [&variant, workspace, borders] {
            if (!borders.empty()) return harness::run_in_ranks(variant.call, borders, harness::Folding::states);
            return run_call(variant.call, workspace);
        };
        require(once());  // an error shows here, before anything is timed
        calls.emplace_back([once] { (void)once(); });
        measured.workspace_bytes.push_back(workspace.bytes);
    }
    measured.timings = harness::time_interleaved(calls, options.limits, on_round);
    return measured;
}

Measured measure_on_device(const ProblemLine& line, const BenchOptions& options, const Call& call,
                           const std::function<void(double)>& on_round) {
    std::unique_ptr<harness::CallOnDevice> device;
    require(line, harness::copy_to_device(call, &device));
    Measured measured;
    measured.variants = variants_of(line, options, device->call());
    std::vector<harness::DeviceVariant> variants;
    for (const Variant& variant : measured.variants) {
        Workspace workspace;
        require(line, device->add_workspace(variant.call, &workspace));
        variants.push_back({variant.call, workspace});
        measured.workspace_bytes.push_back(workspace.bytes);
    }
    std::vector<harness::DeviceTiming> timings;
    require(line, harness::time_on_device(variants, options.limits, on_round, &timings));
    for (const harness::DeviceTiming& timing : timings) {
        measured.timings.push_back(timing.device);
        measured.calls.push_back(timing.call);
    }
    return measured;
}

}  // namespace

double bench_bytes(const ProblemLine& line, const BenchOptions& options) {
    const harness::CallTensors shapes = harness::make_shapes(line);
    double bytes = harness::tensor_bytes(shapes);
    for (const std::string& name : names_of(line, options)) {
        for (int num_steps : steps_of(line, options)) {
            std::size_t workspace = 0;
            require(line, workspace_size(with_options(shapes.call, name, num_steps), &workspace));
            if (!line.cuda) bytes += static_cast<double>(workspace);
        }
    }
    return bytes;
}

BenchCase bench(const ProblemLine& line, const BenchOptions& options, const harness::Peaks& peaks,
                const std::function<void(double)>& on_round) {
    const harness::CallTensors tensors = harness::make_tensors(line);
    const Measured measured = line.cuda ? measure_on_device(line, options, tensors.call, on_round)
                                        : measure_on_host(line, options, tensors.call, on_round);
    BenchCase result;
    result.line = line;
    result.useful_flop = harness::useful_flop(line);
    result.least_bytes = harness::least_bytes(tensors.call);
    result.bounds = harness::bounds(line, tensors.call, peaks);
    const double bound_ms = std::max(result.bounds.bytes_ms, result.bounds.flop_ms);
    std::size_t i = 0;
    for (const Variant& variant : measured.variants) {
        const harness::Timing& timing = measured.timings[i];
        const double seconds = timing.min_ms * 1e-3;
        result.rows.push_back(
            {variant.implementation, variant.call.options.num_steps, timing,
             line.cuda ? measured.calls[i] : harness::Timing(), measured.workspace_bytes[i],
             static_cast<double>(line.B * line.T) / seconds, result.useful_flop / seconds * 1e-9,
             result.least_bytes / seconds * 1e-9,
             line.cuda ? bound_ms / timing.min_ms : harness::share_of_limit(line, peaks, timing.min_ms)});
        ++i;
    }
    return result;
}

harness::Peaks peaks_of(const ProblemLine& line) {
    if (!line.cuda) return harness::measure_peaks(line.threads > 0 ? line.threads : default_threads());
    harness::Peaks peaks;
    require(line, harness::measure_device_peaks(&peaks));
    return peaks;
}

namespace {

void print_device_peaks(const harness::Peaks& peaks) {
    std::printf(
        "measured peaks of %s: fp32 %s GFLOP/s, fp64 %s GFLOP/s, bf16 and fp16 %s GFLOP/s (mma.sync), copy %s "
        "GB/s\n",
        peaks.isa.c_str(), figure(peaks.f32_gflops).c_str(), figure(peaks.f64_gflops).c_str(),
        figure(peaks.bf16_gflops).c_str(), figure(peaks.copy_gbs).c_str());
    if (harness::is_interpreter(peaks.isa)) {
        std::printf("note: no GPU, but an interpreter: its times, rates and shares mean nothing\n");
    }
}

}  // namespace

void print_peaks(const harness::Peaks& peaks) {
    if (peaks.threads == 0) return print_device_peaks(peaks);
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
    if (peaks.threads == 0) {
        return {{"device", peaks.isa},
                {"f32_gflops", peaks.f32_gflops},
                {"f64_gflops", peaks.f64_gflops},
                {"bf16_gflops", peaks.bf16_gflops},
                {"f16_gflops", peaks.f16_gflops},
                {"copy_gbs", peaks.copy_gbs},
                {"times_mean_something", !harness::is_interpreter(peaks.isa)}};
    }
    return {{"threads", peaks.threads},         {"isa", peaks.isa},
            {"f32_gflops", peaks.f32_gflops},   {"f64_gflops", peaks.f64_gflops},
            {"bf16_gflops", peaks.bf16_gflops}, {"copy_gbs", peaks.copy_gbs},
            {"steadiness", peaks.steadiness}};
}

namespace {

std::string steps_text(const BenchRow& row) { return row.num_steps > 0 ? std::to_string(row.num_steps) : "-"; }

// Nothing of work that has no arithmetic, a transition's of the additive rule.
std::string share_text(const BenchRow& row) { return row.share > 0 ? fixed(row.share * 100, 1) + " %" : "-"; }

void print_device_rows(const BenchCase& result) {
    Table table({"implementation", ">steps", ">device ms min", ">median", ">95 %", ">call us min", ">median", ">95 %",
                 ">GFLOP/s", ">GB/s", ">workspace MiB", ">share of bound"});
    for (const BenchRow& row : result.rows) {
        table.add({row.implementation, steps_text(row), figure(row.timing.min_ms), figure(row.timing.median_ms),
                   figure(row.timing.tail_ms), figure(row.call.min_ms * 1e3), figure(row.call.median_ms * 1e3),
                   figure(row.call.tail_ms * 1e3), figure(row.useful_gflops), figure(row.gbs),
                   mebibytes(static_cast<double>(row.workspace_bytes)), share_text(row)});
    }
    table.print();
}

}  // namespace

void print_case(const BenchCase& result, const harness::Peaks& peaks) {
    std::printf("\n%s\n", format(result.line).c_str());
    std::printf("least work: %s MiB, %s ms at %s GB/s; %s GFLOP, %s ms at %s GFLOP/s\n",
                mebibytes(result.least_bytes).c_str(), figure(result.bounds.bytes_ms).c_str(),
                figure(peaks.copy_gbs).c_str(), figure(result.useful_flop * 1e-9).c_str(),
                figure(result.bounds.flop_ms).c_str(),
                figure(harness::judging_gflops(peaks, result.line.dtype)).c_str());
    if (result.line.cuda) return print_device_rows(result);
    Table table({"implementation", ">steps", ">ms min", ">ms median", ">calls", ">ktokens/s", ">GFLOP/s", ">GB/s",
                 ">workspace MiB", ">share of limit"});
    for (const BenchRow& row : result.rows) {
        table.add({row.implementation, steps_text(row), figure(row.timing.min_ms), figure(row.timing.median_ms),
                   std::to_string(row.timing.calls), figure(row.tokens_per_second * 1e-3), figure(row.useful_gflops),
                   figure(row.gbs), mebibytes(static_cast<double>(row.workspace_bytes)),
                   share_text(row)});
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
                                 {result.line.cuda ? "share_of_bound" : "share_of_limit", row.share}});
        if (!result.line.cuda) continue;
        value["rows"].back()["ms_tail"] = row.timing.tail_ms;
        value["rows"].back()["call_ms_min"] = row.call.min_ms;
        value["rows"].back()["call_ms_median"] = row.call.median_ms;
        value["rows"].back()["call_ms_tail"] = row.call.tail_ms;
    }
    return value;
}

}  // namespace headrace::cli
