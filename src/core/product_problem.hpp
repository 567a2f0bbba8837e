// ProductProblem: one validated product of summaries; nothing below checks user input again.
#pragma once

#include <vector>

#include "core/factor.hpp"
#include "core/validation.hpp"
#include "headrace/summary.hpp"

namespace headrace {

// dst = a b + c for each of N sequences and HV heads, dst, b and c seen as [N, HV, rows, columns]. a: [N, HV, K, K],
// its diagonal [N, HV, K], one number for the whole diagonal [N, HV], or not given: the identity. c may be absent.
struct ProductProblem {
    TensorView dst, a, b, c;
    bool transposed = false;
    bool wide = false;  // computed in double
    int threads = 1;
    Device device = Device::cpu;  // of all tensors
    void* stream = nullptr;       // of those of CUDA
};

// compose as the products that it asks for; apply as one.
Status make_products(const Summary& second, const Summary& first, const Summary& out, int threads, void* stream,
                     std::vector<ProductProblem>* products);
Status make_product(const Summary& summary, const TensorView& state, bool transposed, const TensorView& out,
                    int threads, void* stream, ProductProblem* product);

Factor factor_of(const ProductProblem& product);
std::vector<NamedView> named_views(const ProductProblem& product);

}  // namespace headrace
