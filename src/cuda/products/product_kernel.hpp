// ProductKernel: columns of one product of summaries, a b + c, of one sequence and head; sums in double.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"
#include "cuda/tiles/tile_products.hpp"

namespace headrace::cuda {

struct ProductKernel {
    const ProductArgs& args;
    std::int64_t n, head;
    int first, count;  // columns

    HEADRACE_DEVICE void product() const {
        switch (args.factor) {
            case Factor::matrix: add_product([&](int i, int d) { return factor(i, d); }); break;
            case Factor::transposed: add_product([&](int i, int d) { return factor(d, i); }); break;
            case Factor::diagonal:
                // Of the additive rule without channel gates one number serves all rows: its stride is 0.
                each_element(args.rows, count, [&](int i, int j) { leave(i, j, factor(i, 0) * of_b(i, j)); });
                break;
            case Factor::identity:
                each_element(args.rows, count, [&](int i, int j) { leave(i, j, of_b(i, j)); });
                break;
        }
    }

  private:
    HEADRACE_DEVICE double element(const Strided& of, int i, int j) const {
        return load_element<double>(of.data, of.dtype, offset_of(of, n, head, i, j));
    }
    HEADRACE_DEVICE double factor(int i, int d) const { return element(args.a, i, d); }
    HEADRACE_DEVICE double of_b(int i, int j) const { return element(args.b, i, first + j); }
    template <class A>
    HEADRACE_DEVICE void add_product(A a) const {
        const int size = round_up(args.rows, 16);
        multiply<double, few_columns>([&](int i, int d) { return i < args.rows && d < args.rows ? a(i, d) : 0; },
                                      [&](int d, int j) { return d < args.rows && j < count ? of_b(d, j) : 0; }, size,
                                      product_columns, size, Part::full,
                                      [&](int i, int j, double sum) {
                                          if (i < args.rows && j < count) leave(i, j, sum);
                                      });
    }
    HEADRACE_DEVICE void leave(int i, int j, double sum) const {
        const double value = sum + (args.c.given ? element(args.c, i, first + j) : 0);
        store_element(args.dst.data, args.dst.dtype, offset_of(args.dst, n, head, i, first + j), value);
    }
};

}  // namespace headrace::cuda
