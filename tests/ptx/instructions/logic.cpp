// decode_logic: operations on bits: and, or, xor, not, cnot, shifts, lop3, prmt, bit fields, counts; testp.
#include <cmath>

#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

struct And {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a & b);
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a | b);
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a ^ b);
    }
};
struct Not {
    template <class T>
    T operator()(T a) const {
        return static_cast<T>(~a);
    }
};
struct IsZero {
    template <class T>
    T operator()(T a) const {
        return a == 0 ? 1 : 0;
    }
};

// Predicates are masks: all lanes at once.
template <class Op>
void predicate_binary(Warp& warp, const Step& step, Mask active) {
    const Mask result = Op{}(warp.predicate(step.from[0]), warp.predicate(step.from[1]));
    Mask& to = warp.predicate(step.to[0]);
    to = (to & ~active) | (result & active);
}
void predicate_not(Warp& warp, const Step& step, Mask active) {
    Mask& to = warp.predicate(step.to[0]);
    to = (to & ~active) | (~warp.predicate(step.from[0]) & active);
}

template <class Op>
Execute bitwise(Type type) {
    return type == Type::pred ? predicate_binary<Op> : unsigned_binary<Op>(type);
}

// Counts above the width leave zeros, or signs.
template <class T>
void shift_left(Warp& warp, const Step& step, Mask active) {
    map2<T, T, std::uint32_t>(warp, step, active, [](T a, std::uint32_t count) {
        return count >= 8 * sizeof(T) ? T{0} : static_cast<T>(std::uint64_t{a} << count);
    });
}
template <class T>
void shift_right(Warp& warp, const Step& step, Mask active) {
    map2<T, T, std::uint32_t>(warp, step, active, [](T a, std::uint32_t count) {
        constexpr std::uint32_t most = 8 * sizeof(T) - 1;
        if (count > most && std::is_unsigned_v<T>) return T{0};
        return static_cast<T>(a >> (count > most ? most : count));
    });
}
Execute shift(const std::string& opcode, Type type) {
    const int bytes = bytes_of(type);
    if (opcode == "shl") {
        return bytes == 2   ? shift_left<std::uint16_t>
               : bytes == 4 ? shift_left<std::uint32_t>
                            : shift_left<std::uint64_t>;
    }
    if (is_signed(type)) {
        return bytes == 2   ? shift_right<std::int16_t>
               : bytes == 4 ? shift_right<std::int32_t>
                            : shift_right<std::int64_t>;
    }
    return bytes == 2   ? shift_right<std::uint16_t>
           : bytes == 4 ? shift_right<std::uint32_t>
                        : shift_right<std::uint64_t>;
}

// shf: 64 bits, b above a, shifted; left gives the upper half, right the lower. Counts are clamped to 32 or wrap around
// there.
template <bool Left, bool Wrap>
void funnel(Warp& warp, const Step& step, Mask active) {
    map3<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        warp, step, active, [](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
            const std::uint32_t count = Wrap ? c & 31 : c > 32 ? 32 : c;
            const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
            return static_cast<std::uint32_t>(Left ? (both << count) >> 32 : both >> count);
        });
}

// Step::variant is the table: bit i is the result for the operands' bits a b c = i.
void lop3(Warp& warp, const Step& step, Mask active) {
    const auto table = static_cast<std::uint32_t>(step.variant);
    std::uint32_t term[8];
    for (int i = 0; i < 8; ++i) term[i] = (table >> i & 1) != 0 ? ~0u : 0u;
    map3<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        warp, step, active, [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
            return (~a & ((~b & ((~c & term[0]) | (c & term[1]))) | (b & ((~c & term[2]) | (c & term[3]))))) |
                   (a & ((~b & ((~c & term[4]) | (c & term[5]))) | (b & ((~c & term[6]) | (c & term[7])))));
        });
}

enum class Permutation : int { general, f4e, b4e, rc8, ecl, ecr, rc16 };

// The selector of each mode, as one of the general mode: a nibble for each byte of the result, the lowest first.
std::uint32_t selector_of(Permutation mode, std::uint32_t c) {
    const std::uint32_t n = c & 3;
    const auto nibbles = [](std::uint32_t b3, std::uint32_t b2, std::uint32_t b1, std::uint32_t b0) {
        return b3 << 12 | b2 << 8 | b1 << 4 | b0;
    };
    const auto least = [](std::uint32_t a, std::uint32_t b) { return a < b ? a : b; };
    const auto most = [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; };
    switch (mode) {
        case Permutation::general: return c;
        case Permutation::f4e: return nibbles(n + 3, n + 2, n + 1, n);
        case Permutation::b4e: return nibbles((n + 5) & 7, (n + 6) & 7, (n + 7) & 7, n);
        case Permutation::rc8: return nibbles(n, n, n, n);
        case Permutation::ecl: return nibbles(3, most(n, 2), most(n, 1), n);
        case Permutation::ecr: return nibbles(n, least(n, 2), least(n, 1), 0);
        case Permutation::rc16: return (n & 1) != 0 ? 0x3232 : 0x1010;
    }
    return c;
}

void permute(Warp& warp, const Step& step, Mask active) {
    const auto mode = static_cast<Permutation>(step.variant);
    map3<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        warp, step, active, [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
            const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
            const std::uint32_t selector = selector_of(mode, c);
            std::uint32_t result = 0;
            for (int i = 0; i < 4; ++i) {
                const std::uint32_t nibble = selector >> (4 * i);
                std::uint32_t byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7))) & 0xff;
                if (mode == Permutation::general && (nibble & 8) != 0)
                    byte = (byte & 0x80) != 0 ? 0xff : 0;  // its sign
                result |= byte << (8 * i);
            }
            return result;
        });
}

// bfe: `length` bits from `position` on; above the value's width, zeros or copies of its sign. Both operands count 8
// bits.
template <class T>
void extract(Warp& warp, const Step& step, Mask active) {
    map3<T, T, std::uint32_t, std::uint32_t>(warp, step, active, [](T a, std::uint32_t b, std::uint32_t c) {
        constexpr std::uint32_t width = 8 * sizeof(T);
        const std::uint32_t position = b & 0xff, length = c & 0xff;
        using U = std::make_unsigned_t<T>;
        if (length == 0) return T{0};
        const std::uint32_t top = position + length - 1 < width - 1 ? position + length - 1 : width - 1;
        const bool sign = std::is_signed_v<T> && (static_cast<U>(a) >> top & 1) != 0;
        U result = position < width ? static_cast<U>(static_cast<U>(a) >> position) : U{0};
        const std::uint32_t there = position < width ? (length < width - position ? length : width - position) : 0;
        const U field = there >= width ? static_cast<U>(~U{0}) : static_cast<U>((U{1} << there) - 1);
        result &= field;
        return static_cast<T>(sign ? result | static_cast<U>(~field) : result);
    });
}

// bfi: b with `length` bits from `position` on replaced by those of a.
template <class T>
void insert(Warp& warp, const Step& step, Mask active) {
    const std::uint32_t *const position = warp.u32(step.from[2]), *const length = warp.u32(step.from[3]);
    Word<T>* const d = words<T>(warp, step.to[0]);
    const Word<T>*const a = words<T>(warp, step.from[0]), *const b = words<T>(warp, step.from[1]);
    for_lanes(active, [&](int lane) {
        constexpr std::uint32_t width = 8 * sizeof(T);
        const std::uint32_t from = position[lane] & 0xff, count = length[lane] & 0xff;
        const T ones = count >= width ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << count) - 1);
        const T field = from >= width ? T{0} : static_cast<T>(ones << from);
        const T value = from >= width ? T{0} : static_cast<T>(a[lane] << from);
        d[lane] = (b[lane] & ~field) | (value & field);
    });
}

struct Reverse {
    template <class T>
    T operator()(T a) const {
        T result = 0;
        for (std::size_t bit = 0; bit < 8 * sizeof(T); ++bit)
            result |= static_cast<T>((a >> bit & 1) << (8 * sizeof(T) - 1 - bit));
        return result;
    }
};

// To a 32-bit result.
template <class T>
void count_zeros(Warp& warp, const Step& step, Mask active) {
    map1<std::uint32_t, T>(warp, step, active, [](T a) { return static_cast<std::uint32_t>(std::countl_zero(a)); });
}
template <class T>
void count_ones(Warp& warp, const Step& step, Mask active) {
    map1<std::uint32_t, T>(warp, step, active, [](T a) { return static_cast<std::uint32_t>(std::popcount(a)); });
}
// The highest bit that is one (of a negative number: zero); -1 without one. variant 1: as the shift that brings it to
// the top.
template <class T>
void find_highest(Warp& warp, const Step& step, Mask active) {
    map1<std::uint32_t, T>(warp, step, active, [&](T a) {
        using U = std::make_unsigned_t<T>;
        const U bits = static_cast<U>(a < 0 ? ~a : a);
        if (bits == 0) return ~0u;
        const auto zeros = static_cast<std::uint32_t>(std::countl_zero(bits));
        return step.variant == 1 ? zeros : static_cast<std::uint32_t>(8 * sizeof(T)) - 1 - zeros;
    });
}

enum class Test : int { finite, infinite, number, notanumber, normal, subnormal };

template <class T>
void test_lanes(Warp& warp, const Step& step, Mask active) {
    const Word<T>* const a = words<T>(warp, step.from[0]);
    Mask result = 0;
    for_lanes(active, [&](int lane) {
        const T value = from_word<T>(a[lane]);
        bool holds = false;
        switch (static_cast<Test>(step.variant)) {
            case Test::finite: holds = std::isfinite(value); break;
            case Test::infinite: holds = std::isinf(value); break;
            case Test::number: holds = !std::isnan(value); break;
            case Test::notanumber: holds = std::isnan(value); break;
            case Test::normal: holds = std::isnormal(value) || value == 0; break;  // PTX counts zeros as normal
            case Test::subnormal: holds = std::fpclassify(value) == FP_SUBNORMAL; break;
        }
        result |= holds ? Mask{1} << lane : 0;
    });
    Mask& to = warp.predicate(step.to[0]);
    to = (to & ~active) | result;
}

bool decode_testp(Form& form, Step& step, Type type) {
    constexpr const char* names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
    int test = 0;
    while (test < 6 && !form.take(names[test])) ++test;
    form.require(test < 6 && (type == Type::f32 || type == Type::f64));
    step.variant = test;
    form.operands(Type::pred, {type});
    form.execute(type == Type::f32 ? test_lanes<float> : test_lanes<double>);
    return true;
}

bool decode_permute(const Statement& statement, Form& form, Step& step, Type type) {
    constexpr const char* names[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
    for (int i = 0; i < 6; ++i) {
        if (form.take(names[i])) step.variant = i + 1;
    }
    form.require(type == Type::b32 && statement.operands.size() == 4);
    form.operands(type, {type, type, type});
    form.execute(permute);
    return true;
}

bool decode_lop3(const Statement& statement, Form& form, Step& step, Type type) {
    form.require(type == Type::b32 && statement.operands.size() == 5);
    form.require(statement.operands[4].kind == Operand::Kind::immediate && statement.operands[4].bits < 256);
    step.variant = static_cast<int>(statement.operands[4].bits);
    form.operands(type, {type, type, type, Type::b32});
    form.execute(lop3);
    return true;
}

bool decode_funnel(Form& form, Type type) {
    const bool left = form.take("l"), right = !left && form.take("r");
    const bool wrap = form.take("wrap"), clamp = !wrap && form.take("clamp");
    form.require((left || right) && (wrap || clamp) && type == Type::b32);
    form.operands(type, {type, type, Type::u32});
    form.execute(
        left ? (wrap ? funnel<true, true> : funnel<true, false>) : (wrap ? funnel<false, true> : funnel<false, false>));
    return true;
}

bool decode_field(const std::string& opcode, Form& form, Type type) {
    const bool wide = bytes_of(type) == 8;
    if (opcode == "bfi") {
        form.require(type == Type::b32 || type == Type::b64);
        form.operands(type, {type, type, Type::u32, Type::u32});
        form.execute(wide ? insert<std::uint64_t> : insert<std::uint32_t>);
        return true;
    }
    form.require(is_integer(type) && bytes_of(type) >= 4);
    form.operands(type, {type, Type::u32, Type::u32});
    if (is_signed(type))
        form.execute(wide ? extract<std::int64_t> : extract<std::int32_t>);
    else
        form.execute(wide ? extract<std::uint64_t> : extract<std::uint32_t>);
    return true;
}

bool decode_count(const std::string& opcode, Form& form, Step& step, Type type) {
    const bool wide = bytes_of(type) == 8;
    form.require(bytes_of(type) >= 4);
    if (opcode == "bfind") {
        form.require(is_integer(type));
        step.variant = form.take("shiftamt") ? 1 : 0;
        form.operands(Type::u32, {type});
        if (is_signed(type))
            form.execute(wide ? find_highest<std::int64_t> : find_highest<std::int32_t>);
        else
            form.execute(wide ? find_highest<std::uint64_t> : find_highest<std::uint32_t>);
        return true;
    }
    form.require(is_bits(type));
    form.operands(Type::u32, {type});
    if (opcode == "clz")
        form.execute(wide ? count_zeros<std::uint64_t> : count_zeros<std::uint32_t>);
    else
        form.execute(wide ? count_ones<std::uint64_t> : count_ones<std::uint32_t>);
    return true;
}

bool decode_bitwise(const std::string& opcode, Form& form, Type type) {
    form.require(type == Type::pred || (is_bits(type) && bytes_of(type) >= 2));
    if (opcode == "not" || opcode == "cnot") {
        form.operands(type, {type});
        if (opcode == "cnot")
            form.execute(unsigned_unary<IsZero>(type));
        else
            form.execute(type == Type::pred ? predicate_not : unsigned_unary<Not>(type));
        return true;
    }
    form.operands(type, {type, type});
    form.execute(opcode == "and" ? bitwise<And>(type) : opcode == "or" ? bitwise<Or>(type) : bitwise<Xor>(type));
    return true;
}

}  // namespace

bool decode_logic(const Statement& statement, Decoder& decoder, Step& step) {
    const std::string& opcode = statement.opcode;
    Form form(statement, decoder, step);
    const Type type = form.take_type();
    for (const Operand& operand : statement.operands) {
        if (opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not") form.require(!operand.negated);
    }
    if (opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not" || opcode == "cnot") {
        return decode_bitwise(opcode, form, type);
    }
    if (opcode == "shl" || opcode == "shr") {
        form.require(bytes_of(type) >= 2 && (is_bits(type) || (opcode == "shr" && is_integer(type))));
        form.operands(type, {type, Type::u32});
        form.execute(shift(opcode, type));
        return true;
    }
    if (opcode == "shf") return decode_funnel(form, type);
    if (opcode == "lop3") return decode_lop3(statement, form, step, type);
    if (opcode == "prmt") return decode_permute(statement, form, step, type);
    if (opcode == "bfe" || opcode == "bfi") return decode_field(opcode, form, type);
    if (opcode == "bfind" || opcode == "clz" || opcode == "popc") return decode_count(opcode, form, step, type);
    if (opcode == "testp") return decode_testp(form, step, type);
    if (opcode == "brev") {
        form.require(type == Type::b32 || type == Type::b64);
        form.operands(type, {type});
        form.execute(unsigned_unary<Reverse>(type));
        return true;
    }
    return false;
}

}  // namespace headrace::ptx
