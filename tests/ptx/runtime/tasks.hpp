// Scheduler: work that was issued and waits, a graph of tasks; runs it late, in a random order that the edges allow.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace headrace::ptx {

struct Task;
using TaskPtr = std::shared_ptr<Task>;

struct Task {
    std::function<void()> run;               // empty: only order
    int device = 0;
    bool done = false;
    std::uint64_t finished = 0;              // the scheduler's clock
    int unfinished = 0;                      // of those it comes after
    std::vector<TaskPtr> after, before;      // emptied when done: no cycles stay
};

class Scheduler {
  public:
    explicit Scheduler(std::uint64_t seed) : random_(seed) {}

    // `after` may hold null and finished tasks.
    TaskPtr add(int device, std::function<void()> run, const std::vector<TaskPtr>& after);

    // Runs tasks until `target` is done. By a coin either nothing but what the target comes after, so that all other
    // work is as late as it can be, or ready tasks of all streams. What a task throws passes through.
    void run_until(const TaskPtr& target);
    void run_all(int device);
    void run_all();
    void run_any() { run_one(draw()); }
    void run_some();                         // none to all of what is ready, by coins
    void abandon();                          // nothing that waits will run
    bool coin() { return (random_() & 1U) != 0; }
    std::size_t waiting() const;

  private:
    void run_one(std::size_t position);
    std::size_t draw() { return static_cast<std::size_t>(random_() % ready_.size()); }

    std::mt19937_64 random_;
    std::vector<TaskPtr> ready_;
    std::vector<std::size_t> waiting_;       // by device
    std::uint64_t clock_ = 0;
};

}  // namespace headrace::ptx
