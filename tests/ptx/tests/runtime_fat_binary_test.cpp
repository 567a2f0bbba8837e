// ptx_of_fat_binary: containers made by hand, good ones and ones that have to be errors.
#include "runtime/fat_binary.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

struct Part {
    std::uint16_t kind = 1;
    std::uint32_t target = 80;
    std::string payload;
    std::uint64_t flags = 0x11;
    std::uint32_t header_bytes = 64, compressed_bytes = 0;
    std::uint16_t version = 0x0101;
};

std::string text_for(int target) { return "\n\n.version 9.0\n.target sm_" + std::to_string(target) + "\n"; }

template <class T>
void put(std::vector<std::byte>& bytes, T value) {
    const auto* start = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), start, start + sizeof value);
}

// The layout once more, written down apart from the reader's.
std::vector<std::byte> container(const std::vector<Part>& parts) {
    std::vector<std::byte> entries;
    for (const Part& part : parts) {
        const std::size_t start = entries.size(), padded = (part.payload.size() + 8) / 8 * 8;
        put(entries, part.kind);
        put(entries, part.version);
        put(entries, part.header_bytes);
        put(entries, std::uint64_t{padded});
        put(entries, part.compressed_bytes);
        put(entries, std::uint32_t{0});
        put(entries, std::uint32_t{0x90000});
        put(entries, part.target);
        put(entries, std::uint64_t{0});
        put(entries, part.flags);
        entries.resize(start + part.header_bytes);
        for (const char letter : part.payload) put(entries, letter);
        entries.resize(start + part.header_bytes + padded);
    }
    std::vector<std::byte> all;
    put(all, std::uint32_t{0xBA55ED50});
    put(all, std::uint16_t{1});
    put(all, std::uint16_t{16});
    put(all, std::uint64_t{entries.size()});
    all.insert(all.end(), entries.begin(), entries.end());
    return all;
}

EmbeddedText read(const std::vector<std::byte>& bytes, std::uint32_t magic = 0x466243B1, std::uint32_t version = 1,
                  int own_target = 0) {
    std::vector<std::byte> wrapper;
    put(wrapper, magic);
    put(wrapper, version);
    put(wrapper, bytes.data());
    put(wrapper, std::uint64_t{0});
    return ptx_of_fat_binary(wrapper.data(), 80, own_target);
}

std::string error_of(const std::vector<std::byte>& bytes, std::uint32_t magic = 0x466243B1, std::uint32_t version = 1) {
    try {
        read(bytes, magic, version);
    } catch (const Fault& fault) {
        return fault.what();
    }
    return "";
}

TEST(FatBinary, TheTextOfTheHighestTargetThatIsAllowed) {
    const Part elf{2, 80, "\x7f" "ELF"}, old{1, 75, text_for(75)}, wanted{1, 80, text_for(80), 0x11, 104};
    const Part newer{1, 90, text_for(90)}, bound{1, 80, text_for(79), 0x100011};
    const EmbeddedText embedded = read(container({elf, old, wanted, bound, newer}));
    EXPECT_EQ(embedded.target, 80);
    EXPECT_EQ(embedded.text, text_for(80));
    EXPECT_EQ(read(container({old, newer})).target, 75);
}

TEST(FatBinary, TheTextThatIsBoundToTheDevice) {
    const Part general{1, 80, text_for(80)}, newer{1, 90, text_for(90)}, bound{1, 90, text_for(91), 0x100011};
    const Part family{1, 90, text_for(92), 0x200011}, elf{2, 90, "\x7f" "ELF", 0x100011};
    const auto text_of = [](const std::vector<Part>& parts, int own) {
        return read(container(parts), 0x466243B1, 1, own).text;
    };
    EXPECT_EQ(text_of({elf, general, bound, newer}, 90), text_for(91));
    EXPECT_EQ(text_of({bound}, 90), text_for(91));
    EXPECT_EQ(text_of({general, bound, newer}, 80), text_for(80));
    EXPECT_EQ(text_of({elf, general, family, newer}, 90), text_for(80));
}

TEST(FatBinary, WhatIsNotUnderstoodIsAnError) {
    const Part good{1, 80, text_for(80)};
    EXPECT_NE(error_of(container({})), "");
    EXPECT_NE(error_of(container({{1, 90, text_for(90)}})), "");
    EXPECT_NE(error_of(container({{1, 80, "no text"}})), "");
    EXPECT_NE(error_of(container({{3, 80, text_for(80)}, good})), "");
    EXPECT_NE(error_of(container({{1, 80, text_for(80), 0x11, 64, 0, 0x0102}})), "");
    EXPECT_NE(error_of(container({good}), 0x466243B2), "");
    EXPECT_NE(error_of(container({good}), 0x466243B1, 2), "") << "relocatable device code";
    std::vector<std::byte> wrong_magic = container({good}), too_long = wrong_magic, cut = wrong_magic;
    wrong_magic[0] = std::byte{0x51};
    EXPECT_NE(error_of(wrong_magic), "");
    too_long[24] = std::byte{0xFF};  // the first entry's payload would end behind the container
    EXPECT_NE(error_of(too_long), "");
    cut[8] = std::byte{32};          // the container ends inside its first entry
    EXPECT_NE(error_of(cut), "");
}

TEST(FatBinary, ACompressedTextNamesTheRemedy) {
    const Part by_flag{1, 80, text_for(80), 0x8011}, by_size{1, 80, text_for(80), 0x11, 64, 17};
    EXPECT_NE(error_of(container({by_flag})).find("build with --no-compress"), std::string::npos);
    EXPECT_NE(error_of(container({by_size})).find("build with --no-compress"), std::string::npos);
}

}  // namespace
}  // namespace headrace::ptx
