// The implementations of the CUDA backend, fastest first; none where headrace was built without it (src/no_cuda).
#pragma once

#include <vector>

#include "core/implementation.hpp"

namespace headrace::cuda {

std::vector<const Implementation*> tensor_implementations();     // "cuda.tensor": forward, backward by walks
const Implementation* tensor_sweeping_backward();                // its backward of the delta rule and of channel gates
std::vector<const Implementation*> split_implementations();      // "cuda.split"
std::vector<const Implementation*> walk_implementations();       // "cuda.walk"
std::vector<const Implementation*> recurrent_implementations();  // "cuda.recurrent"
std::vector<const Implementation*> implementations();            // all of them, in order of preference

}  // namespace headrace::cuda
