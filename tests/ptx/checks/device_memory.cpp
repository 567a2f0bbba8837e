// DeviceMemory: allocations over two mappings of the same pages, and a shadow word for every two bytes of them.
#include "checks/device_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

constexpr std::size_t alignment = 512, gap = 512, page = 4096;

// A shadow word: bit 0: written; bits 1 to 3: what the running launch did here; above: the block that did it, counted
// through all launches, so that a word of an earlier launch needs no clearing: its owner lies below the launch's first.
using Word = std::uint32_t;
enum Kind : Word {
    untouched,
    read_by_one,
    read_by_several,  // the owner is the first of them
    unchanging,       // read by one block, and by ld.global.nc at least once
    owned,            // by one block, which wrote it or mixed atomics with plain reads
    atomic_by_one,
    atomic_by_several  // the owner is the first of them
};
enum class Access { load, load_unchanging, store, atomic };

constexpr Word written = 1;
constexpr Word word_of(Word owner, Kind kind) { return owner << 4 | static_cast<Word>(kind) << 1 | written; }
constexpr Word owner_limit = Word{1} << 28;

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

std::string hex(std::uint64_t value) {
    std::ostringstream text;
    text << "0x" << std::hex << value;
    return text.str();
}

struct Allocation {
    std::size_t bytes;
    std::string name;
};

using Allocations = std::map<std::uint64_t, Allocation>;  // by address

std::string describe(std::uint64_t address, const Allocation& allocation) {
    return (allocation.name.empty() ? "the allocation" : "'" + allocation.name + "'") + " of " +
           std::to_string(allocation.bytes) + " bytes at " + hex(address);
}

void* map_or_null(std::size_t bytes, int rights, int flags, int file) {
    void* at = mmap(nullptr, bytes, rights, flags | MAP_NORESERVE, file, 0);
    return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

struct DeviceMemory::Implementation {
    std::size_t capacity = 0;
    int file = -1;
    std::uint64_t base = 0;     // as programs see it
    std::byte* data = nullptr;  // the same pages, readable
    Word* shadow = nullptr;
    Allocations live, released;
    std::uint64_t fresh = 0;  // nothing was ever allocated from here on
    std::size_t allocated = 0;
    std::uint64_t last_begin = 0, last_bytes = 0;  // the allocation of the last access
    Word first_owner = 1, next_owner = 1;
    bool may_read_unwritten = false;

    bool map(std::size_t bytes);
    void unmap();
    std::uint64_t free_place(std::size_t bytes) const;
    void give_back(std::uint64_t begin, std::uint64_t end);
    Allocations::const_iterator holding(std::uint64_t address) const;
    Allocations::const_iterator look_up(std::uint64_t address, std::size_t bytes) const;
    [[noreturn]] void outside(std::uint64_t address, std::size_t bytes) const;

    std::byte* access(Access how, std::uint64_t address, unsigned bytes, std::uint32_t block);
    Word after(Access how, Word word, Word me, std::uint64_t address) const;
    [[noreturn]] void race(Access how, Word word, Word me, std::uint64_t address) const;
};

bool DeviceMemory::Implementation::map(std::size_t bytes) {
    capacity = bytes;
    file = memfd_create("headrace-ptx", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return false;
    base = reinterpret_cast<std::uint64_t>(map_or_null(bytes, PROT_NONE, MAP_SHARED, file));
    data = static_cast<std::byte*>(map_or_null(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file));
    shadow = static_cast<Word*>(map_or_null(2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
    if (base == 0 || data == nullptr || shadow == nullptr) return false;
    madvise(data, bytes, MADV_DONTDUMP);
    madvise(shadow, 2 * bytes, MADV_DONTDUMP);
    fresh = base;
    return true;
}

void DeviceMemory::Implementation::unmap() {
    if (base != 0) munmap(reinterpret_cast<void*>(base), capacity);
    if (data != nullptr) munmap(data, capacity);
    if (shadow != nullptr) munmap(shadow, 2 * capacity);
    if (file >= 0) close(file);
    base = 0, data = nullptr, shadow = nullptr, file = -1;
}

// Address space is used once before any is used again, so that an old pointer meets released memory and no newer
// allocation.
std::uint64_t DeviceMemory::Implementation::free_place(std::size_t bytes) const {
    const std::uint64_t end = base + capacity;
    if (fresh < end && bytes + gap <= end - fresh) return fresh;
    std::uint64_t from = base;
    for (const auto& [address, allocation] : live) {
        if (address >= from && address - from >= bytes + gap) return from;
        from = (address + allocation.bytes + gap + alignment - 1) / alignment * alignment;
    }
    return from < end && bytes + gap <= end - from ? from : 0;
}

// The pages that lie wholly between the live neighbours go back; of the others, the shadow forgets what was written.
void DeviceMemory::Implementation::give_back(std::uint64_t begin, std::uint64_t end) {
    const auto next = live.lower_bound(begin);
    const std::uint64_t limit = next == live.end() ? base + capacity : next->first;
    const std::uint64_t floor = next == live.begin() ? base : std::prev(next)->first + std::prev(next)->second.bytes;
    const std::uint64_t first = (std::max(floor, begin / page * page) + page - 1) / page * page;
    const std::uint64_t last = std::min(limit, (end + page - 1) / page * page) / page * page;
    Word *const begin_word = shadow + (begin - base) / 2, *const end_word = shadow + (end - base + 1) / 2;
    if (first >= last) {
        std::fill(begin_word, end_word, Word{0});
    } else {
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - base),
                  static_cast<off_t>(last - first));
        madvise(shadow + (first - base) / 2, 2 * (last - first), MADV_DONTNEED);
        std::fill(begin_word, shadow + (std::max(begin, first) - base) / 2, Word{0});
        std::fill(shadow + (std::min(end, last) - base) / 2, end_word, Word{0});
    }
}

Allocations::const_iterator DeviceMemory::Implementation::holding(std::uint64_t address) const {
    auto next = live.upper_bound(address);
    if (next == live.begin() || address - (--next)->first >= next->second.bytes) return live.end();
    return next;
}

void DeviceMemory::Implementation::outside(std::uint64_t address, std::size_t bytes) const {
    const std::string what = "touches " + std::to_string(bytes) + " bytes at " + hex(address) + ", ";
    if (address == 0) throw_fault(what, "the null pointer");
    if (const auto at = holding(address); at != live.end())
        throw_fault(what, "which reach behind the end of ", describe(at->first, at->second));
    auto old = released.upper_bound(address);
    if (old != released.begin() && address - std::prev(old)->first < std::prev(old)->second.bytes)
        throw_fault(what, "released memory, formerly ", describe(std::prev(old)->first, std::prev(old)->second));
    const auto behind = live.upper_bound(address);
    std::uint64_t distance = ~std::uint64_t{0};
    std::string nearest = "; there is no allocation at all";
    if (behind != live.begin()) {
        const auto& [begin, allocation] = *std::prev(behind);
        distance = address - (begin + allocation.bytes);
        nearest = "; nearest is " + describe(begin, allocation) + ", whose end lies " + std::to_string(distance) +
                  " bytes before";
    }
    if (behind != live.end() && behind->first - address < distance)
        nearest = "; nearest is " + describe(behind->first, behind->second) + ", which begins " +
                  std::to_string(behind->first - address) + " bytes behind";
    throw_fault(what, "outside any allocation", nearest);
}

Allocations::const_iterator DeviceMemory::Implementation::look_up(std::uint64_t address, std::size_t bytes) const {
    const auto at = holding(address);
    if (at == live.end() || bytes > at->second.bytes - (address - at->first)) outside(address, bytes);
    return at;
}

void DeviceMemory::Implementation::race(Access how, Word word, Word me, std::uint64_t address) const {
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
Word DeviceMemory::Implementation::after(Access how, Word word, Word me, std::uint64_t address) const {
    if (how != Access::store && (word & written) == 0 && !may_read_unwritten) {
        const auto at = holding(address);
        throw_fault("reads ", hex(address), ", byte ", address - at->first, " of ", describe(at->first, at->second),
                    ", which nothing wrote");
    }
    const Word owner = word >> 4;
    const Kind kind = owner < first_owner ? untouched : static_cast<Kind>(word >> 1 & 7);
    const bool mine = owner == me;
    const auto illegal = [&]() -> Word { race(how, word, me, address); };
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

inline std::byte* DeviceMemory::Implementation::access(Access how, std::uint64_t address, unsigned bytes,
                                                       std::uint32_t block) {
    if (address - last_begin >= last_bytes || bytes > last_bytes - (address - last_begin)) {
        const auto at = look_up(address, bytes);
        last_begin = at->first;
        last_bytes = at->second.bytes;
    }
    if ((address & (bytes - 1)) != 0)
        throw_fault("touches ", hex(address), ", which is not aligned to ", bytes, " bytes");
    const std::size_t offset = address - base;
    Word* words = shadow + offset / 2;
    const unsigned count = (bytes + 1) / 2;
    const Word me = first_owner + block;
    Word differences = 0;
    if (count == 8)
        for (int i = 0; i < 8; ++i) differences |= words[i] ^ words[0];
    else
        for (unsigned i = 1; i < count; ++i) differences |= words[i] ^ words[0];
    if (differences == 0) {
        const Word word = words[0];
        if (word == word_of(me, owned) && how != Access::load_unchanging) return data + offset;
        if (word == word_of(me, read_by_one) && how == Access::load) return data + offset;
        if (word == word_of(me, unchanging) && how <= Access::load_unchanging) return data + offset;
        const Word shared = word_of(0, how == Access::atomic ? atomic_by_several : read_by_several);
        if ((word & 15) == shared && word >> 4 >= first_owner && how != Access::store) return data + offset;
    }
    if (me < first_owner || me >= owner_limit) throw_fault("more blocks than device memory's shadow can tell apart");
    next_owner = std::max(next_owner, me + 1);
    for (unsigned i = 0; i < count; ++i) words[i] = after(how, words[i], me, address + 2 * i);
    return data + offset;
}

DeviceMemory::DeviceMemory(std::size_t capacity) : implementation_(new Implementation) {
    capacity = (capacity + page - 1) / page * page;
    while (!implementation_->map(capacity)) {
        implementation_->unmap();
        capacity = capacity / 2 / page * page;
        if (capacity < 2 * page) {
            delete implementation_;
            throw_fault("no address space for the device's memory");
        }
    }
}

DeviceMemory::~DeviceMemory() {
    implementation_->unmap();
    delete implementation_;
}

std::uint64_t DeviceMemory::allocate(std::size_t bytes, std::string name) {
    Implementation& my = *implementation_;
    if (bytes == 0 || bytes > my.capacity) return 0;
    const std::uint64_t address = my.free_place(bytes);
    if (address == 0) return 0;
    const std::uint64_t next = (address + bytes + gap + alignment - 1) / alignment * alignment;
    auto old = my.released.lower_bound(address);
    if (old != my.released.begin() && std::prev(old)->first + std::prev(old)->second.bytes > address) --old;
    while (old != my.released.end() && old->first < next) old = my.released.erase(old);
    my.fresh = std::max(my.fresh, next);
    my.live.emplace(address, Allocation{bytes, std::move(name)});
    my.allocated += bytes;
    return address;
}

bool DeviceMemory::release(std::uint64_t address) {
    Implementation& my = *implementation_;
    const auto at = my.live.find(address);
    if (at == my.live.end()) return false;
    auto node = my.live.extract(at);
    const std::size_t bytes = node.mapped().bytes;
    my.allocated -= bytes;
    my.released.insert(std::move(node));
    my.last_bytes = 0;
    my.give_back(address, address + bytes);
    return true;
}

bool DeviceMemory::owns(std::uint64_t address) const {
    return address - implementation_->base < implementation_->capacity;
}
std::size_t DeviceMemory::allocated_bytes() const { return implementation_->allocated; }

std::size_t DeviceMemory::bytes_from(std::uint64_t address) const {
    const auto at = implementation_->holding(address);
    return at == implementation_->live.end() ? 0 : at->second.bytes - (address - at->first);
}

void DeviceMemory::write(std::uint64_t to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    const Implementation& my = *implementation_;
    my.look_up(to, bytes);
    const std::size_t offset = to - my.base;
    std::memcpy(my.data + offset, from, bytes);
    std::fill(my.shadow + offset / 2, my.shadow + (offset + bytes + 1) / 2, written);
}

bool DeviceMemory::read(void* to, std::uint64_t from, std::size_t bytes) const {
    if (bytes == 0) return true;
    const Implementation& my = *implementation_;
    my.look_up(from, bytes);
    const std::size_t offset = from - my.base;
    std::memcpy(to, my.data + offset, bytes);
    Word all = written;
    for (std::size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) all &= my.shadow[i];
    return all != 0;
}

void DeviceMemory::fill(std::uint64_t to, int value, std::size_t bytes) {
    if (bytes == 0) return;
    const Implementation& my = *implementation_;
    my.look_up(to, bytes);
    const std::size_t offset = to - my.base;
    std::memset(my.data + offset, value, bytes);
    std::fill(my.shadow + offset / 2, my.shadow + (offset + bytes + 1) / 2, written);
}

void DeviceMemory::copy(std::uint64_t to, std::uint64_t from, std::size_t bytes) {
    if (bytes == 0) return;
    const Implementation& my = *implementation_;
    my.look_up(to, bytes);
    my.look_up(from, bytes);
    const std::size_t target = to - my.base, source = from - my.base;
    if ((target | source | bytes) % 2 == 0) {
        std::memmove(my.data + target, my.data + source, bytes);
        std::memmove(my.shadow + target / 2, my.shadow + source / 2, bytes / 2 * sizeof(Word));
        for (std::size_t i = target / 2; i < (target + bytes) / 2; ++i) my.shadow[i] &= written;
        return;
    }
    std::vector<std::uint8_t> copied(bytes);  // by bytes: the two may begin in different halves of a granule
    for (std::size_t i = 0; i < bytes; ++i)
        copied[i] = static_cast<std::uint8_t>(my.shadow[(source + i) / 2] & written);
    std::memmove(my.data + target, my.data + source, bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
        Word& word = my.shadow[(target + i) / 2];
        const bool second_half = i > 0 && (target + i) % 2 == 1;
        word = second_half ? word & copied[i] : copied[i];
    }
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
std::byte* DeviceMemory::atomic(std::uint64_t address, unsigned bytes, std::uint32_t block) {
    return implementation_->access(Access::atomic, address, bytes, block);
}

}  // namespace headrace::ptx
