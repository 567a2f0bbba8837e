// FlushSubnormals: the denormal mode of a thread while it computes.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace headrace {

// The mode of a thread while it computes. Subnormal numbers are zero: decays underflow by design, and subnormal
// arithmetic can be a hundred times slower. At the end, streamed stores are ordered before what the thread signals
// next.
class FlushSubnormals {
  public:
    FlushSubnormals() : saved_(mode()) { set_mode(saved_ | flush_bits); }
    ~FlushSubnormals() {
#if defined(__SSE2__)
        _mm_sfence();
#endif
        set_mode(saved_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
#if defined(__SSE2__)
    static constexpr std::uint64_t flush_bits = 0x8040;  // FTZ and DAZ of MXCSR
    static std::uint64_t mode() { return _mm_getcsr(); }
    static void set_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
    static constexpr std::uint64_t flush_bits = 1u << 24;  // FZ of FPCR
    static std::uint64_t mode() {
        std::uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set_mode(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
    static constexpr std::uint64_t flush_bits = 0;
    static std::uint64_t mode() { return 0; }
    static void set_mode(std::uint64_t) {}
#endif
    std::uint64_t saved_;
};

}  // namespace headrace
