// Memory: the limits of a system as its files give them, and what problems take.
#include "harness/memory.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

namespace headrace::harness {
namespace {

namespace fs = std::filesystem;
constexpr double mebibyte = 1 << 20;

// A system's /proc and /sys in a folder.
class MemoryTest : public ::testing::Test {
  protected:
    void SetUp() override {
        root_ = fs::path(::testing::TempDir()) /
                (std::string("headrace_memory_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
        fs::remove_all(root_);
    }
    void TearDown() override { fs::remove_all(root_); }

    void put(const std::string& path, const std::string& text) {
        fs::create_directories((root_.string() + path).substr(0, (root_.string() + path).rfind('/')));
        std::ofstream(root_.string() + path) << text;
    }
    double mebibytes() const { return available_memory(root_.string()).bytes / mebibyte; }
    std::string limit() const { return available_memory(root_.string()).limit; }

    fs::path root_;
};

const std::string meminfo = "MemTotal:  8388608 kB\nMemFree:  1024 kB\nMemAvailable:  2097152 kB\n";

TEST_F(MemoryTest, NothingKnownNothingRefused) {
    EXPECT_TRUE(std::isinf(mebibytes()));
    EXPECT_TRUE(fits("x", 1e30, available_memory(root_.string())).ok());
}

TEST_F(MemoryTest, AvailableMemory) {
    put("/proc/meminfo", meminfo);
    EXPECT_EQ(mebibytes(), 2048);
    EXPECT_EQ(limit(), "MemAvailable of /proc/meminfo");
}

// Version 2, in a group of its own: the cache of files counts as free, and so does what "max" does not limit.
TEST_F(MemoryTest, ControlGroup2) {
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "1048576\n");
    EXPECT_EQ(mebibytes(), 2048);
    put("/sys/fs/cgroup/a/b/memory.max", std::to_string(300 << 20));
    put("/sys/fs/cgroup/a/b/memory.current", std::to_string(200 << 20));
    EXPECT_EQ(mebibytes(), 100);
    EXPECT_EQ(limit(), "the limit of the control group");
    put("/sys/fs/cgroup/a/b/memory.stat", "anon 7\ninactive_file " + std::to_string(50 << 20) + "\nactive_file 9\n");
    EXPECT_EQ(mebibytes(), 150);
    put("/sys/fs/cgroup/a/memory.max", std::to_string(90 << 20));  // of the group above
    put("/sys/fs/cgroup/a/memory.current", std::to_string(20 << 20));
    EXPECT_EQ(mebibytes(), 70);
    put("/sys/fs/cgroup/a/memory.current", std::to_string(200 << 20));
    EXPECT_EQ(mebibytes(), 0);
}

// In a container the group's own folder is the mount, whatever its path outside.
TEST_F(MemoryTest, ControlGroupOfAContainer) {
    for (const char* path : {"/", "/outside/id", "/../../id"}) {
        put("/proc/self/cgroup", std::string("0::") + path + "\n");
        put("/sys/fs/cgroup/memory.max", std::to_string(64 << 20));
        put("/sys/fs/cgroup/memory.current", std::to_string(4 << 20));
        EXPECT_EQ(mebibytes(), 60) << path;
    }
}

TEST_F(MemoryTest, ControlGroup1) {
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "5:cpuset:/x\n4:cpu,memory:/job/1\n0::/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n");
    EXPECT_EQ(mebibytes(), 2048);
    put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(500 << 20));
    put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(400 << 20));
    put("/sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file " + std::to_string(100 << 20) + "\n");
    EXPECT_EQ(mebibytes(), 200);
}

TEST_F(MemoryTest, TheMessageNamesBoth) {
    const AvailableMemory available = {512 * mebibyte, "a limit"};
    EXPECT_TRUE(fits("x", 512 * mebibyte, available).ok());
    const Status status = fits("x", 3072 * mebibyte, available);
    EXPECT_EQ(status.code(), Code::out_of_memory);
    EXPECT_EQ(status.message(), "x: not enough memory: needs 3 GiB, available are 0.5 GiB (a limit)");
}

// Tensors are counted with their guards and strides, without being made.
TEST_F(MemoryTest, TensorsOfALine) {
    ProblemLine line;
    for (const char* text : {"gla:fwd t7 h2 k5 v3", "kda:bwd t7 h2 k5 v3 bf16 strided state=inout seed=4",
                             "comba:step b3 t2 h1 k4 spec=2 strided seed=9"}) {
        ASSERT_TRUE(parse(text, &line).ok());
        double bytes = 0;
        for (const auto& [name, tensor] : make_tensors(line).tensors) {
            std::int64_t last = 0;
            for (std::size_t i = 0; i < tensor.shape().size(); ++i) {
                last += (tensor.shape()[i] - 1) * tensor.strides()[i];
            }
            bytes += static_cast<double>((last + 1) * static_cast<std::int64_t>(size_of(tensor.dtype())) + 512);
        }
        EXPECT_EQ(tensor_bytes(make_shapes(line)), bytes) << text;
    }
}

TEST_F(MemoryTest, ARefusedProblemIsRefused) {
    ProblemLine line;
    ASSERT_TRUE(parse("gla:fwd t5 force=nobody", &line).ok());
    double bytes = 0;
    EXPECT_EQ(check_bytes(line, &bytes).code(), Code::invalid_argument);
}

}  // namespace
}  // namespace headrace::harness
