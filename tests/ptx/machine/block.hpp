// Block: one thread block while it runs: its place in the grid, memories and asynchronous copies, as instructions see
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "checks/device_memory.hpp"
#include "checks/fragment_registers.hpp"
#include "checks/shared_memory.hpp"
#include "machine/settings.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

// Copies of one thread between issue and landing; instructions/async.cpp.
struct AsyncCopies;
// Products of a block's warpgroups between issue and landing; instructions/wgmma.cpp.
struct AsyncProducts;

// Generic addresses: shared and local windows lie where no device address can (the first GiB); cvta adds the base.
inline constexpr std::uint64_t shared_window = std::uint64_t{1} << 24, local_window = std::uint64_t{1} << 25,
                               window_bytes = std::uint64_t{1} << 24;
// Where a block's own shared memory begins: CUDA keeps the first KiB for itself (CUDA C++ Programming Guide, compute
// capabilities 8.x and 9.0), and an address without its beginning is nobody's.
inline constexpr std::uint32_t first_shared = 1024;

class Block {
  public:
    std::uint32_t number = 0;  // in the grid, x fastest
    std::uint32_t index[3] = {}, grid[3] = {}, threads[3] = {};
    const Settings* settings = nullptr;
    DeviceMemory* memory = nullptr;
    SharedMemory* shared = nullptr;
    const std::vector<std::byte>* parameters = nullptr;
    std::size_t local_bytes = 0;                  // per thread
    std::vector<std::byte> local, local_written;  // thread t at t * local_bytes; written: a byte for each
    AsyncCopies* copies = nullptr;                // made by async.cpp when the block starts
    AsyncProducts* products = nullptr;            // likewise by wgmma.cpp; null: the kernel has no wgmma
    // Of each warp's lanes, below zero once setmaxnreg has set it, and what the launch bounds say of them: the product
    // of .maxntid and .minnctapersm, 0: not given.
    std::vector<int> register_counts;
    int launch_bound = 0;
    std::mt19937_64 random;
};

// async.cpp: called by the block's loop.
AsyncCopies* make_async_copies(Block& block, int threads);
void destroy_async_copies(AsyncCopies* copies);
void check_no_copies_in_flight(const Warp& warp, Mask exiting);  // Fault: a thread ends with copies in flight

// register_counts.cpp. Fault: at the end of a block warps of a group differ, or all have more than were launched.
int launched_registers(const Block& block);
void check_register_counts(const Block& block);

// wgmma.cpp, likewise; `slots` of the register file.
AsyncProducts* make_async_products(int warps, int slots);
void destroy_async_products(AsyncProducts* products);
FragmentRegisters& fragment_registers(const Warp& warp);
void check_products_at_exit(const Warp& warp);  // Fault: products in flight, or fewer than its warpgroup's others

}  // namespace headrace::ptx
