// Peak loops per instruction set, a fair timer and the work counts of a problem.
#include "harness/measure.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::harness {
namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A loop that does `rounds` rounds of independent multiply-adds and returns the FLOP done.
using PeakLoop = double (*)(std::int64_t rounds);

// Twelve accumulators: a latency of four to five cycles on two ports leaves no gap. The empty asm makes each step's
// result observed, so that nothing is folded away, and costs no instruction.
#define HEADRACE_TWELVE(STEP) \
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)

#if defined(__x86_64__)

// NAME: the loop; TARGET: instruction set; VECTOR: accumulator; FLOP: of one INSTRUCTION(accumulator); SETUP: its
// operands.
#define HEADRACE_PEAK_LOOP(NAME, TARGET, VECTOR, ZERO, FLOP, SETUP, INSTRUCTION)               \
    __attribute__((target(TARGET))) double NAME(std::int64_t rounds) {                         \
        SETUP;                                                                                 \
        VECTOR sum0 = ZERO, sum1 = ZERO, sum2 = ZERO, sum3 = ZERO, sum4 = ZERO, sum5 = ZERO;   \
        VECTOR sum6 = ZERO, sum7 = ZERO, sum8 = ZERO, sum9 = ZERO, sum10 = ZERO, sum11 = ZERO; \
        for (std::int64_t round = 0; round < rounds; ++round) {                                \
            HEADRACE_TWELVE(INSTRUCTION)                                                       \
        }                                                                                      \
        return 12.0 * FLOP * static_cast<double>(rounds);                                      \
    }

#define HEADRACE_STEP(i)                    \
    sum##i = _mm512_fmadd_ps(a, b, sum##i); \
    asm volatile("" : "+v"(sum##i));
HEADRACE_PEAK_LOOP(f32_avx512, "avx512f", __m512, _mm512_setzero_ps(), 32, const __m512 a = _mm512_set1_ps(0.5f);
                   const __m512 b = a, HEADRACE_STEP)
#undef HEADRACE_STEP
#define HEADRACE_STEP(i)                    \
    sum##i = _mm512_fmadd_pd(a, b, sum##i); \
    asm volatile("" : "+v"(sum##i));
HEADRACE_PEAK_LOOP(f64_avx512, "avx512f", __m512d, _mm512_setzero_pd(), 16, const __m512d a = _mm512_set1_pd(0.5);
                   const __m512d b = a, HEADRACE_STEP)
#undef HEADRACE_STEP
#define HEADRACE_STEP(i)                     \
    sum##i = _mm512_dpbf16_ps(sum##i, a, b); \
    asm volatile("" : "+v"(sum##i));
HEADRACE_PEAK_LOOP(bf16_avx512, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), 64,
                   const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00);
                   const __m512bh b = a, HEADRACE_STEP)
#undef HEADRACE_STEP
#define HEADRACE_STEP(i)                    \
    sum##i = _mm256_fmadd_ps(a, b, sum##i); \
    asm volatile("" : "+x"(sum##i));
HEADRACE_PEAK_LOOP(f32_avx2, "avx2,fma", __m256, _mm256_setzero_ps(), 16, const __m256 a = _mm256_set1_ps(0.5f);
                   const __m256 b = a, HEADRACE_STEP)
#undef HEADRACE_STEP
#define HEADRACE_STEP(i)                    \
    sum##i = _mm256_fmadd_pd(a, b, sum##i); \
    asm volatile("" : "+x"(sum##i));
HEADRACE_PEAK_LOOP(f64_avx2, "avx2,fma", __m256d, _mm256_setzero_pd(), 8, const __m256d a = _mm256_set1_pd(0.5);
                   const __m256d b = a, HEADRACE_STEP)
#undef HEADRACE_STEP
#undef HEADRACE_PEAK_LOOP

#endif

// Vectors of 16 bytes, which every machine of today has; the compiler fuses multiply and add where it may.
template <typename Scalar>
double portable_loop(std::int64_t rounds) {
    typedef Scalar Vector __attribute__((vector_size(16)));
    constexpr int lanes = 16 / static_cast<int>(sizeof(Scalar)), accumulators = 12;
    const Vector factor = Vector{} + Scalar(0.5);
    Vector sums[accumulators] = {};
    for (std::int64_t round = 0; round < rounds; ++round) {
#define HEADRACE_STEP(i) sums[i] = sums[i] * factor + factor;
        HEADRACE_TWELVE(HEADRACE_STEP)
#undef HEADRACE_STEP
        asm volatile("" ::: "memory");
    }
    volatile Scalar sink = 0;  // observed once: the sums feed on themselves, so no round can be dropped
    for (const Vector& sum : sums) sink = sink + sum[0];
    return 2.0 * accumulators * lanes * static_cast<double>(rounds);
}

struct PeakLoops {
    const char* isa;
    PeakLoop f32, f64, bf16;
};

PeakLoops choose_loops() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return {"avx512", f32_avx512, f64_avx512, __builtin_cpu_supports("avx512bf16") ? bf16_avx512 : nullptr};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"avx2", f32_avx2, f64_avx2, nullptr};
#endif
    return {"generic", portable_loop<float>, portable_loop<double>, nullptr};
}

// The best of several attempts, per second, and the median attempt's share of it.
struct Rate {
    double best = 0, steadiness = 0;
};

// Runs `work(thread)`, which returns an amount, on all threads at once, several times. The threads live through all
// attempts and wait by spinning: waking one takes longer than a short attempt.
Rate measure_rate(int threads, std::size_t attempts, const std::function<double(int)>& work) {
    struct Part {
        double begin = 0, end = 0, amount = 0;
    };
    const auto team_size = static_cast<std::size_t>(threads);
    std::vector<Part> parts(attempts * team_size);  // [attempts, threads]
    std::atomic<std::size_t> arrived{0};
    const auto member = [&](int thread) {
        for (std::size_t attempt = 0; attempt < attempts; ++attempt) {
            arrived.fetch_add(1);
            while (arrived.load() < (attempt + 1) * team_size) std::this_thread::yield();
            const double begin = seconds_now();
            const double amount = work(thread);
            parts[attempt * team_size + static_cast<std::size_t>(thread)] = {begin, seconds_now(), amount};
        }
    };
    std::vector<std::thread> team;
    for (int thread = 0; thread < threads; ++thread) team.emplace_back(member, thread);
    for (std::thread& thread : team) thread.join();
    std::vector<double> rates;
    for (std::size_t attempt = 0; attempt < attempts; ++attempt) {
        Part whole = parts[attempt * team_size];
        for (std::size_t i = 1; i < team_size; ++i) {
            const Part& part = parts[attempt * team_size + i];
            whole = {std::min(whole.begin, part.begin), std::max(whole.end, part.end), whole.amount + part.amount};
        }
        rates.push_back(whole.amount / (whole.end - whole.begin));
    }
    std::sort(rates.begin(), rates.end());
    return {rates.back(), rates[rates.size() / 2] / rates.back()};
}

// FLOP/s of a loop. Attempts are short, so that on a busy machine one of them meets no other program.
Rate measure_peak(int threads, PeakLoop loop) {
    if (loop == nullptr) return {0, 1};
    constexpr std::int64_t trial = 100'000;
    constexpr double attempt_seconds = 0.004;
    double seconds = 1;
    for (int i = 0; i < 5; ++i) {
        const double begin = seconds_now();
        loop(trial);
        seconds = std::min(seconds, std::max(seconds_now() - begin, 1e-6));
    }
    const auto rounds = static_cast<std::int64_t>(static_cast<double>(trial) * attempt_seconds / seconds) + 1;
    return measure_rate(threads, 50, [&](int) { return loop(rounds); });
}

// Every thread copies its own slice of 256 MiB, several times the last-level cache.
Rate measure_copy(int threads) {
    const std::size_t slice = (std::size_t{256} << 20) / static_cast<std::size_t>(threads);
    std::vector<std::unique_ptr<char[]>> from, to;
    for (int thread = 0; thread < threads; ++thread) {
        from.push_back(std::make_unique<char[]>(slice));  // zeroed: every page is touched
        to.push_back(std::make_unique<char[]>(slice));
    }
    return measure_rate(threads, 12, [&](int thread) {
        const auto index = static_cast<std::size_t>(thread);
        std::memcpy(to[index].get(), from[index].get(), slice);
        asm volatile("" ::"r"(to[index].get()) : "memory");
        return 2.0 * static_cast<double>(slice);
    });
}

double view_bytes(const TensorView& view) {
    return view.given() ? static_cast<double>(view.numel()) * static_cast<double>(size_of(view.dtype)) : 0;
}

// States read and written by a step: one row per sequence, and with 2-D indices one written row per token.
double pool_bytes(const Call& call) {
    if (!call.pool.states.given() || call.pool.states.shape[0] == 0) return 0;
    const TensorView &indices = call.pool.indices, &cu_seqlens = call.in.cu_seqlens;
    const std::int64_t sequences = cu_seqlens.given() ? cu_seqlens.shape[0] - 1 : call.in.q.shape[0];
    const std::int64_t written = indices.rank == 2 ? indices.numel() : sequences;
    const double row = view_bytes(call.pool.states) / static_cast<double>(call.pool.states.shape[0]);
    return row * static_cast<double>(sequences + written) + view_bytes(indices);
}

}  // namespace

Peaks measure_peaks(int threads) {
    const PeakLoops loops = choose_loops();
    Peaks peaks;
    peaks.threads = std::max(threads, 1);
    peaks.isa = loops.isa;
    const Rate f32 = measure_peak(peaks.threads, loops.f32), f64 = measure_peak(peaks.threads, loops.f64);
    const Rate bf16 = measure_peak(peaks.threads, loops.bf16), copy = measure_copy(peaks.threads);
    peaks.f32_gflops = f32.best * 1e-9;
    peaks.f64_gflops = f64.best * 1e-9;
    peaks.bf16_gflops = bf16.best * 1e-9;
    peaks.copy_gbs = copy.best * 1e-9;
    peaks.steadiness = std::min({f32.steadiness, f64.steadiness, bf16.steadiness});
    return peaks;
}

double time_once(const std::function<void()>& work) {
    const double begin = seconds_now();
    work();
    return seconds_now() - begin;
}

Timing summary_of(std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    const std::size_t middle = seconds.size() / 2;
    const double median = seconds.size() % 2 == 1 ? seconds[middle] : 0.5 * (seconds[middle - 1] + seconds[middle]);
    const double tail = seconds[std::min(seconds.size() - 1, seconds.size() * 95 / 100)];
    return {seconds.front() * 1e3, median * 1e3, static_cast<int>(seconds.size()), tail * 1e3};
}

std::vector<Timing> time_interleaved(const std::vector<std::function<void()>>& variants, const TimingLimits& limits,
                                     const std::function<void(double)>& on_round) {
    std::vector<std::function<double()>> samples;
    for (const auto& variant : variants) {
        variant();
        samples.emplace_back([&variant] { return time_once(variant); });
    }
    return sample_interleaved(samples, limits, on_round);
}

std::vector<Timing> sample_interleaved(const std::vector<std::function<double()>>& samples, const TimingLimits& limits,
                                       const std::function<void(double)>& on_round) {
    constexpr std::size_t max_calls = 1'000'000;  // of calls that take no time at all
    std::vector<std::vector<double>> seconds(samples.size());
    std::vector<double> totals(samples.size());
    double done = samples.empty() ? 1 : 0;
    while (done < 1) {
        done = 1;
        for (std::size_t i = 0; i < samples.size(); ++i) {
            totals[i] += time_once([&] { seconds[i].push_back(samples[i]()); });
            const double calls = static_cast<double>(seconds[i].size());
            if (seconds[i].size() < max_calls) {
                done = std::min({done, calls / limits.min_calls, totals[i] / limits.min_seconds});
            }
        }
        if (on_round) on_round(done);
    }
    std::vector<Timing> timings;
    for (auto& of_one : seconds) timings.push_back(summary_of(std::move(of_one)));
    return timings;
}

double useful_flop(const ProblemLine& line) {
    const bool delta = has_delta_rule(line.op);
    const double forward = delta ? 6 : 4, backward = delta ? 16 : 10;
    const double K = static_cast<double>(line.K), V = static_cast<double>(line.V);
    const double write = delta ? 4 : 2;  // into a column of a state, and what the delta rule reads of it before
    const double columns = (line.part != Parts::transition ? V : 0) + (delta && line.part != Parts::state ? K : 0);
    double per_token_and_head = forward * K * V;
    if (line.direction == Direction::backward) per_token_and_head = backward * K * V;
    if (line.direction == Direction::summarize) per_token_and_head = write * K * columns;
    if (line.direction == Direction::summarize_backward) per_token_and_head = (delta ? 6 : 2) * K * V;
    return per_token_and_head * static_cast<double>(line.B) * static_cast<double>(line.T) *
           static_cast<double>(line.HV);
}

double least_bytes(const Call& call) {
    // Of a summary what its part rests on: a transition on no values, of the additive rule on the gates alone.
    const bool summary = call.direction == Direction::summarize,
               values = summary ? call.summary.state.given() : call.direction != Direction::summarize_backward,
               keys = values || has_delta_rule(call.op);
    double bytes = 0;
    const Inputs& in = call.in;
    if (!summary) bytes += view_bytes(in.q);
    if (keys) bytes += view_bytes(in.k);
    if (values) bytes += view_bytes(in.v) + view_bytes(in.initial_state);
    for (const TensorView* view :
         {&in.p, &in.g, &in.gv, &in.g_gamma, &in.beta, &in.A_log, &in.dt_bias, &in.cu_seqlens}) {
        bytes += view_bytes(*view);
    }
    if (summary) return bytes + view_bytes(call.summary.transition) + view_bytes(call.summary.state);
    if (call.direction == Direction::forward || call.direction == Direction::step) {
        bytes += view_bytes(call.out.o) + view_bytes(call.out.final_state);
        return call.direction == Direction::step ? bytes + pool_bytes(call) : bytes;
    }
    const Gradients& grads = call.grads;
    for (const TensorView* view :
         {&call.d_out.d_o, &call.d_out.d_final_state, &grads.d_q, &grads.d_k, &grads.d_v, &grads.d_p, &grads.d_g,
          &grads.d_gv, &grads.d_g_gamma, &grads.d_beta, &grads.d_A_log, &grads.d_dt_bias, &grads.d_initial_state}) {
        bytes += view_bytes(*view);
    }
    return bytes;
}

double judging_gflops(const Peaks& peaks, DType dtype) {
    if (dtype == DType::f64) return peaks.f64_gflops;
    if (dtype == DType::f16 && peaks.f16_gflops > 0) return peaks.f16_gflops;
    return dtype == DType::bf16 ? std::max(peaks.bf16_gflops, peaks.f32_gflops) : peaks.f32_gflops;
}

Bounds bounds(const ProblemLine& line, const Call& call, const Peaks& peaks) {
    return {least_bytes(call) / peaks.copy_gbs * 1e-6, useful_flop(line) / judging_gflops(peaks, line.dtype) * 1e-6};
}

double share_of_limit(const ProblemLine& line, const Peaks& peaks, double milliseconds) {
    return useful_flop(line) / judging_gflops(peaks, line.dtype) * 1e-6 / milliseconds;
}

}  // namespace headrace::harness
