// SharedMemory: what orders the accesses of a block's threads: meetings of lanes and of warps, as vector clocks.
#include <algorithm>

#include "checks/shared_shadow.hpp"
#include "machine/fault.hpp"

namespace headrace::ptx {

void SharedMemory::Implementation::set_floor(std::size_t warp) {
    const auto row = seen.begin() + static_cast<std::ptrdiff_t>(warp * warps);
    floor[warp] = races ? *std::min_element(row, row + static_cast<std::ptrdiff_t>(warps)) : never - 1;
}

// Whether what `lane` of `warp` did in its interval `when` is ordered before what the actor does now.
bool SharedMemory::Implementation::knows(Actor actor, int warp, int lane, Clock when) const {
    const auto own = static_cast<std::size_t>(actor.warp);
    if (when <= seen[own * warps + static_cast<std::size_t>(warp)]) return true;
    if (warp != actor.warp || actor.lane < 0) return false;
    if (lane == actor.lane) return true;
    return when <= known[(own * 32 + static_cast<std::size_t>(actor.lane)) * 32 + static_cast<std::size_t>(lane)];
}

void SharedMemory::warp_sync(int warp, std::uint32_t members) {
    Implementation& my = *implementation_;
    const auto own = static_cast<std::size_t>(warp);
    const Clock now = my.clock[own]++;
    if (members == ~std::uint32_t{0}) {
        my.seen[own * my.warps + own] = now;
        my.set_floor(own);
        return;
    }
    Clock joined[32] = {};
    Clock* const rows = &my.known[own * 32 * 32];
    for (std::uint32_t rest = members; rest != 0; rest &= rest - 1)
        for (int lane = 0; lane < 32; ++lane)
            joined[lane] = std::max(joined[lane], rows[__builtin_ctz(rest) * 32 + lane]);
    for (std::uint32_t rest = members; rest != 0; rest &= rest - 1) joined[__builtin_ctz(rest)] = now;
    for (std::uint32_t rest = members; rest != 0; rest &= rest - 1)
        std::copy_n(joined, 32, rows + __builtin_ctz(rest) * 32);
}

void SharedMemory::arrive(int warp, int barrier) {
    Implementation& my = *implementation_;
    const auto own = static_cast<std::size_t>(warp);
    const auto row = my.seen.begin() + static_cast<std::ptrdiff_t>(own * my.warps);
    my.arrivals.push_back({warp, barrier, my.clock[own]++, {row, row + static_cast<std::ptrdiff_t>(my.warps)}});
}

void SharedMemory::barrier(const std::vector<int>& arriving, const std::vector<int>& waiting, int barrier) {
    Implementation& my = *implementation_;
    const Clock now = *std::max_element(my.clock.begin(), my.clock.end());
    std::vector<Clock> joined(my.warps);
    const auto join = [&](const Clock* row) {
        for (std::size_t i = 0; i < my.warps; ++i) joined[i] = std::max(joined[i], row[i]);
    };
    for (const int warp : arriving) {
        const auto own = static_cast<std::size_t>(warp);
        const auto early = [&](const auto& a) { return a.warp == warp && a.barrier == barrier; };
        const bool waits = std::find(waiting.begin(), waiting.end(), warp) != waiting.end();
        if (std::any_of(my.arrivals.begin(), my.arrivals.end(), early) && !waits) {
            // Lanes that have parted arrive one after the other.
            for (const auto& arrival : my.arrivals) {
                if (!early(arrival)) continue;
                join(arrival.seen.data());
                joined[own] = std::max(joined[own], arrival.clock);
            }
            my.arrivals.erase(std::remove_if(my.arrivals.begin(), my.arrivals.end(), early), my.arrivals.end());
        } else {
            join(&my.seen[own * my.warps]);
            joined[own] = now;
            my.clock[own] = now + 1;
        }
    }
    for (const int warp : waiting) {
        const auto own = static_cast<std::size_t>(warp);
        for (std::size_t i = 0; i < my.warps; ++i)
            my.seen[own * my.warps + i] = std::max(my.seen[own * my.warps + i], joined[i]);
        my.clock[own] = now + 1;
        my.set_floor(own);
    }
}

}  // namespace headrace::ptx
