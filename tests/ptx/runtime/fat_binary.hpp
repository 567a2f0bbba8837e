// ptx_of_fat_binary: the PTX text inside what nvcc embeds into a program.
#pragma once

#include <string>

namespace headrace::ptx {

struct EmbeddedText {
    std::string text;
    int target = 0;  // 80 for compute_80
};

// `wrapper` is what __cudaRegisterFatBinary is given. The text of the highest target not above `highest_target`, an
// entry that is not bound to one architecture (as compute_90a is). Throws Fault: no such text, a compressed one, an
// unknown layout.
EmbeddedText ptx_of_fat_binary(const void* wrapper, int highest_target);

}  // namespace headrace::ptx
