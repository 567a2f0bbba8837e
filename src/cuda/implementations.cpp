// The list of this backend's implementations.
#include "cuda/implementations.hpp"

namespace headrace::cuda {

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> list;
    for (const auto& form :
         {tensor_implementations(), split_implementations(), walk_implementations(), recurrent_implementations()})
        list.insert(list.end(), form.begin(), form.end());
    return list;
}

}  // namespace headrace::cuda
