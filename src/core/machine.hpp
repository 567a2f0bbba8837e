// The instruction sets that this process may use.
#pragma once

#include "core/implementation.hpp"

namespace headrace {

// What processor and operating system offer.
Machine detect_machine();

// `machine` without what lies above `limit`: "generic", "avx2" or "avx512" (avx512 without bf16); of "avx512_bf16" with
// its dot product where fp32 is faster, too. Any other limit, nullptr included, leaves it as it is.
Machine limited(const Machine& machine, const char* limit);

// detect_machine() under the limit of the environment variable HEADRACE_MAX_ISA, found at the first call.
const Machine& machine();

}  // namespace headrace
