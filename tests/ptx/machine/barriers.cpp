// Barriers: arrival, completion, and what the checks of shared memory hear of it.
#include "machine/barriers.hpp"

#include "checks/shared_memory.hpp"
#include "machine/flow.hpp"

namespace headrace::ptx {

void Barriers::start(std::vector<WarpRun>& warps, SharedMemory& shared) {
    warps_ = &warps;
    shared_ = &shared;
    uses_.fill(Use{});
}

void Barriers::arrive(const Arriving& arriving) {
    if (arriving.barrier >= count) throw_fault("barrier ", arriving.barrier, ": there are ", count);
    if (arriving.threads == 0 || (arriving.threads > 0 && arriving.threads % lanes != 0)) {
        throw_fault("barrier ", arriving.barrier, " for ", arriving.threads, " threads: not a multiple of 32");
    }
    Use& use = uses_[arriving.barrier];
    const auto warp = static_cast<std::size_t>(arriving.warp);
    if (use.open && use.threads != arriving.threads) {
        throw_fault("barrier ", arriving.barrier, " is in use for ",
                    use.threads < 0 ? "all" : std::to_string(use.threads), " threads, this arrival is for ",
                    arriving.threads < 0 ? "all" : std::to_string(arriving.threads));
    }
    if ((use.arrived[warp] & arriving.lanes) != 0) {
        throw_fault("arrives again at barrier ", arriving.barrier, " before it is complete");
    }
    use.open = true;
    use.threads = arriving.threads;
    use.counted += arriving.whole_warp ? lanes : __builtin_popcount(arriving.lanes);
    use.arrived[warp] |= arriving.lanes;
    if (arriving.waits) {
        use.waiting[warp] |= arriving.lanes;
    } else {
        shared_->arrive(arriving.warp, static_cast<int>(arriving.barrier));
    }
    use.popc += __builtin_popcount(arriving.predicates & arriving.lanes);
    use.all = use.all && (arriving.lanes & ~arriving.predicates) == 0;
    use.any = use.any || (arriving.lanes & arriving.predicates) != 0;
    if (use.threads > 0 && use.counted > use.threads) {
        throw_fault("barrier ", arriving.barrier, " for ", use.threads, " threads, but ", use.counted, " arrived");
    }
    if (complete(use)) finish(arriving.barrier);
}

bool Barriers::complete(const Use& use) const {
    if (!use.open) return false;
    if (use.threads > 0) return use.counted == use.threads;
    for (std::size_t warp = 0; warp < warps_->size(); ++warp) {
        const Mask live = (*warps_)[warp].live();
        if ((use.arrived[warp] & live) != live) return false;
    }
    return true;
}

void Barriers::finish(unsigned barrier) {
    const Use use = uses_[barrier];
    uses_[barrier] = Use{};
    std::vector<int> arriving, waiting;
    for (std::size_t warp = 0; warp < warps_->size(); ++warp) {
        if (use.arrived[warp] == 0) continue;
        if (((*warps_)[warp].live() & ~use.arrived[warp]) != 0) {
            throw_fault("barrier ", barrier, " is complete with a part of warp ", warp,
                        " only: not done by this interpreter");
        }
        arriving.push_back(static_cast<int>(warp));
        if (use.waiting[warp] != 0) waiting.push_back(static_cast<int>(warp));
    }
    shared_->barrier(arriving, waiting, static_cast<int>(barrier));
    for (const int warp : waiting) {
        (*warps_)[static_cast<std::size_t>(warp)].write_result(barrier, use.popc, use.all, use.any);
        (*warps_)[static_cast<std::size_t>(warp)].release(barrier);
    }
}

void Barriers::after_exit() {
    for (unsigned barrier = 0; barrier < count; ++barrier) {
        if (uses_[barrier].open && uses_[barrier].threads < 0 && complete(uses_[barrier])) finish(barrier);
    }
}

void Barriers::check_ended() const {
    for (unsigned barrier = 0; barrier < count; ++barrier) {
        if (uses_[barrier].open) throw_fault("the block ends with ", missing(barrier));
    }
}

std::string Barriers::missing(unsigned barrier) const {
    const Use& use = uses_[barrier];
    std::string text = "barrier " + std::to_string(barrier);
    if (use.threads > 0) {
        return text + ", where " + std::to_string(use.counted) + " of " + std::to_string(use.threads) + " threads are";
    }
    text += ", where these are missing:";
    for (std::size_t warp = 0; warp < warps_->size(); ++warp) {
        if (((*warps_)[warp].live() & ~use.arrived[warp]) != 0) text += " warp " + std::to_string(warp);
    }
    return text;
}

}  // namespace headrace::ptx
