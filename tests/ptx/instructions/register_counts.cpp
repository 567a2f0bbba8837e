// setmaxnreg: the registers of a warpgroup's threads, which share those that the block was launched with.
#include <algorithm>
#include <numeric>

#include "machine/block.hpp"

namespace headrace::ptx {
namespace {

constexpr int warps_of_group = 4, least = 24, most = 256, unit = 8;

// A group does so once: of a second time the others would have to know.
void set_count(Warp& warp, const Step& step, Mask) {
    int& own = warp.block->register_counts[static_cast<std::size_t>(warp.index)];
    if (own < 0) throw_fault("has set its number of registers before: not done by this interpreter");
    const int launched = launched_registers(*warp.block);
    if (step.variant != 0 ? step.other < launched : step.other > launched)
        throw_fault(step.variant != 0 ? "takes " : "keeps ", step.other, " registers of the ", launched,
                    " that it was launched with");
    own = -step.other;
}

}  // namespace

int launched_registers(const Block& block) {
    constexpr int of_multiprocessor = 65536, most_of_thread = 255;
    if (block.launch_bound == 0) throw_fault("setmaxnreg in a kernel without .maxntid and .minnctapersm");
    return std::min(of_multiprocessor / block.launch_bound / unit * unit, most_of_thread / unit * unit);
}

bool decode_register_count(const Statement& statement, Decoder& decoder, Step& step) {
    if (statement.opcode != "setmaxnreg") return false;
    const auto& words = statement.modifiers;
    const bool known = words.size() == 4 && (words[0] == "inc" || words[0] == "dec") && words[1] == "sync" &&
                       words[2] == "aligned" && words[3] == "u32" && statement.operands.size() == 1 &&
                       statement.operands[0].kind == Operand::Kind::immediate;
    if (!known) decoder.unknown(statement);
    step.meeting = Meeting::whole_warp;
    step.other = static_cast<int>(statement.operands[0].bits);
    step.variant = words[0] == "inc" ? 1 : 0;
    if (step.other < least || step.other > most || step.other % unit != 0)
        throw_fault("setmaxnreg of ", step.other, ": expected a multiple of 8 from 24 to 256");
    step.execute = set_count;
    return true;
}

void check_register_counts(const Block& block) {
    const auto& counts = block.register_counts;
    if (std::all_of(counts.begin(), counts.end(), [](int count) { return count >= 0; })) return;
    const auto of_warp = [&](int count) { return count < 0 ? -count : launched_registers(block); };
    for (std::size_t warp = 0; warp < counts.size(); ++warp) {
        const std::size_t first = warp / warps_of_group * warps_of_group;
        if (counts[warp] != counts[first] || first + warps_of_group > counts.size())
            throw_fault("warps ", first, " and ", warp, " of a warpgroup have ", of_warp(counts[first]), " and ",
                        of_warp(counts[warp]), " registers, or the group has no four warps");
    }
    const int all = std::accumulate(counts.begin(), counts.end(), 0,
                                    [&](int sum, int count) { return sum + of_warp(count); }),
              launched = static_cast<int>(counts.size()) * launched_registers(block);
    if (all > launched)
        throw_fault("setmaxnreg: the block's warps take ", all, " registers for a lane of each, ", launched,
                    " were launched: some would wait for ever");
}

}  // namespace headrace::ptx
