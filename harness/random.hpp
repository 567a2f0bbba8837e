// Random: counter-based numbers from integer arithmetic alone, so that values are the same with every standard library.
#pragma once

#include <cstdint>
#include <string_view>

namespace headrace::harness {

// SplitMix64's finaliser, a bijection with mix(0) == 0.
constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// One stream of numbers for each (seed, name); the i-th number needs none before it.
class Stream {
  public:
    Stream(std::uint64_t seed, std::string_view name) : key_(mix(seed + 0x9e3779b97f4a7c15u)) {
        for (char c : name) key_ = mix(key_ ^ static_cast<unsigned char>(c)) + 0x9e3779b97f4a7c15u;
    }

    std::uint64_t bits(std::int64_t i) const {
        return mix(key_ + (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u);
    }
    // In [0, 1).
    double uniform(std::int64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }
    // Near-normal with mean 0 and variance 1: the sum of four 16-bit uniforms, within +-3.47.
    double normal(std::int64_t i) const {
        const std::uint64_t z = bits(i);
        const std::uint64_t sum = (z & 0xffff) + ((z >> 16) & 0xffff) + ((z >> 32) & 0xffff) + (z >> 48);
        // 4 uniforms on 0..65535 have mean 131070 and deviation 65536/sqrt(3)
        return (static_cast<double>(static_cast<std::int64_t>(sum)) - 131070.0) * 2.6428997918226276e-05;
    }
    // In [0, count).
    std::int64_t below(std::int64_t i, std::int64_t count) const {
        return static_cast<std::int64_t>(bits(i) % static_cast<std::uint64_t>(count));
    }

  private:
    std::uint64_t key_;
};

}  // namespace headrace::harness
