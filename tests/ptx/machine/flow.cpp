// WarpRun: the loop over statements, branches, the parting and meeting of lanes.
#include "machine/flow.hpp"

#include <algorithm>

#include "machine/barriers.hpp"
#include "machine/block.hpp"

namespace headrace::ptx {

void WarpRun::start(Block& block, int index, Mask existing, std::byte* registers, const Module& module,
                    const Code& code, Executions* counts, Barriers& barriers) {
    warp_ = Warp{};
    warp_.block = &block;
    warp_.index = index;
    warp_.existing = existing;
    warp_.registers = registers;
    module_ = &module;
    code_ = &code;
    counts_ = counts;
    barriers_ = &barriers;
    fragments_.clear();
    fragments_.reserve(lanes);  // each has a lane: references stay valid
    joins_.clear();
    Fragment all;
    all.mask = existing;
    fragments_.push_back(all);
    at_ = 0;
}

void WarpRun::run(std::size_t which, std::uint64_t budget) {
    Fragment& fragment = fragments_[which];
    const int end = static_cast<int>(code_->steps.size());
    for (; budget > 0; --budget) {
        if (fragment.pc == fragment.stop) return park(which);
        at_ = fragment.pc;
        if (at_ >= end) throw_fault("the kernel runs past its last statement");
        const Step& step = code_->steps[static_cast<std::size_t>(at_)];
        const Control& control = code_->controls[static_cast<std::size_t>(at_)];
        Mask active = fragment.mask;
        if (step.guard >= 0) {
            const Mask guard = warp_.predicate(step.guard);
            active &= step.guard_negated ? ~guard : guard;
        }
        if (control.check >= 0) {
            check_registers(code_->checks[static_cast<std::size_t>(control.check)], fragment.mask, active);
        }
        if (active == 0) {
            ++fragment.pc;
        } else if (control.course == Course::next && step.meeting == Meeting::none) {
            count(at_, active);
            step.execute(warp_, step, active);
            ++fragment.pc;
        } else if (!flow(which, active)) {
            return;
        }
    }
    fragment.tired = true;
}

// All but plain steps. True: the fragment goes on.
bool WarpRun::flow(std::size_t which, Mask active) {
    const Step& here = step(at_);
    if (here.meeting == Meeting::none) count(at_, active);  // others count when their lanes have met
    switch (control(at_).course) {
        case Course::next:
            return here.meeting == Meeting::whole_warp ? meet_whole_warp(which, active) : meet_members(which, active);
        case Course::warp_barrier: return meet_members(which, active);
        case Course::barrier:
            return here.meeting == Meeting::whole_warp ? meet_whole_warp(which, active)
                                                       : arrive_at_barrier(which, active);
        case Course::branch: return branch(which, active);
        case Course::indexed: return branch_indexed(which, active);
        case Course::exit: return leave(which, active);
        case Course::trap: throw_fault("trap");
        case Course::pause:
            ++fragments_[which].pc;
            fragments_[which].tired = true;
            return false;
    }
    return false;
}

void WarpRun::check_registers(const RegisterCheck& check, Mask mask, Mask active) {
    const auto look = [&](const std::vector<RegisterCheck::Line>& lines, Mask readers) {
        for (const RegisterCheck::Line& line : lines) {
            const Mask bad = readers & ~warp_.predicate(line.written);
            if (bad != 0) throw_fault("lane ", __builtin_ctz(bad), " reads ", line.name, ", which it has not written");
        }
    };
    look(check.guard, mask);
    look(check.reads, active);
    if (!check.accumulators.empty()) {
        const Mask scale = warp_.predicate(check.scale);
        look(check.accumulators, active & (check.scale_negated ? ~scale : scale));
    }
    for (const RegisterCheck::Line& line : check.writes) warp_.predicate(line.written) |= active;
    for (const RegisterCheck::Copy& copy : check.copies) {
        Mask& to = warp_.predicate(copy.to);
        to = (to & ~active) | (warp_.predicate(copy.from) & active);
    }
    if (active != 0 && (!check.fragment_reads.empty() || !check.fragment_writes.empty())) {
        fragment_registers(warp_).touch(check.fragment_reads, check.fragment_writes, step(at_).statement->line);
    }
}

bool WarpRun::branch(std::size_t which, Mask active) {
    Fragment& fragment = fragments_[which];
    const Control& here = control(at_);
    if (active == fragment.mask) {
        fragment.pc = here.target;
        return true;
    }
    if (step(at_).variant == 1) throw_fault("bra.uni, but its lanes part");
    groups_.assign({{here.target, active}, {at_ + 1, fragment.mask & ~active}});
    part(which, groups_);
    return false;
}

bool WarpRun::branch_indexed(std::size_t which, Mask active) {
    const Control& here = control(at_);
    groups_.clear();
    const auto add = [&](int pc, Mask lanes_there) {
        const auto found =
            std::find_if(groups_.begin(), groups_.end(), [&](const Group& group) { return group.pc == pc; });
        if (found == groups_.end()) {
            groups_.push_back({pc, lanes_there});
        } else {
            found->mask |= lanes_there;
        }
    };
    for_lanes(active, [&](int lane) {
        const std::uint32_t index = warp_.u32(here.index)[lane];
        if (index >= here.targets.size()) {
            throw_fault("lane ", lane, " branches to target ", index, " of ", here.targets.size());
        }
        add(here.targets[index], Mask{1} << lane);
    });
    const Mask others = fragments_[which].mask & ~active;
    if (others != 0) add(at_ + 1, others);
    if (groups_.size() > 1 && step(at_).variant == 1) throw_fault("brx.idx.uni, but its lanes part");
    if (groups_.size() > 1) {
        part(which, groups_);
        return false;
    }
    fragments_[which].pc = groups_[0].pc;
    return true;
}

void WarpRun::part(std::size_t which, const std::vector<Group>& groups) {
    Fragment child = fragments_[which];
    const int meeting_point = control(at_).reconvergence;
    if (meeting_point != child.stop && meeting_point < static_cast<int>(code_->steps.size())) {
        child.join = new_join(meeting_point, child.mask, child.join);
        child.stop = meeting_point;
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
        child.pc = groups[i].pc;
        child.mask = groups[i].mask;
        if (i == 0) {
            fragments_[which] = child;
        } else {
            fragments_.push_back(child);
        }
    }
}

int WarpRun::new_join(int pc, Mask pending, int parent) {
    for (int outer = parent; outer >= 0; outer = joins_[static_cast<std::size_t>(outer)].parent) {
        if (joins_[static_cast<std::size_t>(outer)].pc == pc) throw_fault("joins nest: a bug of this interpreter");
    }
    const auto unused = std::find_if(joins_.begin(), joins_.end(), [](const Join& join) { return !join.in_use; });
    const auto index = unused - joins_.begin();
    if (unused == joins_.end()) joins_.emplace_back();
    joins_[static_cast<std::size_t>(index)] = {pc, pending, 0, parent, true};
    return static_cast<int>(index);
}

// The fragment waits as a part of its join.
void WarpRun::park(std::size_t which) {
    const Fragment fragment = fragments_[which];
    fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(which));
    Join& join = joins_[static_cast<std::size_t>(fragment.join)];
    join.pending &= ~fragment.mask;
    join.arrived |= fragment.mask;
    settle(fragment.join);
}

// A join that misses nobody becomes a fragment again.
void WarpRun::settle(int index) {
    Join& join = joins_[static_cast<std::size_t>(index)];
    if (join.pending != 0) return;
    join.in_use = false;
    if (join.arrived == 0) return;
    Fragment fragment;
    fragment.pc = join.pc;
    fragment.mask = join.arrived;
    fragment.join = join.parent;
    fragment.stop = join.parent < 0 ? -1 : joins_[static_cast<std::size_t>(join.parent)].pc;
    fragments_.push_back(fragment);
}

bool WarpRun::leave(std::size_t which, Mask leaving) {
    check_no_copies_in_flight(warp_, leaving);
    if (warp_.block->products != nullptr) check_products_at_exit(warp_);
    warp_.exited |= leaving;
    Fragment& fragment = fragments_[which];
    fragment.mask &= ~leaving;
    ++fragment.pc;
    const bool stays = fragment.mask != 0;
    const int innermost = fragment.join;
    if (!stays) fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(which));
    for (int join = innermost; join >= 0;) {
        const int parent = joins_[static_cast<std::size_t>(join)].parent;
        joins_[static_cast<std::size_t>(join)].pending &= ~leaving;
        settle(join);
        join = parent;
    }
    after_exit();
    return false;
}

// The lanes with `staying` go on as the fragment, the others as one of their own.
void WarpRun::split_off(std::size_t which, Mask staying, int pc_of_others) {
    Fragment others = fragments_[which];
    others.mask &= ~staying;
    others.pc = pc_of_others;
    fragments_[which].mask &= staying;
    if (others.mask != 0) fragments_.push_back(others);
}

// Fragments that were parted without need, and stand at one statement again, become one.
void WarpRun::merge() {
    for (std::size_t i = 0; i < fragments_.size(); ++i) {
        for (std::size_t k = fragments_.size() - 1; k > i; --k) {
            const Fragment& other = fragments_[k];
            if (fragments_[i].state != Fragment::State::runnable || other.state != Fragment::State::runnable ||
                fragments_[i].pc != other.pc || fragments_[i].join != other.join) {
                continue;
            }
            fragments_[i].mask |= other.mask;
            fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(k));
        }
    }
}

void WarpRun::rest() {
    for (Fragment& fragment : fragments_) fragment.tired = false;
}

}  // namespace headrace::ptx
