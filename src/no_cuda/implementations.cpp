// A build without CUDA: nothing serves tensors of a GPU.
#include <string>

#include "cuda/implementations.hpp"
#include "cuda/layers/layers.hpp"
#include "cuda/products/products.hpp"

namespace headrace::cuda {
namespace {

Status absent(const char* name) {
    return {Code::unsupported, std::string(name) + ": expected a CPU tensor, CUDA is not compiled in (HEADRACE_CUDA)"};
}

}  // namespace

std::vector<const Implementation*> implementations() { return {}; }
Status run(const ConvolutionProblem&) { return absent("x"); }
Status run(const RmsNormProblem&) { return absent("x"); }
Status run(const ProductProblem&) { return absent("out"); }

}  // namespace headrace::cuda
