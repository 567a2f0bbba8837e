// The instruction sets that this process may use.
#include "core/machine.hpp"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headrace {

#if defined(__x86_64__)
Machine detect_machine() {
    // __builtin_cpu_supports also asks whether the operating system saves the wide registers. F16C, which older
    // compilers do not know by name, needs the same registers as AVX2.
    __builtin_cpu_init();
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    Machine found;
    found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
    // One unit of an Intel core has the dot product, two have fp32 multiply-adds; AMD's cores have as many of both.
    found.slow_bf16_dot = found.avx512_bf16 && __builtin_cpu_is("intel");
    return found;
}
#elif defined(__aarch64__)
Machine detect_machine() { return {.neon = true}; }
#else
Machine detect_machine() { return {}; }
#endif

Machine limited(const Machine& machine, const char* limit) {
    const std::string_view name = limit == nullptr ? "" : limit;
    Machine result = machine;
    if (name == "generic") result.avx2 = result.neon = false;
    if (name == "generic" || name == "avx2") result.avx512 = false;
    if (name == "generic" || name == "avx2" || name == "avx512") result.avx512_bf16 = false;
    if (name == "avx512_bf16") result.slow_bf16_dot = false;
    return result;
}

const Machine& machine() {
    static const Machine found = limited(detect_machine(), std::getenv("HEADRACE_MAX_ISA"));
    return found;
}

}  // namespace headrace
