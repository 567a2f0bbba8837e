// BlockRun: one block of a launch while it runs; the turns of its warps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "machine/barriers.hpp"
#include "machine/block.hpp"
#include "machine/flow.hpp"
#include "machine/grid.hpp"

namespace headrace::ptx {

// Serves all blocks of a launch, one after the other.
class BlockRun {
  public:
    BlockRun(const Module& module, const Code& code, const Launch& launch, const Settings& settings,
             DeviceMemory& memory, Executions* counts);

    // Throws Fault with what is known inside; where() then says the rest.
    void run(std::uint32_t number);
    // "PTX line 3 "...", block (0,0,0), warp 1"
    std::string where() const;

  private:
    void start(std::uint32_t number);
    void fill_slots(const WarpRun& warp, std::byte* registers);
    std::uint32_t special(const SpecialSlot& slot, int warp, int lane) const;
    void run_in_order();
    void run_at_random();
    bool run_warp(WarpRun& warp);
    bool any_live() const;
    void look_for_stuck(const WarpRun& warp);
    bool rest();
    [[noreturn]] void deadlock();

    const Module& module_;
    const Code& code_;
    const Launch& launch_;
    Settings settings_;
    Block block_;
    SharedMemory shared_;
    Barriers barriers_;
    std::vector<WarpRun> warps_;
    struct Release {
        void operator()(std::byte* bytes) const;
    };
    std::unique_ptr<std::byte, Release> registers_;
    Executions* counts_;
    std::mt19937_64 order_;
    const WarpRun* running_ = nullptr;
    bool at_statement_ = false;
};

}  // namespace headrace::ptx
