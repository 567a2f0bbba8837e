// Code: a function made ready to run: steps, the flow of control, and what the slots beside the registers hold.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checks/fragment_registers.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

// What a statement does to the flow of control.
enum class Course : std::uint8_t { next, branch, indexed, exit, barrier, warp_barrier, pause, trap };

// What bar and barrier do beside meeting; red: a result over the predicates of all threads.
enum class Arrival : std::uint8_t { sync, arrive, popc, all, any };

struct Control {
    Course course = Course::next;
    int target = 0;            // branch
    std::vector<int> targets;  // indexed
    int index = -1;            // slot of an indexed branch's index
    int reconvergence = 0;     // statement at which lanes that part here meet again
    Arrival arrival = Arrival::sync;
    int barrier = -1, threads = -1;   // slots of bar's operands; threads -1: not given
    int predicate = -1, result = -1;  // slots, for the reductions
    bool predicate_negated = false;
    int check = -1;  // of Code::checks
};

// Registers that some path reads before it writes them carry a mask of the lanes that did write. The compiler copies
// values that are not defined where nobody needs them (a phi of one path, the upper half of a pair): mov hands the mask
// on instead of looking at it, and what it packs counts as written. All other reads look; of wgmma's D where the
// predicate `scale` says that it is read. Also: which registers of wgmma's fragments another statement touches.
struct RegisterCheck {
    struct Line {
        int written;  // slot of the mask
        std::string name;
    };
    struct Copy {
        int to, from;  // slots of masks
    };
    std::vector<Line> guard, reads, writes, accumulators;
    std::vector<Copy> copies;
    int scale = -1;
    bool scale_negated = false;
    std::vector<FragmentRegister> fragment_reads, fragment_writes;
};

enum class Special : std::uint8_t {
    tid,
    ntid,
    ctaid,
    nctaid,
    laneid,
    warpid,
    nwarpid,
    smid,
    nsmid,
    lanemask,
    dynamic_shared
};
struct SpecialSlot {
    int slot = 0;
    Special special = Special::laneid;
    int component = 0;        // x, y, z; of lanemask: eq, le, lt, ge, gt
    std::uint32_t cut = ~0u;  // the bits that are kept: 16 where the instruction reads as many
};

struct Code {
    const Function* function = nullptr;
    std::vector<Step> steps;
    std::vector<Control> controls;
    std::vector<RegisterCheck> checks;
    std::vector<SpecialSlot> specials;
    int slots = 0, first_constant = 0;  // of the file; those from first_constant on begin as `constants` says
    std::vector<std::byte> constants;
    bool has_wgmma = false;
};

using AddressOf = std::function<std::uint64_t(const std::string&)>;

// `function` has its slots; `unwritten` as allocate_slots returned it. Throws Fault: the line and what is not known.
Code make_code(const Module& module, const Function& function, const std::vector<int>& unwritten,
               const AddressOf& address_of);

// "PTX line 12 \"add.s32 ...\"": for messages.
std::string describe(const Module& module, const Statement& statement);

}  // namespace headrace::ptx
