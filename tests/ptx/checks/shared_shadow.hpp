// The shadow of a block's shared memory, and time in it: for shared_memory.cpp, shared_order.cpp and async_proxy.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "checks/shared_memory.hpp"
#include "checks/zeros.hpp"

namespace headrace::ptx {

// Time. Each warp counts intervals: `clock` grows when the warp meets others at a barrier, or its own lanes at a
// bar.warp.sync. seen[w][v] is the interval of warp v up to which all that v did is ordered before what any lane of w
// does next; seen[w][w] is set where all lanes of w met. Where only some lanes met, known[l][m] says the same for lanes
// of w. The clocks never start again: what a block before this one did lies below `birth`, so that a new block clears
// nothing. They are signed since vectors of signed numbers are compared faster.
using Clock = std::int32_t;
// When a granule in flight was written, and never - 1: when one under atomics was; nobody passes.
inline constexpr Clock never = 0x7fffffff;

// Who wrote a granule: in flight 1 | atomic 1 | line 20 | warp 5 | lane 5.
using Entry = std::uint32_t;
inline constexpr Entry in_flight = Entry{1} << 31, atomics_only = Entry{1} << 30, thread_bits = 1023;

constexpr int line_of(Entry entry) { return static_cast<int>(entry >> 10 & 0xfffff); }
constexpr int warp_of(Entry entry) { return static_cast<int>(entry >> 5 & 31); }
constexpr int lane_of(Entry entry) { return static_cast<int>(entry & 31); }
struct Actor {
    int warp, lane, line;  // lane -1: all lanes of the warp
};

constexpr Entry entry_of(Actor actor) {
    return static_cast<Entry>(std::clamp(actor.line, 0, 0xfffff)) << 10 | static_cast<Entry>(actor.warp) << 5 |
           static_cast<Entry>(actor.lane & 31);
}

struct SharedMemory::Implementation {
    std::size_t bytes, granules, warps;
    bool races;
    Zeros<std::byte> data;
    Zeros<Clock> written_at;         // [granule]: the writer's interval
    Zeros<Entry> writer;             // [granule]
    Zeros<Clock> last_read;          // [granule]: the latest interval of any reader since the last write
    Zeros<std::uint32_t> read_by;    // [granule]: the warps that read since then, and maybe others
    Zeros<Clock> read_at;            // [warp][granule]: the interval of the warp's latest reader
    Zeros<std::uint32_t> readers;    // [warp][granule]: the lanes that read then
    Zeros<std::uint32_t> read_line;  // [warp][granule]
    Clock birth = 1;
    std::size_t granules_in_flight = 0;
    std::vector<Clock> clock, seen, floor;  // [warp], [warp][warp], [warp]: the least of its row of seen
    std::vector<Clock> known;               // [warp][lane][lane]; counts where it is above seen[warp][warp]
    struct Arrival {
        int warp, barrier;
        Clock clock;
        std::vector<Clock> seen;
    };
    std::vector<Arrival> arrivals;  // of warps that did not wait, until their barrier completes
    struct Fence {
        Clock clock;  // the interval that it ended
        std::uint32_t lanes;
    };
    std::vector<std::vector<Fence>> fences;  // [warp]: of the proxy, in order
    // [warp][warp]: the interval of the second up to which a fence lies before any read of the first by the proxy
    std::vector<Clock> fenced;
    struct Atomic {
        Clock clock;
        Actor actor;
        bool is_plain;  // the last write before the atomics: they have to be ordered behind it, not behind each other
    };
    std::unordered_map<std::size_t, std::vector<Atomic>> atomics;  // of granules whose entry says atomics_only

    Implementation(std::size_t size, int warp_count, bool look_for_races);
    void begin_block();
    void set_floor(std::size_t warp);
    bool holds(std::uint64_t offset, unsigned size, unsigned alignment) const;
    std::size_t place(std::uint32_t offset, unsigned size) const;  // the first granule
    bool knows(Actor actor, int warp, int lane, Clock when) const;
    bool settled(std::size_t granule, Actor actor) const;

    bool all_below_floor(std::size_t first, int count, int warp) const;
    bool any_older_readers(std::size_t first, int count, int warp) const;
    template <class Bits>
    void mark_readers(std::size_t first, int count, Actor actor, Bits bits);
    template <bool row, class Bits, class Lane>
    bool load_at_once(std::size_t first, int count, Actor actor, Bits bits, Lane lane);
    template <int n>
    bool may_store(std::size_t first, int lanes, Actor actor) const;
    template <int n>
    void put_writer(std::size_t first, int lanes, Clock when, Entry entry);
    template <int n>
    void load(std::size_t first, Actor actor);
    template <int n>
    void store(std::size_t first, Actor actor, Clock when, Entry entry);

    void check_writer(std::size_t granule, Actor actor, const char* verb);
    void check_readers(std::size_t granule, Actor actor, const char* verb);
    void check_written(std::size_t granule) const;
    void check_flight(std::size_t granule, const char* verb) const;
    bool is_fenced(int warp, int writing_warp, int lane, Clock when);
    template <int n>
    bool may_load_by_async_proxy(std::size_t first, int warp);
    void check_proxy(std::size_t granule, int warp);
    void keep_older_readers(std::size_t granule, Actor actor);
    void add_atomic(std::size_t granule, Actor actor);
};

// Whether the granule is written, and its writer is ordered before the actor: the checks have nothing to say.
inline bool SharedMemory::Implementation::settled(std::size_t granule, Actor actor) const {
    const Clock when = written_at[granule];
    if (when < birth || when >= never - 1) return false;
    const Entry entry = writer[granule];
    const auto own = static_cast<std::size_t>(actor.warp);
    return when <= seen[own * warps + static_cast<std::size_t>(warp_of(entry))] ||
           (actor.lane >= 0 && ((entry ^ entry_of(actor)) & thread_bits) == 0);
}

// Whether all are written, and the warp has seen everything that any warp did up to then.
[[gnu::always_inline]] inline bool SharedMemory::Implementation::all_below_floor(std::size_t first, int count,
                                                                                 int warp) const {
    const Clock* const wrote = &written_at[first];
    const Clock since = birth, past = floor[static_cast<std::size_t>(warp)];
    int open = 0;
    for (int i = 0; i < count; ++i) open |= (wrote[i] < since) | (wrote[i] > past);
    return open == 0;
}

// bits(i): the lanes that read the granule first + i.
template <class Bits>
[[gnu::always_inline]] inline void SharedMemory::Implementation::mark_readers(std::size_t first, int count, Actor actor,
                                                                              Bits bits) {
    const auto own = static_cast<std::size_t>(actor.warp);
    const std::size_t at = own * granules + first;
    const Clock now = clock[own];
    const std::uint32_t own_bit = std::uint32_t{1} << own;
    Clock *const when = &read_at[at], *const latest = &last_read[first];
    std::uint32_t *const read = &readers[at], *const lines = &read_line[at], *const by = &read_by[first];
    for (int i = 0; i < count; ++i) read[i] = (when[i] == now ? read[i] : 0) | bits(i);
    for (int i = 0; i < count; ++i) when[i] = now;
    for (int i = 0; i < count; ++i) latest[i] = latest[i] > now ? latest[i] : now;
    for (int i = 0; i < count; ++i) by[i] |= own_bit;
    for (int i = 0; i < count; ++i) lines[i] = static_cast<std::uint32_t>(actor.line);
}

}  // namespace headrace::ptx
