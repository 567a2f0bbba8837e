// Accesses to shared memory by several lanes at once: the same values, marks and faults as lane by lane.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "checks/shared_memory.hpp"
#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {
namespace {

// Two memories under the same threads; in the first one lanes load at once where it lets them.
class TwoMemories {
  public:
    static constexpr unsigned bytes = 192;

    explicit TwoMemories(bool races) : at_once_(bytes, 2, races), one_by_one_(bytes, 2, races) {}

    // f(memory) on both: the same Fault, or none. True: none.
    template <class F>
    bool both(F f) {
        const std::string fault = fault_of([&] { f(at_once_); });
        EXPECT_EQ(fault, fault_of([&] { f(one_by_one_); }));
        return fault == "no fault";
    }

    // stride: from lane to lane, 0 or `size`.
    void load(std::uint32_t offset, unsigned size, unsigned stride, int warp, std::uint32_t readers, int line) {
        const int first = __builtin_ctz(readers), count = __builtin_popcount(readers);
        const std::byte* at = stride == 0 ? at_once_.load_together(offset, size, warp, readers, line)
                                          : at_once_.load_row(offset, size, warp, first, count, line);
        std::vector<std::byte> values;
        const auto lane_by_lane = [&](SharedMemory& memory) {
            values.clear();
            for (std::uint32_t rest = readers; rest != 0; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                const std::byte* own =
                    memory.load(offset + static_cast<unsigned>(lane - first) * stride, size, warp, lane, line);
                values.insert(values.end(), own, own + size);
            }
        };
        if (at == nullptr) {
            ++(both(lane_by_lane) ? looked_at_each : faulted);
            return;
        }
        ++done;
        EXPECT_EQ(fault_of([&] { lane_by_lane(one_by_one_); }), "no fault");
        for (std::size_t i = 0; i < values.size(); i += size)
            EXPECT_EQ(std::memcmp(at + i / size * stride, &values[i], size), 0);
    }

    // By `count` neighbouring lanes from `first` on.
    void store(std::uint32_t offset, unsigned size, int warp, int first, int count, int line) {
        const auto lane_by_lane = [&](SharedMemory& memory) {
            for (int i = 0; i < count; ++i)
                std::memset(memory.store(offset + static_cast<unsigned>(i) * size, size, warp, first + i, line), line,
                            size);
        };
        std::byte* const at = at_once_.store_row(offset, size, warp, first, count, line);
        if (at == nullptr) {
            both(lane_by_lane);
            return;
        }
        ++stored;
        std::memset(at, line, size * static_cast<unsigned>(count));
        EXPECT_EQ(fault_of([&] { lane_by_lane(one_by_one_); }), "no fault");
    }

    // By the async proxy; and that such a read goes on until now, if nothing was written there since.
    void load_by_proxy(std::uint32_t offset, unsigned size, int warp, int line) {
        const auto by_pieces = [&](SharedMemory& memory) {
            for (unsigned piece = 0; piece < size; piece += 16)
                memory.load_by_async_proxy(offset + piece, 16, warp, line);
        };
        read_ = {offset, 0, warp, {}};
        const std::byte* const at = at_once_.load_together_by_async_proxy(offset, size, warp, line);
        if (at == nullptr) {
            if (!both(by_pieces)) return;
        } else {
            ++read_by_proxy;
            EXPECT_EQ(fault_of([&] { by_pieces(one_by_one_); }), "no fault");
            EXPECT_EQ(std::memcmp(at, one_by_one_.load(offset, 16, warp, -1, line), 16), 0);
        }
        read_.size = size;
        for (unsigned piece = 0; piece < size; piece += 16) read_.versions.push_back(at_once_.version(offset + piece));
    }
    void read_on(int line) {
        for (unsigned piece = 0; piece < read_.size; piece += 16) {
            const std::uint64_t version = at_once_.version(read_.offset + piece);
            EXPECT_EQ(version, one_by_one_.version(read_.offset + piece));
            if (version != read_.versions[piece / 16]) return;
        }
        if (read_.size == 0) return;
        ++went_on;
        at_once_.read_on(read_.offset, read_.size, read_.warp, line);
        for (unsigned piece = 0; piece < read_.size; piece += 16)
            EXPECT_EQ(fault_of([&] { one_by_one_.load(read_.offset + piece, 16, read_.warp, -1, line); }), "no fault");
    }
    void start_block() {
        read_ = {};
        both([](SharedMemory& m) { m.reset(); });
    }

    int done = 0, looked_at_each = 0, faulted = 0, stored = 0, read_by_proxy = 0, went_on = 0;

  private:
    struct Read {
        std::uint32_t offset = 0;
        unsigned size = 0;  // none
        int warp = 0;
        std::vector<std::uint64_t> versions;
    };
    Read read_;
    SharedMemory at_once_, one_by_one_;
};

// What threads do to shared memory, drawn: most of it is allowed.
class Threads {
  public:
    Threads(bool races, std::uint32_t seed) : memories(races), random_(seed) {}

    void act(int line) {
        const auto warp = static_cast<int>(below(2)), lane = static_cast<int>(below(32));
        const unsigned size = 1U << below(5);
        const std::uint32_t offset = below(TwoMemories::bytes / size) * size;
        const unsigned action = below(54);
        if (action >= 52) {
            memories.read_on(line);
        } else if (action >= 48) {
            const unsigned part = std::array{16U, 32U, 128U}[below(3)];
            memories.load_by_proxy(below(TwoMemories::bytes / part) * part, part, warp, line);
        } else if (action >= 44) {
            const std::uint32_t lanes = below(4) == 0 ? neighbours() : ~0U;
            memories.both([&](SharedMemory& m) { m.fence_proxy(warp, lanes); });
        } else if (action >= 40) {
            const std::uint32_t writers = neighbours();
            memories.store(below(2) == 0 ? offset : 0, size, warp, __builtin_ctz(writers), __builtin_popcount(writers),
                           line);
        } else if (action < 6) {
            memories.both([&](SharedMemory& m) { std::memset(m.store(offset, size, warp, lane, line), line, size); });
        } else if (action < 7) {
            memories.both([&](SharedMemory& m) { m.atomic(offset, size, warp, lane, line); });
        } else if (action < 9) {
            copy(offset / 16 * 16, line);
        } else if (action < 15) {
            order(warp, action);
        } else {
            load(offset, size, warp, line);
        }
    }
    void start_block() {
        memories.start_block();
        copying_ = arrived_ = false;
        for (std::uint32_t offset = 0; offset < TwoMemories::bytes - 16; offset += 16)
            memories.both([&](SharedMemory& m) { std::memset(m.store(offset, 16, 0, 7, 1), 1, 16); });
        memories.both([](SharedMemory& m) { m.barrier({0, 1}, {0, 1}); });
    }

    TwoMemories memories;

  private:
    std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_()) % bound; }

    // All lanes, one, or some neighbouring ones.
    std::uint32_t neighbours() {
        const std::uint32_t all = ~0U, count = 1 + below(32);
        if (below(3) == 0) return all;
        return (all >> (32 - count)) << below(33 - count);
    }
    void copy(std::uint32_t offset, int line) {
        if (copying_) {
            const std::vector<std::byte> contents(16, static_cast<std::byte>(line));
            memories.both([&](SharedMemory& m) { m.land(copy_, contents.data(), 16, 0, 3, line); });
            copying_ = false;
        } else if (memories.both([&](SharedMemory& m) { m.issue(offset, 16, 0, 3, line); })) {
            copying_ = true;
            copy_ = offset;
        }
    }
    void order(int warp, unsigned kind) {
        if (kind % 3 == 0) {
            memories.both([&](SharedMemory& m) { m.barrier({0, 1}, {0, 1}); });
        } else if (kind % 3 == 1) {
            const std::uint32_t members = below(2) == 0 ? ~0U : static_cast<std::uint32_t>(random_()) | 1;
            memories.both([&](SharedMemory& m) { m.warp_sync(warp, members); });
        } else {
            memories.both([&](SharedMemory& m) { arrived_ ? m.barrier({0, 1}, {1}, 5) : m.arrive(0, 5); });
            arrived_ = !arrived_;
        }
    }
    void load(std::uint32_t offset, unsigned size, int warp, int line) {
        const std::uint32_t shift = below(20) == 0 ? 1 : 0;  // aligned or not
        if (below(2) == 0) {
            const std::uint32_t readers = below(2) == 0 ? neighbours() : static_cast<std::uint32_t>(random_()) | 1;
            memories.load(offset + shift, size, 0, warp, readers, line);
        } else {
            const std::uint32_t start = below(4) == 0 ? offset : 0;  // many rows are longer than what follows
            memories.load(start + shift, size, size, warp, neighbours(), line);
        }
    }

    std::mt19937 random_;
    bool copying_ = false, arrived_ = false;
    std::uint32_t copy_ = 0;
};

TEST(SharedLoads, AtOnceAsOneByOne) {
    for (const bool races : {false, true}) {
        int done = 0, looked_at_each = 0, faulted = 0, stored = 0, read_by_proxy = 0, went_on = 0;
        for (std::uint32_t seed = 0; seed < 600; ++seed) {
            Threads threads(races, seed);
            for (int line = 0; line < 400 && !HasFailure(); ++line) {
                if (line % 40 == 0) threads.start_block();
                threads.act(line);
            }
            ASSERT_FALSE(HasFailure()) << "seed " << seed;
            done += threads.memories.done;
            looked_at_each += threads.memories.looked_at_each;
            faulted += threads.memories.faulted;
            stored += threads.memories.stored;
            read_by_proxy += threads.memories.read_by_proxy;
            went_on += threads.memories.went_on;
        }
        EXPECT_GT(done, 20000);
        EXPECT_GT(looked_at_each, 1000);
        EXPECT_GT(faulted, 10000);
        EXPECT_GT(stored, 1000);
        EXPECT_GT(read_by_proxy, 1000);
        EXPECT_GT(went_on, 1000);
    }
}

// What `body` loads into %r11 and %r12 of each lane from a window (at %r7; generic: at %rd8) of 64 words. Lane l stored
// 100 + l to word l, at %r9; the upper half is not written.
std::vector<std::uint32_t> loaded(const std::string& body, const std::string& order = "bar.warp.sync 0xffffffff;") {
    Device device;
    const auto to = device.buffer(std::vector<std::uint32_t>(64, 0));
    device.run(kernel_text(1,
                           ".shared .align 16 .b8 window[256]; mov.u32 %r7, window; mad.lo.u32 %r9, %r0, 4, %r7;"
                           "add.u32 %r10, %r0, 100; st.shared.u32 [%r9], %r10;" +
                               order + "cvta.shared.u64 %rd8, window; mov.u32 %r11, 0; mov.u32 %r12, 0;" + body +
                               "mad.wide.u32 %rd9, %r0, 8, %rd0; st.global.v2.u32 [%rd9], {%r11, %r12};"),
               {to});
    return device.read<std::uint32_t>(to, 64);
}

// Word of(l) for lane l of `lanes`, and if `words` is 2 the next one; zeros for the others.
template <class F>
std::vector<std::uint32_t> want(std::uint32_t lanes, int words, F of) {
    std::vector<std::uint32_t> values(64, 0);
    for (std::uint32_t lane = 0; lane < 32; ++lane)
        for (std::uint32_t word = 0; (lanes >> lane & 1) != 0 && word < static_cast<std::uint32_t>(words); ++word)
            values[2 * lane + word] = 100 + of(lane) + word;
    return values;
}

TEST(SharedLoads, Values) {
    EXPECT_EQ(loaded("ld.shared.u32 %r11, [%r7+20];"), want(~0U, 1, [](auto) { return 5; }));
    EXPECT_EQ(loaded("ld.shared.v2.u32 {%r11, %r12}, [%r7+24];"), want(~0U, 2, [](auto) { return 6; }));
    EXPECT_EQ(loaded("ld.u32 %r11, [%rd8+20];"), want(~0U, 1, [](auto) { return 5; }));
    EXPECT_EQ(loaded("ld.shared.u32 %r11, [%r9];"), want(~0U, 1, [](auto lane) { return lane; }));
    EXPECT_EQ(loaded("setp.ge.u32 %p1, %r0, 9; @%p1 ld.shared.u32 %r11, [%r9+-16];"),
              want(~0U << 9, 1, [](auto lane) { return lane - 4; }));
    EXPECT_EQ(loaded("setp.lt.u32 %p1, %r0, 16; mad.lo.u32 %r9, %r0, 8, %r7;"
                     "@%p1 ld.shared.v2.u32 {%r11, %r12}, [%r9];"),
              want(0xffff, 2, [](auto lane) { return 2 * lane; }));
    EXPECT_EQ(loaded("and.b32 %r8, %r0, 3; mad.lo.u32 %r9, %r8, 8, %r7; ld.shared.v2.u32 {%r11, %r12}, [%r9+8];"),
              want(~0U, 2, [](auto lane) { return lane % 4 * 2 + 2; }));
    EXPECT_EQ(loaded("mul.lo.u32 %r8, %r0, 5; and.b32 %r8, %r8, 31; mad.lo.u32 %r9, %r8, 4, %r7;"
                     "ld.shared.u32 %r11, [%r9];"),
              want(~0U, 1, [](auto lane) { return lane * 5 % 32; }));
    // One address, but for lane 8.
    EXPECT_EQ(loaded("setp.eq.u32 %p1, %r0, 8; selp.u32 %r9, %r9, %r7, %p1; ld.shared.u32 %r11, [%r9];"),
              want(~0U, 1, [](auto lane) { return lane == 8 ? 8 : 0; }));
}

TEST(SharedLoads, Faults) {
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r7+128];"), "lane 0 reads shared offset 128, which nothing wrote");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r9+16];"), "lane 28 reads shared offset 128, which nothing wrote");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r7+256];"), "lane 0 touches 4 bytes at shared offset 256, outside");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r9+-12];"), "lane 0 touches shared address 1012, below 1024");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r7+2];"), "lane 0 touches shared offset 2, which is not aligned");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r7+20];", ""), "lane 0 race: reads shared offset 20, which warp 0");
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r9+4];", ""), "lane 0 race: reads shared offset 4, which warp 0 lane 1");
    EXPECT_EQ(loaded("ld.shared.u32 %r11, [%r9];", ""), want(~0U, 1, [](auto lane) { return lane; }));
    const std::string then_store = "setp.eq.u32 %p1, %r0, 9; @%p1 st.shared.u32 [%r7+20], %r0;";
    EXPECT_FAULT(loaded("ld.shared.u32 %r11, [%r7+20];" + then_store), "which warp 0 lane 0 read");
    EXPECT_FAULT(loaded("setp.ge.u32 %p1, %r0, 4; @%p1 ld.shared.u32 %r11, [%r9+-12];" + then_store),
                 "lane 9 race: writes shared offset 20, which warp 0 lane 8 read");
    EXPECT_FAULT(loaded("setp.eq.u32 %p1, %r0, 0; @%p1 ld.shared.u32 %r11, [%r7+4]; st.shared.u32 [%r9], %r0;"),
                 "lane 1 race: writes shared offset 4, which warp 0 lane 0 read");
}

}  // namespace
}  // namespace headrace::ptx
