// Settings: how the interpreter orders what PTX leaves open, and how strictly it looks.
#pragma once

#include <cstdint>

namespace headrace::ptx {

enum class Order : std::uint8_t { ascending, descending, random };

// How mma rounds: the exact sum rounded once; or products and addend aligned to the largest exponent and cut to 24
// bits.
enum class MmaArithmetic : std::uint8_t { exact, truncated };

struct Settings {
    Order order = Order::ascending;  // of blocks, warps and diverged lanes; random: with preemption at any instruction
    std::uint64_t seed = 1;          // of everything that is drawn, cp.async's coin too
    MmaArithmetic mma = MmaArithmetic::exact;
    bool races = true;  // look for races (bounds, alignment, unwritten reads and cp.async are always checked)
    // Of a launch of more than a thousand blocks this share runs alone at the end of each quarter of them, as a kernel
    // may have two or four kinds. It may read what nothing wrote. At most 0.25, or 1: all blocks run.
    double share = 1;
};

// HEADRACE_PTX_ORDER=ascending|descending|random, HEADRACE_PTX_SEED=N, HEADRACE_PTX_MMA=exact|truncated,
// HEADRACE_PTX_RACES=0|1, HEADRACE_PTX_SHARE=NUMBER. Throws Fault on anything else.
Settings settings_from_environment();

}  // namespace headrace::ptx
