// tensor_memory: the memory of a block of the kernels on tensor cores, all of it shared, at places known to the
// compiler.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/tile_ops.hpp"

namespace headrace::cuda {

// Matrices begin at multiples of their rows, those for products of groups at multiples of group_multiple.
extern __shared__ __align__(1024) char block_memory[];

HEADRACE_DEVICE Arena block_arena() { return {block_memory, nullptr, ~std::size_t{0}}; }

// What a Block carves when it is made.
template <class Block>
BlockMemory shared_memory_of(const KernelArgs& args, std::size_t /*shared_limit*/) {
    Arena arena{nullptr, nullptr, ~std::size_t{0}};
    Block(args, arena);
    return {arena.shared_used, 0};
}

}  // namespace headrace::cuda
