// products: products of the matrices of summaries in f32 and f64, compiled once per ISA.
#include "cpu/products/product_kernel.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct ProductEntry {
    static std::size_t scratch(const ProductArgs& args) {
        Arena arena;
        ProductKernel<T>(args, arena);
        return arena.used;
    }
    static void product(const ProductArgs& args, std::int64_t n, std::int64_t head, void* memory) {
        Arena arena{static_cast<char*>(memory)};
        ProductKernel<T>(args, arena).product(n, head);
    }
    static ProductKernels entries() { return {scratch, product}; }
};

void fill_products(ProductKernels (&kernels)[2]);
void fill_products(ProductKernels (&kernels)[2]) {
    kernels[0] = ProductEntry<float>::entries();
    kernels[1] = ProductEntry<double>::entries();
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
