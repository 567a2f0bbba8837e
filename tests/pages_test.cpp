// Huge pages: large outputs ask for them, unless they have wide gaps.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "behaviours.hpp"

namespace headrace::test {
namespace {

// The line of /proc/self/smaps that tells what was asked for the mapping around an address.
std::string mapping_flags(const void* address) {
    std::ifstream file("/proc/self/smaps");
    std::uintptr_t begin = 0, end = 0;
    for (std::string line; std::getline(file, line);) {
        std::uintptr_t from = 0, to = 0;
        if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) begin = from, end = to;
        const auto wanted = reinterpret_cast<std::uintptr_t>(address);
        if (line.rfind("VmFlags:", 0) == 0 && begin <= wanted && wanted < end) return line + " ";
    }
    return {};
}

TEST(Pages, LargeOutputsAskForHugePages) {
    const bool kernel_has_them = std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
    for (const std::int64_t tokens : {64, 4096}) {
        ProblemLine line = line_of("linear_attention:fwd h16 k64 threads=2");  // o: 4 KiB a token
        line.T = tokens;
        for (const int gaps : {1, 8, 32}) {  // the memory of a token over its elements
            CallTensors made = harness::make_tensors(line);
            constexpr std::size_t bytes = std::size_t{512} << 20;
            void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            ASSERT_NE(memory, MAP_FAILED);
            TensorView& o = made.call.out.o;
            o.data = memory;
            o.strides[1] *= gaps;
            ASSERT_TRUE(run(made.call).ok());
            const std::string flags = mapping_flags(static_cast<char*>(memory) + (std::size_t{4} << 20));
            ASSERT_FALSE(flags.empty());
            EXPECT_EQ(flags.find(" hg ") != std::string::npos, kernel_has_them && tokens * gaps >= 4096 && gaps < 32)
                << flags << tokens << " tokens, gaps " << gaps;
            munmap(memory, bytes);
        }
    }
}

}  // namespace
}  // namespace headrace::test
