// Implementation: one way to compute some problems; the dispatcher asks each in turn.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/workspace.hpp"
#include "headrace/launches.hpp"

namespace headrace {

// What the running machine offers, found once per process.
struct Machine {
    bool avx2 = false;         // with FMA and F16C
    bool avx512 = false;       // F, BW, DQ, VL
    bool avx512_bf16 = false;  // avx512 and the bf16 dot product
    bool slow_bf16_dot = false;  // it does no more multiply-adds in a second than fp32
    bool neon = false;
};

class Implementation {
  public:
    virtual ~Implementation() = default;
    virtual std::string name() const = 0;  // "avx512.chunk": backend.algorithm[.variant]
    // Where the tensors of its problems lie; it is never asked about others.
    virtual Device device() const { return Device::cpu; }
    virtual bool serves(Direction direction) const = 0;
    // Why this implementation cannot compute the problem; empty if it can. Only called when it serves the direction.
    virtual std::string refusal(const Problem& problem, const Machine& machine) const = 0;
    // Why a later implementation serves this problem better, though this one could; empty if none does. Not asked when
    // this one is forced.
    virtual std::string yields(const Problem&) const { return {}; }
    // How it computes the states between tokens: those of two implementations with one text agree bit for bit.
    virtual std::string states(const Problem&) const { return name(); }
    // Takes every block that run() will use.
    virtual void carve(const Problem& problem, Carver& carver) const = 0;
    // What run() launches on a GPU, in order.
    virtual std::vector<LaunchPlan> launches(const Problem&) const { return {}; }
    // `carver` is fresh over a buffer of at least carve()'s size, on its device. An error where a value of g was not
    // acceptable (NaN, or positive unless allowed): the values are looked at where they are read anyway. Outputs are
    // then undefined.
    virtual Status run(const Problem& problem, Carver& carver) const = 0;
    // That buffer, where the caller gave none.
    virtual Status allocate(const Problem&, std::size_t bytes, Block* block) const {
        return headrace::allocate(bytes, block);
    }
};

// All implementations, in order of preference.
const std::vector<const Implementation*>& all_implementations();

}  // namespace headrace
