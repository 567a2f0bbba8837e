// The pool: calls in slots that are never freed, tasks taken by compare-and-swap, helpers that spin and then sleep.
#include "core/threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "core/flush_subnormals.hpp"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds helper_spin{100};  // from a call to the next one of a loop that decodes or trains
constexpr std::chrono::microseconds caller_spin{20};  // then the helper may need the caller's core
constexpr int most_shares = 64;                       // of a call with fixed shares; threads above take from others'
constexpr std::uint64_t half = std::uint64_t{1} << 32;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until ready() or `end`; looks at the clock now and then.
template <class Ready>
bool spin_until(Clock::time_point end, const Ready& ready) {
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return ready();
}

// What is left of a call to take: the call's number above, how many below, in one word. Who has read the number of a
// call that has ended since takes nothing of the next one, whose other fields may already stand while its word does
// not.
struct alignas(64) Counter {
    std::atomic<std::uint64_t> value{0};
    std::atomic<std::uint32_t> end{0};

    void begin(std::uint32_t call, std::uint32_t first, std::uint32_t past) {
        end.store(past, std::memory_order_relaxed);
        value.store(call * half + (past - first), std::memory_order_release);
    }
    // Takes the next of [first, past), if any of the call is left.
    bool take(std::uint32_t call, std::uint32_t* taken) {
        std::uint64_t seen = value.load(std::memory_order_acquire);
        for (;;) {
            const auto left = static_cast<std::uint32_t>(seen);
            if (seen / half != call || left == 0) return false;
            if (!value.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            *taken = end.load(std::memory_order_relaxed) - left;  // the call's: it cannot end before who has taken
            return true;
        }
    }
};

// A call in progress.
struct Slot {
    std::atomic<std::uint32_t> owned{0};
    std::atomic<std::uint32_t> call{0};     // its number, or that of the last; 0: none
    Counter threads;                        // that have joined
    Counter shares[most_shares];            // the first `used` hold the call's tasks
    std::atomic<int> used{0};
    std::atomic<Task> task{nullptr};
    std::atomic<const void*> body{nullptr};
    alignas(64) std::atomic<std::uint32_t> left{0};  // tasks that have not ended

    // Takes tasks until none is left, the thread's own share first.
    void work(std::uint32_t number, std::uint32_t thread) {
        const FlushSubnormals mode;
        const std::uint32_t count = static_cast<std::uint32_t>(used.load(std::memory_order_relaxed));
        std::uint32_t ended = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            Counter& share = shares[(thread + i) % count];
            for (std::uint32_t taken; share.take(number, &taken); ++ended) {
                task.load(std::memory_order_relaxed)(body.load(std::memory_order_relaxed), taken, static_cast<int>(thread));
            }
        }
        if (ended > 0 && left.fetch_sub(ended, std::memory_order_acq_rel) == ended) left.notify_all();
    }
};

int core() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

// The cores of a helper: all that it may use but the caller's. A kernel on a virtual machine takes a core that sleeps
// for one that the host has taken away, and wakes a helper on its caller's core, where it does not get to run for
// milliseconds.
class HelperCores {
  public:
#ifdef __linux__
    HelperCores() = default;
    explicit HelperCores(pid_t thread) : thread_(thread) {}
    void avoid(int core) {
        cpu_set_t now;
        if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(thread_, sizeof now, &now) != 0) return;
        if (!CPU_EQUAL(&now, &set_)) allowed_ = now;  // someone else has set it since
        set_ = allowed_;
        CPU_CLR(static_cast<std::size_t>(core), &set_);
        if (CPU_COUNT(&set_) == 0) set_ = allowed_;
        if (!CPU_EQUAL(&now, &set_) && sched_setaffinity(thread_, sizeof set_, &set_) != 0) set_ = now;
    }

  private:
    pid_t thread_ = 0;
    cpu_set_t allowed_{}, set_{};
#else
    void avoid(int) {}
#endif
};

class Pool {
  public:
    bool run(std::int64_t tasks, int threads, Sharing sharing, Task task, const void* body) {
        const int index = take_slot();
        if (index < 0) return false;
        Slot& slot = slots_[index];
        const auto count = static_cast<std::uint32_t>(tasks), others = static_cast<std::uint32_t>(threads);
        const auto parts = sharing.shares == Shares::dynamic ? 1 : std::min<std::uint32_t>(others, most_shares);
        std::uint32_t number = slot.call.load(std::memory_order_relaxed) + 1;
        if (number == 0) number = 1;
        slot.task.store(task, std::memory_order_relaxed);
        slot.body.store(body, std::memory_order_relaxed);
        slot.used.store(static_cast<int>(parts), std::memory_order_relaxed);
        slot.left.store(count, std::memory_order_relaxed);
        for (std::uint64_t i = 0; i < parts; ++i) {
            slot.shares[i].begin(number, static_cast<std::uint32_t>(count * i / parts), static_cast<std::uint32_t>(count * (i + 1) / parts));
        }
        slot.threads.begin(number, 1, others);
        slot.call.store(number, std::memory_order_release);
        active_.fetch_or(std::uint64_t{1} << index, std::memory_order_release);
        published_.fetch_add(1);
        call_helpers(threads - 1, sharing.nanoseconds);
        slot.work(number, 0);
        if (!spin_until(Clock::now() + caller_spin, [&] { return slot.left.load(std::memory_order_acquire) == 0; })) {
            for (std::uint32_t left; (left = slot.left.load(std::memory_order_acquire)) != 0;) slot.left.wait(left);
        }
        active_.fetch_and(~(std::uint64_t{1} << index), std::memory_order_relaxed);
        last_end_.store(now(), std::memory_order_relaxed);
        slot.owned.store(0, std::memory_order_release);
        return true;
    }

    std::uint64_t calls() const { return published_.load(); }

  private:
    static constexpr int most_slots = 64;
    Slot slots_[most_slots];
    std::atomic<std::uint64_t> active_{0};      // a bit for each slot with a call
    alignas(64) std::atomic<std::uint32_t> published_{0};  // calls; what helpers watch and sleep on
    std::atomic<int> looking_{0}, asleep_{0};   // helpers without a call
    std::atomic<std::int64_t> last_end_{0};     // of a call, in nanoseconds
    std::atomic<int> helpers_{0};
    std::mutex starting_;
    static constexpr int most_placed = 16;      // among more cores a helper finds another
    HelperCores cores_[most_placed];
    int placed_ = 0;
    std::atomic<int> avoided_{-1};              // core of the last caller that woke helpers
    std::mutex placing_;

    static std::int64_t now() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

    int take_slot() {
        static thread_local int last = 0;
        for (int i = 0; i < most_slots; ++i) {
            const int index = (last + i) % most_slots;
            std::uint32_t free = 0;
            if (slots_[index].owned.compare_exchange_strong(free, 1, std::memory_order_acquire, std::memory_order_relaxed)) return last = index;
        }
        return -1;
    }
    // A call that would end before a sleeper is awake wakes one only where the next call is soon to come.
    void call_helpers(int wanted, std::int64_t nanoseconds) {
        if (helpers_.load(std::memory_order_relaxed) < wanted) start_helpers(wanted);
        int missing = std::min(wanted - looking_.load(), asleep_.load());
        if (missing <= 0) return;
        constexpr std::int64_t waking = std::chrono::nanoseconds(helper_spin).count();
        if (nanoseconds < waking && now() - last_end_.load(std::memory_order_relaxed) > waking) return;
        keep_off(core());
        for (; missing > 0; --missing) published_.notify_one();
    }
    void keep_off(int core) {
        if (core == avoided_.load(std::memory_order_relaxed)) return;
        const std::unique_lock lock(placing_, std::try_to_lock);
        if (!lock.owns_lock()) return;
        avoided_.store(core);
        for (int i = 0; i < placed_; ++i) cores_[i].avoid(core);
    }
    void start_helpers(int wanted) {
        const std::lock_guard lock(starting_);
        keep_off(core());
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
        try {
            while (helpers_.load() < wanted) {
                std::thread([this] { help(); }).detach();
                helpers_.fetch_add(1);
            }
        } catch (const std::exception&) {  // a limit of the system: those that there are do the work
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    [[noreturn]] void help() {
#ifdef __linux__
        pthread_setname_np(pthread_self(), "headrace");
#endif
        {
            const std::lock_guard lock(placing_);
            if (placed_ < most_placed) {
#ifdef __linux__
                cores_[placed_] = HelperCores(gettid());
#endif
                cores_[placed_++].avoid(avoided_.load());
            }
        }
        for (auto until = Clock::now() + helper_spin;;) {
            const std::uint32_t seen = published_.load();
            if (work_on_calls()) {
                until = Clock::now() + helper_spin;
                continue;
            }
            looking_.fetch_add(1);
            const bool more = spin_until(until, [&] { return published_.load(std::memory_order_acquire) != seen; });
            looking_.fetch_sub(1);
            if (more) continue;
            asleep_.fetch_add(1);
            published_.wait(seen);
            asleep_.fetch_sub(1);
            until = Clock::now() + helper_spin;
        }
    }
    bool work_on_calls() {
        bool worked = false;
        for (std::uint64_t left = active_.load(std::memory_order_acquire); left != 0; left &= left - 1) {
            Slot& slot = slots_[__builtin_ctzll(left)];
            const std::uint32_t number = slot.call.load(std::memory_order_acquire);
            std::uint32_t thread = 0;
            if (!slot.threads.take(number, &thread)) continue;
            slot.work(number, thread);
            worked = true;
        }
        return worked;
    }
};

// Never destroyed: helpers live as long as the process. The child of a fork has none of them and makes a pool of its
// own.
std::atomic<Pool*> the_pool{nullptr};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });

// Null without memory for it.
Pool* pool() {
    Pool* found = the_pool.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    std::unique_ptr<Pool> made(new (std::nothrow) Pool);
    return the_pool.compare_exchange_strong(found, made.get()) ? made.release() : found;
}

}  // namespace

void run_tasks(std::int64_t tasks, int threads, Sharing sharing, Task task, const void* body) {
    constexpr std::int64_t most = std::int64_t{1} << 31;  // of one call in the pool
    constexpr std::int64_t worth = 4000;                  // nanoseconds for a thread: less would be over before it has looked
    const std::int64_t count = std::min({tasks, std::int64_t{threads}, 1 + sharing.nanoseconds / worth});
    Pool* const helped = count > 1 && tasks <= most ? pool() : nullptr;
    if (helped != nullptr && helped->run(tasks, static_cast<int>(count), sharing, task, body)) return;
    const FlushSubnormals mode;
    for (std::int64_t i = 0; i < tasks; ++i) task(body, i, 0);
}

std::uint64_t shared_calls() {
    const Pool* const found = the_pool.load(std::memory_order_acquire);
    return found != nullptr ? found->calls() : 0;
}

}  // namespace headrace
