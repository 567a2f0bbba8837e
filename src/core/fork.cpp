// Whether fork left the threads of this process behind.
#include "core/fork.hpp"

#include <pthread.h>
#include <sys/stat.h>

#include <atomic>

namespace headrace {
namespace {

std::atomic<bool> had_threads{false}, lost_threads{false};

// Any library's threads count: another that uses our OpenMP run-time leaves the child in the same state. A folder has a
// link from outside, one to itself and one from each folder in it, here one per thread; without it there may be threads.
bool has_other_threads() {
    struct stat tasks;
    return stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink != 3;
}

void before_fork() { had_threads = has_other_threads(); }
void after_fork_in_child() { lost_threads = lost_threads || had_threads; }

// When the library is loaded: its first call may come after the fork.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, nullptr, after_fork_in_child);

}  // namespace

bool forked_from_threads() { return lost_threads; }

}  // namespace headrace
