// ld, st and what accompanies them: prefetch, membar, fence, createpolicy. atom and red are in atomics.cpp.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include "instructions/addresses.hpp"
#include "instructions/families.hpp"

namespace headrace::ptx {
namespace {

constexpr int unchanging_bit = 1;  // of Step::variant: ld.global.nc

struct b128 {
    std::uint64_t low, high;
};

std::byte* local_at(Warp& warp, std::uint64_t address, unsigned bytes, int lane, bool is_store) {
    Block& block = *warp.block;
    if (address > block.local_bytes || bytes > block.local_bytes - address)
        throw_fault("touches ", bytes, " bytes at local offset ", address, ", outside the thread's ",
                    block.local_bytes);
    if (address % bytes != 0) throw_fault("local offset ", address, " is not aligned to ", bytes, " bytes");
    const std::size_t at = static_cast<std::size_t>(warp.index * lanes + lane) * block.local_bytes + address;
    std::byte* written = &block.local_written[at];
    if (is_store)
        std::fill_n(written, bytes, std::byte{1});
    else if (std::find(written, written + bytes, std::byte{0}) != written + bytes)
        throw_fault("reads local offset ", address, ", which nothing wrote");
    return &block.local[at];
}

const std::byte* parameter_at(const Block& block, std::uint64_t address, unsigned bytes) {
    const std::size_t size = block.parameters->size();
    if (address > size || bytes > size - address)
        throw_fault("reads ", bytes, " bytes at parameter offset ", address, ", outside the launch's ", size);
    if (address % bytes != 0) throw_fault("parameter offset ", address, " is not aligned to ", bytes, " bytes");
    return block.parameters->data() + address;
}

inline const std::byte* load_from(Warp& warp, const Step& step, std::uint64_t address, unsigned bytes, int lane) {
    Block& block = *warp.block;
    switch (resolve(step.space, address)) {
        case Space::shared:
            return block.shared->load(shared_offset(block, address), bytes, warp.index, lane, step.statement->line);
        case Space::local: return local_at(warp, address, bytes, lane, /*is_store=*/false);
        case Space::param: return parameter_at(block, address, bytes);
        case Space::constant: return block.memory->load_unchanging(address, bytes, block.number);
        default: break;
    }
    if ((step.variant & unchanging_bit) != 0) return block.memory->load_unchanging(address, bytes, block.number);
    return block.memory->load(address, bytes, block.number);
}

inline std::byte* store_to(Warp& warp, const Step& step, std::uint64_t address, unsigned bytes, int lane) {
    Block& block = *warp.block;
    switch (resolve(step.space, address)) {
        case Space::shared:
            return block.shared->store(shared_offset(block, address), bytes, warp.index, lane, step.statement->line);
        case Space::local: return local_at(warp, address, bytes, lane, /*is_store=*/true);
        default: return block.memory->store(address, bytes, block.number);
    }
}

// Which of two lanes' values stays where they store to the same global bytes is not defined.
void check_overlap(const Block& block, Space space, const std::uint64_t* addresses, Mask active, unsigned bytes) {
    if ((space != Space::global && space != Space::generic) || !block.settings->races) return;
    std::uint64_t end = 0;
    bool ascending = true;
    for_lanes(active, [&](int lane) {
        ascending &= addresses[lane] >= end;
        end = addresses[lane] + bytes;
    });
    if (ascending) return;
    std::array<std::pair<std::uint64_t, int>, lanes> sorted;
    std::size_t count = 0;
    for_lanes(active, [&](int lane) {
        std::uint64_t address = addresses[lane];
        if (resolve(space, address) == Space::global) sorted[count++] = {address, lane};
    });
    std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(count));
    for (std::size_t i = 1; i < count; ++i)
        if (sorted[i].first - sorted[i - 1].first < bytes)
            throw_fault("race: lanes ", sorted[i - 1].second, " and ", sorted[i].second,
                        " write the same global bytes in one instruction");
}

// A loaded value as the register holds it: sign-extended to `register_bytes` if T is signed.
template <class T>
inline void put(const Warp& warp, int slot, int register_bytes, int lane, T value) {
    if constexpr (sizeof(T) == 16) {
        std::memcpy(reinterpret_cast<std::byte*>(warp.u32(slot)) + 16 * lane, &value, 16);
    } else {
        if (register_bytes == 8)
            warp.u64(slot)[lane] = static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
        else
            warp.u32(slot)[lane] = static_cast<std::uint32_t>(value) & (register_bytes == 2 ? 0xffffU : ~0U);
    }
}

template <class T>
inline T take(const Warp& warp, int slot, int register_bytes, int lane) {
    if constexpr (sizeof(T) == 16) {
        T value;
        std::memcpy(&value, reinterpret_cast<const std::byte*>(warp.u32(slot)) + 16 * lane, 16);
        return value;
    } else {
        return static_cast<T>(register_bytes == 8 ? warp.u64(slot)[lane] : warp.u32(slot)[lane]);
    }
}

// What lanes loaded: the first at `at`, the next ones `stride` bytes further each.
template <class T, int width>
inline void put_all(const Warp& warp, const Step& step, Mask active, const std::byte* at, int stride) {
    const int first = __builtin_ctz(active);
    for (int i = 0; i < width; ++i) {
        const int slot = step.to[static_cast<std::size_t>(i)];
        if (slot < 0) continue;
        for_lanes(active, [&](int lane) {
            T value;
            std::memcpy(&value, at + (lane - first) * stride + i * static_cast<int>(sizeof(T)), sizeof(T));
            put(warp, slot, step.other, lane, value);
        });
    }
}

// What neighbouring lanes from `first` on load, or several from one address; null as DeviceMemory and SharedMemory say.
inline const std::byte* load_at_once(Warp& warp, const Step& step, std::uint64_t address, unsigned bytes, int first,
                                     int count, Mask readers) {
    Block& block = *warp.block;
    const Space space = resolve(step.space, address);
    if (space == Space::global) {
        const bool unchanging = (step.variant & unchanging_bit) != 0;
        return block.memory->load_row(address, bytes, count, unchanging, block.number);
    }
    if (space != Space::shared || block.shared == nullptr) return nullptr;
    const std::uint64_t offset = address - first_shared;
    const int line = step.statement->line;
    return count == 1 ? block.shared->load_together(offset, bytes, warp.index, readers, line)
                      : block.shared->load_row(offset, bytes, warp.index, first, count, line);
}

// Lanes that load from one address do so together: most loads have one address, or a few. False: one lane of several
// is alone with its address, or memory wants to look at each lane.
template <class T, int width>
bool load_together(Warp& warp, const Step& step, const std::uint64_t* addresses, Mask active) {
    for (Mask rest = active; rest != 0;) {
        const Mask first = rest & -rest;
        const int lane_of_first = __builtin_ctz(rest);
        const std::uint64_t address = addresses[lane_of_first];
        Mask same = 0;
        for (int lane = 0; lane < lanes; ++lane) same |= static_cast<Mask>(addresses[lane] == address) << lane;
        same &= rest;
        if (same == first && active != first) return false;
        const std::byte* at = load_at_once(warp, step, address, sizeof(T) * width, lane_of_first, 1, same);
        if (at == nullptr) return false;
        put_all<T, width>(warp, step, same, at, /*stride=*/0);
        rest &= ~same;
    }
    return true;
}

// Whether neighbouring lanes have neighbouring values of so many bytes.
inline bool are_row(const std::uint64_t* addresses, Mask active, unsigned bytes) {
    const int first = __builtin_ctz(active), count = __builtin_popcount(active);
    if (active >> first != all_lanes >> (lanes - count)) return false;
    std::uint64_t differences = 0;
    for (int i = 0; i < count; ++i)
        differences |= addresses[first + i] ^ (addresses[first] + static_cast<std::uint64_t>(i) * bytes);
    return differences == 0;
}

template <class T, int width>
bool load_row(Warp& warp, const Step& step, const std::uint64_t* addresses, Mask active) {
    constexpr unsigned bytes = sizeof(T) * width;
    const int first = __builtin_ctz(active), count = __builtin_popcount(active);
    if (count == 1 || !are_row(addresses, active, bytes)) return false;  // one was looked at together
    const std::byte* at = load_at_once(warp, step, addresses[first], bytes, first, count, active);
    if (at != nullptr) put_all<T, width>(warp, step, active, at, bytes);
    return at != nullptr;
}

template <class T, int width>
void load(Warp& warp, const Step& step, Mask active) {
    constexpr unsigned bytes = sizeof(T) * width;
    std::uint64_t addresses[lanes] = {};
    gather_addresses(warp, step.from[0], step.offset, (step.variant & wide_base) != 0, active, addresses);
    if (!load_together<T, width>(warp, step, addresses, active) && !load_row<T, width>(warp, step, addresses, active)) {
        for_faulting_lanes(active, [&](int lane) {
            const std::byte* at = load_from(warp, step, addresses[lane], bytes, lane);
            put_all<T, width>(warp, step, Mask{1} << lane, at, /*stride=*/0);
        });
    }
    if (step.space == Space::shared) count_conflicts(step, addresses, active, bytes);
}

// What a lane stores, at its place.
template <class T, int width>
inline void take_all(const Warp& warp, const Step& step, int lane, std::byte* at) {
    for (int i = 0; i < width; ++i) {
        const T value = take<T>(warp, step.from[static_cast<std::size_t>(i) + 1], step.other, lane);
        std::memcpy(at + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
    }
}

// Where neighbouring lanes store; null as above.
inline std::byte* store_row(Warp& warp, const Step& step, const std::uint64_t* addresses, Mask active, unsigned bytes) {
    if (!are_row(addresses, active, bytes)) return nullptr;
    Block& block = *warp.block;
    const int first = __builtin_ctz(active), count = __builtin_popcount(active);
    std::uint64_t address = addresses[first];
    const Space space = resolve(step.space, address);
    if (space == Space::global) return block.memory->store_row(address, bytes, count, block.number);
    if (space != Space::shared || block.shared == nullptr) return nullptr;
    return block.shared->store_row(address - first_shared, bytes, warp.index, first, count, step.statement->line);
}

template <class T, int width>
void store(Warp& warp, const Step& step, Mask active) {
    constexpr unsigned bytes = sizeof(T) * width;
    std::uint64_t addresses[lanes] = {};
    gather_addresses(warp, step.from[0], step.offset, (step.variant & wide_base) != 0, active, addresses);
    if (std::byte* const row = store_row(warp, step, addresses, active, bytes)) {
        const int first = __builtin_ctz(active);
        for_lanes(active, [&](int lane) {
            take_all<T, width>(warp, step, lane, row + static_cast<std::size_t>(lane - first) * bytes);
        });
    } else {
        check_overlap(*warp.block, step.space, addresses, active, bytes);
        for_faulting_lanes(active, [&](int lane) {
            take_all<T, width>(warp, step, lane, store_to(warp, step, addresses[lane], bytes, lane));
        });
    }
    if (step.space == Space::shared) count_conflicts(step, addresses, active, bytes);
}

// Kernel parameters are the same for all lanes: one look is enough where the address is.
template <class T, int width>
void load_parameter(Warp& warp, const Step& step, Mask active) {
    std::uint64_t addresses[lanes] = {};
    gather_addresses(warp, step.from[0], step.offset, (step.variant & wide_base) != 0, active, addresses);
    const std::uint64_t first = addresses[__builtin_ctz(active)];
    bool uniform = true;
    for_lanes(active, [&](int lane) { uniform &= addresses[lane] == first; });
    if (!uniform) return load<T, width>(warp, step, active);
    put_all<T, width>(warp, step, active, parameter_at(*warp.block, first, sizeof(T) * width), /*stride=*/0);
}

void do_nothing(Warp&, const Step&, Mask) {}

// A policy is an opaque number that only hints take; they change no value here.
void create_policy(Warp& warp, const Step& step, Mask active) {
    if (step.to[0] >= 0) for_lanes(active, [&](int lane) { warp.u64(step.to[0])[lane] = 0; });
}

struct Families {
    template <class T, int width>
    static Execute of(const Step& step, bool is_load) {
        if (!is_load) return store<T, width>;
        return step.space == Space::param ? load_parameter<T, width> : load<T, width>;
    }
    template <class T>
    static Execute of_type(const Step& step, bool is_load) {
        if (step.width == 1) return of<T, 1>(step, is_load);
        if constexpr (sizeof(T) <= 8)
            if (step.width == 2) return of<T, 2>(step, is_load);
        if constexpr (sizeof(T) <= 4)
            if (step.width == 4) return of<T, 4>(step, is_load);
        return nullptr;
    }
};

Execute execute_for(const Step& step, bool is_load) {
    const bool is_signed = is_load && step.type >= Type::s8 && step.type <= Type::s64;
    switch (bytes_of(step.type)) {
        case 1:
            return is_signed ? Families::of_type<std::int8_t>(step, true)
                             : Families::of_type<std::uint8_t>(step, is_load);
        case 2:
            return is_signed ? Families::of_type<std::int16_t>(step, true)
                             : Families::of_type<std::uint16_t>(step, is_load);
        case 4:
            return is_signed ? Families::of_type<std::int32_t>(step, true)
                             : Families::of_type<std::uint32_t>(step, is_load);
        case 8: return Families::of_type<std::uint64_t>(step, is_load);
        case 16: return Families::of_type<b128>(step, is_load);
        default: return nullptr;
    }
}

bool any_of(std::string_view modifier, std::initializer_list<std::string_view> words) {
    return std::find(words.begin(), words.end(), modifier) != words.end();
}

// What a modifier of ld or st means to the step. False: none that we know. Orders and scopes change nothing, since
// blocks may share only through atomics, and within a block barriers alone order; hints change nothing either.
bool take_modifier(std::string_view modifier, Step& step, bool is_load, bool& has_policy) {
    if (const Space space = space_named(modifier); space != Space::generic) return step.space = space, true;
    if (const Type type = type_named(modifier); type != Type::none) return step.type = type, true;
    if (modifier == "v2") return step.width = 2, true;
    if (modifier == "v4") return step.width = 4, true;
    if (modifier == "nc" && is_load) return step.variant |= unchanging_bit, true;
    if (modifier == "L2::cache_hint") return has_policy = true;
    if (any_of(modifier, {"weak", "relaxed", "volatile", "cta", "gpu", "sys"})) return true;
    if (modifier == (is_load ? "acquire" : "release")) return true;
    if (any_of(modifier, {"cg", "cs"}) ||
        (is_load ? any_of(modifier, {"ca", "lu", "cv"}) : any_of(modifier, {"wb", "wt"})))
        return true;
    return any_of(modifier,
                  {"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
                   "L2::64B", "L2::128B", "L2::256B", "L2::evict_normal", "L2::evict_first", "L2::evict_last"});
}

bool decode_load_or_store(const Statement& statement, Decoder& decoder, Step& step, bool is_load) {
    bool has_policy = false;
    for (const std::string& modifier : statement.modifiers)
        if (!take_modifier(modifier, step, is_load, has_policy)) decoder.unknown(statement);
    if (statement.operands.size() != (has_policy ? 3U : 2U)) decoder.unknown(statement);
    if (!is_load && (step.space == Space::param || step.space == Space::constant)) decoder.unknown(statement);
    if ((step.variant & unchanging_bit) != 0 && step.space != Space::global) decoder.unknown(statement);
    const Operand& value = statement.operands[is_load ? 0 : 1];
    const bool is_vector = value.kind == Operand::Kind::vector;
    const std::size_t count = is_vector ? value.parts.size() : 1;
    if (count != static_cast<std::size_t>(step.width)) decoder.unknown(statement);
    step.offset = decode_address(statement, statement.operands[is_load ? 1 : 0], decoder, step, 0, wide_base);
    step.other = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Operand& part = is_vector ? value.parts[i] : value;
        if (is_load)
            step.to[i] = decoder.destination(part);
        else
            step.from[i + 1] = decoder.source(part, step.type);
        if (part.kind == Operand::Kind::reg) {
            const int bytes = bytes_of(decoder.type_of(part));
            if (bytes < bytes_of(step.type) || (step.other != 0 && bytes != step.other)) decoder.unknown(statement);
            step.other = bytes;
        }
    }
    if (step.other == 0) step.other = std::max(4, bytes_of(step.type));
    step.destinations = static_cast<std::int16_t>(is_load ? count : 0);
    step.sources = static_cast<std::int16_t>(is_load ? 1 : count + 1);
    step.execute = execute_for(step, is_load);
    if (step.execute == nullptr) decoder.unknown(statement);
    return true;
}

// Modifiers that a statement without effect may have; others name something that we do not do.
bool decode_without_effect(const Statement& statement, Decoder& decoder, Step& step,
                           std::initializer_list<std::string_view> allowed) {
    for (const std::string& modifier : statement.modifiers)
        if (!any_of(modifier, allowed)) decoder.unknown(statement);
    step.execute = do_nothing;
    return true;
}

}  // namespace

Space space_named(std::string_view modifier) {
    if (modifier == "global") return Space::global;
    if (modifier == "shared" || modifier == "shared::cta") return Space::shared;
    if (modifier == "local") return Space::local;
    if (modifier == "param" || modifier == "param::entry") return Space::param;
    if (modifier == "const") return Space::constant;
    return Space::generic;
}

bool decode_memory(const Statement& statement, Decoder& decoder, Step& step) {
    const std::string& opcode = statement.opcode;
    if (opcode == "ld" || opcode == "st") return decode_load_or_store(statement, decoder, step, opcode == "ld");
    if (opcode == "ldu") {
        step.variant = unchanging_bit;
        step.space = Space::global;
        return decode_load_or_store(statement, decoder, step, /*is_load=*/true);
    }
    if (opcode == "atom" || opcode == "red") return decode_atomic(statement, decoder, step);
    if (opcode == "membar") return decode_without_effect(statement, decoder, step, {"cta", "gl", "sys"});
    if (opcode == "fence" && !statement.has("proxy"))
        return decode_without_effect(statement, decoder, step,
                                     {"sc", "acq_rel", "acquire", "release", "cta", "gpu", "sys"});
    if (opcode == "prefetch")
        return decode_without_effect(statement, decoder, step,
                                     {"global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal"});
    if (opcode == "prefetchu") return decode_without_effect(statement, decoder, step, {"L1"});
    if (opcode != "createpolicy") return false;
    if (!statement.has("fractional")) decoder.unknown(statement);
    step.to[0] = decoder.destination(statement.operands.at(0));
    step.destinations = 1;
    step.execute = create_policy;
    return true;
}

}  // namespace headrace::ptx
