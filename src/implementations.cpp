// THE LIST: every implementation, in order of preference; the only file that names all backends.
#include "core/implementation.hpp"
#include "cpu/implementations.hpp"

namespace headrace {

const std::vector<const Implementation*>& all_implementations() {
    static const std::vector<const Implementation*> list = cpu::implementations();
    return list;
}

}  // namespace headrace
