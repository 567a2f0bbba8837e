// Address operands: how a step keeps them, and where a generic address leads.
#pragma once

#include <cstdint>

#include "machine/block.hpp"
#include "machine/fault.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

// In Step::variant: the base register of the step's address (of the second one, where it has two) is 64 bits wide.
inline constexpr int wide_base = 1 << 16, wide_second_base = 1 << 17;

// Fills from[position] with the base's slot, and variant's bit if it is wide. The result is the offset.
inline std::int64_t decode_address(const Statement& statement, const Operand& operand, Decoder& decoder, Step& step,
                                   int position, int wide_bit) {
    if (operand.kind != Operand::Kind::address || operand.parts.size() != 1) decoder.unknown(statement);
    const Operand& base = operand.parts[0];
    const bool wide = base.kind != Operand::Kind::reg || bytes_of(decoder.type_of(base)) == 8;
    step.from[static_cast<std::size_t>(position)] = decoder.source(base, wide ? Type::u64 : Type::u32);
    if (wide) step.variant |= wide_bit;
    return static_cast<std::int64_t>(operand.bits);
}

// addresses[lane], for the lanes of the mask.
inline void gather_addresses(const Warp& warp, int slot, std::int64_t offset, bool is_wide, Mask active,
                             std::uint64_t* addresses) {
    const auto add = static_cast<std::uint64_t>(offset);
    if (is_wide) {
        const std::uint64_t* base = warp.u64(slot);
        for_lanes(active, [&](int lane) { addresses[lane] = base[lane] + add; });
    } else {
        const std::uint32_t* base = warp.u32(slot);
        // in 32 bits: nvcc writes [%r1+252] where %r1 is -128
        for_lanes(active, [&](int lane) { addresses[lane] = static_cast<std::uint32_t>(base[lane] + add); });
    }
}

// A generic address's own space, and the address in it. Everything that is in no window is global.
inline Space resolve(Space space, std::uint64_t& address) {
    if (space != Space::generic) return space;
    if (address - shared_window < window_bytes) return address -= shared_window, Space::shared;
    if (address - local_window < window_bytes) return address -= local_window, Space::local;
    return Space::global;
}

// Into a block's own shared memory.
inline std::uint32_t shared_offset(const Block& block, std::uint64_t address) {
    if (block.shared == nullptr) throw_fault("the block has no shared memory");
    if (address > 0xffffffffU) throw_fault("shared offset ", address, " reaches outside the block's shared memory");
    if (address < first_shared)
        throw_fault("touches shared address ", address, ", below ", first_shared, ", where the block's begin");
    return static_cast<std::uint32_t>(address - first_shared);
}

// f(lane) for the lanes of a mask; a Fault that it throws gets the lane's number.
template <class F>
inline void for_faulting_lanes(Mask active, F f) {
    int lane = 0;
    try {
        for (Mask rest = active; rest != 0; rest &= rest - 1) f(lane = __builtin_ctz(rest));
    } catch (const Fault& fault) {
        throw_fault("lane ", lane, " ", fault.what());
    }
}

// The wavefronts of shared memory beyond those that the bytes need: in each group of lanes that 128 bytes serve, the
// most words that any bank has to give. Offsets are aligned to `bytes`.
inline int extra_wavefronts(const std::uint64_t* offsets, Mask active, unsigned bytes) {
    const unsigned unit = bytes < 4 ? 4 : bytes, banks = 128 / unit, group = banks;
    int extra = 0;
    for (unsigned first = 0; first < lanes; first += group) {
        const Mask members = active >> first & (group == 32 ? all_lanes : (Mask{1} << group) - 1);
        std::uint64_t words[32];
        std::uint8_t bank_of[32], count[32] = {};
        int distinct = 0, most = 1;
        std::uint64_t last[32];
        for (Mask rest = members; rest != 0; rest &= rest - 1) {
            const std::uint64_t word = offsets[first + static_cast<unsigned>(__builtin_ctz(rest))] / unit;
            const auto bank = static_cast<std::uint8_t>(word % banks);
            bool known = count[bank] > 0 && last[bank] == word;
            for (int i = 0; count[bank] > 1 && i < distinct && !known; ++i)
                known = bank_of[i] == bank && words[i] == word;
            if (known) continue;
            last[bank] = words[distinct] = word;
            bank_of[distinct++] = bank;
            most = most > ++count[bank] ? most : count[bank];
        }
        extra += most - 1;
    }
    return extra;
}

inline void count_conflicts(const Step& step, const std::uint64_t* offsets, Mask active, unsigned bytes) {
    if (step.conflicts != nullptr)
        *step.conflicts += static_cast<std::uint64_t>(extra_wavefronts(offsets, active, bytes));
}

}  // namespace headrace::ptx
