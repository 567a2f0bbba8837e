// shfl, vote, match, redux and activemask: what happens once the lanes of a member mask have met.
#include <algorithm>

#include "machine/block.hpp"
#include "machine/fault.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {
namespace {

// The lanes that take part are `active`. A member mask that leaves out its own lane has no meaning.
void check_members(const Warp& warp, const Step& step, Mask active) {
    const Mask* members = warp.u32(step.members);
    Mask missing = 0;
    for_lanes(active, [&](int lane) { missing |= ~members[lane] & Mask{1} << lane; });
    if (missing != 0) throw_fault("lane ", __builtin_ctz(missing), " executes with a member mask that leaves it out");
}

void set_predicate(const Warp& warp, int slot, Mask active, Mask bits) {
    if (slot < 0) return;
    Mask& predicate = warp.predicate(slot);
    predicate = (predicate & ~active) | (bits & active);
}

void set_all(const Warp& warp, int slot, Mask active, std::uint32_t value) {
    if (slot < 0) return;
    std::uint32_t* to = warp.u32(slot);
    for_lanes(active, [&](int lane) { to[lane] = value; });
}

enum class Shuffle { up, down, bfly, idx };

// The source lane, and whether it lies in the segment; where it does not, the lane reads itself.
template <Shuffle mode>
inline bool source_lane(int lane, std::uint32_t b, std::uint32_t c, int& source) {
    const int value = static_cast<int>(b & 31), clamp = static_cast<int>(c & 31),
              segment = static_cast<int>(c >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    if constexpr (mode == Shuffle::up) source = lane - value;
    if constexpr (mode == Shuffle::down) source = lane + value;
    if constexpr (mode == Shuffle::bfly) source = lane ^ value;
    if constexpr (mode == Shuffle::idx) source = least | (value & ~segment);
    const bool inside = mode == Shuffle::up ? source >= most : source <= most;
    if (!inside) source = lane;
    return inside;
}

template <Shuffle mode>
void shuffle(Warp& warp, const Step& step, Mask active) {
    check_members(warp, step, active);
    const std::uint32_t *a = warp.u32(step.from[0]), *b = warp.u32(step.from[1]), *c = warp.u32(step.from[2]);
    std::uint32_t results[lanes];
    Mask inside = 0;
    for_lanes(active, [&](int lane) {
        int source;
        if (source_lane<mode>(lane, b[lane], c[lane], source)) inside |= Mask{1} << lane;
        if ((active >> source & 1) == 0)
            throw_fault("lane ", lane, " reads lane ", source, ", which does not take part in the shfl");
        results[lane] = a[source];
    });
    if (step.to[0] >= 0) {
        std::uint32_t* to = warp.u32(step.to[0]);
        for_lanes(active, [&](int lane) { to[lane] = results[lane]; });
    }
    set_predicate(warp, step.to[1], active, inside);
}

enum class Vote { all, any, uni, ballot };

template <Vote mode>
void vote(Warp& warp, const Step& step, Mask active) {
    check_members(warp, step, active);
    Mask votes = warp.predicate(step.from[0]);
    if (step.other != 0) votes = ~votes;
    votes &= active;
    if (mode == Vote::ballot) return set_all(warp, step.to[0], active, votes);
    const bool agreed = mode == Vote::all   ? votes == active
                        : mode == Vote::any ? votes != 0
                                            : votes == active || votes == 0;
    set_predicate(warp, step.to[0], active, agreed ? all_lanes : 0);
}

template <class T>
const T* values(const Warp& warp, int slot) {
    if constexpr (sizeof(T) == 8)
        return warp.u64(slot);
    else
        return warp.u32(slot);
}

template <class T>
void match_any(Warp& warp, const Step& step, Mask active) {
    check_members(warp, step, active);
    T a[lanes];
    std::copy_n(values<T>(warp, step.from[0]), lanes, a);
    if (step.to[0] < 0) return;
    for_lanes(active, [&](int lane) {
        Mask same = 0;
        for (int other = 0; other < lanes; ++other) same |= Mask{a[other] == a[lane]} << other;
        warp.u32(step.to[0])[lane] = same & active;
    });
}

template <class T>
void match_all(Warp& warp, const Step& step, Mask active) {
    check_members(warp, step, active);
    const T* a = values<T>(warp, step.from[0]);
    const T first = a[__builtin_ctz(active)];
    bool same = true;
    for_lanes(active, [&](int lane) { same &= a[lane] == first; });
    set_all(warp, step.to[0], active, same ? active : 0);
    set_predicate(warp, step.to[1], active, same ? all_lanes : 0);
}

enum class Reduction { add, min, max, bit_and, bit_or, bit_xor };

template <Reduction operation, class T>
T combine(T a, T b) {
    switch (operation) {
        case Reduction::add: return static_cast<T>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
        case Reduction::min: return std::min(a, b);
        case Reduction::max: return std::max(a, b);
        case Reduction::bit_and: return a & b;
        case Reduction::bit_or: return a | b;
        case Reduction::bit_xor: return a ^ b;
    }
    return a;
}

template <Reduction operation, class T>
void reduce(Warp& warp, const Step& step, Mask active) {
    check_members(warp, step, active);
    const std::uint32_t* a = warp.u32(step.from[0]);
    const int first = __builtin_ctz(active);
    T result = static_cast<T>(a[first]);
    for_lanes(active & ~(Mask{1} << first),
              [&](int lane) { result = combine<operation>(result, static_cast<T>(a[lane])); });
    set_all(warp, step.to[0], active, static_cast<std::uint32_t>(result));
}

void active_mask(Warp& warp, const Step& step, Mask active) { set_all(warp, step.to[0], active, active); }

// The destinations "d|p" or "d" and the sources between them and the member mask, which comes last.
void decode_operands(const Statement& statement, Decoder& decoder, Step& step, std::size_t sources) {
    const auto& operands = statement.operands;
    if (operands.size() != sources + 2) decoder.unknown(statement);
    step.to[0] = step.to[1] = -1;
    if (operands[0].kind == Operand::Kind::pair) {
        step.to[0] = decoder.destination(operands[0].parts[0]);
        step.to[1] = decoder.destination(operands[0].parts[1]);
    } else {
        step.to[0] = decoder.destination(operands[0]);
    }
    step.destinations = operands[0].kind == Operand::Kind::pair ? 2 : 1;
    for (std::size_t i = 0; i < sources; ++i)
        step.from[i] = decoder.source(operands[i + 1], i == 0 ? step.type : Type::b32);
    step.sources = static_cast<std::int16_t>(sources);
    step.meeting = Meeting::members;
    step.members = decoder.source(operands.back(), Type::b32);
}

Execute shuffle_for(const std::string& mode) {
    if (mode == "up") return shuffle<Shuffle::up>;
    if (mode == "down") return shuffle<Shuffle::down>;
    if (mode == "bfly") return shuffle<Shuffle::bfly>;
    return mode == "idx" ? shuffle<Shuffle::idx> : nullptr;
}

Execute vote_for(const std::string& mode) {
    if (mode == "all") return vote<Vote::all>;
    if (mode == "any") return vote<Vote::any>;
    if (mode == "uni") return vote<Vote::uni>;
    return mode == "ballot" ? vote<Vote::ballot> : nullptr;
}

Execute match_for(const std::string& mode, Type type) {
    const bool wide = type == Type::b64;
    if (mode == "any") return wide ? match_any<std::uint64_t> : match_any<std::uint32_t>;
    if (mode == "all") return wide ? match_all<std::uint64_t> : match_all<std::uint32_t>;
    return nullptr;
}

Execute reduction_for(const std::string& mode, Type type) {
    if (type == Type::b32) {
        if (mode == "and") return reduce<Reduction::bit_and, std::uint32_t>;
        if (mode == "or") return reduce<Reduction::bit_or, std::uint32_t>;
        return mode == "xor" ? reduce<Reduction::bit_xor, std::uint32_t> : nullptr;
    }
    const bool is_signed = type == Type::s32;
    if (!is_signed && type != Type::u32) return nullptr;
    if (mode == "add") return reduce<Reduction::add, std::uint32_t>;
    if (mode == "min") return is_signed ? reduce<Reduction::min, std::int32_t> : reduce<Reduction::min, std::uint32_t>;
    if (mode == "max") return is_signed ? reduce<Reduction::max, std::int32_t> : reduce<Reduction::max, std::uint32_t>;
    return nullptr;
}

void decode_vote(const Statement& statement, Decoder& decoder, Step& step) {
    const bool ballot = statement.modifiers[1] == "ballot";
    if (step.type != (ballot ? Type::b32 : Type::pred)) decoder.unknown(statement);
    step.type = Type::pred;
    decode_operands(statement, decoder, step, 1);
    step.other = statement.operands[1].negated ? 1 : 0;
    step.execute = vote_for(statement.modifiers[1]);
}

}  // namespace

bool decode_collective(const Statement& statement, Decoder& decoder, Step& step) {
    const std::string& opcode = statement.opcode;
    if (opcode == "activemask") {
        step.to[0] = decoder.destination(statement.operands.at(0));
        step.destinations = 1;
        step.execute = active_mask;
        return true;
    }
    if (opcode == "elect") decoder.unknown(statement);
    if (opcode != "shfl" && opcode != "vote" && opcode != "match" && opcode != "redux") return false;
    step.type = statement.type();
    // Each is OPCODE.sync.MODE.TYPE, but match.MODE.sync.TYPE.
    if (statement.modifiers.size() != 3) decoder.unknown(statement);
    const bool sync_first = statement.modifiers[0] == "sync";
    if (!sync_first && (opcode != "match" || statement.modifiers[1] != "sync")) decoder.unknown(statement);
    const std::string& mode = statement.modifiers[sync_first ? 1 : 0];
    if (opcode == "shfl") {
        if (step.type != Type::b32) decoder.unknown(statement);
        decode_operands(statement, decoder, step, 3);
        step.execute = shuffle_for(mode);
    } else if (opcode == "vote") {
        decode_vote(statement, decoder, step);
    } else if (opcode == "match") {
        if (step.type != Type::b32 && step.type != Type::b64) decoder.unknown(statement);
        decode_operands(statement, decoder, step, 1);
        step.execute = match_for(mode, step.type);
    } else {
        decode_operands(statement, decoder, step, 1);
        step.execute = reduction_for(mode, step.type);
    }
    if (step.execute == nullptr) decoder.unknown(statement);
    return true;
}

}  // namespace headrace::ptx
