// cvt: between all integer and floating-point types.
#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

// What a conversion is, as a step keeps it: Step::type to, Step::source_type from, Step::other the rounding of numbers,
// Step::variant the rest of these.
enum : int { integral = 1, ftz = 2, sat = 4, relu = 8, wide_from = 16, wide_to = 32 };

int bits_of(Type type) {
    switch (type) {
        case Type::u8:
        case Type::s8: return 8;
        case Type::u16:
        case Type::s16:
        case Type::f16:
        case Type::bf16: return 16;
        case Type::u64:
        case Type::s64:
        case Type::f64: return 64;
        default: return 32;
    }
}

const Format* format_of(Type type) {
    switch (type) {
        case Type::f16: return &format_f16;
        case Type::bf16: return &format_bf16;
        case Type::f32: return &format_f32;
        case Type::f64: return &format_f64;
        case Type::tf32: return &format_tf32;
        default: return nullptr;
    }
}

// (-1)^negative * significand * 2^exponent, or what is no number.
struct Number {
    enum class Kind { finite, infinite, nan } kind = Kind::finite;
    bool negative = false;
    std::uint64_t significand = 0;
    int exponent = 0;
};

std::uint64_t low_bits(int count) { return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1; }

// The low bits of a word as a 64-bit integer, with its sign if it has one.
std::uint64_t extended(std::uint64_t word, int bits, bool has_sign) {
    const std::uint64_t sign = has_sign ? std::uint64_t{1} << (bits - 1) : 0;
    return ((word & low_bits(bits)) ^ sign) - sign;
}

Number number_of(Type type, std::uint64_t word, bool flush) {
    Number number;
    const Format* format = format_of(type);
    if (format == nullptr) {
        const std::uint64_t value = extended(word, bits_of(type), is_signed(type));
        number.negative = is_signed(type) && value >> 63 != 0;
        number.significand = number.negative ? 0 - value : value;
        return number;
    }
    const int fraction_bits = format->precision - 1;
    const std::uint64_t fraction = word & low_bits(fraction_bits);
    const int field = static_cast<int>(word >> fraction_bits & low_bits(format->bits - 1 - fraction_bits));
    number.negative = (word >> (format->bits - 1) & 1) != 0;
    if (field == format->most - format->least + 2) {
        number.kind = fraction != 0 ? Number::Kind::nan : Number::Kind::infinite;
        return number;
    }
    number.significand = field == 0 ? (flush ? 0 : fraction) : fraction | std::uint64_t{1} << fraction_bits;
    number.exponent = (field == 0 ? 1 : field) - 1 + format->least - fraction_bits;
    return number;
}

// The number's magnitude as an integer; all ones where it has more than 64 bits.
std::uint64_t integer_magnitude(const Number& number, Rounding mode) {
    const std::uint64_t significand = number.significand;
    if (significand == 0) return 0;
    if (number.exponent >= 0) {
        if (number.exponent >= std::countl_zero(significand) + 1) return ~std::uint64_t{0};
        return significand << number.exponent;
    }
    const int drop = -number.exponent;
    const std::uint64_t kept = drop >= 64 ? 0 : significand >> drop;
    const std::uint64_t rest = drop >= 64 ? significand : significand & low_bits(drop);
    const std::uint64_t half = drop > 64 ? 0 : std::uint64_t{1} << (drop - 1);
    bool up = false;
    switch (mode) {
        case Rounding::rn: up = drop <= 64 && (rest > half || (rest == half && (kept & 1) != 0)); break;
        case Rounding::rm: up = number.negative && rest != 0; break;
        case Rounding::rp: up = !number.negative && rest != 0; break;
        default: break;
    }
    return kept + (up ? 1 : 0);
}

// Out of range: the nearest end of it. A NaN: zero, but the highest bit alone where f64 or 64-bit integers are
// involved.
std::uint64_t to_integer(const Number& number, Type from, Type to, Rounding mode) {
    const int bits = bits_of(to);
    const std::uint64_t top = std::uint64_t{1} << (bits - 1);
    if (number.kind == Number::Kind::nan) return from == Type::f64 || bits == 64 ? top : 0;
    const std::uint64_t magnitude =
        number.kind == Number::Kind::infinite ? ~std::uint64_t{0} : integer_magnitude(number, mode);
    if (number.negative) {
        const std::uint64_t most = is_signed(to) ? top : 0;
        return 0 - (magnitude < most ? magnitude : most);
    }
    const std::uint64_t most = is_signed(to) ? top - 1 : low_bits(bits);
    return magnitude < most ? magnitude : most;
}

std::uint64_t to_float(Number number, Type to, Rounding mode, int flags) {
    const Format& format = *format_of(to);
    const std::uint64_t infinity = static_cast<std::uint64_t>(format.most - format.least + 2) << (format.precision - 1);
    if (number.kind == Number::Kind::nan) return (flags & sat) != 0 ? 0 : low_bits(format.bits - 1);
    if ((flags & (sat | relu)) != 0 && number.negative) return 0;
    std::uint64_t result = 0;
    if (number.kind == Number::Kind::infinite) {
        result = infinity | (number.negative ? std::uint64_t{1} << (format.bits - 1) : 0);
    } else {
        if ((flags & integral) != 0 && number.exponent < 0) {
            number.significand = integer_magnitude(number, mode);
            number.exponent = 0;
        }
        result = round_to(format, mode, number.negative, number.significand, number.exponent);
    }
    if ((flags & sat) != 0) {
        const std::uint64_t one = static_cast<std::uint64_t>(1 - format.least) << (format.precision - 1);
        return result < one ? result : one;
    }
    const bool subnormal = (result & low_bits(format.bits - 1)) >> (format.precision - 1) == 0;
    if ((flags & ftz) != 0 && to == Type::f32 && subnormal) result &= std::uint64_t{1} << 31;
    return result;
}

std::uint64_t convert(const Step& step, std::uint64_t word) {
    const auto mode = static_cast<Rounding>(step.other);
    const Number number = number_of(step.source_type, word, (step.variant & ftz) != 0 && step.source_type == Type::f32);
    if (is_integer(step.type)) return to_integer(number, step.source_type, step.type, mode);
    const std::uint64_t bits = to_float(number, step.type, mode, step.variant);
    return step.type == Type::tf32 ? bits << 13 : bits;
}

// Step::width: bytes of the destination's register, which integers fill with their sign or zeros.
void any_conversion(Warp& warp, const Step& step, Mask active) {
    const bool from_integer = is_integer(step.source_type), to_signed = is_signed(step.type);
    for_lanes(active, [&](int lane) {
        const int from = step.from[0];
        const std::uint64_t word = (step.variant & wide_from) != 0 ? warp.u64(from)[lane] : warp.u32(from)[lane];
        std::uint64_t result = 0;
        if (from_integer && is_integer(step.type) && (step.variant & sat) == 0) {
            result = extended(word, bits_of(step.source_type), is_signed(step.source_type));
        } else {
            result = convert(step, word);
        }
        if (is_integer(step.type)) result = extended(result, bits_of(step.type), to_signed);
        result &= low_bits(8 * step.width);
        if ((step.variant & wide_to) != 0) {
            warp.u64(step.to[0])[lane] = result;
        } else {
            warp.u32(step.to[0])[lane] = static_cast<std::uint32_t>(result);
        }
    });
}

// Integers without saturation: cut and extended, twice.
template <class From, class To>
void integers(Warp& warp, const Step& step, Mask active) {
    const auto sign_of = [](Type type) { return is_signed(type) ? std::uint64_t{1} << (bits_of(type) - 1) : 0; };
    const std::uint64_t from_mask = low_bits(bits_of(step.source_type)), from_sign = sign_of(step.source_type);
    const std::uint64_t to_mask = low_bits(bits_of(step.type)), to_sign = sign_of(step.type);
    const std::uint64_t kept = low_bits(8 * step.width);
    map1<To, From>(warp, step, active, [=](From word) {
        const std::uint64_t value = ((word & from_mask) ^ from_sign) - from_sign;
        return static_cast<To>((((value & to_mask) ^ to_sign) - to_sign) & kept);
    });
}

// Conversions that the host does alike, to nearest where they round.
void f32_from_s32(Warp& warp, const Step& step, Mask active) {
    map1<float, std::int32_t>(warp, step, active, [](std::int32_t a) { return static_cast<float>(a); });
}
void f32_from_u32(Warp& warp, const Step& step, Mask active) {
    map1<float, std::uint32_t>(warp, step, active,
                               [](std::uint32_t a) { return static_cast<float>(static_cast<double>(a)); });
}
void f64_from_f32(Warp& warp, const Step& step, Mask active) {
    map1<double, float>(warp, step, active, [](float a) { return static_cast<double>(a); });
}
void f32_from_f64(Warp& warp, const Step& step, Mask active) {
    map1<float, double>(warp, step, active,
                        [](double a) { return a == a ? static_cast<float>(a) : std::bit_cast<float>(nan_f32); });
}
void f32_from_f16(Warp& warp, const Step& step, Mask active) {
    map1<float, std::uint16_t>(warp, step, active, [](std::uint16_t a) {
        const float value = f16_to_f32(a);
        return value == value ? value : std::bit_cast<float>(nan_f32);
    });
}
void f16_from_f32(Warp& warp, const Step& step, Mask active) {
    map1<std::uint16_t, float>(warp, step, active, [](float a) { return f32_to_f16(a); });
}
void bf16_from_f32(Warp& warp, const Step& step, Mask active) {
    map1<std::uint16_t, float>(warp, step, active, [](float a) { return f32_to_bf16(a); });
}
// Two f32 into a pair; the first is the upper half.
void f16x2_from_f32(Warp& warp, const Step& step, Mask active) {
    map2<std::uint32_t, float, float>(warp, step, active, [](float a, float b) {
        return static_cast<std::uint32_t>(f32_to_f16(a)) << 16 | f32_to_f16(b);
    });
}
void bf16x2_from_f32(Warp& warp, const Step& step, Mask active) {
    map2<std::uint32_t, float, float>(warp, step, active, [](float a, float b) {
        return static_cast<std::uint32_t>(f32_to_bf16(a)) << 16 | f32_to_bf16(b);
    });
}
void any_pair(Warp& warp, const Step& step, Mask active) {
    map2<std::uint32_t, std::uint32_t, std::uint32_t>(warp, step, active, [&](std::uint32_t a, std::uint32_t b) {
        return static_cast<std::uint32_t>(convert(step, a) << 16 | convert(step, b));
    });
}

Execute fast(const Step& step) {
    const Type to = step.type, from = step.source_type;
    const bool nearest = static_cast<Rounding>(step.other) == Rounding::rn;
    if (is_integer(to) && is_integer(from) && (step.variant & sat) == 0) {
        const bool reads_wide = (step.variant & wide_from) != 0;
        if ((step.variant & wide_to) != 0) {
            return reads_wide ? integers<std::uint64_t, std::uint64_t> : integers<std::uint32_t, std::uint64_t>;
        }
        return reads_wide ? integers<std::uint64_t, std::uint32_t> : integers<std::uint32_t, std::uint32_t>;
    }
    const int plain = step.variant & ~(wide_from | wide_to);
    const bool own_widths = step.width * 8 == bits_of(to) && ((step.variant & wide_from) != 0) == (bits_of(from) == 64);
    if (plain != 0 || !own_widths || !nearest) return nullptr;
    if (to == Type::f32 && from == Type::s32) return f32_from_s32;
    if (to == Type::f32 && from == Type::u32) return f32_from_u32;
    if (to == Type::f64 && from == Type::f32) return f64_from_f32;
    if (to == Type::f32 && from == Type::f64) return f32_from_f64;
    if (to == Type::f32 && from == Type::f16) return f32_from_f16;
    if (to == Type::f16 && from == Type::f32) return f16_from_f32;
    if (to == Type::bf16 && from == Type::f32) return bf16_from_f32;
    return nullptr;
}

// Which rounding a conversion must name, may not name, or may.
void take_rounding(Form& form, Step& step) {
    const Format *to = format_of(step.type), *from = format_of(step.source_type);
    const auto take_integral = [&] {
        constexpr const char* names[] = {"rni", "rzi", "rmi", "rpi"};
        for (int i = 0; i < 4; ++i) {
            if (!form.take(names[i])) continue;
            step.other = i;  // in the order of Rounding
            return true;
        }
        return false;
    };
    step.other = static_cast<int>(Rounding::rn);
    if (to == nullptr && from == nullptr) return;
    if (to == nullptr) {
        form.require(take_integral());
        return;
    }
    if (from != nullptr && take_integral()) {
        form.require(step.type == step.source_type);
        step.variant |= integral;
        return;
    }
    const bool exact = from != nullptr && from->precision <= to->precision && from->most <= to->most;
    if (exact) return;
    if (step.type == Type::tf32 && form.take("rna")) {
        step.other = static_cast<int>(Rounding::rna);
        return;
    }
    const Rounding rounding = form.take_rounding(Rounding::rna);
    form.require(rounding != Rounding::rna);
    step.other = static_cast<int>(rounding);
}

// cvt.rn.f16x2.f32 d, a, b
bool decode_pair(const Statement& statement, Form& form, Step& step) {
    const Type pair = step.type;
    form.require(step.source_type == Type::f32 && statement.operands.size() == 3);
    step.type = pair == Type::f16x2 ? Type::f16 : Type::bf16;
    const Rounding rounding = form.take_rounding(Rounding::rna);
    form.require(rounding == Rounding::rn || rounding == Rounding::rz);
    step.other = static_cast<int>(rounding);
    if (form.take("relu")) step.variant |= relu;
    form.operands(pair, {Type::f32, Type::f32});
    const bool plain = rounding == Rounding::rn && step.variant == 0;
    form.execute(!plain ? any_pair : pair == Type::f16x2 ? f16x2_from_f32 : bf16x2_from_f32);
    return true;
}

}  // namespace

bool decode_convert(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    step.source_type = form.take_type();
    step.type = form.take_type();
    if (step.type == Type::f16x2 || step.type == Type::bf16x2) return decode_pair(statement, form, step);
    form.require((is_integer(step.type) || format_of(step.type) != nullptr) && statement.operands.size() == 2);
    form.require(is_integer(step.source_type) || is_float(step.source_type));
    form.require(step.type != Type::tf32 || step.source_type == Type::f32);
    take_rounding(form, step);
    if ((step.type == Type::f32 || step.source_type == Type::f32) && form.take("ftz")) step.variant |= ftz;
    if (step.type != Type::tf32 && form.take("sat")) step.variant |= sat;
    const bool narrow = step.type == Type::f16 || step.type == Type::bf16 || step.type == Type::tf32;
    if (narrow && step.source_type == Type::f32 && form.take("relu")) step.variant |= relu;
    form.all_taken();
    // Registers may be wider than the types.
    const Operand &to = statement.operands[0], &from = statement.operands[1];
    const int to_bytes = bytes_of(decoder.type_of(to));
    const int from_bytes =
        from.kind == Operand::Kind::reg ? bytes_of(decoder.type_of(from)) : bytes_of(step.source_type);
    form.require(to.kind == Operand::Kind::reg && to_bytes * 8 >= bits_of(step.type) && to_bytes <= 8);
    form.require(from_bytes * 8 >= bits_of(step.source_type) && from_bytes <= 8);
    form.require(is_integer(step.type) || to_bytes * 8 == bits_of(step.type));
    step.to[0] = decoder.destination(to);
    step.from[0] = decoder.source(from, step.source_type);
    step.width = static_cast<std::int16_t>(to_bytes);
    if (from_bytes == 8) step.variant |= wide_from;
    if (to_bytes == 8) step.variant |= wide_to;
    const Execute quick = fast(step);
    form.execute(quick != nullptr ? quick : any_conversion);
    return true;
}

}  // namespace headrace::ptx
