// The threads of a call: every task once, many callers at once, no waiting for a thread that has not begun.
#include "core/threads.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr Sharing both_ways[] = {{Shares::dynamic}, {Shares::fixed}};

// Runs the tasks and counts how often each was run; no thread number is in two tasks at once.
void expect_each_once(std::int64_t tasks, int threads, Sharing sharing) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks)), busy(static_cast<std::size_t>(threads));
    std::atomic<bool> right{true};
    parallel_for(tasks, threads, [&](std::int64_t task, int thread) {
        if (task < 0 || task >= tasks || thread < 0 || thread >= threads || busy[static_cast<std::size_t>(thread)]++ != 0) {
            right = false;
            return;
        }
        ++runs[static_cast<std::size_t>(task)];
        --busy[static_cast<std::size_t>(thread)];
    }, sharing);
    EXPECT_TRUE(right) << tasks << " tasks, " << threads << " threads";
    EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](const std::atomic<int>& count) { return count == 1; }))
        << tasks << " tasks, " << threads << " threads";
}

void wait_until(const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::yield();
}

std::chrono::nanoseconds cpu_time() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

TEST(Threads, EveryTaskOnce) {
    for (const Sharing sharing : both_ways) {
        for (const std::int64_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
            for (const int threads : {1, 2, 3, 8, 100}) expect_each_once(tasks, threads, sharing);
        }
        for (int i = 0; i < 3000; ++i) expect_each_once(1 + i % 9, 4, sharing);
    }
}

TEST(Threads, ManyCallersAtOnce) {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 80; ++caller) {  // more than there is room for: some have to work alone
        callers.emplace_back([caller] {
            for (int i = 0; i < 100; ++i) expect_each_once(1 + (caller + i) % 20, 2 + i % 3, both_ways[i % 2]);
        });
    }
    for (std::thread& caller : callers) caller.join();
}

TEST(Threads, HelpersHelp) {
    for (const Sharing sharing : both_ways) {
        std::set<std::thread::id> seen;
        for (int attempt = 0; attempt < 100 && seen.size() < 2; ++attempt) {
            std::atomic<int> begun{0};
            std::vector<std::thread::id> ids(2);
            const auto end = Clock::now() + 1s;
            parallel_for(2, 2, [&](std::int64_t task, int) {
                ids[static_cast<std::size_t>(task)] = std::this_thread::get_id();
                for (++begun; begun < 2 && Clock::now() < end;) std::this_thread::yield();
            }, sharing);
            seen.insert(ids.begin(), ids.end());
        }
        EXPECT_EQ(seen.size(), 2u);
    }
}

// All helpers are held in one call; another call ends without them.
TEST(Threads, ACallEndsThoughNoHelperComes) {
    std::atomic<int> held{0};
    std::atomic<bool> release{false};
    std::thread holder([&] {
        parallel_for(4, 4, [&](std::int64_t, int) {
            ++held;
            wait_until(release);
        });
    });
    while (held < 1) std::this_thread::yield();
    for (const Sharing sharing : both_ways) {
        for (int i = 0; i < 100; ++i) expect_each_once(16, 4, sharing);
    }
    release = true;
    holder.join();
    EXPECT_EQ(held, 4);
}

TEST(Threads, FromAnOpenMpRegion) {
#pragma omp parallel num_threads(3)
    {
        EXPECT_EQ(default_threads(), 1);
        for (int i = 0; i < 100; ++i) expect_each_once(20, 3, both_ways[i % 2]);
    }
}

TEST(Threads, ACallInsideATask) {
    parallel_for(4, 2, [](std::int64_t, int) { expect_each_once(10, 3, {}); });
}

#ifdef __linux__
std::vector<pid_t> helpers() {
    std::vector<pid_t> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        if (name == "headrace") found.push_back(std::stoi(task.path().filename()));
    }
    return found;
}

cpu_set_t cores_of(pid_t thread) {
    cpu_set_t cores{};
    EXPECT_EQ(sched_getaffinity(thread, sizeof cores, &cores), 0);
    return cores;
}

// A caller that has moved has its helpers woken on another core than its own, and only on cores that are allowed to
// them.
TEST(Threads, HelpersWakeOnAnotherCore) {
    const cpu_set_t all = cores_of(0);
    if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "needs two cores";
    int first = 0, second = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    for (second = first + 1; !CPU_ISSET(second, &all);) ++second;
    cpu_set_t both{}, alone{};
    CPU_SET(first, &both);
    CPU_SET(second, &both);
    bool moved = false;
    for (const int caller : {first, second, first}) {
        alone = {};
        CPU_SET(caller, &alone);
        ASSERT_EQ(sched_setaffinity(0, sizeof alone, &alone), 0);
        for (const pid_t helper : helpers()) EXPECT_EQ(sched_setaffinity(helper, sizeof both, &both), 0);
        bool elsewhere = false;
        for (int attempt = 0; attempt < (moved ? 100 : 10) && !elsewhere; ++attempt) {
            std::this_thread::sleep_for(5ms);
            expect_each_once(100, 2, {});
            const std::vector<pid_t> found = helpers();
            elsewhere = std::any_of(found.begin(), found.end(), [&](pid_t helper) {
                const cpu_set_t cores = cores_of(helper);
                return CPU_COUNT(&cores) == 1 && CPU_ISSET(caller == first ? second : first, &cores);
            });
        }
        EXPECT_TRUE(elsewhere || !moved) << "caller on core " << caller;
        moved = true;
        for (const pid_t helper : helpers()) {  // of nobody else
            const cpu_set_t cores = cores_of(helper);
            for (int core = 0; core < CPU_SETSIZE; ++core) EXPECT_FALSE(CPU_ISSET(core, &cores) && !CPU_ISSET(core, &both)) << core;
        }
    }
    EXPECT_EQ(sched_setaffinity(0, sizeof all, &all), 0);
    for (const pid_t helper : helpers()) EXPECT_EQ(sched_setaffinity(helper, sizeof all, &all), 0);
}
#endif

// After a millisecond: what it takes from 5 ms to 205 ms after a call, the least of a few attempts.
TEST(Threads, SleepWithoutWork) {
    auto least = std::chrono::nanoseconds::max();
    for (int attempt = 0; attempt < 10 && least >= 1ms; ++attempt) {
        expect_each_once(100, 4, {});
        std::this_thread::sleep_for(5ms);
        const auto before = cpu_time();
        std::this_thread::sleep_for(200ms);
        least = std::min(least, cpu_time() - before);
    }
    EXPECT_LT(least, 1ms);
}

#ifndef HEADRACE_SANITIZED  // sanitizers need memory of their own
// In a process that may not start threads the caller does all.
TEST(Threads, WhereNoneCanBeStarted) {
    const pid_t child = fork();
    if (child == 0) {
        const rlimit none{0, 0};
        const bool limited = setrlimit(RLIMIT_AS, &none) == 0;
        int runs = 0;
        int* const count = &runs;
        parallel_for(50, 4, [count](std::int64_t, int) { __atomic_add_fetch(count, 1, __ATOMIC_RELAXED); });
        _exit(limited && runs == 50 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}
#endif

}  // namespace
}  // namespace headrace
