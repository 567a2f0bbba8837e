// The text of the Fault that a call throws, for tests that look at it.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "machine/fault.hpp"

namespace headrace::ptx {

template <class F>
std::string fault_of(F f) {
    try {
        f();
    } catch (const Fault& fault) {
        return fault.what();
    }
    return "no fault";
}

// EXPECT_FAULT(call, "words of the message")
#define EXPECT_FAULT(call, words)                                                     \
    do {                                                                              \
        const std::string text = headrace::ptx::fault_of([&] { call; });              \
        EXPECT_NE(text.find(words), std::string::npos) << "the fault says: " << text; \
    } while (false)

}  // namespace headrace::ptx
