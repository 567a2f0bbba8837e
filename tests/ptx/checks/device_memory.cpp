// DeviceMemory: allocations over two mappings of the same pages, and what the host copies.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks/device_shadow.hpp"
#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

constexpr std::size_t alignment = 512, gap = 512, page = 4096;

void* map_or_null(std::size_t bytes, int rights, int flags, int file) {
    void* at = mmap(nullptr, bytes, rights, flags | MAP_NORESERVE, file, 0);
    return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

bool DeviceMemory::Implementation::map(std::size_t bytes) {
    capacity = bytes;
    file = memfd_create("headrace-ptx", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return false;
    base = reinterpret_cast<std::uint64_t>(map_or_null(bytes, PROT_NONE, MAP_SHARED, file));
    data = static_cast<std::byte*>(map_or_null(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file));
    shadow = static_cast<Shadow*>(map_or_null(2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
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
    Shadow *const begin_word = shadow + (begin - base) / 2, *const end_word = shadow + (end - base + 1) / 2;
    if (first >= last) {
        std::fill(begin_word, end_word, Shadow{0});
    } else {
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - base),
                  static_cast<off_t>(last - first));
        madvise(shadow + (first - base) / 2, 2 * (last - first), MADV_DONTNEED);
        std::fill(begin_word, shadow + (std::max(begin, first) - base) / 2, Shadow{0});
        std::fill(shadow + (std::min(end, last) - base) / 2, end_word, Shadow{0});
    }
}

DeviceAllocations::const_iterator DeviceMemory::Implementation::holding(std::uint64_t address) const {
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

DeviceAllocations::const_iterator DeviceMemory::Implementation::look_up(std::uint64_t address,
                                                                        std::size_t bytes) const {
    const auto at = holding(address);
    if (at == live.end() || bytes > at->second.bytes - (address - at->first)) outside(address, bytes);
    return at;
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
    my.live.emplace(address, DeviceAllocation{bytes, std::move(name)});
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
    Shadow all = written;
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
        std::memmove(my.shadow + target / 2, my.shadow + source / 2, bytes / 2 * sizeof(Shadow));
        for (std::size_t i = target / 2; i < (target + bytes) / 2; ++i) my.shadow[i] &= written;
        return;
    }
    std::vector<std::uint8_t> copied(bytes);  // by bytes: the two may begin in different halves of a granule
    for (std::size_t i = 0; i < bytes; ++i)
        copied[i] = static_cast<std::uint8_t>(my.shadow[(source + i) / 2] & written);
    std::memmove(my.data + target, my.data + source, bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
        Shadow& word = my.shadow[(target + i) / 2];
        const bool second_half = i > 0 && (target + i) % 2 == 1;
        word = second_half ? word & copied[i] : copied[i];
    }
}

}  // namespace headrace::ptx
