// Times of problems on the device, beside the two bounds that it was measured to have in the same run.
#include <algorithm>
#include <memory>

#include "harness/device_call.hpp"
#include "harness/device_measure.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"
#include "tests/cuda/gpu_check/gpu_check.hpp"

namespace headrace::gpu_check {
namespace {

using harness::ProblemLine;

std::vector<ProblemLine> problems(const Arguments& arguments) {
    std::vector<ProblemLine> lines;
    if (!arguments.file.empty()) require(harness::read_problem_file(arguments.file, &lines));
    for (const std::string& text : arguments.problems) require(harness::parse(text, &lines.emplace_back()));
    for (const ProblemLine& line : lines) {
        if (!line.cuda) throw Failure(format(line) + ": expected the word cuda");
    }
    if (lines.empty()) throw Failure("bench: expected problems");
    return lines;
}

// The times of the implementation that serves the line; an error is a result too.
Status measure(const ProblemLine& line, harness::DeviceTiming* timing, Workspace* workspace) {
    const harness::CallTensors host = harness::make_tensors(line);
    std::unique_ptr<harness::CallOnDevice> device;
    Status status = harness::copy_to_device(host.call, &device);
    if (status.ok()) status = device->add_workspace(device->call(), workspace);
    std::vector<harness::DeviceTiming> timings;
    const harness::TimingLimits limits{.min_calls = 5, .min_seconds = 0.3};
    if (status.ok()) status = time_on_device({{device->call(), *workspace}}, limits, {}, &timings);
    if (status.ok()) *timing = timings[0];
    return status;
}

// Returns whether it could be measured.
bool bench_line(const Arguments& arguments, const ProblemLine& line, const harness::Peaks& peaks) {
    std::string implementation;
    require(harness::find_serving(harness::make_shapes(line).call, &implementation));
    harness::DeviceTiming timing;
    Workspace workspace;
    const Status status = measure(line, &timing, &workspace);
    Line written("bench");
    written.add("problem", format(line)).add("implementation", implementation).add("ok", status.ok());
    if (!status.ok()) {
        std::printf("NOT MEASURED %s: %s\n", format(line).c_str(), status.message().c_str());
        write(arguments, written.add("message", status.message()));
        return false;
    }
    const harness::Bounds bounds = harness::bounds(line, harness::make_shapes(line).call, peaks);
    const double bound = std::max(bounds.bytes_ms, bounds.flop_ms);
    written.add("device_ms_min", timing.device.min_ms).add("device_ms_median", timing.device.median_ms);
    written.add("device_ms_tail", timing.device.tail_ms).add("call_us_min", timing.call.min_ms * 1e3);
    written.add("call_us_median", timing.call.median_ms * 1e3).add("call_us_tail", timing.call.tail_ms * 1e3);
    written.add("samples", std::int64_t{timing.device.calls}).add("queued", std::int64_t{timing.queued});
    written.add("bound_ms_bytes", bounds.bytes_ms).add("bound_ms_flop", bounds.flop_ms);
    written.add("workspace_bytes", static_cast<std::int64_t>(workspace.bytes));
    write(arguments, written);
    std::printf("%-60s %9.3f ms, bound %7.3f ms, call %7.1f us\n", format(line).c_str(), timing.device.min_ms, bound,
                timing.call.min_ms * 1e3);
    std::fflush(stdout);
    return true;
}

}  // namespace

std::int64_t bench(const Arguments& arguments) {
    const Deadline deadline(arguments.seconds);
    const std::vector<ProblemLine> lines = problems(arguments);
    harness::Peaks peaks;
    require(harness::measure_device_peaks(&peaks));
    write(arguments, Line("peaks")
                         .add("device", peaks.isa)
                         .add("copy_gbs", peaks.copy_gbs)
                         .add("f32_gflops", peaks.f32_gflops)
                         .add("f64_gflops", peaks.f64_gflops)
                         .add("bf16_gflops", peaks.bf16_gflops)
                         .add("times_mean_something", !harness::is_interpreter(peaks.isa)));
    std::int64_t failed = 0, made = 0;
    for (const ProblemLine& line : lines) {
        if (deadline.over()) break;
        ++made;
        failed += bench_line(arguments, line, peaks) ? 0 : 1;
    }
    const auto all = static_cast<std::int64_t>(lines.size());
    std::printf("bench: %lld of %lld problems measured, %.0f s%s\n", static_cast<long long>(made - failed),
                static_cast<long long>(all), deadline.passed(), made < all ? "; out of time" : "");
    write(arguments,
          Line("bench_done").add("runs", made).add("of", all).add("missed", failed).add("seconds", deadline.passed()));
    return failed;
}

}  // namespace headrace::gpu_check
