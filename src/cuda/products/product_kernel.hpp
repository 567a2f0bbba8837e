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
    // Of transitions and what is added or written, f32 or f64; a state that is multiplied may have any type.
    HEADRACE_DEVICE double number(const Strided& of, int i, int j) const {
        const std::int64_t place = offset_of(of, n, head, i, j);
        return of.dtype == DType::f64 ? reinterpret_cast<const double*>(of.data)[place]
                                      : static_cast<double>(reinterpret_cast<const float*>(of.data)[place]);
    }
    HEADRACE_DEVICE double factor(int i, int d) const { return number(args.a, i, d); }
    HEADRACE_DEVICE double of_b(int i, int j) const {
        return load_element<double>(args.b.data, args.b.dtype, offset_of(args.b, n, head, i, first + j));
    }
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
        const double value = sum + (args.c.given ? number(args.c, i, first + j) : 0);
        const std::int64_t place = offset_of(args.dst, n, head, i, first + j);
        if (args.dst.dtype == DType::f64) {
            reinterpret_cast<double*>(args.dst.data)[place] = value;
        } else {
            reinterpret_cast<float*>(args.dst.data)[place] = static_cast<float>(value);
        }
    }
};

}  // namespace headrace::cuda
