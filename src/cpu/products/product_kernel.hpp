// ProductKernel: one product of summaries, a b + c, of one sequence and head.
#pragma once

#include "cpu/plumbing/kernel_table.hpp"
#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct ProductKernel {
    using Arithmetic = std::conditional_t<sizeof(T) == 8, F64, F32>;
    const ProductArgs& args;
    int rows, inner, columns;
    Tile<T> dst, a, b;

    ProductKernel(const ProductArgs& arguments, Arena& arena)
        : args(arguments), rows(round_up(args.rows, 16)), inner(round_up(args.inner, 16)), columns(round_up(args.columns, 16)) {
        dst = arena.tile<T>(rows, columns);
        b = arena.tile<T>(inner, columns);
        a = arena.tile<T>(rows > inner ? rows : inner, rows > inner ? rows : inner);
    }
    void product(std::int64_t n, std::int64_t head) const {
        load_state(dst, args.c, n, head, args.rows, 0, args.columns);
        load_state(b, args.b, n, head, args.inner, 0, args.columns);
        switch (args.factor) {
            case Factor::matrix:
                load_state(a, args.a, n, head, args.rows, 0, args.inner);
                add_product({a.data, a.row, 1});
                break;
            case Factor::transposed:
                load_state(a, args.a, n, head, args.inner, 0, args.rows);
                add_product({a.data, 1, a.row});
                break;
            case Factor::diagonal: add_diagonal(n, head); break;
            case Factor::identity: add(dst, b, rows, columns); break;
        }
        store_state(args.dst, dst, n, head, args.rows, 0, args.columns);
    }

  private:
    void add_product(Left<Arithmetic> left) const {
        matmul<Arithmetic>(dst.data, dst.row, left, {b.data, b.row}, rows, columns, inner, Part::full, {Start<T>::add});
    }
    void add_diagonal(std::int64_t n, std::int64_t head) const {
        for (int c = 0; c < args.rows; ++c) {
            const reg<T> factor = broadcast<T>(static_cast<T>(load_element(element_at(args.a, n, head, c), args.a.dtype, 0)));
            for (int j = 0; j < columns; j += lanes<T>) {
                store<T>(dst.at(c) + j, fma(factor, load<T>(b.at(c) + j), load<T>(dst.at(c) + j)));
            }
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
