// SharedMemory: bounds, unwritten reads, races within and between warps, barriers of every kind, bytes in flight.
#include "checks/shared_memory.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/faults.hpp"

namespace headrace::ptx {
namespace {

constexpr std::uint32_t all = 0xffffffff;
const std::vector<int> both{0, 1};

TEST(SharedMemory, BoundsAndAlignment) {
    SharedMemory memory(100, 1, true);
    EXPECT_EQ(memory.size(), 100U);
    EXPECT_NO_THROW(memory.store(96, 4, 0, 0, 1));
    EXPECT_FAULT(memory.store(100, 4, 0, 0, 1), "outside the block's 100 bytes");
    EXPECT_FAULT(memory.store(96, 8, 0, 0, 1), "8 bytes at shared offset 96");
    EXPECT_FAULT(memory.load(2, 4, 0, 0, 1), "not aligned to 4 bytes");
    EXPECT_FAULT(memory.load(0xfffffffe, 2, 0, 0, 1), "outside");
}

TEST(SharedMemory, UnwrittenReads) {
    for (const bool races : {false, true}) {
        SharedMemory memory(64, 1, races);
        EXPECT_FAULT(memory.load(0, 4, 0, 0, 1), "shared offset 0, which nothing wrote");
        std::memset(memory.store(0, 2, 0, 0, 1), 1, 2);
        EXPECT_NO_THROW(memory.load(0, 2, 0, 0, 1));
        EXPECT_FAULT(memory.load(0, 4, 0, 0, 1), "shared offset 2, which nothing wrote");
        EXPECT_FAULT(memory.atomic(4, 4, 0, 0, 1), "which nothing wrote");
        memory.reset();
        EXPECT_FAULT(memory.load(0, 2, 0, 0, 1), "which nothing wrote");
    }
}

TEST(SharedMemory, LanesOfOneWarp) {
    SharedMemory memory(64, 1, true);
    memory.store(0, 4, 0, 3, 11);
    EXPECT_NO_THROW(memory.load(0, 4, 0, 3, 12));
    EXPECT_NO_THROW(memory.store(0, 4, 0, 3, 12));
    EXPECT_FAULT(memory.load(0, 4, 0, 4, 13), "race: reads shared offset 0, which warp 0 lane 3 wrote at line 12");
    EXPECT_FAULT(memory.store(2, 2, 0, 4, 13), "race: writes shared offset 2, which warp 0 lane 3 wrote at line 12");
    memory.warp_sync(0, all);
    for (int lane = 0; lane < 32; ++lane) EXPECT_NO_THROW(memory.load(0, 4, 0, lane, 14));
    EXPECT_FAULT(memory.store(0, 4, 0, 9, 15), "which warp 0 lane 0 read at line 14");
    memory.warp_sync(0, all);
    EXPECT_NO_THROW(memory.store(0, 4, 0, 9, 15));
}

TEST(SharedMemory, OwnReadThenWrite) {
    SharedMemory memory(64, 1, true);
    memory.store(0, 16, 0, 5, 1);
    memory.load(0, 16, 0, 5, 2);
    EXPECT_NO_THROW(memory.store(0, 16, 0, 5, 3));
    EXPECT_NO_THROW(memory.load(4, 4, 0, 5, 4));
}

TEST(SharedMemory, PartialWarpSync) {
    SharedMemory memory(64, 1, true);
    memory.store(0, 4, 0, 0, 1);
    memory.warp_sync(0, 0x3);
    EXPECT_NO_THROW(memory.load(0, 4, 0, 1, 2));
    EXPECT_FAULT(memory.load(0, 4, 0, 2, 2), "lane 0 wrote at line 1");
    memory.warp_sync(0, 0x6);  // 1 hands on what it knows of 0
    EXPECT_NO_THROW(memory.load(0, 4, 0, 2, 3));
    EXPECT_NO_THROW(memory.store(0, 4, 0, 2, 4));
    memory.warp_sync(0, 0xc);
    EXPECT_NO_THROW(memory.store(0, 4, 0, 3, 5));
    EXPECT_FAULT(memory.load(0, 4, 0, 0, 6), "lane 3 wrote at line 5");
}

TEST(SharedMemory, WholeWarpLoad) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 16, 0, 3, 1);
    EXPECT_FAULT(memory.load(0, 16, 0, -1, 2), "lane 3 wrote at line 1");
    memory.warp_sync(0, all);
    EXPECT_NO_THROW(memory.load(0, 16, 0, -1, 2));
    EXPECT_FAULT(memory.store(0, 4, 0, 3, 3), "read at line 2");
    EXPECT_FAULT(memory.load(0, 16, 1, -1, 4), "warp 0 lane 3 wrote");
    memory.barrier(both, both);
    EXPECT_NO_THROW(memory.load(0, 16, 1, -1, 4));
}

TEST(SharedMemory, Warps) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    memory.warp_sync(0, all);
    EXPECT_FAULT(memory.load(0, 4, 1, 0, 2), "warp 0 lane 0 wrote at line 1");
    EXPECT_FAULT(memory.store(0, 4, 1, 0, 2), "warp 0 lane 0 wrote at line 1");
    memory.barrier(both, both);
    EXPECT_NO_THROW(memory.load(0, 4, 1, 0, 2));
    EXPECT_NO_THROW(memory.load(0, 4, 0, 7, 3));
    EXPECT_FAULT(memory.store(0, 4, 0, 7, 4), "warp 1 lane 0 read at line 2");
    EXPECT_FAULT(memory.store(0, 4, 1, 0, 4), "warp 0 lane 7 read at line 3");
    memory.barrier(both, both);
    EXPECT_NO_THROW(memory.store(0, 4, 1, 0, 4));
}

TEST(SharedMemory, OldReadersCount) {
    SharedMemory memory(64, 3, true);
    const std::vector<int> three{0, 1, 2};
    memory.store(0, 4, 0, 0, 1);
    memory.barrier(three, three);
    memory.load(0, 4, 2, 5, 2);
    memory.barrier(both, both);  // without warp 2
    memory.load(0, 4, 1, 5, 3);
    memory.barrier(both, both);
    EXPECT_FAULT(memory.store(0, 4, 0, 0, 4), "warp 2 lane 5 read at line 2");
    memory.barrier(three, three);
    EXPECT_NO_THROW(memory.store(0, 4, 0, 0, 4));
}

TEST(SharedMemory, OrderPassesThroughAThirdWarp) {
    SharedMemory memory(64, 3, true);
    memory.store(0, 4, 0, 0, 1);
    memory.barrier({0, 1}, {0, 1});
    memory.barrier({1, 2}, {1, 2});
    EXPECT_NO_THROW(memory.store(0, 4, 2, 0, 2));
    EXPECT_FAULT(memory.load(0, 4, 0, 0, 3), "warp 2 lane 0 wrote");
}

TEST(SharedMemory, ArrivingReleasesAndWaitingAcquires) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    memory.arrive(0, 5);
    memory.store(8, 4, 0, 0, 2);  // between arrival and completion: not released
    memory.store(16, 4, 1, 0, 3);
    memory.barrier({0, 1}, {1}, 5);
    EXPECT_NO_THROW(memory.load(0, 4, 1, 0, 4));
    EXPECT_FAULT(memory.load(8, 4, 1, 0, 5), "warp 0 lane 0 wrote at line 2");
    EXPECT_FAULT(memory.load(16, 4, 0, 0, 6), "warp 1 lane 0 wrote at line 3");
    EXPECT_FAULT(memory.store(0, 4, 0, 0, 7), "warp 1 lane 0 read at line 4");
    EXPECT_NO_THROW(memory.load(0, 4, 0, 0, 7));
}

// Lanes that have parted arrive one after the other; what each part has written before is released.
TEST(SharedMemory, ArrivingInParts) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    memory.arrive(0, 5);
    memory.store(8, 4, 0, 20, 2);
    memory.arrive(0, 5);
    memory.store(16, 4, 0, 20, 3);
    memory.barrier({0, 1}, {1}, 5);
    EXPECT_NO_THROW(memory.load(0, 4, 1, 0, 4));
    EXPECT_NO_THROW(memory.load(8, 4, 1, 0, 5));
    EXPECT_FAULT(memory.load(16, 4, 1, 0, 6), "warp 0 lane 20 wrote at line 3");
    memory.store(24, 4, 0, 0, 7);
    memory.arrive(0, 5);  // none of the former arrivals is left
    memory.barrier({0, 1}, {1}, 5);
    EXPECT_NO_THROW(memory.load(24, 4, 1, 0, 8));
}

TEST(SharedMemory, Atomics) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    EXPECT_FAULT(memory.atomic(0, 4, 1, 0, 2), "race: uses atomics on shared offset 0, which warp 0 lane 0 wrote");
    memory.barrier(both, both);
    for (int lane = 0; lane < 32; ++lane) {
        EXPECT_NO_THROW(memory.atomic(0, 4, 0, lane, 3));
        EXPECT_NO_THROW(memory.atomic(0, 4, 1, lane, 3));
    }
    EXPECT_FAULT(memory.load(0, 4, 0, 5, 4), "used atomics on at line 3");
    memory.warp_sync(0, all);
    EXPECT_FAULT(memory.load(0, 4, 0, 5, 4), "warp 1 lane 0 used atomics on at line 3");
    memory.barrier(both, both);
    EXPECT_NO_THROW(memory.load(0, 4, 0, 5, 4));
    EXPECT_FAULT(memory.atomic(0, 4, 1, 0, 5), "warp 0 lane 5 read at line 4");
    memory.barrier(both, both);
    EXPECT_NO_THROW(memory.store(0, 4, 1, 0, 6));
}

TEST(SharedMemory, AllAtomicsAreBehindTheWrite) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    memory.atomic(0, 4, 0, 0, 2);
    EXPECT_FAULT(memory.atomic(0, 4, 0, 1, 2), "uses atomics on shared offset 0, which warp 0 lane 0 wrote at line 1");
    memory.warp_sync(0, all);
    EXPECT_NO_THROW(memory.atomic(0, 4, 0, 1, 3));
    EXPECT_FAULT(memory.atomic(0, 4, 1, 1, 3), "which warp 0 lane 0 wrote at line 1");
}

TEST(SharedMemory, InFlight) {
    for (const bool races : {false, true}) {
        SharedMemory memory(64, 2, races);
        const std::byte contents[16] = {std::byte{7}};
        memory.issue(0, 16, 0, 3, 20);
        const std::string where = "the cp.async of line 20 (warp 0 lane 3) is in flight";
        EXPECT_FAULT(memory.load(4, 4, 0, 3, 21), "reads shared offset 4 while " + where);
        EXPECT_FAULT(memory.store(4, 4, 0, 3, 21), "writes shared offset 4 while " + where);
        EXPECT_FAULT(memory.atomic(4, 4, 1, 3, 21), "while " + where);
        EXPECT_FAULT(memory.issue(8, 8, 0, 3, 21), "while " + where);
        memory.land(0, contents, 16, 0, 3, 20);
        EXPECT_EQ(*memory.load(0, 1, 0, 3, 22), std::byte{7});
        if (races) {
            EXPECT_FAULT(memory.load(0, 1, 0, 4, 23), "which warp 0 lane 3 wrote at line 20");
        }
        memory.barrier(both, both);
        EXPECT_NO_THROW(memory.load(0, 16, 1, 4, 23));
        if (races) {
            EXPECT_FAULT(memory.issue(0, 16, 0, 3, 24), "which warp 1 lane 4 read at line 23");
        }
    }
}

// The fence has to lie between the writer's write and what orders it before the read.
TEST(SharedMemory, FencesOfTheProxy) {
    SharedMemory memory(64, 2, true);
    const auto load = [&](std::uint32_t offset) { memory.load_by_async_proxy(offset, 16, 1, 9); };
    memory.store(0, 16, 0, 3, 1);
    memory.fence_proxy(0, 1U << 3);
    memory.store(16, 16, 0, 3, 2);
    memory.store(32, 16, 0, 4, 3);
    memory.fence_proxy(0, all);
    memory.store(48, 16, 0, 3, 4);
    memory.barrier(both, both);
    EXPECT_NO_THROW(load(0));
    EXPECT_NO_THROW(load(16));
    EXPECT_FAULT(load(48), "reads shared offset 48 by the async proxy, which warp 0 lane 3 wrote at line 4; no fence");
    EXPECT_NO_THROW(load(32));
    memory.fence_proxy(0, all);  // behind the barrier
    EXPECT_FAULT(load(48), "no fence");
    memory.barrier(both, both);
    EXPECT_NO_THROW(load(48));
    memory.store(0, 16, 0, 3, 5);
    memory.store(16, 16, 0, 4, 5);
    memory.fence_proxy(0, 1U << 3);
    memory.barrier(both, both);
    EXPECT_NO_THROW(load(0));
    EXPECT_FAULT(load(16), "which warp 0 lane 4 wrote");
    memory.fence_proxy(1, all);
    EXPECT_NO_THROW(load(16));
}

TEST(SharedMemory, VersionsTellWritesApart) {
    SharedMemory memory(32, 1, true);
    const auto store = [&] {
        memory.warp_sync(0, all);
        memory.store(0, 16, 0, 3, 1);
    };
    store();
    for (std::uint32_t granule = 0; granule < 8; ++granule) {
        memory.warp_sync(0, all);
        const std::uint64_t before = memory.version(0);
        EXPECT_EQ(memory.version(0), before);
        memory.store(2 * granule, 2, 0, 3, 1);  // only later
        const std::uint64_t later = memory.version(0);
        EXPECT_NE(later, before);
        memory.store(2 * granule, 2, 0, 3, 2);  // only by another line
        EXPECT_NE(memory.version(0), later);
        EXPECT_EQ(memory.writer_line(2 * granule), 2);
        store();
    }
}

TEST(SharedMemory, ResetForgetsEverything) {
    SharedMemory memory(64, 2, true);
    memory.store(0, 4, 0, 0, 1);
    memory.load(0, 4, 0, 0, 1);
    memory.issue(16, 16, 0, 0, 1);
    memory.store(32, 4, 0, 0, 1);
    memory.atomic(32, 4, 0, 0, 1);
    memory.reset();
    for (const std::uint32_t offset : {0U, 16U, 32U}) EXPECT_NO_THROW(memory.store(offset, 4, 1, 9, 2));
    memory.atomic(32, 4, 1, 9, 2);
    EXPECT_NO_THROW(memory.load(32, 4, 1, 9, 2));
    EXPECT_FAULT(memory.load(32, 4, 0, 0, 2), "warp 1 lane 9 wrote");
}

TEST(SharedMemory, NoRacesWhereNobodyLooks) {
    SharedMemory memory(64, 2, false);
    memory.store(0, 4, 0, 0, 1);
    memory.store(0, 4, 1, 0, 1);
    EXPECT_NO_THROW(memory.load(0, 4, 0, 3, 1));
    EXPECT_NO_THROW(memory.atomic(0, 4, 0, 3, 1));
    EXPECT_NO_THROW(memory.store(0, 4, 1, 3, 1));
}

}  // namespace
}  // namespace headrace::ptx
