// decode_move: mov with packing and unpacking, cvta, isspacep; cvt is in convert.cpp.
#include <cstring>

#include "instructions/plain.hpp"
#include "machine/block.hpp"

namespace headrace::ptx {
namespace {

template <class T>
void copy(Warp& warp, const Step& step, Mask active) {
    map1<T, T>(warp, step, active, [](T a) { return a; });
}
void copy_predicate(Warp& warp, const Step& step, Mask active) {
    Mask& to = warp.predicate(step.to[0]);
    to = (to & ~active) | (warp.predicate(step.from[0]) & active);
}

// A lane's part of a slot of a register with so many bytes.
std::byte* lane_bytes(const Warp& warp, int slot, int bytes, int lane) {
    const int stride = bytes <= 4 ? 4 : bytes;
    return warp.registers + static_cast<std::size_t>(slot) * slot_bytes +
           static_cast<std::size_t>(lane) * static_cast<std::size_t>(stride);
}

// Step::variant: bytes of the whole; Step::width: of an element. The first element is the lowest.
void pack(Warp& warp, const Step& step, Mask active) {
    const auto element = static_cast<std::size_t>(step.width);
    for_lanes(active, [&](int lane) {
        std::byte whole[16] = {};
        for (std::size_t i = 0; i < static_cast<std::size_t>(step.sources); ++i) {
            std::memcpy(whole + i * element, lane_bytes(warp, step.from[i], step.width, lane), element);
        }
        std::memcpy(lane_bytes(warp, step.to[0], step.variant, lane), whole, static_cast<std::size_t>(step.variant));
    });
}
void unpack(Warp& warp, const Step& step, Mask active) {
    const auto element = static_cast<std::size_t>(step.width);
    for_lanes(active, [&](int lane) {
        std::byte whole[16];
        std::memcpy(whole, lane_bytes(warp, step.from[0], step.variant, lane), static_cast<std::size_t>(step.variant));
        for (std::size_t i = 0; i < static_cast<std::size_t>(step.destinations); ++i) {
            if (step.to[i] < 0) continue;
            std::byte* const to = lane_bytes(warp, step.to[i], step.width, lane);
            if (element < 4) std::memset(to, 0, 4);
            std::memcpy(to, whole + i * element, element);
        }
    });
}

// The pairs that kernels are full of, fast.
template <class Half, class Whole>
void pack_pair(Warp& warp, const Step& step, Mask active) {
    map2<Whole, Half, Half>(warp, step, active, [](Half low, Half high) {
        return static_cast<Whole>(static_cast<Whole>(high) << (8 * sizeof(Half)) | low);
    });
}
template <class Half, class Whole>
void unpack_pair(Warp& warp, const Step& step, Mask active) {
    const Word<Whole>* const from = words<Whole>(warp, step.from[0]);
    for (std::size_t i = 0; i < 2; ++i) {
        if (step.to[i] < 0) continue;
        Word<Half>* const to = words<Half>(warp, step.to[i]);
        each_lane(active, [&](int lane) { to[lane] = static_cast<Half>(from[lane] >> (8 * sizeof(Half) * i)); });
    }
}

Execute packer(const Step& step, std::size_t parts, bool packs) {
    if (parts == 2 && step.width == 2) {
        return packs ? pack_pair<std::uint16_t, std::uint32_t> : unpack_pair<std::uint16_t, std::uint32_t>;
    }
    if (parts == 2 && step.width == 4) {
        return packs ? pack_pair<std::uint32_t, std::uint64_t> : unpack_pair<std::uint32_t, std::uint64_t>;
    }
    return packs ? pack : unpack;
}

Type bits_of_bytes(int bytes) {
    return bytes == 2 ? Type::b16 : bytes == 4 ? Type::b32 : bytes == 8 ? Type::b64 : Type::none;
}

bool decode_packing(const Statement& statement, Decoder& decoder, Form& form, Step& step, Type type) {
    form.all_taken();
    const bool packs = statement.operands[1].kind == Operand::Kind::vector;
    const std::vector<Operand>& parts = statement.operands[packs ? 1 : 0].parts;
    form.require(type == Type::b32 || type == Type::b64 || type == Type::b128);
    form.require((parts.size() == 2 || parts.size() == 4) &&
                 statement.operands[packs ? 0 : 1].kind != Operand::Kind::vector);
    step.variant = bytes_of(type);
    step.width = static_cast<std::int16_t>(bytes_of(type) / static_cast<int>(parts.size()));
    const Type element = bits_of_bytes(step.width);
    form.require(element != Type::none);
    for (std::size_t i = 0; i < parts.size(); ++i) {
        if (packs) {
            form.source(static_cast<int>(i), parts[i], element);
        } else if (parts[i].kind == Operand::Kind::sink) {
            step.to[i] = -1;
        } else {
            form.destination(static_cast<int>(i), parts[i], element);
        }
    }
    if (packs) {
        step.sources = static_cast<std::int16_t>(parts.size());
        form.destination(0, statement.operands[0], type);
    } else {
        step.destinations = static_cast<std::int16_t>(parts.size());
        form.require(decoder.type_of(statement.operands[1]) != Type::none || type != Type::b128);
        form.source(0, statement.operands[1], type);
    }
    form.execute(packer(step, parts.size(), packs));
    return true;
}

void copy_128(Warp& warp, const Step& step, Mask active) {
    for_lanes(active, [&](int lane) {
        std::memcpy(lane_bytes(warp, step.to[0], 16, lane), lane_bytes(warp, step.from[0], 16, lane), 16);
    });
}

bool decode_mov(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const Type type = form.take_type();
    form.require(statement.operands.size() == 2);
    for (const Operand& operand : statement.operands) {
        if (operand.kind == Operand::Kind::vector) return decode_packing(statement, decoder, form, step, type);
    }
    form.require(!statement.operands[1].negated && (type == Type::pred || bytes_of(type) >= 2));
    form.operands(type, {type});
    form.execute(type == Type::pred     ? copy_predicate
                 : bytes_of(type) == 16 ? copy_128
                 : bytes_of(type) == 8  ? copy<std::uint64_t>
                                        : copy<std::uint32_t>);
    return true;
}

std::uint64_t window_of(Space space) {
    return space == Space::shared ? shared_window : space == Space::local ? local_window : 0;
}
bool lies_in(Space space, std::uint64_t address) {
    const bool in_shared = address - shared_window < window_bytes, in_local = address - local_window < window_bytes;
    return space == Space::shared ? in_shared : space == Space::local ? in_local : !in_shared && !in_local;
}

void to_generic(Warp& warp, const Step& step, Mask active) {
    const std::uint64_t window = window_of(step.space);
    map1<std::uint64_t, std::uint64_t>(warp, step, active, [&](std::uint64_t a) { return a + window; });
}
void from_generic(Warp& warp, const Step& step, Mask active) {
    const std::uint64_t window = window_of(step.space);
    const std::uint64_t* const a = warp.u64(step.from[0]);
    for_lanes(active, [&](int lane) {
        if (!lies_in(step.space, a[lane]))
            throw_fault("lane ", lane, ": the address ", a[lane], " is not of that space");
        warp.u64(step.to[0])[lane] = a[lane] - window;
    });
}
void is_space(Warp& warp, const Step& step, Mask active) {
    const std::uint64_t* const a = warp.u64(step.from[0]);
    Mask result = 0;
    for_lanes(active, [&](int lane) { result |= lies_in(step.space, a[lane]) ? Mask{1} << lane : 0; });
    Mask& to = warp.predicate(step.to[0]);
    to = (to & ~active) | result;
}

// Constants lie among the global variables here.
Space take_space(Form& form) {
    if (form.take("global") || form.take("const")) return Space::global;
    if (form.take("shared") || form.take("shared::cta")) return Space::shared;
    if (form.take("local")) return Space::local;
    form.unknown();
}

bool decode_cvta(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const bool to_space = form.take("to");
    step.space = take_space(form);
    form.require(form.take_type() == Type::u64);
    form.operands(Type::u64, {Type::u64});
    form.execute(to_space ? from_generic : to_generic);
    return true;
}

bool decode_isspacep(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    form.require(!statement.has("const"));
    step.space = take_space(form);
    form.operands(Type::pred, {Type::u64});
    form.execute(is_space);
    return true;
}

}  // namespace

bool decode_move(const Statement& statement, Decoder& decoder, Step& step) {
    if (statement.opcode == "mov") return decode_mov(statement, decoder, step);
    if (statement.opcode == "cvt") return decode_convert(statement, decoder, step);
    if (statement.opcode == "cvta") return decode_cvta(statement, decoder, step);
    if (statement.opcode == "isspacep") return decode_isspacep(statement, decoder, step);
    return false;
}

}  // namespace headrace::ptx
