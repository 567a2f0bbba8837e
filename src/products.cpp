// C++ entry of products of summaries: check the arguments, run them where the tensors lie.
#include <vector>

#include "core/guarded.hpp"
#include "core/machine.hpp"
#include "cpu/products/products.hpp"
#include "cuda/products/products.hpp"

namespace headrace {
namespace {

Status run(const ProductProblem& product) {
    return product.device == Device::cuda ? cuda::run(product) : cpu::run(product, machine());
}

}  // namespace

Status compose(const Summary& second, const Summary& first, const Summary& out, int threads, void* stream) {
    return guarded([&]() -> Status {
        std::vector<ProductProblem> products;
        if (Status status = make_products(second, first, out, threads, stream, &products); !status.ok()) return status;
        for (const ProductProblem& product : products) {
            if (Status status = run(product); !status.ok()) return status;
        }
        return {};
    });
}

Status apply(const Summary& summary, const TensorView& state, bool transposed, const TensorView& out, int threads,
             void* stream) {
    return guarded([&]() -> Status {
        ProductProblem product;
        if (Status status = make_product(summary, state, transposed, out, threads, stream, &product); !status.ok())
            return status;
        return run(product);
    });
}

}  // namespace headrace
