// THE LIST: every implementation, in order of preference; the only file that names all backends.
#include "core/implementation.hpp"
#include "cpu/implementations.hpp"

namespace headrace {

const std::vector<const Implementation*>& all_implementations() {
    // Never destroyed: the list must outlive every caller, and its objects stay reachable.
    static const auto& list = *new std::vector<const Implementation*>(cpu::implementations());
    return list;
}

}  // namespace headrace
