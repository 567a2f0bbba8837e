// What gates are drawn from: log decays of constant heads, of tokens and channels, and pre-activations of raw gates.
#pragma once

#include <cmath>
#include <limits>

#include "harness/problem_line.hpp"
#include "harness/random.hpp"

namespace headrace::harness {

// Near the slopes of the checkpoints of models.md for layer 10 of 20: -m_h (1 - 9/19 + 1e-5).
inline double head_slope(std::int64_t head, std::int64_t heads) {
    std::int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    const double slope =
        head < power ? std::exp2(-8.0 * static_cast<double>(head + 1) / static_cast<double>(power))
                     : std::exp2(-4.0 * static_cast<double>(2 * (head - power) + 1) / static_cast<double>(power));
    return -slope * (1.0 - 9.0 / 19.0 + 1e-5);
}

// The exponential is a subnormal double.
inline constexpr double subnormal_decay = -720;

// One log decay <= 0. `decay` scales the random ones: trained heads differ from each other by orders of magnitude.
inline double log_decay(const Stream& stream, std::int64_t i, GateValues gates, double decay, double forget) {
    const std::uint64_t dice = mix(stream.bits(i)) % 64;
    if (gates == GateValues::zero) return 0;
    if (gates == GateValues::lasting) return -forget * stream.uniform(i);
    if (gates == GateValues::strong) {
        const double x = stream.normal(i);
        return dice < 13 ? -0.01 * std::abs(x) : -20 + 2 * x;
    }
    if (gates == GateValues::reset && dice < 4) return dice == 0 ? -1e30 : dice == 1 ? subnormal_decay : -1000;
    if (gates == GateValues::minus_inf && dice < 3) return -std::numeric_limits<double>::infinity();
    const double x = stream.normal(i);
    // -softplus(x), with the square root in place of exp and log: equal at 0 and exact in every standard library
    return -decay * 0.5 * (x + std::sqrt(x * x + 1.921812));
}

// The pre-activation of a gate; the log decay that comes of it follows `gates` as above, softplus or bounded.
inline double gate_preactivation(const Stream& stream, std::int64_t i, GateValues gates, double forget) {
    const std::uint64_t dice = mix(stream.bits(i)) % 64;
    const double x = stream.normal(i);
    if (gates == GateValues::zero) return -1000 + x;
    if (gates == GateValues::lasting) return std::log(1e-30 + forget) - std::abs(x);
    if (gates == GateValues::strong) return dice < 13 ? -8 + x : 20 + 2 * x;
    // exp(-exp(A_log) 2e4) is 0 in every type, and f16 holds 2e4
    if (gates == GateValues::reset && dice < 4) return dice == 1 ? -subnormal_decay : 2e4;
    return x;
}

}  // namespace headrace::harness
