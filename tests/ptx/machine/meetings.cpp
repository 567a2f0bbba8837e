// WarpRun: lanes that wait for lanes of their own warp, and for other warps.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "checks/shared_memory.hpp"
#include "machine/barriers.hpp"
#include "machine/block.hpp"
#include "machine/flow.hpp"

namespace headrace::ptx {
namespace {

std::string hexadecimal(Mask mask) {
    std::ostringstream text;
    text << "0x" << std::hex << std::setw(8) << std::setfill('0') << mask;
    return text.str();
}

}  // namespace

// .aligned: the lanes of the warp execute the statement together or not at all. A fragment waits here for the others,
// since the interpreter may have parted lanes that a machine would not; that they cannot come is found when nobody else
// can run.
bool WarpRun::meet_whole_warp(std::size_t which, Mask active) {
    Fragment& fragment = fragments_[which];
    if (active != fragment.mask) {
        throw_fault("all lanes of the warp must execute this, but the guard lets through ", hexadecimal(active), " of ",
                    hexadecimal(fragment.mask));
    }
    if (active == live() && control(at_).course == Course::next) {
        execute_whole_warp(at_);
        ++fragment.pc;
        return true;
    }
    fragment.state = Fragment::State::meeting;
    fragment.members = 0;
    try_whole_warp(at_);
    return false;
}

void WarpRun::execute_whole_warp(int pc) {
    const Step& here = step(pc);
    if (live() != all_lanes) {
        throw_fault("a warp with lanes that have exited or never were, live: ", hexadecimal(live()));
    }
    count(pc, all_lanes);
    here.execute(warp_, here, all_lanes);
}

// Executes a statement that all live lanes wait at. False: some are not there.
bool WarpRun::try_whole_warp(int pc) {
    const auto waits = [&](const Fragment& fragment) {
        return fragment.state == Fragment::State::meeting && fragment.members == 0 && fragment.pc == pc;
    };
    Mask there = 0;
    for (const Fragment& fragment : fragments_) there |= waits(fragment) ? fragment.mask : 0;
    if (there == 0 || there != live()) return false;
    if (control(pc).course == Course::barrier) {
        arrive(pc, there);
        return true;
    }
    execute_whole_warp(pc);
    for (Fragment& fragment : fragments_) {
        if (!waits(fragment)) continue;
        fragment.state = Fragment::State::runnable;
        ++fragment.pc;
    }
    merge();
    return true;
}

Mask WarpRun::members_of(const Step& here, int lane) const { return warp_.u32(here.members)[lane]; }

void WarpRun::check_members(Mask group, Mask members) const {
    if ((group & ~members) != 0) {
        throw_fault("lane ", __builtin_ctz(group & ~members), " is not in the member mask ", hexadecimal(members),
                    " that it names");
    }
    if ((members & warp_.exited) != 0) {
        throw_fault("the member mask ", hexadecimal(members),
                    " names lanes that have exited: ", hexadecimal(members & warp_.exited));
    }
    if ((members & ~warp_.existing) != 0) {
        throw_fault("the member mask ", hexadecimal(members),
                    " names lanes that are no threads of the block: ", hexadecimal(members & ~warp_.existing));
    }
}

// Lanes that name one mask are a group; a group that is complete here need not wait.
bool WarpRun::meet_members(std::size_t which, Mask active) {
    const Step& here = step(at_);
    const bool is_barrier = control(at_).course == Course::warp_barrier;
    const Mask first = members_of(here, __builtin_ctz(active));
    bool uniform = true, complete = true;
    for (Mask rest = active; rest != 0;) {
        const Mask members = members_of(here, __builtin_ctz(rest));
        Mask group = 0;
        for_lanes(active, [&](int lane) { group |= members_of(here, lane) == members ? Mask{1} << lane : 0; });
        check_members(group, members);
        uniform = uniform && members == first;
        complete = complete && group == members;
        rest &= ~group;
    }
    if (!complete) {
        // The fragment keeps the first group; the others come here once more by themselves.
        Mask group = 0;
        for_lanes(active, [&](int lane) { group |= members_of(here, lane) == first ? Mask{1} << lane : 0; });
        split_off(which, group, at_);
        wait_for_members(which, first);
        return false;
    }
    count(at_, active);
    for (Mask rest = active; rest != 0;) {
        const Mask members = uniform ? first : members_of(here, __builtin_ctz(rest));
        if (is_barrier) {
            warp_.block->shared->warp_sync(warp_.index, members);
        } else {
            here.execute(warp_, here, members);
        }
        rest &= ~members;
    }
    ++fragments_[which].pc;
    return true;
}

void WarpRun::wait_for_members(std::size_t which, Mask members) {
    Fragment& fragment = fragments_[which];
    fragment.state = Fragment::State::meeting;
    fragment.members = members;
    try_members(fragment.pc, members);
}

// Executes what the lanes of one member mask wait for together: the same statement, or any bar.warp.sync.
void WarpRun::try_members(int pc, Mask members) {
    const bool is_barrier = control(pc).course == Course::warp_barrier;
    const auto waits = [&](const Fragment& fragment) {
        if (fragment.state != Fragment::State::meeting || fragment.members != members) return false;
        return fragment.pc == pc || (is_barrier && control(fragment.pc).course == Course::warp_barrier);
    };
    Mask there = 0;
    for (const Fragment& fragment : fragments_) there |= waits(fragment) ? fragment.mask : 0;
    if (there != members) return;
    if (is_barrier) {
        warp_.block->shared->warp_sync(warp_.index, members);
    } else {
        step(pc).execute(warp_, step(pc), members);
    }
    count(pc, there);
    for (Fragment& fragment : fragments_) {
        if (!waits(fragment)) continue;
        fragment.state = Fragment::State::runnable;
        ++fragment.pc;
    }
    merge();
}

// barrier.sync without .aligned: each lane arrives by itself.
bool WarpRun::arrive_at_barrier(std::size_t which, Mask active) {
    split_off(which, active, at_ + 1);
    fragments_[which].state = Fragment::State::meeting;
    fragments_[which].members = active;
    arrive(at_, active);
    return false;
}

// `active` waits at the barrier statement `pc`, in one fragment or several.
void WarpRun::arrive(int pc, Mask active) {
    const Control& here = control(pc);
    Barriers::Arriving arriving;
    const int first = __builtin_ctz(active);
    arriving.warp = warp_.index;
    arriving.lanes = active;
    arriving.whole_warp = step(pc).meeting == Meeting::whole_warp;
    arriving.barrier = warp_.u32(here.barrier)[first];
    if (here.threads >= 0) arriving.threads = static_cast<int>(warp_.u32(here.threads)[first]);
    for_lanes(active, [&](int lane) {
        const bool same_threads =
            here.threads < 0 || static_cast<int>(warp_.u32(here.threads)[lane]) == arriving.threads;
        if (warp_.u32(here.barrier)[lane] != arriving.barrier || !same_threads) {
            throw_fault("lanes ", first, " and ", lane, " name different barriers");
        }
    });
    arriving.waits = here.arrival != Arrival::arrive;
    if (here.predicate >= 0) {
        const Mask predicates = warp_.predicate(here.predicate);
        arriving.predicates = here.predicate_negated ? ~predicates : predicates;
    }
    if (arriving.whole_warp) count(pc, active);
    for (Fragment& fragment : fragments_) {
        if (fragment.pc != pc || fragment.state != Fragment::State::meeting || (fragment.mask & active) == 0) continue;
        fragment.state = arriving.waits ? Fragment::State::barrier : Fragment::State::runnable;
        fragment.barrier = arriving.barrier;
        if (!arriving.waits) ++fragment.pc;
    }
    if (!arriving.waits) merge();
    barriers_->arrive(arriving);
}

void WarpRun::write_result(unsigned barrier, int popc, bool all, bool any) {
    for (const Fragment& fragment : fragments_) {
        if (fragment.state != Fragment::State::barrier || fragment.barrier != barrier) continue;
        const Control& here = control(fragment.pc);
        if (here.result < 0) continue;
        if (here.arrival == Arrival::popc) {
            for_lanes(fragment.mask,
                      [&](int lane) { warp_.u32(here.result)[lane] = static_cast<std::uint32_t>(popc); });
        } else {
            const bool value = here.arrival == Arrival::all ? all : any;
            Mask& result = warp_.predicate(here.result);
            result = value ? result | fragment.mask : result & ~fragment.mask;
        }
    }
}

void WarpRun::release(unsigned barrier) {
    for (Fragment& fragment : fragments_) {
        if (fragment.state != Fragment::State::barrier || fragment.barrier != barrier) continue;
        fragment.state = Fragment::State::runnable;
        ++fragment.pc;
    }
    merge();
}

// Lanes have exited: who waited for them is wrong, who waited for the live ones may go on.
void WarpRun::after_exit() {
    for (const Fragment& fragment : fragments_) {
        if (fragment.state == Fragment::State::meeting && (fragment.members & warp_.exited) != 0) {
            throw_fault("lanes ", hexadecimal(fragment.members & warp_.exited), " exit, but lanes ",
                        hexadecimal(fragment.mask), " wait for them at ",
                        describe(*module_, *step(fragment.pc).statement));
        }
    }
    for (std::size_t i = 0; i < fragments_.size(); ++i) {
        if (fragments_[i].state != Fragment::State::meeting || fragments_[i].members != 0) continue;
        if (try_whole_warp(fragments_[i].pc)) break;
    }
    barriers_->after_exit();
}

bool WarpRun::waits_for_other_warps() const {
    return std::any_of(fragments_.begin(), fragments_.end(),
                       [](const Fragment& fragment) { return fragment.state == Fragment::State::barrier; });
}

std::string WarpRun::waiters() const {
    std::string text;
    const auto add = [&](Mask mask, int pc, const std::string& for_what) {
        text += text.empty() ? "lanes " : "; lanes ";
        text += hexadecimal(mask) + " wait at " + describe(*module_, *step(pc).statement) + " for " + for_what;
    };
    for (const Fragment& fragment : fragments_) {
        if (fragment.state == Fragment::State::barrier) {
            add(fragment.mask, fragment.pc, barriers_->missing(fragment.barrier));
        } else if (fragment.state == Fragment::State::meeting) {
            add(fragment.mask, fragment.pc,
                fragment.members == 0 ? "all lanes of the warp" : "the lanes " + hexadecimal(fragment.members));
        }
    }
    for (const Join& join : joins_) {
        if (join.in_use && join.arrived != 0) {
            add(join.arrived, join.pc, "the lanes " + hexadecimal(join.pending) + " that they parted from");
        }
    }
    return text;
}

}  // namespace headrace::ptx
