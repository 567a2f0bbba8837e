// The implementations of the CPU backend, fastest first.
#include "cpu/implementations.hpp"

namespace headrace::cpu {

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> all = chunk_implementations();
    for (const auto& list : {summary_implementations(), recurrent_implementations(), recurrent_summaries()}) {
        all.insert(all.end(), list.begin(), list.end());
    }
    return all;
}

}  // namespace headrace::cpu
