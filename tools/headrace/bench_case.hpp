// One problem of headrace bench: its variants timed in turn, against the machine's peaks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/measure.hpp"
#include "tools/headrace/common.hpp"

namespace headrace::cli {

struct BenchOptions {
    bool all = false;    // every implementation that accepts, instead of the one that serves
    bool steps = false;  // num_steps 1, 2, 4, 8, instead of the problem's own
    harness::TimingLimits limits;
};

struct BenchRow {
    std::string implementation;
    int num_steps = 0;
    harness::Timing timing;  // of a call; of a line with the word cuda, of the device
    harness::Timing call;    // with that word, of the host in one asynchronous call
    std::size_t workspace_bytes = 0;
    double tokens_per_second = 0, useful_gflops = 0, gbs = 0;  // of the best call
    double share = 0;  // of the arithmetic peak; on a device, of the larger of the two bounds
};

struct BenchCase {
    ProblemLine line;
    double useful_flop = 0, least_bytes = 0;
    harness::Bounds bounds;
    std::vector<BenchRow> rows;
};

// The host memory that bench() takes: the tensors, and a workspace for each variant that runs there. Throws where the
// library refuses one.
double bench_bytes(const ProblemLine& line, const BenchOptions& options);

// The peaks of what the line runs on: so many threads, or the current CUDA device.
harness::Peaks peaks_of(const ProblemLine& line);

// `on_round(done)` reports the fraction done, 0 to 1.
BenchCase bench(const ProblemLine& line, const BenchOptions& options, const harness::Peaks& peaks,
                const std::function<void(double)>& on_round);

void print_peaks(const harness::Peaks& peaks);
json to_json(const harness::Peaks& peaks);
void print_case(const BenchCase& result, const harness::Peaks& peaks);
json to_json(const BenchCase& result);

}  // namespace headrace::cli
