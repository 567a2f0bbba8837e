// Measuring on a CUDA device: which it is, what it reaches, and how long calls on its tensors take.
#include "harness/device_measure.hpp"

#ifdef HEADRACE_HAS_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "harness/device_loops.hpp"
#include "harness/run_call.hpp"
#endif

namespace headrace::harness {

#ifdef HEADRACE_HAS_CUDA
namespace {

Status checked(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return {};
    return {Code::unsupported, std::string("CUDA: ") + what + ": " + cudaGetErrorString(error)};
}

// Keeps the first error of calls made one after the other; the rest are not made.
class Calls {
  public:
    template <class F>
    void make(const char* what, F call) {
        if (status_.ok()) status_ = checked(call(), what);
    }
    void take(Status status) {
        if (status_.ok()) status_ = std::move(status);
    }
    const Status& status() const { return status_; }

  private:
    Status status_;
};

class Event {
  public:
    explicit Event(Calls& calls) {
        calls.make("cudaEventCreate", [&] { return cudaEventCreate(&event_); });
    }
    ~Event() {
        if (event_ != nullptr) cudaEventDestroy(event_);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    operator cudaEvent_t() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

// Device memory, all of it written.
class Memory {
  public:
    Memory(Calls& calls, std::size_t bytes) {
        calls.make("cudaMalloc", [&] { return cudaMalloc(&data_, bytes); });
        calls.make("cudaMemset", [&] { return cudaMemset(data_, 1, bytes); });
    }
    ~Memory() { cudaFree(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
};

// Holds a stream from where it is made until it is opened, two seconds at most: a queue that is full would wait too.
class Gate {
  public:
    Gate(Calls& calls, cudaStream_t stream) {
        calls.make("cudaLaunchHostFunc", [&] { return cudaLaunchHostFunc(stream, &Gate::hold, this); });
    }
    void open() { open_ = true; }

  private:
    static void hold(void* gate) {
        auto& self = *static_cast<Gate*>(gate);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (!self.open_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    }
    std::atomic<bool> open_ = false;
};

// Milliseconds of the device between two points of a stream, once it has passed both.
double elapsed(Calls& calls, cudaEvent_t begin, cudaEvent_t end) {
    float milliseconds = 0;
    calls.make("cudaEventSynchronize", [&] { return cudaEventSynchronize(end); });
    calls.make("cudaEventElapsedTime", [&] { return cudaEventElapsedTime(&milliseconds, begin, end); });
    return milliseconds;
}

// The best of several attempts per second; work() queues on the default stream and returns an amount.
double best_rate(Calls& calls, int attempts, const std::function<double()>& work) {
    const Event begin(calls), end(calls);
    double best = 0;
    for (int attempt = 0; attempt < attempts && calls.status().ok(); ++attempt) {
        double amount = 0;
        calls.make("cudaEventRecord", [&] { return cudaEventRecord(begin, nullptr); });
        calls.make("launch", [&] {
            amount = work();
            return cudaGetLastError();
        });
        calls.make("cudaEventRecord", [&] { return cudaEventRecord(end, nullptr); });
        const double seconds = elapsed(calls, begin, end) * 1e-3;
        if (attempt > 0 && seconds > 0) best = std::max(best, amount / seconds);  // the first warms up
    }
    return best;
}

double copy_rate(Calls& calls, std::size_t bytes, int attempts) {
    const Memory from(calls, bytes), to(calls, bytes);
    return best_rate(calls, attempts, [&] {
        cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, nullptr);
        return 2.0 * static_cast<double>(bytes);
    });
}

// A variant with what was measured of it.
class Sampler {
  public:
    Sampler(Calls& calls, const DeviceVariant& variant, bool interpreter)
        : calls_(calls),
          variant_(variant),
          stream_(static_cast<cudaStream_t>(variant.call.options.stream)),
          begin_(calls),
          end_(calls) {
        // The first call loads the kernels, which may wait for the stream.
        calls_.take(run_call(variant_.call, variant_.workspace));
        calls_.make("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream_); });
        constexpr double seconds_between_events = 2e-3;
        constexpr int most_queued = 32;  // far from where a queue of a thousand launches is full
        const double seconds = sample();
        if (!interpreter && seconds > 0)
            queued_ = std::clamp(static_cast<int>(seconds_between_events / seconds), 1, most_queued);
        call_seconds_.clear();
    }

    // Seconds of the device in one call.
    double sample() {
        Gate gate(calls_, stream_);
        calls_.make("cudaEventRecord", [&] { return cudaEventRecord(begin_, stream_); });
        for (int i = 0; i < queued_ && calls_.status().ok(); ++i) {
            call_seconds_.push_back(time_once([&] { calls_.take(run_call(variant_.call, variant_.workspace)); }));
        }
        calls_.make("cudaEventRecord", [&] { return cudaEventRecord(end_, stream_); });
        gate.open();
        const double seconds = elapsed(calls_, begin_, end_) * 1e-3 / queued_;
        if (!calls_.status().ok()) cudaStreamSynchronize(stream_);  // before the gate goes
        return seconds;
    }
    Timing call_timing() const { return summary_of(call_seconds_); }
    int queued() const { return queued_; }

  private:
    Calls& calls_;
    const DeviceVariant& variant_;
    cudaStream_t stream_;
    Event begin_, end_;
    int queued_ = 1;
    std::vector<double> call_seconds_;
};

}  // namespace

Status describe_device(DeviceFacts* facts) {
    int device = 0;
    cudaDeviceProp properties{};
    Calls calls;
    calls.make("cudaGetDevice", [&] { return cudaGetDevice(&device); });
    calls.make("cudaGetDeviceProperties", [&] { return cudaGetDeviceProperties(&properties, device); });
    *facts = {properties.name, properties.major, properties.minor, properties.multiProcessorCount};
    return calls.status();
}

Status measure_device_peaks(Peaks* peaks) {
    DeviceFacts facts;
    if (Status status = describe_device(&facts); !status.ok()) return status;
    const bool quick = is_interpreter(facts.name);
    const int attempts = quick ? 2 : 12, blocks = quick ? 1 : 8 * facts.multiprocessors;
    Calls calls;
    std::size_t free = 0, total = 0;
    calls.make("cudaMemGetInfo", [&] { return cudaMemGetInfo(&free, &total); });
    const std::size_t copied = quick ? 1 << 16 : std::min<std::size_t>(1 << 30, free / 4);
    *peaks = Peaks{};
    peaks->threads = 0;
    peaks->isa = facts.name;
    peaks->copy_gbs = copy_rate(calls, copied, attempts) * 1e-9;
    const Memory sums(calls, sizeof(double) * static_cast<std::size_t>(blocks) * loop_threads);
    const auto gflops = [&](LoopKind kind, std::int64_t rounds) {
        return 1e-9 * best_rate(calls, attempts, [&] {
                   return launch_loop(kind, blocks, quick ? 1 : rounds, static_cast<double*>(sums.data()));
               });
    };
    peaks->f32_gflops = gflops(LoopKind::f32_fma, 4096);
    peaks->f64_gflops = gflops(LoopKind::f64_fma, 2048);
    peaks->bf16_gflops = peaks->f16_gflops = gflops(LoopKind::bf16_mma, 4096);
    return calls.status();
}

Status time_on_device(const std::vector<DeviceVariant>& variants, const TimingLimits& limits,
                      const std::function<void(double)>& on_round, std::vector<DeviceTiming>* timings) {
    DeviceFacts facts;
    if (Status status = describe_device(&facts); !status.ok()) return status;
    Calls calls;
    std::vector<std::unique_ptr<Sampler>> samplers;
    std::vector<std::function<double()>> samples;
    for (const DeviceVariant& variant : variants) {
        samplers.push_back(std::make_unique<Sampler>(calls, variant, is_interpreter(facts.name)));
        samples.emplace_back([&sampler = *samplers.back()] { return sampler.sample(); });
        if (!calls.status().ok()) return calls.status();
    }
    const std::vector<Timing> device = sample_interleaved(samples, limits, on_round);
    if (!calls.status().ok()) return calls.status();
    timings->clear();
    for (std::size_t i = 0; i < variants.size(); ++i) {
        timings->push_back({device[i], samplers[i]->call_timing(), samplers[i]->queued()});
    }
    return {};
}
#else
namespace {

Status no_cuda() { return {Code::unsupported, "cuda: this build has no CUDA (HEADRACE_CUDA)"}; }

}  // namespace

Status describe_device(DeviceFacts*) { return no_cuda(); }
Status measure_device_peaks(Peaks*) { return no_cuda(); }
Status time_on_device(const std::vector<DeviceVariant>&, const TimingLimits&, const std::function<void(double)>&,
                      std::vector<DeviceTiming>*) {
    return no_cuda();
}
#endif

}  // namespace headrace::harness
