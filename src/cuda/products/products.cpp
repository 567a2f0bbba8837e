// Products of summaries on a CUDA device: a block for each sequence, head and block of columns.
#include "cuda/products/products.hpp"

#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/args.hpp"
#include "cuda/plumbing/launch.hpp"

namespace headrace::cuda {
Status run(const ProductProblem& product) {
    const OnDevice device(named_views(product));
    if (!device.status().ok()) return device.status();
    const std::int64_t N = product.dst.shape[0], HV = product.dst.shape[1], rows = product.dst.shape[2],
                       columns = product.dst.shape[3];
    if (rows == 0) return {};
    ProductArgs args{strided(product.dst), strided(product.a),     strided(product.b),       strided(product.c), HV,
                     factor_of(product),   static_cast<int>(rows), static_cast<int>(columns)};
    const std::int64_t blocks = N * HV * ((columns + product_columns - 1) / product_columns);
    return launch(product_kernel(), "product", blocks, {launched_threads}, &args, product.stream);
}

}  // namespace headrace::cuda
