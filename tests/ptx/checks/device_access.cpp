// DeviceMemory: what kernels load, store and use atomics on, and what the shadow says to it.
#include <algorithm>

#include "checks/device_shadow.hpp"
#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

const char* past(Kind kind) {
    constexpr const char* words[] = {"left alone",
                                     "read",
                                     "and others read",
                                     "read with ld.global.nc",
                                     "wrote",
                                     "used atomics on",
                                     "and others used atomics on"};
    return words[kind];
}

const char* present(Access access) {
    constexpr const char* words[] = {"reads", "reads with ld.global.nc", "writes", "uses atomics on"};
    return words[static_cast<int>(access)];
}

}  // namespace

void DeviceMemory::Implementation::race(Access how, Shadow word, Shadow me, std::uint64_t address) const {
    const auto at = holding(address);
    const Kind kind = static_cast<Kind>(word >> 1 & 7);
    const std::string byte = std::to_string(address - at->first);
    const std::string where = hex(address) + ", byte " + byte + " of " + describe(at->first, at->second);
    if (word >> 4 == me)
        throw_fault("block ", me - first_owner, " ", present(how), " ", where, ", which it ", past(kind),
                    " in this launch: ld.global.nc wants memory that stays as it is");
    throw_fault("race: block ", me - first_owner, " ", present(how), " ", where, ", which block ",
                (word >> 4) - first_owner, " ", past(kind), " in the same launch");
}

// The word after an access that the fast path did not settle. Blocks of a launch are ordered by nothing.
Shadow DeviceMemory::Implementation::after(Access how, Shadow word, Shadow me, std::uint64_t address) const {
    if (how != Access::store && (word & written) == 0 && !may_read_unwritten) {
        const auto at = holding(address);
        throw_fault("reads ", hex(address), ", byte ", address - at->first, " of ", describe(at->first, at->second),
                    ", which nothing wrote");
    }
    const Shadow owner = word >> 4;
    const Kind kind = owner < first_owner ? untouched : static_cast<Kind>(word >> 1 & 7);
    const bool mine = owner == me;
    const auto illegal = [&]() -> Shadow { race(how, word, me, address); };
    switch (how) {
        case Access::load:
            if (kind == untouched) return word_of(me, read_by_one);
            if (kind == read_by_one || kind == unchanging) return mine ? word : word_of(owner, read_by_several);
            if (kind == read_by_several || (kind == owned && mine)) return word;
            return kind == atomic_by_one && mine ? word_of(me, owned) : illegal();
        case Access::load_unchanging:
            if (kind == untouched || (kind == read_by_one && mine)) return word_of(me, unchanging);
            if (kind == read_by_one || kind == unchanging) return mine ? word : word_of(owner, read_by_several);
            return kind == read_by_several ? word : illegal();
        case Access::store:
            if (kind == untouched) return word_of(me, owned);
            if (mine && (kind == read_by_one || kind == owned || kind == atomic_by_one)) return word_of(me, owned);
            return illegal();
        case Access::atomic: break;
    }
    if (kind == untouched) return word_of(me, atomic_by_one);
    if (kind == atomic_by_one) return mine ? word : word_of(owner, atomic_by_several);
    if (kind == atomic_by_several) return word;
    return mine && (kind == read_by_one || kind == owned) ? word_of(me, owned) : illegal();
}

// What most accesses meet: words that are all the same and stay so, or all of earlier launches. False: neither.
[[gnu::always_inline]] inline bool DeviceMemory::Implementation::settle(Access how, Shadow* words, std::size_t count,
                                                                        Shadow me) {
    const Shadow word = words[0];
    Shadow differences = 0, common = word, highest = word;
    for (std::size_t i = 1; i < count; ++i) {
        differences |= words[i] ^ word;
        common &= words[i];
        highest = words[i] > highest ? words[i] : highest;
    }
    if (differences == 0) {
        if (word == word_of(me, owned) && how != Access::load_unchanging) return true;
        if (word == word_of(me, read_by_one) && how == Access::load) return true;
        if (word == word_of(me, unchanging) && how <= Access::load_unchanging) return true;
        const Shadow shared = word_of(0, how == Access::atomic ? atomic_by_several : read_by_several);
        if ((word & 15) == shared && word >> 4 >= first_owner && how != Access::store) return true;
    }
    const bool untouched_before = highest >> 4 < first_owner && (how == Access::store || (common & written) != 0);
    if (!untouched_before || how == Access::atomic || me < first_owner || me >= owner_limit) return false;
    next_owner = std::max(next_owner, me + 1);
    std::fill_n(words, count,
                word_of(me, how == Access::load    ? read_by_one
                            : how == Access::store ? owned
                                                   : unchanging));
    return true;
}

// Whether the bytes lie in an allocation; the next access asks for the same one first.
inline bool DeviceMemory::Implementation::is_inside(std::uint64_t address, std::uint64_t bytes) {
    if (address - last_begin < last_bytes && bytes <= last_bytes - (address - last_begin)) return true;
    const auto at = holding(address);
    if (at == live.end() || bytes > at->second.bytes - (address - at->first)) return false;
    last_begin = at->first;
    last_bytes = at->second.bytes;
    return true;
}

inline std::byte* DeviceMemory::Implementation::access(Access how, std::uint64_t address, unsigned bytes,
                                                       std::uint32_t block) {
    if (!is_inside(address, bytes)) outside(address, bytes);
    if ((address & (bytes - 1)) != 0)
        throw_fault("touches ", hex(address), ", which is not aligned to ", bytes, " bytes");
    const std::size_t offset = address - base;
    Shadow* words = shadow + offset / 2;
    const unsigned count = (bytes + 1) / 2;
    const Shadow me = first_owner + block;
    if (count == 8 ? settle(how, words, 8, me) : settle(how, words, count, me)) return data + offset;
    if (me < first_owner || me >= owner_limit) throw_fault("more blocks than device memory's shadow can tell apart");
    next_owner = std::max(next_owner, me + 1);
    for (unsigned i = 0; i < count; ++i) words[i] = after(how, words[i], me, address + 2 * i);
    return data + offset;
}

std::byte* DeviceMemory::Implementation::access_row(Access how, std::uint64_t address, unsigned bytes, int lanes,
                                                    std::uint32_t block) {
    const std::uint64_t all = std::uint64_t{bytes} * static_cast<unsigned>(lanes);
    if (bytes < 2 || (address & (bytes - 1)) != 0 || !is_inside(address, all)) return nullptr;
    const std::size_t offset = address - base;
    return settle(how, shadow + offset / 2, all / 2, first_owner + block) ? data + offset : nullptr;
}

void DeviceMemory::begin_launch(bool may_read_unwritten) {
    Implementation& my = *implementation_;
    my.first_owner = my.next_owner, my.may_read_unwritten = may_read_unwritten;
    if (my.first_owner <= owner_limit / 2) return;
    for (const auto& [address, allocation] : my.live)
        for (std::size_t i = 0; i < (allocation.bytes + 1) / 2; ++i) my.shadow[(address - my.base) / 2 + i] &= written;
    my.first_owner = my.next_owner = 1;
}

const std::byte* DeviceMemory::load(std::uint64_t address, unsigned bytes, std::uint32_t block) {
    return implementation_->access(Access::load, address, bytes, block);
}
const std::byte* DeviceMemory::load_unchanging(std::uint64_t address, unsigned bytes, std::uint32_t block) {
    return implementation_->access(Access::load_unchanging, address, bytes, block);
}
std::byte* DeviceMemory::store(std::uint64_t address, unsigned bytes, std::uint32_t block) {
    return implementation_->access(Access::store, address, bytes, block);
}
const std::byte* DeviceMemory::load_row(std::uint64_t address, unsigned bytes, int lanes, bool unchanging,
                                        std::uint32_t block) {
    return implementation_->access_row(unchanging ? Access::load_unchanging : Access::load, address, bytes, lanes,
                                       block);
}
std::byte* DeviceMemory::store_row(std::uint64_t address, unsigned bytes, int lanes, std::uint32_t block) {
    return implementation_->access_row(Access::store, address, bytes, lanes, block);
}
std::byte* DeviceMemory::atomic(std::uint64_t address, unsigned bytes, std::uint32_t block) {
    return implementation_->access(Access::atomic, address, bytes, block);
}

}  // namespace headrace::ptx
