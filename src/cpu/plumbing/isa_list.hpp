// isa_list: the ISAs compiled in, fastest first, with the test whether the running machine has them.
#pragma once

#include <string>
#include <vector>

#include "core/implementation.hpp"
#include "cpu/plumbing/kernel_table.hpp"

namespace headrace::cpu {

struct Isa {
    std::string name;
    std::string needs;  // "AVX-512", for refusals
    bool (*available)(const Machine&);
    const KernelTable& (*kernels)();
    bool bf16_only;  // only the chunk form on bf16 inputs
};

const std::vector<Isa>& isas();

}  // namespace headrace::cpu
