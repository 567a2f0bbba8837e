// Scheduler: which task runs next.
#include "runtime/tasks.hpp"

#include <numeric>
#include <unordered_set>

namespace headrace::ptx {
namespace {

std::unordered_set<const Task*> with_all_before(const TaskPtr& target) {
    std::unordered_set<const Task*> found{target.get()};
    std::vector<const Task*> open{target.get()};
    while (!open.empty()) {
        const Task* task = open.back();
        open.pop_back();
        for (const TaskPtr& earlier : task->after) {
            if (!earlier->done && found.insert(earlier.get()).second) open.push_back(earlier.get());
        }
    }
    return found;
}

}  // namespace

TaskPtr Scheduler::add(int device, std::function<void()> run, const std::vector<TaskPtr>& after) {
    auto task = std::make_shared<Task>();
    task->run = std::move(run);
    task->device = device;
    for (const TaskPtr& earlier : after) {
        if (earlier == nullptr || earlier->done) continue;
        task->after.push_back(earlier);
        earlier->before.push_back(task);
        ++task->unfinished;
    }
    if (task->unfinished == 0) ready_.push_back(task);
    if (waiting_.size() <= static_cast<std::size_t>(device)) waiting_.resize(static_cast<std::size_t>(device) + 1);
    ++waiting_[static_cast<std::size_t>(device)];
    return task;
}

void Scheduler::run_one(std::size_t position) {
    const TaskPtr task = ready_[position];
    ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(position));
    try {
        if (task->run) task->run();
    } catch (...) {
        ready_.push_back(task);  // for abandon()
        throw;
    }
    task->run = nullptr;
    task->done = true;
    task->finished = ++clock_;
    --waiting_[static_cast<std::size_t>(task->device)];
    for (const TaskPtr& later : task->before) {
        if (--later->unfinished == 0) ready_.push_back(later);
    }
    task->before.clear();
    task->after.clear();
}

void Scheduler::run_until(const TaskPtr& target) {
    if (target == nullptr || target->done) return;
    if (coin()) {
        while (!target->done) run_one(draw());
        return;
    }
    const auto wanted = with_all_before(target);
    std::vector<std::size_t> choice;
    while (!target->done) {
        choice.clear();
        for (std::size_t position = 0; position < ready_.size(); ++position) {
            if (wanted.count(ready_[position].get()) != 0) choice.push_back(position);
        }
        run_one(choice[static_cast<std::size_t>(random_() % choice.size())]);
    }
}

void Scheduler::run_all(int device) {
    const auto index = static_cast<std::size_t>(device);
    while (index < waiting_.size() && waiting_[index] != 0) run_one(draw());
}

void Scheduler::run_all() {
    while (!ready_.empty()) run_one(draw());
}

void Scheduler::run_some() {
    while (!ready_.empty() && coin()) run_one(draw());
}

void Scheduler::abandon() {
    std::vector<TaskPtr> open = std::move(ready_);
    ready_.clear();
    while (!open.empty()) {
        const TaskPtr task = open.back();
        open.pop_back();
        open.insert(open.end(), task->before.begin(), task->before.end());
        task->before.clear();
        task->after.clear();
        task->run = nullptr;
        task->done = true;
    }
    waiting_.assign(waiting_.size(), 0);
}

std::size_t Scheduler::waiting() const { return std::accumulate(waiting_.begin(), waiting_.end(), std::size_t{0}); }

}  // namespace headrace::ptx
