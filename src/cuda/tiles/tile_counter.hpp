// TileCounter: what the primitives of tile_ops.hpp and rows.hpp do, added up on the host in place of doing it.
#pragma once

#include <memory>

#include "cuda/tiles/rows.hpp"
#include "cuda/tiles/tile_products.hpp"
#include "headrace/launches.hpp"

namespace headrace::cuda {

// Whether neighbouring lanes reach for neighbours in a row, or in a column, or all for one element.
enum class Reach { row, column, one };

constexpr double quotient_up(double count, double size) {
    const auto whole = static_cast<std::int64_t>(count / size);
    return static_cast<double>(static_cast<double>(whole) * size < count ? whole + 1 : whole);
}

// Memory that nobody touches, in which the tiles of a block get addresses: shared memory, and behind it what that has
// no room for.
struct CountedMemory {
    std::unique_ptr<char[]> bytes;
    Arena arena;
    explicit CountedMemory(const Arena& measured)
        : bytes(new char[measured.shared_size + measured.spill_used]),
          arena{bytes.get(), bytes.get() + measured.shared_size, measured.shared_size} {}
};

// Counts are those of a whole block; waits are those of one of its warps, which has its part of the work.
struct TileCounter {
    KernelWork work;
    int warps = block_warps;
    const char* spill = nullptr;  // where tiles begin for which shared memory has no room

    int threads() const { return warps * warp_lanes; }
    static double parts(int columns) { return quotient_up(columns, warp_lanes); }

    template <class T>
    bool spilled(const T* data) const {
        return reinterpret_cast<const char*>(data) >= spill;
    }

    // `count` accesses of warps
    template <class T>
    void access(const T* data, double count, Reach reach = Reach::row) {
        const double size = sizeof(T);
        work.tile_bytes += count * (reach == Reach::one ? 128 : warp_lanes * size);
        if (spilled(data))
            work.spill_bytes += count * (reach == Reach::row ? warp_lanes * size : sector * lines(reach));
    }
    template <class T>
    void access(Tile<T> tile, double count, Reach reach = Reach::row) {
        if (tile.data != nullptr) access(tile.data, count, reach);
    }
    // A warp waits for elements of the tiles, loaded together.
    template <class... Tiles>
    void wait(double count, Tiles... tiles) {
        ((spilled(tiles.data) && tiles.data != nullptr) || ...) ? work.spill_waits += count : work.tile_waits += count;
    }
    void fma(double count) { work.fma_flop += count * 2 * warp_lanes; }  // of warps
    void shuffle(double count) { work.tile_bytes += 128 * count; }
    void barrier() { ++work.barriers; }

    // for_each and the like over [rows, columns], an access to an element of each tile
    template <class... Tiles>
    void each_element(int rows, int columns, Tiles... tiles) {
        (access(tiles, rows * parts(columns)), ...);
        wait(quotient_up(rows, warps) * parts(columns), tiles...);
        barrier();
    }
    template <class T, class... Tiles>
    void each_row_sum(int rows, int columns, Tile<T> tile, Tiles... tiles) {
        each_element(rows, columns, tile, tiles...);
        sums_of_warp<T>(rows);
    }
    template <class T>
    void sums_of_warp(double count) {
        shuffle(5 * count * (sizeof(T) / 4.0));
        work.tile_waits += 5 * quotient_up(count, warps);
    }
    // A thread for each of `count` numbers, and so many accesses of it to small vectors in shared memory.
    void each(double count, double accesses) {
        work.tile_bytes += quotient_up(count, warp_lanes) * accesses * 128;
        work.tile_waits += quotient_up(count, threads()) * accesses;
        barrier();
    }

    // multiply<T, width>(a, b, rows, columns, depth, part): b is reached along its rows or columns; a loads so many
    // numbers for an element, b of doubles b_loads. What is left goes to dst, which is read first where it is `added`
    // to.
    enum class Leave { store, add };
    template <class T>
    void multiply(int width, Tile<T> dst, Leave leave, Tile<T> a, double a_loads, Tile<T> b, Reach b_reach, int rows,
                  int columns, int depth, Part part, double b_loads = 1) {
        if (sizeof(T) == 8)
            return multiply_doubles(width, dst, leave, a, a_loads, b, b_loads, rows, columns, depth, part);
        double terms = 0;  // of all groups of four rows
        for (int i = 0; i < rows; i += 4)
            terms += part == Part::a_upper ? depth - i : part == Part::a_lower && i + 4 < depth ? i + 4 : depth;
        const double column_blocks = quotient_up(columns, warp_lanes * width);
        fma(terms * column_blocks * 4 * width);
        access(a, terms * column_blocks * 4 * a_loads, Reach::one);
        access(b, terms * parts(columns), b_reach);
        wait(terms * column_blocks / warps, a, b);
        access(dst, rows * parts(columns) * (leave == Leave::add ? 2 : 1));
        barrier();
    }
    template <class T>
    void multiply_doubles(int width, Tile<T> dst, Leave leave, Tile<T> a, double a_loads, Tile<T> b, double b_loads,
                          int rows, int columns, int depth, Part part) {
        const int height = width < wide ? 8 : 16;
        double terms = 0, longest = 0;  // of all of a warp's blocks, and of those of the first warp
        int tile = 0;
        for (int i = 0; i < rows; i += height)
            for (int j = 0; j < columns; j += 16, ++tile) {
                const bool nothing = part == Part::lower_sums && j >= i + height;
                const int its = part == Part::a_upper   ? depth - i / 16 * 16
                                : part == Part::a_lower ? i / 16 * 16 + 16
                                                        : depth;
                terms += nothing ? 0 : its;
                if (tile % warps == 0) longest += nothing ? 0 : its;
            }
        products(terms / 4 * (height / 8) * 2);
        access(a, terms / 4 * (height / 8) * a_loads);
        access(b, terms / 4 * 2 * b_loads);
        wait(longest / 16, a, b);
        access(dst, rows * columns / 32.0 * (leave == Leave::add ? 2 : 1));
        barrier();
    }
    void products(double count) { work.tensor_flop += count * flop_of_f64_product; }  // multiply_f64
    static constexpr double flop_of_f64_product = 2 * 8 * 8 * 4;

    // solve_unit_lower(x, n, rows, columns): a thread has a column, of doubles a warp has eight
    template <class T>
    void solve(Tile<T> x, Tile<T> n, int rows, int columns) {
        if (sizeof(T) == 8) {
            const double steps = rows / 8.0, blocks = columns / 8.0, before = steps * (steps - 1);  // products
            products(before * blocks);
            access(n, (before + 8 * steps) * blocks);
            access(x, (before + 4 * steps) * blocks);
            fma(14 * steps * blocks);
            shuffle(28 * steps * blocks);
            wait((before / 2 + 8 * steps) * quotient_up(blocks, warps), x, n);
            return barrier();
        }
        const double terms = rows * (rows - 1) / 2.0, of_columns = parts(columns);
        fma(terms * of_columns);
        access(n, terms * of_columns, Reach::one);
        access(x, (terms + 2.0 * rows) * of_columns);
        wait(terms * quotient_up(columns, threads()), x, n);
        barrier();
    }

    // ---- tensors, over [rows, columns]: load_tokens, whose threads have pieces of rows at once where they lie so ----
    template <class T>
    void load_tokens(double KernelWork::*bytes, const Strided& tensor, Tile<T> dst, int rows, int columns) {
        if (columns % 4 != 0) return load(bytes, tensor, dst, rows, columns);
        access(dst, rows * round_up(columns, 16) / 32.0);
        barrier();
        if (!tensor.given) return;
        work.*bytes += static_cast<double>(rows) * columns * static_cast<double>(size_of(tensor.dtype));
        work.memory_waits += quotient_up(rows, 4 * (threads() >> lanes_of_row(columns))) * quotient_up(columns, 128);
    }
    // ---- load_state, store_tokens and the like ----
    template <class T>
    void load(double KernelWork::*bytes, const Strided& tensor, Tile<T> dst, int rows, int columns) {
        access(dst, rows * parts(round_up(columns, 16)));
        if (tensor.given)
            work.*bytes += static_cast<double>(rows) * columns * static_cast<double>(size_of(tensor.dtype));
        if (tensor.given) work.memory_waits += quotient_up(rows, warps) * parts(columns);
        barrier();
    }
    template <class T>
    void store(double KernelWork::*bytes, const Strided& tensor, Tile<T> values, int rows, int columns) {
        if (!tensor.given) return;
        each_element(rows, columns, values);
        work.*bytes += static_cast<double>(rows) * columns * static_cast<double>(size_of(tensor.dtype));
    }

  private:
    static constexpr double sector = 32;
    static double lines(Reach reach) { return reach == Reach::column ? warp_lanes : 1; }
};

}  // namespace headrace::cuda
