// ptx_of_fat_binary: the PTX text inside what nvcc embeds into a program.
#pragma once

#include <string>

namespace headrace::ptx {

struct EmbeddedText {
    std::string text;
    int target = 0;  // 80 for compute_80
};

// `wrapper` is what __cudaRegisterFatBinary is given. The text that is bound to `own_target` (90: compute_90a), or else
// that of the highest target not above `highest_target` that is not bound to one architecture. Throws Fault: no such
// text, a compressed one, an unknown layout.
EmbeddedText ptx_of_fat_binary(const void* wrapper, int highest_target, int own_target = 0);

}  // namespace headrace::ptx
