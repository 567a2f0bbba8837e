// Measuring: the machine's peaks, times of calls interleaved in one run, and the least work that a problem asks for.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/problem_line.hpp"

namespace headrace::harness {

// What the machine reaches with `threads` threads, measured, not looked up; or a CUDA device
// (harness/device_measure.hpp).
struct Peaks {
    int threads = 1;        // 0: of a device
    std::string isa;        // of the arithmetic loops: "avx512", "avx2", "generic"; a device's name
    double f32_gflops = 0;  // fused multiply-add, two FLOP each
    double f64_gflops = 0;
    double bf16_gflops = 0;  // dot product of bf16 pairs into f32; 0 where the machine has none
    double f16_gflops = 0;   // the same of f16
    double steadiness =
        1;                // median attempt over best attempt, the worst of the arithmetic loops; low on a busy machine
    double copy_gbs = 0;  // memory copy far larger than the caches, bytes read + bytes written
};
Peaks measure_peaks(int threads);
constexpr double bytes_of_measure_peaks = 512 << 20;  // the memory that it copies, from and to

struct Timing {
    double min_ms = 0, median_ms = 0;
    int calls = 0;
    double tail_ms = 0;  // 95 of 100 calls took no longer
};

// Seconds that one call takes, and the figures of several such times.
double time_once(const std::function<void()>& work);
Timing summary_of(std::vector<double> seconds);

struct TimingLimits {
    int min_calls = 5;         // per variant, and
    double min_seconds = 1;  // per variant, whichever takes longer
};

// Times the variants in turn, round by round, so that a slow spell of the machine hits all of them. The first call of
// each is not counted. `on_round(done)` reports the fraction done, 0 to 1.
std::vector<Timing> time_interleaved(const std::vector<std::function<void()>>& variants,
                                     const TimingLimits& limits = {}, const std::function<void(double)>& on_round = {});

// The same of samples: what each returns is how many seconds it measured, what it takes counts against the limits.
std::vector<Timing> sample_interleaved(const std::vector<std::function<double()>>& samples,
                                       const TimingLimits& limits = {},
                                       const std::function<void(double)>& on_round = {});

// The least floating-point operations that the recurrence needs: per token and value head, forward and step 4 K V
// (additive rule) or 6 K V (delta rule), backward 10 K V or 16 K V; a summary's part 2 or 4 K V
// (the transition of the delta rule: K K), the adjoint 2 or 6 K V. Implementations may do more.
double useful_flop(const ProblemLine& line);

// The least bytes that the call must move: every input that its results rest on once, every output once, the states of
// a step in and out.
double least_bytes(const Call& call);

// The peak that judges a problem: f64 for f64, for f16 its dot product where there is one, for bf16 that or f32,
// which of them is faster, else f32.
double judging_gflops(const Peaks& peaks, DType dtype);

// How long the problem must take at least, and the share of the arithmetic peak that a time reaches.
struct Bounds {
    double bytes_ms = 0, flop_ms = 0;
};
Bounds bounds(const ProblemLine& line, const Call& call, const Peaks& peaks);
double share_of_limit(const ProblemLine& line, const Peaks& peaks, double milliseconds);

}  // namespace headrace::harness
