// The list of this backend's implementations.
#include "cuda/implementations.hpp"

namespace headrace::cuda {

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> list = walk_implementations();
    for (const Implementation* implementation : recurrent_implementations()) list.push_back(implementation);
    return list;
}

}  // namespace headrace::cuda
