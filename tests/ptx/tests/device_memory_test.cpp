// DeviceMemory: allocation, bounds, unwritten reads, released memory, races between blocks.
#include "checks/device_memory.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "tests/faults.hpp"

namespace headrace::ptx {
namespace {

TEST(DeviceMemory, AllocationsLieApart) {
    DeviceMemory memory;
    const auto a = memory.allocate(100, "a"), b = memory.allocate(1000, "b");
    EXPECT_EQ(a % 512, 0U);
    EXPECT_EQ(b % 512, 0U);
    EXPECT_GE(b, a + 100 + 512);
    EXPECT_EQ(memory.allocated_bytes(), 1100U);
    EXPECT_EQ(memory.bytes_from(a + 1), 99U);
    EXPECT_EQ(memory.bytes_from(a + 100), 0U);
    EXPECT_TRUE(memory.owns(a + 100));
    EXPECT_FALSE(memory.owns(reinterpret_cast<std::uint64_t>(&memory)));
    EXPECT_EQ(memory.allocate(0), 0U);
    EXPECT_EQ(memory.allocate(std::size_t{1} << 40), 0U);
}

TEST(DeviceMemory, HostReadsWhatItWrote) {
    DeviceMemory memory;
    const auto a = memory.allocate(64), b = memory.allocate(64);
    std::vector<char> in(64, 'x'), out(64);
    EXPECT_FALSE(memory.read(out.data(), a, 64));
    memory.write(a, in.data(), 32);
    EXPECT_TRUE(memory.read(out.data(), a, 32));
    EXPECT_EQ(std::memcmp(in.data(), out.data(), 32), 0);
    EXPECT_FALSE(memory.read(out.data(), a, 34));
    memory.copy(b, a, 64);
    EXPECT_TRUE(memory.read(out.data(), b, 32));
    EXPECT_FALSE(memory.read(out.data(), b + 32, 2));
    memory.copy(b + 33, a + 2, 7);
    EXPECT_TRUE(memory.read(out.data(), b + 33, 7));
    EXPECT_FALSE(memory.read(out.data(), b + 40, 2));
    memory.fill(a, 3, 64);
    EXPECT_TRUE(memory.read(out.data(), a, 64));
    EXPECT_EQ(out[63], 3);
    EXPECT_FAULT(memory.write(a + 60, in.data(), 8), "reach behind the end");
    EXPECT_FAULT(memory.read(out.data(), 16, 8), "outside any allocation");
}

TEST(DeviceMemoryDeathTest, HostCannotFollowTheAddress) {
    DeviceMemory memory;
    const auto a = memory.allocate(64);
    memory.fill(a, 1, 64);
    EXPECT_DEATH(std::printf("%d", *reinterpret_cast<volatile char*>(a)), "");
}

TEST(DeviceMemory, BoundsAndAlignment) {
    DeviceMemory memory;
    const auto a = memory.allocate(100, "keys"), b = memory.allocate(64, "values");
    memory.fill(a, 0, 100);
    memory.begin_launch();
    EXPECT_NO_THROW(memory.load(a + 96, 4, 0));
    EXPECT_FAULT(memory.load(a + 96, 8, 0), "reach behind the end of 'keys' of 100 bytes");
    EXPECT_FAULT(memory.load(a + 100, 4, 0), "nearest is 'keys' of 100 bytes");
    EXPECT_FAULT(memory.load(a + 104, 4, 0), "whose end lies 4 bytes before");
    EXPECT_FAULT(memory.store(b - 4, 4, 0), "'values' of 64 bytes");
    EXPECT_FAULT(memory.store(b - 4, 4, 0), "which begins 4 bytes behind");
    EXPECT_FAULT(memory.load(a + 2, 4, 0), "not aligned to 4 bytes");
    EXPECT_FAULT(memory.load(a + 8, 16, 0), "not aligned to 16 bytes");
    EXPECT_FAULT(memory.load(0, 4, 0), "null pointer");
    EXPECT_FAULT(memory.load(1 << 20, 4, 0), "outside any allocation");
}

TEST(DeviceMemory, UnwrittenReads) {
    DeviceMemory memory;
    const auto a = memory.allocate(64, "a");
    memory.begin_launch();
    EXPECT_FAULT(memory.load(a, 4, 0), "byte 0 of 'a' of 64 bytes");
    EXPECT_FAULT(memory.atomic(a, 4, 0), "which nothing wrote");
    std::memset(memory.store(a, 2, 0), 1, 2);
    EXPECT_NO_THROW(memory.load(a, 2, 0));
    EXPECT_FAULT(memory.load(a, 4, 0), "byte 2 of 'a'");
}

TEST(DeviceMemory, ReleasedMemory) {
    DeviceMemory memory;
    const auto a = memory.allocate(std::size_t{1} << 22, "a"), keep = memory.allocate(16);
    memory.fill(a, 1, std::size_t{1} << 22);
    memory.fill(keep, 2, 16);
    memory.begin_launch();
    memory.load(a, 16, 0);
    EXPECT_FALSE(memory.release(a + 512));
    EXPECT_TRUE(memory.release(a));
    EXPECT_FALSE(memory.release(a));
    EXPECT_FAULT(memory.load(a, 16, 0), "released memory, formerly 'a' of 4194304 bytes");
    EXPECT_EQ(memory.allocated_bytes(), 16U);
    char out[16];
    EXPECT_TRUE(memory.read(out, keep, 16));
    EXPECT_EQ(out[15], 2);
}

TEST(DeviceMemory, AddressSpaceIsUsedAgainUnwritten) {
    DeviceMemory memory(std::size_t{1} << 20);
    std::uint64_t kept = memory.allocate(5000);
    memory.fill(kept, 7, 5000);
    for (int i = 0; i < 50; ++i) {
        const auto a = memory.allocate(100001);
        ASSERT_NE(a, 0U) << i;
        std::vector<char> out(100001);
        EXPECT_FALSE(memory.read(out.data(), a, 2));
        EXPECT_FALSE(memory.read(out.data(), a + 100000, 1));
        memory.fill(a, i, 100001);
        EXPECT_TRUE(memory.release(a));
    }
    std::vector<char> out(5000);
    EXPECT_TRUE(memory.read(out.data(), kept, 5000));
    EXPECT_EQ(out[4999], 7);
    EXPECT_EQ(memory.allocate(std::size_t{1} << 20), 0U);
}

class Races : public testing::Test {
  protected:
    DeviceMemory memory;
    std::uint64_t a = memory.allocate(256, "a");
    void SetUp() override {
        memory.fill(a, 0, 256);
        memory.begin_launch();
    }
};

TEST_F(Races, ReadersShare) {
    for (std::uint32_t block = 0; block < 5; ++block) EXPECT_NO_THROW(memory.load(a, 16, block));
    EXPECT_NO_THROW(memory.load(a, 16, 0));
    EXPECT_FAULT(memory.store(a + 4, 4, 0), "block 0 writes");
}

TEST_F(Races, WriterOwns) {
    memory.store(a, 16, 3);
    EXPECT_NO_THROW(memory.load(a, 16, 3));
    EXPECT_NO_THROW(memory.store(a, 8, 3));
    EXPECT_NO_THROW(memory.atomic(a, 8, 3));
    EXPECT_FAULT(memory.load(a, 4, 4), "block 4 reads");
    EXPECT_FAULT(memory.load(a, 4, 4), "which block 3 wrote in the same launch");
    EXPECT_FAULT(memory.store(a + 14, 2, 4), "block 4 writes");
    EXPECT_FAULT(memory.atomic(a, 4, 4), "block 4 uses atomics on");
    EXPECT_NO_THROW(memory.store(a + 16, 2, 4));
}

TEST_F(Races, WriteAfterAnothersRead) {
    memory.load(a, 4, 1);
    EXPECT_FAULT(memory.store(a, 4, 2), "which block 1 read in the same launch");
    EXPECT_NO_THROW(memory.store(a, 4, 1));
    EXPECT_FAULT(memory.load(a, 4, 2), "which block 1 wrote");
}

TEST_F(Races, AtomicsShare) {
    for (std::uint32_t block = 0; block < 4; ++block) EXPECT_NO_THROW(memory.atomic(a, 4, block));
    EXPECT_FAULT(memory.load(a, 4, 1), "used atomics on");
    EXPECT_FAULT(memory.store(a, 4, 9), "used atomics on");
    memory.atomic(a + 8, 4, 7);
    EXPECT_NO_THROW(memory.load(a + 8, 4, 7));
    EXPECT_FAULT(memory.atomic(a + 8, 4, 8), "block 8 uses atomics on");
}

TEST_F(Races, LaunchesAreOrdered) {
    memory.store(a, 16, 3);
    memory.begin_launch();
    EXPECT_NO_THROW(memory.load(a, 16, 0));
    EXPECT_NO_THROW(memory.load(a, 16, 3));
    memory.begin_launch();
    EXPECT_NO_THROW(memory.store(a, 16, 2));
}

TEST_F(Races, UnchangingMemoryStaysUnchanged) {
    memory.load_unchanging(a, 16, 0);
    EXPECT_NO_THROW(memory.load_unchanging(a, 16, 0));
    EXPECT_NO_THROW(memory.load(a, 16, 0));
    EXPECT_FAULT(memory.store(a, 4, 0), "ld.global.nc");
    memory.load(a + 16, 4, 0);
    memory.load_unchanging(a + 16, 4, 0);
    EXPECT_FAULT(memory.store(a + 16, 4, 0), "which it read with ld.global.nc");
    memory.store(a + 32, 4, 0);
    EXPECT_FAULT(memory.load_unchanging(a + 32, 4, 0), "which it wrote");
}

TEST_F(Races, ManyLaunches) {
    for (int launch = 0; launch < 600; ++launch) {
        memory.begin_launch();
        memory.store(a, 16, 0);
        EXPECT_FAULT(memory.load(a, 16, 1 << 20), "which block 0 wrote");
        memory.load(a + 16, 16, 1 << 20);
    }
}

// Rows of neighbours at once: the same values, marks and faults as one by one.
TEST(DeviceMemory, RowsAsOneByOne) {
    struct Side {
        DeviceMemory memory{std::size_t{1} << 20};
        std::uint64_t first = memory.allocate(200, "first"), second = memory.allocate(64, "second");
    } rows, singles;
    std::mt19937 random(5);
    const auto below = [&](unsigned bound) { return static_cast<unsigned>(random()) % bound; };
    const auto fault_on = [](auto f) {  // without addresses, which differ
        return std::regex_replace(fault_of(f), std::regex("0x[0-9a-f]+"), "#");
    };
    int at_once = 0, one_by_one = 0, faulted = 0;
    const auto both = [&](auto f) {
        const std::string fault = fault_on([&] { f(rows); });
        ASSERT_EQ(fault, fault_on([&] { f(singles); }));
        faulted += fault != "no fault";
    };
    for (int i = 0; i < 40000 && !HasFailure(); ++i) {
        const unsigned action = below(40), size = 1U << below(5), block = below(3);
        const unsigned at = (below(4) == 0 ? below(200) : 0) / size * size + (below(20) == 0 ? 1 : 0);
        const int lanes = 1 + static_cast<int>(below(32));
        const bool in_second = below(4) == 0, stores = below(4) == 0, unchanging = below(5) == 0;
        const auto address = [&](const Side& side) { return (in_second ? side.second : side.first) + at; };
        if (action < 8) {
            both([](Side& side) { side.memory.begin_launch(); });
        } else if (action < 10) {
            const std::vector<char> bytes(below(8) == 0 ? 200 : 64, static_cast<char>(i));
            both([&](Side& side) { side.memory.write(side.first, bytes.data(), bytes.size()); });
        } else if (action < 11) {
            both([&](Side& side) { side.memory.atomic(address(side), size, block); });
        } else if (action < 12) {
            both([](Side& side) {
                side.memory.release(side.second);
                side.second = side.memory.allocate(64, "second");
            });
        } else {
            const auto each = [&](Side& side) {
                for (int lane = 0; lane < lanes; ++lane) {
                    const std::uint64_t its = address(side) + static_cast<unsigned>(lane) * size;
                    if (stores)
                        std::memset(side.memory.store(its, size, block), i, size);
                    else if (unchanging)
                        side.memory.load_unchanging(its, size, block);
                    else
                        side.memory.load(its, size, block);
                }
            };
            const unsigned all = static_cast<unsigned>(lanes) * size;
            std::byte* const stored = stores ? rows.memory.store_row(address(rows), size, lanes, block) : nullptr;
            const std::byte* const found =
                stores ? stored : rows.memory.load_row(address(rows), size, lanes, unchanging, block);
            if (found == nullptr) {
                both(each), ++one_by_one;
                continue;
            }
            if (stores) std::memset(stored, i, all);
            ++at_once;
            ASSERT_EQ(fault_on([&] { each(singles); }), "no fault");
            std::vector<char> there(all);
            singles.memory.read(there.data(), address(singles), all);
            EXPECT_EQ(std::memcmp(there.data(), found, all), 0);
        }
    }
    EXPECT_GT(at_once, 3000);
    EXPECT_GT(one_by_one, 3000);
    EXPECT_GT(faulted, 3000);
}

}  // namespace
}  // namespace headrace::ptx
