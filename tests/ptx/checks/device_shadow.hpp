// The allocations of device memory and its shadow, a word for every two bytes: for device_memory.cpp and
// device_access.cpp.
#pragma once

#include <map>
#include <sstream>
#include <string>

#include "checks/device_memory.hpp"

namespace headrace::ptx {

// A shadow word: bit 0: written; bits 1 to 3: what the running launch did here; above: the block that did it, counted
// through all launches, so that a word of an earlier launch needs no clearing: its owner lies below the launch's first.
using Shadow = std::uint32_t;
enum Kind : Shadow {
    untouched,
    read_by_one,
    read_by_several,  // the owner is the first of them
    unchanging,       // read by one block, and by ld.global.nc at least once
    owned,            // by one block, which wrote it or mixed atomics with plain reads
    atomic_by_one,
    atomic_by_several  // the owner is the first of them
};
enum class Access { load, load_unchanging, store, atomic };

inline constexpr Shadow written = 1;
constexpr Shadow word_of(Shadow owner, Kind kind) { return owner << 4 | static_cast<Shadow>(kind) << 1 | written; }
inline constexpr Shadow owner_limit = Shadow{1} << 28;

inline std::string hex(std::uint64_t value) {
    std::ostringstream text;
    text << "0x" << std::hex << value;
    return text.str();
}

struct DeviceAllocation {
    std::size_t bytes;
    std::string name;
};

using DeviceAllocations = std::map<std::uint64_t, DeviceAllocation>;  // by address

inline std::string describe(std::uint64_t address, const DeviceAllocation& allocation) {
    return (allocation.name.empty() ? "the allocation" : "'" + allocation.name + "'") + " of " +
           std::to_string(allocation.bytes) + " bytes at " + hex(address);
}

struct DeviceMemory::Implementation {
    std::size_t capacity = 0;
    int file = -1;
    std::uint64_t base = 0;     // as programs see it
    std::byte* data = nullptr;  // the same pages, readable
    Shadow* shadow = nullptr;
    DeviceAllocations live, released;
    std::uint64_t fresh = 0;  // nothing was ever allocated from here on
    std::size_t allocated = 0;
    std::uint64_t last_begin = 0, last_bytes = 0;  // the allocation of the last access
    Shadow first_owner = 1, next_owner = 1;
    bool may_read_unwritten = false;

    bool map(std::size_t bytes);
    void unmap();
    std::uint64_t free_place(std::size_t bytes) const;
    void give_back(std::uint64_t begin, std::uint64_t end);
    DeviceAllocations::const_iterator holding(std::uint64_t address) const;
    DeviceAllocations::const_iterator look_up(std::uint64_t address, std::size_t bytes) const;
    [[noreturn]] void outside(std::uint64_t address, std::size_t bytes) const;

    bool is_inside(std::uint64_t address, std::uint64_t bytes);
    std::byte* access(Access how, std::uint64_t address, unsigned bytes, std::uint32_t block);
    std::byte* access_row(Access how, std::uint64_t address, unsigned bytes, int lanes, std::uint32_t block);
    bool settle(Access how, Shadow* words, std::size_t count, Shadow me);
    Shadow after(Access how, Shadow word, Shadow me, std::uint64_t address) const;
    [[noreturn]] void race(Access how, Shadow word, Shadow me, std::uint64_t address) const;
};

}  // namespace headrace::ptx
