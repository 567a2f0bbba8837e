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
#if defined(__SSE2__)
    FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
    ~FlushSubnormals() {
        _mm_sfence();
        _mm_setcsr(saved_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    unsigned saved_;
#endif
};

// body(task, thread) for every task in [0, tasks). Which thread runs a task never changes a result.
template <class Body>
void parallel_for(std::int64_t tasks, int threads, const Body& body) {
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
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t task = 0; task < tasks; ++task) body(task, thread);
    }
}

}  // namespace headrace::cpu
