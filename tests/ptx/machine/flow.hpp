// WarpRun: a warp while it runs: which lanes stand at which statement, where they wait, and where they meet again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine/code.hpp"
#include "machine/grid.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

class Barriers;

// Lanes of a warp that stand at one statement.
struct Fragment {
    enum class State : std::uint8_t {
        runnable,
        meeting,  // waits for lanes of its own warp
        barrier,  // waits for other warps
    };
    int pc = 0;
    Mask mask = 0;
    int join = -1;  // of WarpRun::joins_: where its lanes meet those that they parted from
    int stop = -1;  // that join's statement
    State state = State::runnable;
    bool tired = false;  // ran its share; others come first
    Mask members = 0;    // meeting: the lanes that it waits for; 0: the whole warp
    unsigned barrier = 0;
};

// A statement at which parted lanes meet again. A branch inside makes a further one only if its own lies before, so the
// chain of parents is never longer than the function's post-dominator tree is deep.
struct Join {
    int pc = 0;
    Mask pending = 0, arrived = 0;
    int parent = -1;
    bool in_use = false;
};

class WarpRun {
  public:
    // All existing lanes at the first statement. `counts`: of each statement.
    void start(Block& block, int index, Mask existing, std::byte* registers, const Module& module, const Code& code,
               Executions* counts, Barriers& barriers);

    const Warp& warp() const { return warp_; }
    Mask live() const { return warp_.existing & ~warp_.exited; }
    const std::vector<Fragment>& fragments() const { return fragments_; }
    int statement() const { return at_; }  // that runs or ran last

    // Lets a runnable fragment run: until it waits, parts, ends or has run `budget` statements, and is tired then.
    void run(std::size_t fragment, std::uint64_t budget);
    void rest();                                                        // nobody is tired any more
    void release(unsigned barrier);                                     // those that wait there go on
    void write_result(unsigned barrier, int popc, bool all, bool any);  // of bar.red, before the release

    bool waits_for_other_warps() const;
    // "lanes 0x0000ffff wait at PTX line 12 \"bar.sync 0;\" for ...", one for each group of lanes.
    std::string waiters() const;

  private:
    struct Group {
        int pc;
        Mask mask;
    };
    const Step& step(int pc) const { return code_->steps[static_cast<std::size_t>(pc)]; }
    const Control& control(int pc) const { return code_->controls[static_cast<std::size_t>(pc)]; }

    void count(int pc, Mask active) {
        ++counts_[pc].times;
        counts_[pc].lanes += static_cast<std::uint64_t>(active == all_lanes ? lanes : __builtin_popcount(active));
    }
    void check_registers(const RegisterCheck& check, Mask mask, Mask active);
    bool flow(std::size_t which, Mask active);
    bool meet_whole_warp(std::size_t which, Mask active);
    bool meet_members(std::size_t which, Mask active);
    void wait_for_members(std::size_t which, Mask members);
    void execute_whole_warp(int pc);
    bool try_whole_warp(int pc);
    void try_members(int pc, Mask members);
    Mask members_of(const Step& step, int lane) const;
    void check_members(Mask group, Mask members) const;
    bool arrive_at_barrier(std::size_t which, Mask active);
    void arrive(int pc, Mask active);
    bool branch(std::size_t which, Mask active);
    bool branch_indexed(std::size_t which, Mask active);
    void part(std::size_t which, const std::vector<Group>& groups);
    void split_off(std::size_t which, Mask staying, int pc_of_others);
    void park(std::size_t which);
    void settle(int join);
    bool leave(std::size_t which, Mask leaving);
    void after_exit();
    void merge();
    int new_join(int pc, Mask pending, int parent);

    Warp warp_;
    std::vector<Fragment> fragments_;
    std::vector<Join> joins_;
    std::vector<Group> groups_;
    const Module* module_ = nullptr;
    const Code* code_ = nullptr;
    Executions* counts_ = nullptr;
    Barriers* barriers_ = nullptr;
    int at_ = 0;
};

}  // namespace headrace::ptx
