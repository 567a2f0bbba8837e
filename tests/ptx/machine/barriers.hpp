// Barriers: the sixteen barriers of a block: who has arrived, when one is complete.
#pragma once

#include <array>
#include <vector>

#include "machine/warp.hpp"

namespace headrace::ptx {

class WarpRun;
class SharedMemory;

class Barriers {
  public:
    static constexpr unsigned count = 16;
    static constexpr int most_warps = 32;

    void start(std::vector<WarpRun>& warps, SharedMemory& shared);

    struct Arriving {
        int warp = 0;
        Mask lanes = 0;          // that arrive
        bool whole_warp = true;  // .aligned: counts as a full warp, whatever has exited of it
        unsigned barrier = 0;
        int threads = -1;     // -1: not given
        bool waits = true;    // false: bar.arrive
        Mask predicates = 0;  // of bar.red
    };
    // May complete the barrier, and then releases all that wait there. Throws Fault.
    void arrive(const Arriving& arriving);
    // Lanes have exited: a barrier of all threads may be complete without them.
    void after_exit();
    // All lanes have exited. Throws Fault where some had arrived, without waiting, at a barrier that was never
    // complete.
    void check_ended() const;
    // What is missing at a barrier, for a message.
    std::string missing(unsigned barrier) const;

  private:
    struct Use {
        bool open = false;
        int threads = -1, counted = 0;
        std::array<Mask, most_warps> arrived{}, waiting{};
        int popc = 0;
        bool all = true, any = false;
    };
    bool complete(const Use& use) const;
    void finish(unsigned barrier);

    std::vector<WarpRun>* warps_ = nullptr;
    SharedMemory* shared_ = nullptr;
    std::array<Use, count> uses_{};
};

}  // namespace headrace::ptx
