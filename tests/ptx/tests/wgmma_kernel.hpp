// Warpgroup: a kernel around one wgmma, for its tests: right as it stands, with places for statements that break it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "machine/block.hpp"
#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {

inline constexpr std::uint32_t threads = 128;

// A kernel of one warpgroup: shared memory gets an image, registers get A and D; D = A B (+ D) is stored.
struct Warpgroup {
    int columns = 16;
    bool by_rows = false;  // trans-b
    std::string type = "bf16";
    std::uint64_t start = 0, leading = 0, stride = 1024, more_bits = std::uint64_t{1} << 62;  // of the descriptor
    std::size_t image_bytes = 8192;
    bool adds = true;
    // The statements around the product, to be broken.
    std::string fence = "wgmma.fence.sync.aligned;", proxy = "fence.proxy.async;", barrier = "bar.sync 0;",
                commit = "wgmma.commit_group.sync.aligned;", wait = "wgmma.wait_group.sync.aligned 0;";
    std::string before_proxy, before_fence, before_product, before_commit, before_wait, after_wait, at_start;
    std::uint32_t block = threads;

    static std::string list(const std::string& name, int first, int count) {
        std::string text = "{";
        for (int i = 0; i < count; ++i) text += (i == 0 ? "%" : ", %") + name + std::to_string(first + i);
        return text + "}";
    }
    std::string product(int first_d = 0, int first_a = 10) const {
        return "wgmma.mma_async.sync.aligned.m64n" + std::to_string(columns) + "k16.f32." + type + "." + type + " " +
               list("d", first_d, columns / 2) + ", " + list("r", first_a, 4) + ", %rd20, %p1, 1, 1, " +
               (by_rows ? "1;" : "0;");
    }
    std::uint64_t descriptor() const {
        return (first_shared + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | more_bits;
    }

    // %r1: the shared memory. %r30: the thread's first place in it. %rd12: its place in the image.
    std::string text() const {
        const auto at = [](const char* base, std::size_t offset) {
            return std::string(", [") + base + "+" + std::to_string(offset) + "]";
        };
        std::string body = ".shared .align 1024 .b8 own[" + std::to_string(image_bytes) +
                           "]; .reg .f32 %d<256>; mov.u32 %r1, own; mad.lo.u32 %r30, %r0, 16, %r1;"
                           "mad.wide.u32 %rd12, %r0, 16, %rd1; mov.u32 %r2, 7;\n" +
                           at_start + "\n";
        for (std::size_t i = 0; i < image_bytes; i += threads * 16)
            body += "ld.global.v4.u32 {%r3,%r4,%r5,%r6}" + at("%rd12", i) + "; st.shared.v4.u32 [%r30+" +
                    std::to_string(i) + "], {%r3,%r4,%r5,%r6};\n";
        body += before_proxy + proxy + barrier + "\nmad.wide.u32 %rd10, %r0, 16, %rd0;" +
                "ld.global.v4.u32 {%r10,%r11,%r12,%r13}, [%rd10];\nmad.wide.u32 %rd11, %r0, " +
                std::to_string(2 * columns) + ", %rd2; mad.wide.u32 %rd13, %r0, " + std::to_string(2 * columns) +
                ", %rd3; mov.u64 %rd20, " + std::to_string(descriptor()) + "; mov.u32 %r20, " + (adds ? "1" : "0") +
                "; setp.ne.u32 %p1, %r20, 0;\n";
        for (int i = 0; i < columns / 2; ++i)
            body += "ld.global.f32 %d" + std::to_string(i) + at("%rd11", static_cast<std::size_t>(4 * i)) + ";\n";
        body += before_fence + "\n" + fence + "\n" + before_product + "\n" + product() + "\n" + before_commit + "\n" +
                commit + "\n" + before_wait + "\n" + wait + "\n" + after_wait + "\n";
        for (int i = 0; i < columns / 2; ++i)
            body += "st.global.f32 [%rd13+" + std::to_string(4 * i) + "], %d" + std::to_string(i) + ";\n";
        std::string whole = kernel_text(4, body);
        whole.replace(whole.find("sm_80"), 5, "sm_90a");
        return whole;
    }

    std::uint64_t place(int k, int n) const {
        const auto column = static_cast<std::uint64_t>(n), row = static_cast<std::uint64_t>(k);
        const std::uint64_t plain =
            by_rows ? start + column / 64 * leading + column % 64 * 2 + row / 8 * stride + row % 8 * 128
                    : start + column / 8 * stride + column % 8 * 128 + row * 2;
        const std::uint64_t line = plain / 128 % 8, piece = plain / 16 % 8;
        return plain - piece * 16 + (piece ^ line) * 16;
    }

    std::uint16_t bits_of(int value) const {
        return type == "f16"
                   ? static_cast<std::uint16_t>(bits_of_f16_integer(value))
                   : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
    }
    static std::uint32_t bits_of_f16_integer(int value) {
        if (value == 0) return 0;
        const auto size = static_cast<std::uint32_t>(std::abs(value));
        const auto top = static_cast<std::uint32_t>(std::bit_width(size)) - 1;
        return (value < 0 ? 0x8000U : 0U) | (15 + top) << 10 | ((size << (10 - top)) & 0x3ff);
    }

    // Runs it with small integers; compares each element.
    void run(const Settings& settings = {}, std::uint32_t seed = 1) const {
        std::mt19937 random(seed);
        const auto draw = [&] { return static_cast<int>(random() % 17) - 8; };
        const auto width = static_cast<std::size_t>(columns);
        std::vector<int> a(64 * 16), b(16 * width), c(64 * width);
        for (auto* const list : {&a, &b, &c}) std::generate(list->begin(), list->end(), draw);
        std::vector<std::uint16_t> image(image_bytes / 2, 0x3c00);
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < columns; ++n)
                if (const std::uint64_t offset = place(k, n); offset + 2 <= image_bytes)
                    image[offset / 2] = bits_of(b[static_cast<std::size_t>(k * columns + n)]);
        std::vector<std::uint32_t> registers_of_a(4 * threads);
        std::vector<float> registers_of_c(threads * width / 2);
        const auto row_of = [](std::size_t thread, std::size_t half) {
            return thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        };
        for (std::size_t thread = 0; thread < threads; ++thread) {
            const std::size_t t = thread % 4;
            for (std::size_t r = 0; r < 4; ++r) {
                const std::size_t at = row_of(thread, r % 2) * 16 + 8 * (r / 2) + 2 * t;
                registers_of_a[4 * thread + r] = bits_of(a[at]) | static_cast<std::uint32_t>(bits_of(a[at + 1])) << 16;
            }
            for (std::size_t i = 0; i < width / 2; ++i)
                registers_of_c[thread * width / 2 + i] =
                    static_cast<float>(c[row_of(thread, i / 2 % 2) * width + i / 4 * 8 + 2 * t + i % 2]);
        }
        Device device;
        device.settings = settings;
        device.block = {block, 1, 1};
        const auto in_a = device.buffer(registers_of_a), in_b = device.buffer(image),
                   in_c = device.buffer(registers_of_c), out = device.unwritten(4 * registers_of_c.size());
        device.run(text(), {in_a, in_b, in_c, out});
        const auto d = device.read<float>(out, registers_of_c.size());
        for (std::size_t thread = 0; thread < threads; ++thread)
            for (std::size_t i = 0; i < width / 2; ++i) {
                const std::size_t row = row_of(thread, i / 2 % 2), n = i / 4 * 8 + 2 * (thread % 4) + i % 2;
                int want = adds ? c[row * width + n] : 0;
                for (std::size_t k = 0; k < 16; ++k) want += a[row * 16 + k] * b[k * width + n];
                ASSERT_EQ(d[thread * width / 2 + i], static_cast<float>(want)) << "row " << row << " column " << n;
            }
    }
};

// All of A is 1, of B 2 and of D 5: what D becomes, or the fault.
inline std::string element_of(const std::string& text) {
    Device device;
    device.block = {threads, 1, 1};
    const auto a = device.buffer(std::vector<std::uint32_t>(4 * threads, 0x3f803f80)),
               b = device.buffer(std::vector<std::uint32_t>(2048, 0x40004000)),
               c = device.buffer(std::vector<float>(8 * threads, 5.0F)), d = device.unwritten(32 * threads);
    const std::string fault = fault_of([&] { device.run(text, {a, b, c, d}); });
    return fault == "no fault" ? std::to_string(device.read<float>(d, 1)[0]) : fault;
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
    return text;
}

}  // namespace headrace::ptx
