// threads: shares the independent tasks of a call with helper threads; its time does not depend on who else runs.
#pragma once

#include <cstdint>

namespace headrace {

// Who takes a task: whoever is free, or in every call first the same thread, which finds in its caches what it left
// there.
enum class Shares { dynamic, fixed };

struct Sharing {
    Shares shares = Shares::dynamic;
    std::int64_t nanoseconds = 1'000'000;  // about what all tasks take on one thread; decides whether sleepers are woken
};

// A task: body, its number, and that of the thread within the call, below `threads`.
using Task = void (*)(const void* body, std::int64_t task, int thread);

// Runs task(body, i, thread) once for each i in [0, tasks), on the caller and up to threads - 1 helpers. The caller
// takes every task that no helper has begun and waits for those in progress only, never for a thread that has not
// started. Helpers are started by the first call that wants them, look for work for 100 microseconds after a call, and
// sleep. Any number of callers at once; in the child of a fork helpers are started anew. Tasks must not throw.
void run_tasks(std::int64_t tasks, int threads, Sharing sharing, Task task, const void* body);

// The same for body(task, thread). Which thread runs a task never changes a result.
template <class Body>
void parallel_for(std::int64_t tasks, int threads, const Body& body, Sharing sharing = {}) {
    const Task call = [](const void* of, std::int64_t task, int thread) { (*static_cast<const Body*>(of))(task, thread); };
    run_tasks(tasks, threads, sharing, call, &body);
}

// Calls of this process so far whose tasks were shared: a test counts the parallel regions of an operator.
std::uint64_t shared_calls();

}  // namespace headrace
