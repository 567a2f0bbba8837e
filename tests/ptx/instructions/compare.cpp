// decode_compare: setp, set, selp, slct.
#include <cmath>

#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

enum class Compare : int { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };
constexpr const char* compare_names[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                         "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
constexpr int compare_count = 14, ordered_count = 6;

template <Compare How, class T>
bool holds(T a, T b) {
    const bool unordered = a != a || b != b;
    switch (How) {
        case Compare::eq: return a == b;
        case Compare::ne: return !unordered && a != b;
        case Compare::lt: return a < b;
        case Compare::le: return a <= b;
        case Compare::gt: return a > b;
        case Compare::ge: return a >= b;
        case Compare::equ: return unordered || a == b;
        case Compare::neu: return a != b;
        case Compare::ltu: return !(a >= b);
        case Compare::leu: return !(a > b);
        case Compare::gtu: return !(a <= b);
        case Compare::geu: return !(a < b);
        case Compare::num: return !unordered;
        case Compare::nan: return unordered;
    }
    return false;
}

// What a lane's word is compared as.
template <class T, bool Ftz>
struct Plain {
    using Stored = T;
    static T value(T stored) {
        if constexpr (Ftz) return std::fabs(stored) < std::numeric_limits<T>::min() ? T{0} : stored;
        return stored;
    }
};
template <bool Ftz, int Shift>
struct HalfOf {
    using Stored = std::uint32_t;
    static float value(std::uint32_t stored) {
        const auto bits = static_cast<std::uint16_t>(stored >> Shift);
        return f16_to_f32(Ftz && (bits & 0x7c00) == 0 ? static_cast<std::uint16_t>(bits & 0x8000) : bits);
    }
};
template <int Shift>
struct BrainOf {
    using Stored = std::uint32_t;
    static float value(std::uint32_t stored) { return bf16_to_f32(static_cast<std::uint16_t>(stored >> Shift)); }
};

template <class As, Compare How>
Mask compare(const Warp& warp, const Step& step, Mask active) {
    using T = typename As::Stored;
    const Word<T>*const a = words<T>(warp, step.from[0]), *const b = words<T>(warp, step.from[1]);
    Mask result = 0;
    for_lanes(active, [&](int lane) {
        const bool is = holds<How>(As::value(from_word<T>(a[lane])), As::value(from_word<T>(b[lane])));
        result |= static_cast<Mask>(is) << lane;
    });
    return result;
}

// Step::variant, the bits above those of Combine: c is negated.
enum class Combine : int { none, with_and, with_or, with_xor };
constexpr int negated_c = 4;

Mask combined(const Warp& warp, const Step& step, Mask truth) {
    const auto how = static_cast<Combine>(step.variant & 3);
    if (how == Combine::none) return truth;
    const Mask c = warp.predicate(step.from[2]) ^ ((step.variant & negated_c) != 0 ? all_lanes : 0);
    return how == Combine::with_and ? truth & c : how == Combine::with_or ? truth | c : truth ^ c;
}

void write_predicate(Warp& warp, int slot, Mask active, Mask value) {
    if (slot < 0) return;
    Mask& to = warp.predicate(slot);
    to = (to & ~active) | (value & active);
}

template <class As, Compare How>
void setp(Warp& warp, const Step& step, Mask active) {
    const Mask truth = compare<As, How>(warp, step, active);
    const Mask first = combined(warp, step, truth), second = combined(warp, step, ~truth);
    write_predicate(warp, step.to[0], active, first);
    write_predicate(warp, step.to[1], active, second);
}
// Of a pair: to[0] for the lower halves, to[1] for the upper ones.
template <class Low, class High, Compare How>
void setp_pair(Warp& warp, const Step& step, Mask active) {
    const Mask low = combined(warp, step, compare<Low, How>(warp, step, active));
    const Mask high = combined(warp, step, compare<High, How>(warp, step, active));
    write_predicate(warp, step.to[0], active, low);
    write_predicate(warp, step.to[1], active, high);
}
// set: step.other holds the bits for true, of 16 bits for each half of a pair.
template <class As, Compare How>
void set(Warp& warp, const Step& step, Mask active) {
    const Mask truth = combined(warp, step, compare<As, How>(warp, step, active));
    std::uint32_t* const d = warp.u32(step.to[0]);
    for_lanes(active,
              [&](int lane) { d[lane] = (truth >> lane & 1) != 0 ? static_cast<std::uint32_t>(step.other) : 0; });
}
template <class Low, class High, Compare How>
void set_pair(Warp& warp, const Step& step, Mask active) {
    const Mask low = combined(warp, step, compare<Low, How>(warp, step, active));
    const Mask high = combined(warp, step, compare<High, How>(warp, step, active));
    std::uint32_t* const d = warp.u32(step.to[0]);
    const auto value = static_cast<std::uint32_t>(step.other);
    for_lanes(active, [&](int lane) { d[lane] = value * (low >> lane & 1) | value * (high >> lane & 1) << 16; });
}

// setp and set by comparison; Pair says whether the types come in pairs.
struct Entry {
    Execute setp = nullptr, set = nullptr;
};
template <class As, Compare How>
constexpr Entry entry() {
    return {setp<As, How>, set<As, How>};
}
template <class Low, class High, Compare How>
constexpr Entry pair_entry() {
    return {setp_pair<Low, High, How>, set_pair<Low, High, How>};
}

template <class... As>
Entry choose(int how) {
    Entry result;
    const auto try_one = [&]<int Index>(std::integral_constant<int, Index>) {
        if (how != Index) return;
        if constexpr (sizeof...(As) == 1) {
            result = entry<As..., static_cast<Compare>(Index)>();
        } else {
            result = pair_entry<As..., static_cast<Compare>(Index)>();
        }
    };
    [&]<int... Index>(std::integer_sequence<int, Index...>) {
        (try_one(std::integral_constant<int, Index>{}), ...);
    }(std::make_integer_sequence<int, compare_count>{});
    return result;
}

Entry by_type(Type type, int how, bool ftz) {
    switch (type) {
        case Type::b16:
        case Type::u16: return choose<Plain<std::uint16_t, false>>(how);
        case Type::b32:
        case Type::u32: return choose<Plain<std::uint32_t, false>>(how);
        case Type::b64:
        case Type::u64: return choose<Plain<std::uint64_t, false>>(how);
        case Type::s16: return choose<Plain<std::int16_t, false>>(how);
        case Type::s32: return choose<Plain<std::int32_t, false>>(how);
        case Type::s64: return choose<Plain<std::int64_t, false>>(how);
        case Type::f32: return ftz ? choose<Plain<float, true>>(how) : choose<Plain<float, false>>(how);
        case Type::f64: return choose<Plain<double, false>>(how);
        case Type::f16: return ftz ? choose<HalfOf<true, 0>>(how) : choose<HalfOf<false, 0>>(how);
        case Type::f16x2:
            return ftz ? choose<HalfOf<true, 0>, HalfOf<true, 16>>(how)
                       : choose<HalfOf<false, 0>, HalfOf<false, 16>>(how);
        case Type::bf16: return choose<BrainOf<0>>(how);
        case Type::bf16x2: return choose<BrainOf<0>, BrainOf<16>>(how);
        default: return {};
    }
}

// eq ... nan; lo, ls, hi, hs of unsigned types. -1: the type has no such comparison.
int take_compare(Form& form, Type type) {
    int how = -1;
    for (int i = 0; i < compare_count && how < 0; ++i) {
        if (form.take(compare_names[i])) how = i;
    }
    constexpr const char* unsigned_names[] = {"lo", "ls", "hi", "hs"};
    for (int i = 0; i < 4 && how < 0; ++i) {
        if (is_unsigned(type) && form.take(unsigned_names[i])) how = static_cast<int>(Compare::lt) + i;
    }
    if (is_bits(type) && how > static_cast<int>(Compare::ne)) return -1;
    if (is_integer(type) && how >= ordered_count) return -1;
    return how;
}

// The bits that `set` gives for true: all ones of an integer, 1.0 of a float.
std::int64_t truth_of(Type to, Type from) {
    const bool from_pair = from == Type::f16x2 || from == Type::bf16x2;
    switch (to) {
        case Type::u32:
        case Type::s32: return from_pair ? 0xffff : 0xffffffff;
        case Type::f32: return from_pair ? -1 : 0x3f800000;
        case Type::u16:
        case Type::s16: return from == Type::f16 || from == Type::bf16 ? 0xffff : -1;
        case Type::f16: return from == Type::f16 ? 0x3c00 : -1;
        case Type::bf16: return from == Type::bf16 ? 0x3f80 : -1;
        case Type::f16x2: return from == Type::f16x2 ? 0x3c00 : -1;
        case Type::bf16x2: return from == Type::bf16x2 ? 0x3f80 : -1;
        default: return -1;
    }
}

bool decode_set(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const bool to_predicate = statement.opcode == "setp";
    const Type type = form.take_type();
    const Type to = to_predicate ? Type::pred : form.take_type();
    const int how = take_compare(form, type);
    form.require(how >= 0);
    const bool may_flush = type == Type::f32 || type == Type::f16 || type == Type::f16x2;
    const bool ftz = may_flush && form.take("ftz");
    Combine combine = Combine::none;
    if (form.take("and"))
        combine = Combine::with_and;
    else if (form.take("or"))
        combine = Combine::with_or;
    else if (form.take("xor"))
        combine = Combine::with_xor;
    form.all_taken();
    const std::size_t sources = combine == Combine::none ? 2 : 3;
    form.require(statement.operands.size() == sources + 1);
    step.variant = static_cast<int>(combine);
    step.type = type;
    form.source(0, statement.operands[1], type);
    form.source(1, statement.operands[2], type);
    if (sources == 3) {
        form.source(2, statement.operands[3], Type::pred);
        if (statement.operands[3].negated) step.variant |= negated_c;
    }
    const Operand& result = statement.operands[0];
    const Entry functions = by_type(type, how, ftz);
    step.to[0] = step.to[1] = -1;
    if (to_predicate) {
        const bool pair = result.kind == Operand::Kind::pair;
        const std::size_t count = pair ? 2 : 1;
        for (std::size_t i = 0; i < count; ++i) {
            const Operand& part = pair ? result.parts[i] : result;
            form.require(part.kind == Operand::Kind::sink || decoder.type_of(part) == Type::pred);
            step.to[i] = decoder.destination(part);
        }
        form.require(pair || (type != Type::f16x2 && type != Type::bf16x2));
        form.execute(functions.setp);
    } else {
        const std::int64_t truth = truth_of(to, type);
        form.require(truth >= 0);
        step.other = static_cast<int>(static_cast<std::uint32_t>(truth));
        form.destination(0, result, to);
        form.execute(functions.set);
    }
    return true;
}

template <class T>
void select_by_predicate(Warp& warp, const Step& step, Mask active) {
    const Mask c = warp.predicate(step.from[2]) ^ (step.variant != 0 ? all_lanes : 0);
    Word<T>* const d = words<T>(warp, step.to[0]);
    const Word<T>*const a = words<T>(warp, step.from[0]), *const b = words<T>(warp, step.from[1]);
    each_lane(active, [&](int lane) { d[lane] = (c >> lane & 1) != 0 ? a[lane] : b[lane]; });
}

bool decode_selp(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const Type type = form.take_type();
    form.require(bytes_of(type) >= 2 && bytes_of(type) <= 8 && statement.operands.size() == 4);
    form.operands(type, {type, type, Type::pred});
    step.variant = statement.operands[3].negated ? 1 : 0;
    form.execute(bytes_of(type) == 8 ? select_by_predicate<std::uint64_t> : select_by_predicate<std::uint32_t>);
    return true;
}

// slct: a where c >= 0, else b; also b where c is a NaN; -0 counts as zero.
template <class T, class C, bool Ftz>
void select_by_sign(Warp& warp, const Step& step, Mask active) {
    map3<T, T, T, C>(warp, step, active, [](T a, T b, C c) { return Plain<C, Ftz>::value(c) >= C{0} ? a : b; });
}

bool decode_slct(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const Type by = form.take_type(), type = form.take_type();
    form.require((by == Type::s32 || by == Type::f32) && bytes_of(type) >= 2 && bytes_of(type) <= 8);
    const bool ftz = by == Type::f32 && form.take("ftz");
    const bool wide = bytes_of(type) == 8;
    form.operands(type, {type, type, by});
    if (by == Type::s32) {
        form.execute(wide ? select_by_sign<std::uint64_t, std::int32_t, false>
                          : select_by_sign<std::uint32_t, std::int32_t, false>);
    } else if (ftz) {
        form.execute(wide ? select_by_sign<std::uint64_t, float, true> : select_by_sign<std::uint32_t, float, true>);
    } else {
        form.execute(wide ? select_by_sign<std::uint64_t, float, false> : select_by_sign<std::uint32_t, float, false>);
    }
    return true;
}

}  // namespace

bool decode_compare(const Statement& statement, Decoder& decoder, Step& step) {
    if (statement.opcode == "setp" || statement.opcode == "set") return decode_set(statement, decoder, step);
    if (statement.opcode == "selp") return decode_selp(statement, decoder, step);
    if (statement.opcode == "slct") return decode_slct(statement, decoder, step);
    return false;
}

}  // namespace headrace::ptx
