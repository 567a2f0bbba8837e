// C++ entry of products of summaries: check the arguments, run them on the CPU.
#include <vector>

#include "core/guarded.hpp"
#include "core/machine.hpp"
#include "cpu/products/products.hpp"

namespace headrace {

Status compose(const Summary& second, const Summary& first, const Summary& out, int threads) {
    return guarded([&]() -> Status {
        std::vector<ProductProblem> products;
        if (Status status = make_products(second, first, out, threads, &products); !status.ok()) return status;
        for (const ProductProblem& product : products) {
            if (Status status = cpu::run(product, machine()); !status.ok()) return status;
        }
        return {};
    });
}

Status apply(const Summary& summary, const TensorView& state, bool transposed, const TensorView& out, int threads) {
    return guarded([&]() -> Status {
        ProductProblem product;
        if (Status status = make_product(summary, state, transposed, out, threads, &product); !status.ok()) return status;
        return cpu::run(product, machine());
    });
}

}  // namespace headrace
