// Runs snippets in all orders of the interpreter: right programs agree, wrong ones are found in each.
#pragma once

#include <gtest/gtest.h>

#include "tests/faults.hpp"
#include "tests/kernel.hpp"

namespace headrace::ptx {

inline std::vector<Settings> orders() {
    std::vector<Settings> result;
    for (const Order order : {Order::ascending, Order::descending})
        result.push_back({order, 1, MmaArithmetic::exact, true});
    for (std::uint64_t seed = 1; seed <= 20; ++seed)
        result.push_back({Order::random, seed, MmaArithmetic::exact, true});
    return result;
}

// Each thread computes %r1, which is stored by its index; all orders give one result.
inline std::vector<std::uint32_t> run_threads(const std::string& body, std::uint32_t threads = 32,
                                              std::uint32_t blocks = 1, const std::string& before = {}) {
    const std::string text =
        kernel_text(1,
                    "mov.u32 %r20, %ctaid.x;\nmov.u32 %r21, %ntid.x;\nmad.lo.u32 %r22, %r20, %r21, %r0;\n" + body +
                        "\nmul.wide.u32 %rd20, %r22, 4;\nadd.u64 %rd20, %rd20, %rd0;\n"
                        "st.global.u32 [%rd20], %r1;\n",
                    before);
    std::vector<std::uint32_t> first;
    for (const Settings& settings : orders()) {
        Device device;
        device.settings = settings;
        device.block = {threads, 1, 1};
        device.grid = {blocks, 1, 1};
        const std::uint64_t out = device.buffer(std::vector<std::uint32_t>(threads * blocks, 0xdddddddd));
        device.run(text, {out});
        const auto result = device.read<std::uint32_t>(out, threads * blocks);
        if (first.empty()) first = result;
        EXPECT_EQ(first, result) << "order " << static_cast<int>(settings.order) << " seed " << settings.seed;
    }
    return first;
}

// The fault of a body, in every order; returns the first.
inline std::string fault_of_body(const std::string& body, std::uint32_t threads = 32) {
    std::string first;
    for (const Settings& settings : orders()) {
        Device device;
        device.settings = settings;
        device.block = {threads, 1, 1};
        const std::string fault =
            fault_of([&] { device.run(kernel_text(0, body, ".extern .shared .align 16 .b8 dynamic[];"), {}); });
        EXPECT_NE(fault, "no fault") << "order " << static_cast<int>(settings.order) << " seed " << settings.seed;
        if (first.empty()) first = fault;
    }
    return first;
}

inline void expect_words(const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << "\"" << word << "\" in: " << text;
}

}  // namespace headrace::ptx
