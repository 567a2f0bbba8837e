// Scheduler: edges hold with every seed, nothing else orders, nothing runs before it is asked for.
#include "runtime/tasks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

namespace headrace::ptx {
namespace {

constexpr std::uint64_t seeds = 200;

// Tasks that note their letter when they run.
struct Notes {
    explicit Notes(std::uint64_t seed) : scheduler(seed) {}
    TaskPtr add(char letter, const std::vector<TaskPtr>& after = {}, int device = 0) {
        return scheduler.add(device, [this, letter] { ran += letter; }, after);
    }
    Scheduler scheduler;
    std::string ran;
};

TEST(Scheduler, NothingRunsBeforeItIsAskedFor) {
    Notes notes(1);
    const TaskPtr a = notes.add('a');
    EXPECT_EQ(notes.ran, "");
    EXPECT_EQ(notes.scheduler.waiting(), 1U);
    notes.scheduler.run_until(a);
    notes.scheduler.run_until(a);
    notes.scheduler.run_until(nullptr);
    EXPECT_EQ(notes.ran, "a");
}

TEST(Scheduler, EdgesHoldAndEveryOrderThatTheyAllowComesUp) {
    std::set<std::string> orders;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        Notes notes(seed);
        const TaskPtr a = notes.add('a'), b = notes.add('b', {a, nullptr}), c = notes.add('c', {a});
        const TaskPtr d = notes.add('d', {b, c});
        notes.add('e');
        notes.scheduler.run_all();
        orders.insert(notes.ran);
        EXPECT_EQ(d->after.size() + a->before.size(), 0U) << "finished tasks hold nothing";
    }
    EXPECT_EQ(orders.size(), 10U);  // abcd and acbd, with e at five places
    for (const std::string& order : orders) {
        EXPECT_EQ(order.size(), 5U);
        EXPECT_LT(order.find('a'), std::min(order.find('b'), order.find('c')));
        EXPECT_GT(order.find('d'), std::max(order.find('b'), order.find('c')));
    }
}

TEST(Scheduler, OtherWorkIsSometimesAsLateAsItCanBe) {
    std::set<std::string> orders;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        Notes notes(seed);
        for (int i = 0; i < 20; ++i) notes.add('x');
        notes.scheduler.run_until(notes.add('a'));
        orders.insert(notes.ran);
    }
    EXPECT_EQ(orders.count("a"), 1U);
    EXPECT_GT(orders.size(), 5U);
}

TEST(Scheduler, DevicesAreWaitedForApart) {
    Notes notes(3);
    notes.add('a', {}, 0);
    const TaskPtr b = notes.add('b', {}, 1);
    notes.add('c', {b}, 0);
    notes.scheduler.run_all(0);
    EXPECT_TRUE(b->done);
    EXPECT_EQ(notes.ran.size(), 3U);
    notes.scheduler.run_all(7);
}

TEST(Scheduler, AfterAFailureTheRestCanBeDropped) {
    Notes notes(1);
    const TaskPtr bad = notes.scheduler.add(0, [] { throw std::runtime_error("bad"); }, {});
    const TaskPtr later = notes.add('a', {bad});
    EXPECT_THROW(notes.scheduler.run_until(later), std::runtime_error);
    notes.scheduler.abandon();
    EXPECT_EQ(notes.scheduler.waiting(), 0U);
    EXPECT_TRUE(later->done);
    notes.scheduler.run_until(notes.add('b', {later}));
    EXPECT_EQ(notes.ran, "b");
}

}  // namespace
}  // namespace headrace::ptx
