// SharedMemory: accesses, and what the shadow of last writers and readers says to them.
#include <algorithm>
#include <cstring>

#include "checks/shared_shadow.hpp"
#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

[[noreturn]] void race(std::size_t granule, const char* now, const char* before, Actor other) {
    throw_fault("race: ", now, " shared offset ", 2 * granule, ", which warp ", other.warp, " lane ", other.lane, " ",
                before, " at line ", other.line, "; no barrier lies between");
}

}  // namespace

SharedMemory::Implementation::Implementation(std::size_t size, int warp_count, bool look_for_races)
    : bytes(size),
      granules((size + 1) / 2),
      warps(static_cast<std::size_t>(warp_count)),
      races(look_for_races),
      data(size + 16),
      written_at(granules),
      writer(granules),
      last_read(granules),
      read_by(granules),
      read_at(granules * warps),
      readers(granules * warps),
      read_line(granules * warps),
      clock(warps, 1),
      seen(warps * warps),
      floor(warps),
      known(warps * 32 * 32),
      fences(warps),
      fenced(warps * warps) {
    begin_block();
}

void SharedMemory::Implementation::begin_block() {
    birth = *std::max_element(clock.begin(), clock.end()) + 1;
    if (birth > never / 2) {
        std::fill_n(written_at.at, granules, Clock{0});
        std::fill_n(last_read.at, granules, Clock{0});
        std::fill_n(read_at.at, granules * warps, Clock{0});
        std::fill(known.begin(), known.end(), Clock{0});
        birth = 1;
    }
    // Granules under atomics or in flight look younger than any block.
    for (const auto& entry : atomics) written_at[entry.first] = 0;
    for (std::size_t i = 0; i < granules && granules_in_flight > 0; ++i)
        if (written_at[i] == never) written_at[i] = 0;
    granules_in_flight = 0;
    std::fill(clock.begin(), clock.end(), birth);
    std::fill(seen.begin(), seen.end(), birth - 1);
    std::fill(fenced.begin(), fenced.end(), birth - 1);
    for (auto& list : fences) list.clear();
    arrivals.clear();
    atomics.clear();
    for (std::size_t warp = 0; warp < warps; ++warp) set_floor(warp);
}

bool SharedMemory::Implementation::holds(std::uint64_t offset, unsigned size, unsigned alignment) const {
    return offset <= bytes && size <= bytes - offset && (offset & (alignment - 1)) == 0;
}

std::size_t SharedMemory::Implementation::place(std::uint32_t offset, unsigned size) const {
    if (offset > bytes || size > bytes - offset)
        throw_fault("touches ", size, " bytes at shared offset ", offset, ", outside the block's ", bytes,
                    " bytes of shared memory");
    if ((offset & (size - 1)) != 0)
        throw_fault("touches shared offset ", offset, ", which is not aligned to ", size, " bytes");
    return offset / 2;
}

void SharedMemory::Implementation::check_flight(std::size_t granule, const char* verb) const {
    if (written_at[granule] != never) return;
    const Entry entry = writer[granule];
    throw_fault(verb, " shared offset ", 2 * granule, " while the cp.async of line ", line_of(entry), " (warp ",
                warp_of(entry), " lane ", lane_of(entry), ") is in flight to it");
}

void SharedMemory::Implementation::check_written(std::size_t granule) const {
    if (written_at[granule] < birth) throw_fault("reads shared offset ", 2 * granule, ", which nothing wrote");
}

void SharedMemory::Implementation::check_writer(std::size_t granule, Actor actor, const char* verb) {
    const Entry entry = writer[granule];
    if (written_at[granule] < birth || !races) return;
    if ((entry & atomics_only) == 0) {
        if (!knows(actor, warp_of(entry), lane_of(entry), written_at[granule]))
            race(granule, verb, "wrote", {warp_of(entry), lane_of(entry), line_of(entry)});
        return;
    }
    for (const Atomic& atomic : atomics[granule])
        if (!knows(actor, atomic.actor.warp, atomic.actor.lane, atomic.clock))
            race(granule, verb, atomic.is_plain ? "wrote" : "used atomics on", atomic.actor);
}

void SharedMemory::Implementation::check_readers(std::size_t granule, Actor actor, const char* verb) {
    if (last_read[granule] <= floor[static_cast<std::size_t>(actor.warp)] || !races) return;
    for (std::uint32_t by = read_by[granule]; by != 0; by &= by - 1) {
        const auto warp = static_cast<std::size_t>(__builtin_ctz(by));
        const Clock when = read_at[warp * granules + granule];
        if (when < birth || when <= seen[static_cast<std::size_t>(actor.warp) * warps + warp]) continue;
        for (std::uint32_t rest = readers[warp * granules + granule]; rest != 0; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            if (knows(actor, static_cast<int>(warp), lane, when)) continue;
            const auto line = static_cast<int>(read_line[warp * granules + granule]);
            race(granule, verb, "read", {static_cast<int>(warp), lane, line});
        }
    }
}

// The lanes that read in an earlier interval of the warp stay marked unless they are ordered before the actor. They
// take its interval: where lanes sync in changing partial groups this may accuse a pair that a third lane ordered;
// nobody is let off.
void SharedMemory::Implementation::keep_older_readers(std::size_t granule, Actor actor) {
    const auto own = static_cast<std::size_t>(actor.warp);
    const std::size_t at = own * granules + granule;
    const Clock when = read_at[at], now = clock[own];
    if (when == now || when <= seen[own * warps + own]) return;
    std::uint32_t kept = 0;
    for (std::uint32_t rest = readers[at]; rest != 0; rest &= rest - 1)
        if (!knows(actor, actor.warp, __builtin_ctz(rest), when)) kept |= rest & -rest;
    read_at[at] = now;
    readers[at] = kept;
}

template <class F>
inline auto with_count(unsigned size, F f) {
    if (size == 16) return f(std::integral_constant<int, 8>{});
    if (size == 8) return f(std::integral_constant<int, 4>{});
    if (size == 4) return f(std::integral_constant<int, 2>{});
    return f(std::integral_constant<int, 1>{});
}

// Whether keep_older_readers has anything to do.
[[gnu::always_inline]] inline bool SharedMemory::Implementation::any_older_readers(std::size_t first, int count,
                                                                                   int warp) const {
    const auto own = static_cast<std::size_t>(warp);
    const Clock* const when = &read_at[own * granules + first];
    const Clock now = clock[own], flat = seen[own * warps + own];
    int older = 0;
    for (int i = 0; i < count; ++i) older |= (when[i] != now) & (when[i] > flat);
    return older != 0;
}

template <int n>
inline void SharedMemory::Implementation::load(std::size_t first, Actor actor) {
    const std::size_t open = all_below_floor(first, n, actor.warp) ? 0 : n;
    for (std::size_t granule = first; granule < first + open; ++granule) {
        if (settled(granule, actor)) continue;
        check_written(granule);
        check_flight(granule, "reads");
        check_writer(granule, actor, "reads");
    }
    if (!races) return;
    // All lanes of the warp read: none was marked that is not marked now.
    const std::size_t older = actor.lane >= 0 && any_older_readers(first, n, actor.warp) ? n : 0;
    for (std::size_t granule = first; granule < first + older; ++granule) keep_older_readers(granule, actor);
    const std::uint32_t own_bits = actor.lane < 0 ? ~std::uint32_t{0} : std::uint32_t{1} << actor.lane;
    mark_readers(first, n, actor, [=](int) { return own_bits; });
}

// By several lanes of the actor's warp: bits(i) those that read the granule first + i, lane(i) the first of them.
// `row`: it is the only one; else only what all lanes know settles anything. False: not done.
template <bool row, class Bits, class Lane>
[[gnu::always_inline]] inline bool SharedMemory::Implementation::load_at_once(std::size_t first, int count, Actor actor,
                                                                              Bits bits, Lane lane) {
    const int open = all_below_floor(first, count, actor.warp) ? 0 : count;
    for (int i = 0; i < open; ++i)
        if (!settled(first + static_cast<std::size_t>(i), {actor.warp, row ? lane(i) : -1, actor.line})) return false;
    if (!races) return true;
    const int older = any_older_readers(first, count, actor.warp) ? count : 0;
    for (int i = 0; i < older; ++i)
        keep_older_readers(first + static_cast<std::size_t>(i), {actor.warp, lane(i), actor.line});
    mark_readers(first, count, actor, bits);
    return true;
}

// By lanes from the actor's on, n granules each. True: whoever wrote or read any of them before is ordered before the
// lane that writes it now, or is that lane.
template <int n>
[[gnu::always_inline]] inline bool SharedMemory::Implementation::may_store(std::size_t first, int lanes,
                                                                           Actor actor) const {
    const auto own = static_cast<std::size_t>(actor.warp);
    const Clock *const wrote = &written_at[first], *const read = &last_read[first];
    const Entry* const writers = &writer[first];
    const std::uint32_t *const by = &read_by[first], *const own_readers = &readers[own * granules + first];
    const Clock past = floor[own];
    const Entry thread = entry_of(actor) & thread_bits;
    const std::uint32_t own_bit = std::uint32_t{1} << own, lane_bit = std::uint32_t{1} << actor.lane;
    int open = 0;
    for (int i = 0; i < n * lanes; ++i) {
        const int other_writer =
            (wrote[i] >= never - 1) | (((writers[i] ^ (thread + static_cast<Entry>(i / n))) & thread_bits) != 0);
        const int other_reader = (by[i] != own_bit) | (own_readers[i] != lane_bit << (i / n));
        open |= ((wrote[i] > past) & other_writer) | ((read[i] > past) & other_reader);
    }
    return open == 0;
}

template <int n>
[[gnu::always_inline]] inline void SharedMemory::Implementation::put_writer(std::size_t first, int lanes, Clock when,
                                                                            Entry entry) {
    Clock *const wrote = &written_at[first], *const read = &last_read[first];
    std::uint32_t* const by = &read_by[first];
    Entry* const writers = &writer[first];
    for (int i = 0; i < n * lanes; ++i) wrote[i] = when;
    for (int i = 0; i < n * lanes; ++i) writers[i] = entry + static_cast<Entry>(i / n);
    for (int i = 0; i < n * lanes; ++i) read[i] = 0;
    for (int i = 0; i < n * lanes; ++i) by[i] = 0;
}

template <int n>
inline void SharedMemory::Implementation::store(std::size_t first, Actor actor, Clock when, Entry entry) {
    const std::size_t open = may_store<n>(first, 1, actor) ? 0 : n;
    for (std::size_t granule = first; granule < first + open; ++granule) {
        if (!settled(granule, actor)) {
            check_flight(granule, "writes");
            check_writer(granule, actor, "writes");
        }
        check_readers(granule, actor, "writes");
    }
    put_writer<n>(first, 1, when, entry);
}

void SharedMemory::Implementation::add_atomic(std::size_t granule, Actor actor) {
    check_written(granule);
    check_flight(granule, "uses atomics on");
    check_readers(granule, actor, "uses atomics on");
    if (!races) return;
    std::vector<Atomic>& list = atomics[granule];
    if (const Entry entry = writer[granule]; (entry & atomics_only) == 0) {
        list.clear();
        list.push_back({written_at[granule], {warp_of(entry), lane_of(entry), line_of(entry)}, /*is_plain=*/true});
    }
    for (const Atomic& a : list)
        if (a.is_plain && !knows(actor, a.actor.warp, a.actor.lane, a.clock))
            race(granule, "uses atomics on", "wrote", a.actor);
    std::erase_if(list,
                  [&](const Atomic& a) { return !a.is_plain && knows(actor, a.actor.warp, a.actor.lane, a.clock); });
    list.push_back({clock[static_cast<std::size_t>(actor.warp)], actor, /*is_plain=*/false});
    written_at[granule] = never - 1;
    writer[granule] = entry_of(actor) | atomics_only;
}

SharedMemory::SharedMemory(std::size_t bytes, int warps, bool look_for_races)
    : implementation_(std::make_unique<Implementation>(bytes, warps, look_for_races)) {}
SharedMemory::~SharedMemory() = default;

std::size_t SharedMemory::size() const { return implementation_->bytes; }
void SharedMemory::reset() { implementation_->begin_block(); }

const std::byte* SharedMemory::load(std::uint32_t offset, unsigned bytes, int warp, int lane, int line) {
    Implementation& my = *implementation_;
    const std::size_t first = my.place(offset, bytes);
    with_count(bytes, [&](auto n) { my.load<n()>(first, {warp, lane, line}); });
    return &my.data[offset];
}

const std::byte* SharedMemory::load_together(std::uint64_t offset, unsigned bytes, int warp, std::uint32_t readers,
                                             int line) {
    Implementation& my = *implementation_;
    if (!my.holds(offset, bytes, bytes)) return nullptr;
    const bool done = with_count(bytes, [&](auto n) {
        return my.load_at_once<false>(
            offset / 2, n(), {warp, -1, line}, [=](int) { return readers; },
            [=](int) { return __builtin_ctz(readers); });
    });
    return done ? &my.data[offset] : nullptr;
}

const std::byte* SharedMemory::load_row(std::uint64_t offset, unsigned bytes, int warp, int lane, int lanes, int line) {
    Implementation& my = *implementation_;
    if (bytes < 2 || !my.holds(offset, bytes * static_cast<unsigned>(lanes), bytes)) return nullptr;
    const bool done = with_count(bytes, [&](auto n) {
        const auto bits = [=](int i) { return std::uint32_t{1} << (lane + i / n()); };
        return my.load_at_once<true>(offset / 2, n() * lanes, {warp, -1, line}, bits,
                                     [=](int i) { return lane + i / n(); });
    });
    return done ? &my.data[offset] : nullptr;
}

std::byte* SharedMemory::store(std::uint32_t offset, unsigned bytes, int warp, int lane, int line) {
    Implementation& my = *implementation_;
    const std::size_t first = my.place(offset, bytes);
    const Actor actor{warp, lane, line};
    const Clock now = my.clock[static_cast<std::size_t>(warp)];
    with_count(bytes, [&](auto n) { my.store<n()>(first, actor, now, entry_of(actor)); });
    return &my.data[offset];
}

std::byte* SharedMemory::store_row(std::uint64_t offset, unsigned bytes, int warp, int lane, int lanes, int line) {
    Implementation& my = *implementation_;
    if (bytes < 2 || !my.holds(offset, bytes * static_cast<unsigned>(lanes), bytes)) return nullptr;
    const Actor actor{warp, lane, line};
    const Clock now = my.clock[static_cast<std::size_t>(warp)];
    const bool done = with_count(bytes, [&](auto n) {
        const bool may = my.may_store<n()>(offset / 2, lanes, actor);
        if (may) my.put_writer<n()>(offset / 2, lanes, now, entry_of(actor));
        return may;
    });
    return done ? &my.data[offset] : nullptr;
}

std::byte* SharedMemory::atomic(std::uint32_t offset, unsigned bytes, int warp, int lane, int line) {
    Implementation& my = *implementation_;
    for (std::size_t first = my.place(offset, bytes), i = 0; i < (bytes + 1) / 2; ++i)
        my.add_atomic(first + i, {warp, lane, line});
    return &my.data[offset];
}

void SharedMemory::issue(std::uint32_t offset, unsigned bytes, int warp, int lane, int line) {
    Implementation& my = *implementation_;
    const std::size_t first = my.place(offset, bytes);
    const Actor actor{warp, lane, line};
    with_count(bytes, [&](auto n) { my.store<n()>(first, actor, never, entry_of(actor) | in_flight); });
    my.granules_in_flight += (bytes + 1) / 2;
    std::memset(&my.data[offset], 0xff, bytes);
}

void SharedMemory::land(std::uint32_t offset, const std::byte* contents, unsigned bytes, int warp, int lane, int line) {
    Implementation& my = *implementation_;
    const std::size_t first = my.place(offset, bytes);
    std::fill_n(&my.written_at[first], (bytes + 1) / 2, my.clock[static_cast<std::size_t>(warp)]);
    std::fill_n(&my.writer[first], (bytes + 1) / 2, entry_of({warp, lane, line}));
    my.granules_in_flight -= (bytes + 1) / 2;
    std::memcpy(&my.data[offset], contents, bytes);
}

}  // namespace headrace::ptx
