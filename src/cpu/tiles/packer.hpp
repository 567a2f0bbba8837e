// Packer: the operands of products, in the form that matmul reads.
#pragma once

#include <cassert>

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Brings tiles into the form that matmul<A> reads. F32 and F64 read tiles as they are, but for transposed right
// operands; Bf16 rounds to pairs along the contraction. Buffers live until reset().
template <class A>
struct Packer {
    using T = typename A::real;
    using unit = typename A::unit;
    unit* buffer = nullptr;
    std::size_t used = 0, capacity = 0;
    enum class Form { left, right, right_transposed };
    struct Kept {
        const T* tile;
        Form form;
        const unit* packed;
        long row;
    };
    static constexpr int most_kept = 12;
    Kept keeps[most_kept];
    int kept = 0;

    void carve(Arena& arena, std::size_t units) {
        capacity = units;
        buffer = arena.take<unit>(units);
    }
    void reset() {
        used = 0;
        kept = 0;
    }
    unit* take(int rows, long row) {
        unit* piece = buffer + used;
        used += static_cast<std::size_t>(rows) * static_cast<std::size_t>(row);
        assert(used <= capacity);
        return piece;
    }

    // a[i,k] = x[i,k]
    Left<A> left(Tile<T> x, int rows, int columns) {
        if constexpr (A::pack == 1) {
            return {x.data, x.row, 1};
        } else {
            return left_of([&](int i, int j) { return load<T>(x.at(i) + j); }, rows, columns);
        }
    }
    // a[i,k] = x[k,i]
    Left<A> left_transposed(Tile<T> x, int rows, int columns) {
        if constexpr (A::pack == 1) {
            return {x.data, 1, x.row};
        } else {
            return transposed(right(x, rows, columns));
        }
    }
    // b[k,j] = x[k,j]
    Right<A> right(Tile<T> x, int rows, int columns) {
        if constexpr (A::pack == 1) {
            return {x.data, x.row};
        } else {
            return right_of([&](int i, int j) { return load<T>(x.at(i) + j); }, rows, columns);
        }
    }
    // As right and left, where the operands are kept by someone else.
    static void copy(const Copies<A>& copies, Tile<T> x, int rows, int columns) {
        const auto value = [&](int i, int j) { return load<T>(x.at(i) + j); };
        if (copies.right != nullptr) pack_rows(copies.right, copies.right_row, value, rows, columns);
        for (int i = 0; copies.left != nullptr && i < rows; ++i) {
            for (int j = 0; j < columns; j += lanes<T>) store_pairs_of(copies.left + i * copies.left_row + j / 2, value(i, j));
        }
    }
    // As left, right and right_transposed, of a tile that does not change until reset() and is packed once.
    Left<A> left_once(Tile<T> x, int rows, int columns) {
        if constexpr (A::pack == 1) return left(x, rows, columns);
        const Kept kept_left = once(x.data, Form::left, [&] { return left(x, rows, columns); });
        return {kept_left.packed, kept_left.row, 1};
    }
    Right<A> right_once(Tile<T> x, int rows, int columns) {
        if constexpr (A::pack == 1) return right(x, rows, columns);
        const Kept kept_right = once(x.data, Form::right, [&] { return right(x, rows, columns); });
        return {kept_right.packed, kept_right.row};
    }
    Right<A> right_transposed_once(Tile<T> x, int rows, int columns) {
        const Kept kept_right = once(x.data, Form::right_transposed, [&] { return right_transposed(x, rows, columns); });
        return {kept_right.packed, kept_right.row};
    }
    // The same of scale x[i,j] weights[i,j], or factors[i] x[i,j], which F32 and F64 leave in `spare`.
    Left<A> left(Tile<T> x, Tile<T> weights, T scale, Tile<T> spare, int rows, int columns) {
        if constexpr (A::pack == 1) {
            multiply(spare, x, weights, scale, rows, columns);
            return left(spare, rows, columns);
        } else {
            return left_of([&](int i, int j) { return load<T>(x.at(i) + j) * load<T>(weights.at(i) + j) * scale; }, rows, columns);
        }
    }
    Left<A> left_transposed(Tile<T> x, Tile<T> weights, T scale, Tile<T> spare, int rows, int columns) {
        if constexpr (A::pack == 1) {
            multiply(spare, x, weights, scale, rows, columns);
            return left_transposed(spare, rows, columns);
        } else {
            const auto weighted = [&](int i, int j) { return load<T>(x.at(i) + j) * load<T>(weights.at(i) + j) * scale; };
            return transposed(right_of(weighted, rows, columns));
        }
    }
    Right<A> right(Tile<T> x, const T* factors, Tile<T> spare, int rows, int columns) {
        if constexpr (A::pack == 1) {
            scale_rows(spare, x, factors, T(1), rows, columns);
            return right(spare, rows, columns);
        } else {
            return right_of([&](int i, int j) { return load<T>(x.at(i) + j) * broadcast<T>(factors[i]); }, rows, columns);
        }
    }
    // b[k,j] = x[j,k], or x[j,k] weights[j,k]
    Right<A> right_transposed(Tile<T> x, int rows, int columns) {
        return right_transposed_of([&](int i, int j) { return load<T>(x.at(i) + j); }, rows, columns);
    }
    Right<A> right_transposed(Tile<T> x, Tile<T> weights, int rows, int columns) {
        return right_transposed_of([&](int i, int j) { return load<T>(x.at(i) + j) * load<T>(weights.at(i) + j); }, rows, columns);
    }

  private:
    template <class Pack>
    Kept once(const T* tile, Form form, const Pack& pack) {
        for (int i = 0; i < kept; ++i) {
            if (keeps[i].tile == tile && keeps[i].form == form) return keeps[i];
        }
        assert(kept < most_kept);
        const auto packed = pack();
        return keeps[kept++] = {tile, form, packed.data, packed.row};
    }
    static Left<A> transposed(Right<A> pairs) { return {pairs.data, 1, pairs.row}; }
    template <class Value>
    Left<A> left_of(const Value& value, int rows, int columns) {
        const long row = columns / 2 + 16;
        unit* packed = take(rows, row);
        pack_neighbours(packed, row, value, rows, columns);
        return {packed, row, 1};
    }
    template <class Value>
    Right<A> right_of(const Value& value, int rows, int columns) {
        const long row = columns + 16;
        unit* packed = take(rows / 2, row);
        pack_rows(packed, row, value, rows, columns);
        return {packed, row};
    }
    template <class Value>
    static void pack_rows(unit* packed, long row, const Value& value, int rows, int columns) {
        for (int i = 0; i < rows; i += 2) {
            for (int j = 0; j < columns; j += lanes<T>) store_pairs(packed + i / 2 * row + j, value(i, j), value(i + 1, j));
        }
    }
    template <class Value>
    Right<A> right_transposed_of(const Value& value, int rows, int columns) {
        const long row = rows + 16;
        unit* packed = take(columns / A::pack, row);
        if constexpr (A::pack == 1) {
            transpose_into<T>(packed, row, value, rows, columns);
        } else {
            const std::size_t mark = used;
            const long pairs_row = round_up(columns / 2, 16) + 16;
            unit* pairs = take(rows, pairs_row);
            pack_neighbours(pairs, pairs_row, value, rows, columns);
            for (int j = columns / 2; j < round_up(columns / 2, 16); ++j) {
                for (int i = 0; i < rows; ++i) pairs[i * pairs_row + j] = 0;
            }
            transpose_pairs(packed, row, pairs, pairs_row, rows, columns / 2);
            used = mark;
        }
        return {packed, row};
    }
    template <class Value>
    static void pack_neighbours(unit* packed, long row, const Value& value, int rows, int columns) {
        for (int i = 0; i < rows; ++i) {
            for (int j = 0; j < columns; j += 2 * lanes<T>) {
                const bool whole = j + lanes<T> < columns;
                store_neighbours(packed + i * row + j / 2, value(i, j), whole ? value(i, j + lanes<T>) : reg<T>{});
            }
        }
    }
    // 32-bit units moved as floats: no arithmetic touches them.
    static void transpose_pairs(unit* dst, long dst_row, const unit* a, long a_row, int rows, int columns) {
        constexpr int n = lanes<T>;
        for (int i = 0; i < rows; i += n) {
            for (int j = 0; j < columns; j += n) {
                reg<T> block[n];
                for (int r = 0; r < n; ++r) block[r] = load<T>(reinterpret_cast<const T*>(a + (i + r) * a_row + j));
                transpose<T>(block);
                for (int r = 0; r < n && j + r < columns; ++r) {
                    store<T>(reinterpret_cast<T*>(dst + (j + r) * dst_row + i), block[r]);
                }
            }
        }
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
