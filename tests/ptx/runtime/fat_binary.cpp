// ptx_of_fat_binary: reads the container of a fat binary, as nvcc 13.0 writes it; another layout is an error.
#include "runtime/fat_binary.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

// What the program registers (section .nvFatBinSegment). Version 2 belongs to relocatable device code, with a list of
// further containers behind `prelinked`.
struct Wrapper {
    std::uint32_t magic, version;
    const std::byte* data;
    const void* prelinked;
};
static_assert(sizeof(Wrapper) == 24);
constexpr std::uint32_t wrapper_magic = 0x466243B1;

// The container (section .nv_fatbin) begins with this; `bytes` of entries follow.
struct Header {
    std::uint32_t magic;
    std::uint16_t version, header_bytes;
    std::uint64_t bytes;
};
static_assert(sizeof(Header) == 16);
constexpr std::uint32_t container_magic = 0xBA55ED50;

// An entry: a header of header_bytes (64, or more where the options and the name of the source follow inside it), then
// payload_bytes, padded with zeros. PTX begins with a few newlines and ends with a zero.
struct Entry {
    std::uint16_t kind, version;     // kind 1: PTX, 2: ELF; version 0x0101
    std::uint32_t header_bytes;
    std::uint64_t payload_bytes;
    std::uint32_t compressed_bytes;  // 0: not compressed
    std::uint32_t options_offset;    // in the entry; 0: none
    std::uint16_t minor, major;      // of the PTX ISA: 9.0
    std::uint32_t target;            // 80 for sm_80 and compute_80
    std::uint32_t name_offset, name_bytes;
    std::uint64_t flags;
    std::uint64_t reserved;
    std::uint64_t whole_bytes;       // of a compressed payload
};
static_assert(sizeof(Entry) == 64);
constexpr std::uint16_t kind_ptx = 1, kind_elf = 2;
constexpr std::uint64_t flag_compressed = 0x8000 | 0x2000 | 0x1000;  // zstd, and what older versions wrote
constexpr std::uint64_t flag_one_architecture = 0x100000;            // sm_90a, compute_90a
constexpr std::uint64_t flag_family = 0x200000;                      // sm_100f

const char* const remedy = "; build the program with nvcc 13.0, --no-compress and a PTX of compute_80, without -rdc";

Header header_of(const Wrapper& wrapper) {
    if (wrapper.magic != wrapper_magic) throw_fault("fat binary: wrapper with unknown magic ", wrapper.magic, remedy);
    if (wrapper.version != 1) throw_fault("fat binary: wrapper of version ", wrapper.version, remedy);
    Header header;
    std::memcpy(&header, wrapper.data, sizeof header);
    if (header.magic != container_magic || header.version != 1 || header.header_bytes != sizeof header) {
        throw_fault("fat binary: unknown container (magic ", header.magic, ", version ", header.version, ", header of ",
                    header.header_bytes, " bytes)", remedy);
    }
    return header;
}

Entry entry_at(const std::byte* position, std::uint64_t left) {
    Entry entry;
    if (left < sizeof entry) throw_fault("fat binary: the container ends inside an entry", remedy);
    std::memcpy(&entry, position, sizeof entry);
    if (entry.version != 0x0101 || entry.header_bytes < sizeof entry || entry.header_bytes > left ||
        entry.payload_bytes > left - entry.header_bytes) {
        throw_fault("fat binary: unknown entry (version ", entry.version, ", header of ", entry.header_bytes,
                    " bytes, payload of ", entry.payload_bytes, ")", remedy);
    }
    if (entry.kind != kind_ptx && entry.kind != kind_elf) throw_fault("fat binary: entry of kind ", entry.kind, remedy);
    return entry;
}

std::string text_of(const Entry& entry, const std::byte* position) {
    if (entry.compressed_bytes != 0 || entry.whole_bytes != 0 || (entry.flags & flag_compressed) != 0) {
        throw_fault("fat binary: the PTX of compute_", entry.target, " is compressed; build with --no-compress");
    }
    const std::string_view payload(reinterpret_cast<const char*>(position + entry.header_bytes), entry.payload_bytes);
    const std::string text(payload.substr(0, payload.find('\0')));
    if (text.find(".version") == std::string::npos || text.find(".target") == std::string::npos) {
        throw_fault("fat binary: the entry of compute_", entry.target, " is not PTX text", remedy);
    }
    return text;
}

}  // namespace

EmbeddedText ptx_of_fat_binary(const void* wrapper_address, int highest_target, int own_target) {
    Wrapper wrapper;
    std::memcpy(&wrapper, wrapper_address, sizeof wrapper);
    const Header header = header_of(wrapper);
    EmbeddedText best, own;
    std::uint64_t left = header.bytes;
    for (const std::byte* position = wrapper.data + header.header_bytes; left != 0;) {
        const Entry entry = entry_at(position, left);
        const int target = static_cast<int>(entry.target);
        const bool general = (entry.flags & (flag_one_architecture | flag_family)) == 0;
        if (entry.kind == kind_ptx && general && target <= highest_target && target > best.target) {
            best = {text_of(entry, position), target};
        }
        if (entry.kind == kind_ptx && (entry.flags & flag_one_architecture) != 0 && target == own_target) {
            own = {text_of(entry, position), target};
        }
        const std::uint64_t bytes = entry.header_bytes + entry.payload_bytes;
        position += bytes;
        left -= bytes;
    }
    if (own.target != 0) return own;
    if (best.target == 0) throw_fault("fat binary: no PTX of compute_", highest_target, " or below", remedy);
    return best;
}

}  // namespace headrace::ptx
