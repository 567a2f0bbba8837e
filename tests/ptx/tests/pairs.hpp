// All pairs of edge values through a snippet, each result checked.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "tests/kernel.hpp"

namespace headrace::ptx {

// All pairs of the values, 32 at a time through the body: %a and %b are the inputs, %d the result.
struct Pairs {
    std::vector<std::uint64_t> values;
    std::string type;       // of the loads
    std::string registers;  // "%f", "%r", "%rd", "%fd", "%h"
};

using Check = std::function<std::string(std::uint64_t a, std::uint64_t b, std::uint64_t result)>;

template <class T>
void for_pairs(const Pairs& pairs, std::string body, const std::string& result_type, const std::string& result_register,
               const Check& check) {
    const auto replace = [&](const std::string& from, const std::string& to) {
        for (std::size_t at = body.find(from); at != std::string::npos; at = body.find(from))
            body.replace(at, from.size(), to);
    };
    const std::string a = pairs.registers + "9", b = pairs.registers + "8";
    replace("$a", a);
    replace("$b", b);
    replace("$d", result_register);
    std::vector<std::uint64_t> left, right;
    const auto flush = [&] {
        const auto results =
            run_lanes<T>({{left, pairs.type, a}, {right, pairs.type, b}}, body, result_type, result_register);
        for (std::size_t i = 0; i < left.size(); ++i) {
            const std::string wrong = check(left[i], right[i], results[i]);
            EXPECT_EQ(wrong, "") << body << " of 0x" << std::hex << left[i] << " and 0x" << right[i] << " gave 0x"
                                 << static_cast<std::uint64_t>(results[i]);
        }
        left.clear();
        right.clear();
    };
    for (const std::uint64_t x : pairs.values) {
        for (const std::uint64_t y : pairs.values) {
            left.push_back(x);
            right.push_back(y);
            if (left.size() == 32) flush();
        }
    }
    if (!left.empty()) flush();
}

inline std::string expected(std::uint64_t is, std::uint64_t should) {
    if (is == should) return {};
    std::ostringstream text;
    text << "expected 0x" << std::hex << should;
    return text.str();
}

}  // namespace headrace::ptx
