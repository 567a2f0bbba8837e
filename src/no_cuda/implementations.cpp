// A build without CUDA: nothing serves tensors of a GPU.
#include "cuda/implementations.hpp"
#include "cuda/layers/layers.hpp"

namespace headrace::cuda {
namespace {

Status absent() { return {Code::unsupported, "x: expected a CPU tensor, CUDA is not compiled in (HEADRACE_CUDA)"}; }

}  // namespace

std::vector<const Implementation*> implementations() { return {}; }
Status run(const ConvolutionProblem&) { return absent(); }
Status run(const RmsNormProblem&) { return absent(); }

}  // namespace headrace::cuda
