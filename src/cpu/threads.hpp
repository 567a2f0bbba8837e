// threads: parallel_for over independent tasks, and the denormal mode of its threads.
#pragma once

#include <cstdint>

#include <omp.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace headrace::cpu {

// The mode of a thread while it computes. Subnormal numbers are zero: decays underflow by design, and subnormal
// arithmetic can be a hundred times slower. At the end, streamed stores are ordered before what the thread signals next.
class FlushSubnormals {
  public:
    FlushSubnormals() : saved_(mode()) { set_mode(saved_ | flush_bits); }
    ~FlushSubnormals() {
#if defined(__SSE2__)
        _mm_sfence();
#endif
        set_mode(saved_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
#if defined(__SSE2__)
    static constexpr std::uint64_t flush_bits = 0x8040;  // FTZ and DAZ of MXCSR
    static std::uint64_t mode() { return _mm_getcsr(); }
    static void set_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
    static constexpr std::uint64_t flush_bits = 1u << 24;  // FZ of FPCR
    static std::uint64_t mode() {
        std::uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set_mode(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
    static constexpr std::uint64_t flush_bits = 0;
    static std::uint64_t mode() { return 0; }
    static void set_mode(std::uint64_t) {}
#endif
    std::uint64_t saved_;
};

// Who takes a task: whoever is free, or in every call the same thread, which finds in its caches what it left there.
enum class Shares { dynamic, fixed };

// body(task, thread) for every task in [0, tasks). Which thread runs a task never changes a result.
template <class Body>
void parallel_for(std::int64_t tasks, int threads, const Body& body, Shares shares = Shares::dynamic) {
    if (tasks <= 0) return;
    const int count = tasks < threads ? static_cast<int>(tasks) : threads;
    if (count == 1) {
        const FlushSubnormals mode;
        for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
        return;
    }
#pragma omp parallel num_threads(count)
    {
        const FlushSubnormals mode;
        const int thread = omp_get_thread_num();
        if (shares == Shares::fixed) {
#pragma omp for schedule(static) nowait
            for (std::int64_t task = 0; task < tasks; ++task) body(task, thread);
        } else {
#pragma omp for schedule(dynamic, 1) nowait
            for (std::int64_t task = 0; task < tasks; ++task) body(task, thread);
        }
    }
}

}  // namespace headrace::cpu
