// THE LIST: every implementation, in order of preference; the only file that names all backends.
#include "core/implementation.hpp"
#include "cpu/implementations.hpp"
#include "cuda/implementations.hpp"

namespace headrace {

const std::vector<const Implementation*>& all_implementations() {
    // Never destroyed: the list must outlive every caller, and its objects stay reachable.
    static const auto& list = *[] {
        auto* all = new std::vector<const Implementation*>(cpu::implementations());
        for (const Implementation* implementation : cuda::implementations()) all->push_back(implementation);
        return all;
    }();
    return list;
}

}  // namespace headrace
