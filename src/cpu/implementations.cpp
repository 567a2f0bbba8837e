// The implementations of the CPU backend, fastest first.
#include "cpu/implementations.hpp"

namespace headrace::cpu {

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> all = chunk_implementations();
    const std::vector<const Implementation*> recurrent = recurrent_implementations();
    all.insert(all.end(), recurrent.begin(), recurrent.end());
    return all;
}

}  // namespace headrace::cpu
